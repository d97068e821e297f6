"""Episodes as bytes: decoded exactly, and any other bytes are rejected."""

import io
import math
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from m3pc.types import Episode
from replay.format import payload
from replay.format.manifest import Header
from replay.format.payload import CHECKED, HEAD, MAGIC, MAX_BYTES, PayloadError, decode, encode
from replay.format.schema import vectors, wire_schema
from tests.support.episodes.episodes import same

STATES, ACTIONS, STEPS = 3, 2, 5
HEADER = Header(states=STATES, actions=ACTIONS, max_episode_steps=8, env=None, source={})
FUZZED = 10_000


def episode(steps: int = STEPS) -> Episode:
    rng = np.random.default_rng(0)
    return Episode(
        states=rng.normal(size=(steps + 1, STATES)).astype(np.float32),
        actions=rng.uniform(-1, 1, (steps, ACTIONS)).astype(np.float32),
        rewards=rng.normal(size=steps).astype(np.float32),
        terminated=True,
        truncated=False,
        seed=7,
        version=2**40,
        last_version=2**40 + 3,
        target_return=-2.5,
        utility=math.nan,
    )


def sealed(content: bytes) -> bytes:
    """Bytes behind the checksum, with a right one before them."""
    return MAGIC + struct.pack("<I", zlib.crc32(content)) + content


def head(*, rows: int = STEPS + 1, ended: int = 1) -> bytes:
    return HEAD.pack(MAGIC, 0, rows, ended, 7, 0, 0, 0.0, 0.0)[CHECKED:]


def stream(
    *batches: pa.RecordBatch,
    schema: pa.Schema | None = None,
    compression: str | None = None,
) -> bytes:
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, schema or batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sealed(head(rows=batches[0].num_rows if batches else STEPS + 1) + sink.getvalue())


def batch(rows: int = STEPS + 1, **columns: np.ndarray) -> pa.RecordBatch:
    zeros = np.zeros(rows, np.float32)
    return pa.record_batch(
        [
            vectors(columns.get("states", np.zeros((rows, STATES), np.float32))),
            vectors(columns.get("actions", np.zeros((rows, ACTIONS), np.float32))),
            pa.array(columns.get("rewards", zeros)),
        ],
        schema=wire_schema(STATES, ACTIONS),
    )


@pytest.mark.parametrize("steps", [1, STEPS, 8])
@pytest.mark.parametrize(
    ("terminated", "truncated"), [(True, False), (False, True), (False, False)]
)
def test_an_episode_survives_encoding_and_decoding(
    steps: int, terminated: bool, truncated: bool
) -> None:
    given = replace(episode(steps), terminated=terminated, truncated=truncated)
    assert same(decode(encode(given), HEADER), given)


@pytest.mark.parametrize("steps", [1, STEPS, 8])
def test_arrow_reads_the_same(steps: int) -> None:
    given = episode(steps)
    with pa.ipc.open_stream(encode(given)[HEAD.size :]) as reader:
        table = reader.read_all()
    states = table["states"].combine_chunks().flatten().to_numpy().reshape(-1, STATES)
    actions = table["actions"].combine_chunks().flatten().to_numpy().reshape(-1, ACTIONS)
    assert np.array_equal(states, given.states)
    assert np.array_equal(actions[:-1], given.actions)
    assert np.array_equal(table["rewards"].to_numpy()[:-1], given.rewards)


def test_arrays_are_not_copied() -> None:
    content = encode(episode())
    decoded = decode(content, HEADER)
    memory = np.frombuffer(content, np.uint8)
    assert all(
        np.shares_memory(memory, x) for x in (decoded.states, decoded.actions, decoded.rewards)
    )


def test_every_flipped_bit_is_noticed() -> None:
    content = encode(episode())
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            decode(bytes(changed), HEADER)


def test_every_cut_is_noticed() -> None:
    content = encode(episode())
    for size in range(len(content)):
        with pytest.raises(PayloadError):
            decode(content[:size], HEADER)


