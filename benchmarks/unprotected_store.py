"""A live store without any protection, for comparison only: fast, and unsafe.

Payloads are not checked, CRC-32 and SHA-256 are constants, readers check nothing, nothing is ever
synced. The few lines of the manifest are written as usual.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from m3pc.types import Episode, Floats
from replay.format import fs, log, payload, segment
from replay.format.manifest import FileEntry, Header
from replay.writing import writer


def trusting_decode(content: bytes, header: Header) -> Episode:
    _, _, rows, ended, seed, *tags = payload.HEAD.unpack_from(content)
    version, last_version, target_return, utility = tags
    place = payload.HEAD.size + len(
        payload.stream_frame(header.states, header.actions, rows).before
    )
    columns: list[Floats] = []
    for width in (header.states, header.actions, 1):
        values = np.frombuffer(content, np.float32, rows * width, place)
        columns.append(values.reshape(rows, width))
        place += payload.padded_bytes(rows * width)
    return Episode(
        states=columns[0],
        actions=columns[1][:-1],
        rewards=columns[2][:-1, 0],
        terminated=bool(ended & payload.TERMINATED),
        truncated=bool(ended & payload.TRUNCATED),
        seed=seed,
        version=version,
        last_version=last_version,
        target_return=target_return,
        utility=utility,
    )


def trusting_map(disk: fs.FS, folder: Path, entry: FileEntry, schema: pa.Schema) -> pa.RecordBatch:
    return pa.ipc.open_file(pa.py_buffer(disk.map(folder / entry.name))).get_batch(0)


DIGEST = SimpleNamespace(update=lambda content: None, hexdigest=lambda: "0" * 64)
REPLACEMENTS: tuple[tuple[Any, str, Any], ...] = (
    (writer, "decode", trusting_decode),
    (log, "checksum", lambda parts, salt: b"none"),
    (log, "check_episode", lambda episode, header, number: None),
    (segment, "hashlib", SimpleNamespace(sha256=lambda content=b"": DIGEST)),
    (segment, "_map", trusting_map),
    (fs.DiskFile, "sync", lambda self: None),
    (fs.Disk, "sync_folder", lambda self, path: None),
)


@contextmanager
def unprotected() -> Iterator[None]:
    """For this process, until the block ends."""
    with ExitStack() as stack:
        for place, name, replacement in REPLACEMENTS:
            stack.enter_context(patch.object(place, name, replacement))
        yield
