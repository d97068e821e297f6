"""From a dataset id to a file on this disk: resumed where it broke off, checked by its SHA-256.

`catalogue.tsv` lists what is known: the publishers' addresses, with sizes and hashes as
TensorFlow Datasets recorded them.
"""

import csv
import difflib
import fcntl
import http.client
import os
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from m3pc.core.files import sha256
from m3pc.types import InputError

CATALOGUE = Path(__file__).with_name("catalogue.tsv")
SHIPPED = Path(__file__).with_name("shipped")
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 20  # bytes between two progress reports
OnBytes = Callable[[dict[str, int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    id: str
    url: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSource:
    path: Path
    kind: str  # d4rl, robomimic, minari, or '' where the file must tell
    name: str  # what to call it; D4RL's names say which robot it was


def locate(source: str, on_progress: OnBytes) -> LocatedSource:
    """A path as it is; an id from the cache, fetched first if need be."""
    kind, colon, rest = source.partition(":")
    path = Path(os.path.expanduser(source))  # which, unlike pathlib's, takes any text
    if os.path.exists(path):
        return LocatedSource(path=path, kind="", name=path.name)
    if not colon:
        raise InputError(
            f"there is no file or folder {source}; "
            "give a path or an id such as d4rl:hopper-medium-v2"
        )
    if kind == "minari":
        return _minari(rest)
    if kind not in ("d4rl", "robomimic"):
        raise InputError(f"{source} begins with {kind!r}; known are d4rl:, robomimic: and minari:")
    path = Path(os.path.expanduser(rest))
    if os.path.isfile(path):
        return LocatedSource(path=path, kind=kind, name=path.name)
    entry = find(source)
    return LocatedSource(path=fetch(entry, cache() / "datasets", on_progress), kind=kind, name=rest)


def find(dataset_id: str) -> CatalogueEntry:
    with CATALOGUE.open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file, delimiter="\t")}
    if dataset_id not in rows:
        close = difflib.get_close_matches(dataset_id, rows, n=4, cutoff=0.5)
        raise InputError(
            f"there is no dataset {dataset_id}, nor a file of that name; "
            f"did you mean one of {close or sorted(rows)[:8]}?"
        )
    row = rows[dataset_id]
    return CatalogueEntry(
        id=row["id"], url=row["url"], bytes=int(row["bytes"]), sha256=row["sha256"]
    )


def fetch(entry: CatalogueEntry, folder: Path, on_progress: OnBytes) -> Path:
    """The entry's file in `folder`. What an earlier try left is continued, not begun again."""
    path = folder / f"{entry.id.replace(':', '-').replace('/', '-')}.hdf5"
    if path.is_file() and path.stat().st_size == entry.bytes and sha256(path) == entry.sha256:
        return path
    part = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(part, "ab", opener=_without_links) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another process may be at it
            _continue(entry, file, on_progress)
    except BlockingIOError:
        raise InputError(f"{entry.id} is being fetched by another process; wait for it") from None
    except (OSError, http.client.HTTPException) as error:
        have = part.stat().st_size if part.exists() else 0
        raise InputError(
            f"{entry.id} could not be fetched from {entry.url} "
            f"({getattr(error, 'reason', error)}); "
            f"{have} of {entry.bytes} bytes are kept. Run the command again when the network is "
            f"there, or fetch the file by other means and give its path"
        ) from None
    found = sha256(part)
    if found != entry.sha256:
        part.unlink()
        raise InputError(
            f"{entry.url} gave a file with SHA-256 {found}, expected {entry.sha256}; it was removed"
        )
    part.replace(path)
    return path


def _without_links(path: str, flags: int) -> int:
    """A cache may be shared, and a link in it lead to a file that is none of its own."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def cache() -> Path:
    return Path(os.environ.get("M3PC_CACHE", "~/.cache/m3pc")).expanduser()


def _continue(entry: CatalogueEntry, file: BinaryIO, on_progress: OnBytes) -> None:
    have = file.tell()
    if have == entry.bytes:
        return  # an earlier try ended just before the hash
    if have > entry.bytes:
        have = file.truncate(0)
    request = urllib.request.Request(entry.url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
        if answer.status != 206:  # a server that ignores Range sends everything from the start
            file.truncate(0)
        while block := answer.read(BLOCK):
            file.write(block)
            on_progress({"bytes": file.tell(), "of": entry.bytes})
            if file.tell() > entry.bytes:
                raise OSError(f"the server sent more than {entry.bytes} bytes")
    if file.tell() < entry.bytes:
        raise OSError("the connection ended early")


def _minari(dataset_id: str) -> LocatedSource:
    """A Minari data set in its own folder, fetched by Minari where it is not there yet."""
    import minari

    folder = Path(minari.storage.get_dataset_path(dataset_id))
    if not (folder / "data").is_dir():
        try:
            minari.download_dataset(dataset_id)
        except Exception as error:  # Minari passes on what its network libraries raise
            raise InputError(
                f"minari:{dataset_id} is not in {folder} and could not be fetched "
                f"({type(error).__name__}: {error}); "
                f"run `minari download {dataset_id}` where there is a network"
            ) from None
    return LocatedSource(path=folder, kind="minari", name=f"minari:{dataset_id}")