def nan(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def with_null() -> pa.RecordBatch:
    columns = [*batch().columns[:2], pa.array([None, *[0.0] * STEPS], pa.float32())]
    fields = [pa.field(f.name, f.type, nullable=True) for f in batch().schema]
    return pa.record_batch(columns, schema=pa.schema(fields))


HOSTILE: Mapping[str, tuple[payload.PayloadFault, Callable[[], bytes]]] = {
    "nothing": ("size", lambda: b""),
    "less than a head": ("size", lambda: encode(episode())[: HEAD.size - 1]),
    "a head alone": ("arrow", lambda: sealed(encode(episode())[CHECKED : HEAD.size])),
    "too much": ("size", lambda: bytes(MAX_BYTES + 1)),
    "something else": ("head", lambda: b"PK" + encode(episode())[2:]),
    "an unknown end": ("head", lambda: sealed(head(ended=4) + encode(episode())[HEAD.size :])),
    "no Arrow": ("arrow", lambda: sealed(head() + bytes(len(encode(episode())) - HEAD.size))),
    "other columns": (
        "arrow",
        lambda: stream(batch().rename_columns(["states", "actions", "prices"])),
    ),
    "columns that may be empty": ("arrow", lambda: stream(with_null())),
    "another robot": ("arrow", lambda: encode(replace(episode(), actions=nan((STEPS, 9))))),
    "columns with notes": (
        "arrow",
        lambda: stream(batch().replace_schema_metadata({"pickle": "gASV"})),
    ),
    "no batch": ("arrow", lambda: stream(schema=batch().schema)),
    "two batches": ("arrow", lambda: stream(batch(), batch())),
    "bytes behind the end": ("arrow", lambda: sealed(stream(batch())[CHECKED:] + b"more")),
    "a compressed batch": ("arrow", lambda: stream(batch(), compression="zstd")),
    "a bomb": (
        "arrow",
        lambda: sealed(head() + stream(batch(100_000), compression="zstd")[HEAD.size :]),
    ),
    "more rows than it has": (
        "arrow",
        lambda: sealed(head(rows=7) + encode(episode())[HEAD.size :]),
    ),
    "no end": ("arrow", lambda: sealed(encode(episode())[CHECKED:-1] + b"\1")),
    "an end without a step": ("rows", lambda: stream(batch(1))),
    "more steps than the limit": ("rows", lambda: encode(episode(9))),
    "a state that is not finite": ("values", lambda: stream(batch(states=nan((6, STATES))))),
    "an action that is too large": (
        "values",
        lambda: encode(replace(episode(), actions=np.full((STEPS, ACTIONS), 2, np.float32))),
    ),
    "a reward that is too large": (
        "values",
        lambda: encode(replace(episode(), rewards=np.full(STEPS, 1e7, np.float32))),
    ),
    "an infinite condition": ("values", lambda: encode(replace(episode(), target_return=math.inf))),
    "an infinite utility": ("values", lambda: encode(replace(episode(), utility=-math.inf))),
    "an episode of an older version": ("head", lambda: b"m3pe" + encode(episode())[4:]),
    "an action after the end": (
        "values",
        lambda: stream(batch(actions=np.ones((STEPS + 1, ACTIONS), np.float32))),
    ),
    "a reward after the end": (
        "values",
        lambda: stream(batch(rewards=np.ones(STEPS + 1, np.float32))),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_rejected_with_a_code(name: str) -> None:
    code, make = HOSTILE[name]
    with pytest.raises(PayloadError) as caught:
        decode(make(), HEADER)
    assert caught.value.code == code, str(caught.value)


def test_whatever_carries_a_right_checksum_is_an_episode_or_rejected() -> None:
    """Behind the checksum: the bytes that Arrow parses."""
    rng = random.Random(0)
    content = encode(episode())[CHECKED:]
    outcomes = {"taken": 0, "rejected": 0}
    for _ in range(FUZZED):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            place = rng.randrange(len(changed))
            changed[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        if rng.random() < 0.2:
            del changed[rng.randrange(len(changed)) :]
        try:
            decoded = decode(sealed(bytes(changed)), HEADER)
        except PayloadError:
            outcomes["rejected"] += 1
            continue
        outcomes["taken"] += 1
        assert 1 <= len(decoded) <= HEADER.max_episode_steps
        assert decoded.states.shape == (len(decoded) + 1, STATES)
        assert decoded.actions.shape == (len(decoded), ACTIONS)
        assert all(np.isfinite(x).all() for x in (decoded.states, decoded.actions, decoded.rewards))
    assert min(outcomes.values()) > 100, outcomes
