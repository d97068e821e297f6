"""Finds a dataset on this disk or downloads it; downloads resume and are checked by SHA-256.

`catalogue.tsv` lists the known datasets: the publishers' addresses, with sizes and hashes as
TensorFlow Datasets recorded them.
"""

import csv
import difflib
import fcntl
import http.client
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from m3pc.core.files import sha256
from m3pc.core.progress import OnProgress
from m3pc.types import InputError

CATALOGUE = Path(__file__).with_name("catalogue.tsv")
SHIPPED = Path(__file__).with_name("shipped")
TIMEOUT = 30.0  # seconds without a byte
BLOCK = 1 << 20  # bytes between two progress reports


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A row of `catalogue.tsv`."""

    id: str
    url: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedSource:
    """A dataset on this disk."""

    path: Path
    kind: str  # d4rl, robomimic, minari; '' if not known before reading
    name: str  # for people; D4RL's names contain the robot


def locate(source: str, on_progress: OnProgress) -> LocatedSource:
    """Return the dataset at a path or with an id, which is downloaded if it is not cached."""
    kind, colon, rest = source.partition(":")
    path = Path(os.path.expanduser(source))  # unlike pathlib's method, it accepts any text
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
    entry = find_entry(source)
    return LocatedSource(
        path=fetch(entry, cache_folder() / "datasets", on_progress), kind=kind, name=rest
    )


def find_entry(dataset_id: str) -> CatalogueEntry:
    """The catalogue's entry; InputError with similar ids where there is none."""
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


def fetch(entry: CatalogueEntry, folder: Path, on_progress: OnProgress) -> Path:
    """The entry's file in `folder`. An interrupted download is continued."""
    path = folder / f"{entry.id.replace(':', '-').replace('/', '-')}.hdf5"
    if path.is_file() and path.stat().st_size == entry.bytes and sha256(path) == entry.sha256:
        return path
    part = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(part, "ab", opener=_without_links) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # excludes a second download
            _continue(entry, file, on_progress)
    except BlockingIOError:
        raise InputError(f"{entry.id} is being fetched by another process; wait for it") from None
    except (OSError, http.client.HTTPException) as error:
        have = part.stat().st_size if part.exists() else 0
        raise InputError(
            f"{entry.id} could not be fetched from {entry.url} "
            f"({getattr(error, 'reason', error)}); "
            f"{have} of {entry.bytes} bytes are kept. Run the command again when the network is "
            f"available, or fetch the file by other means and give its path"
        ) from None
    digest = sha256(part)
    if digest != entry.sha256:
        part.unlink()
        raise InputError(
            f"{entry.url} gave a file with SHA-256 {digest}, expected {entry.sha256}; "
            "it was removed"
        )
    part.replace(path)
    return path


def _without_links(path: str, flags: int) -> int:
    """An opener that refuses links: in a shared cache they may lead to other files."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def cache_folder() -> Path:
    """$M3PC_CACHE, or ~/.cache/m3pc."""
    return Path(os.environ.get("M3PC_CACHE", "~/.cache/m3pc")).expanduser()


def _continue(entry: CatalogueEntry, file: BinaryIO, on_progress: OnProgress) -> None:
    have = file.tell()
    if have == entry.bytes:
        return  # complete, only the hash was not checked yet
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
    """A Minari dataset in Minari's own folder, downloaded by Minari if it is not there."""
    import minari

    folder = Path(minari.storage.get_dataset_path(dataset_id))
    if not (folder / "data").is_dir():
        try:
            minari.download_dataset(dataset_id)
        except Exception as error:  # Minari raises whatever its network libraries raise
            raise InputError(
                f"minari:{dataset_id} is not in {folder} and could not be fetched "
                f"({type(error).__name__}: {error}); "
                f"run `minari download {dataset_id}` on a machine with a network"
            ) from None
    return LocatedSource(path=folder, kind="minari", name=f"minari:{dataset_id}")
