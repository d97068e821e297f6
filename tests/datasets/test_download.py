"""Downloads from a real HTTP server on loopback that can break off, ignore ranges, send junk."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from m3pc.core.progress import ignore_progress
from m3pc.datasets.download import CatalogueEntry, fetch, find_entry, locate
from m3pc.types import InputError

CONTENT = bytes(range(256)) * 1000


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT. `cut` bytes are sent before the connection breaks; ranges may be ignored."""

    cut: ClassVar[int | None] = None
    ranges: ClassVar[bool] = True
    requests: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        self.requests.append(requested)
        first = (
            int(requested.removeprefix("bytes=").removesuffix("-"))
            if requested and self.ranges
            else 0
        )
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(CONTENT) - first))
        self.end_headers()
        self.wfile.write(CONTENT[first : self.cut])

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def entry() -> Iterator[CatalogueEntry]:
    Handler.cut, Handler.ranges, Handler.requests = None, True, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield CatalogueEntry(
            id="d4rl:test-v0",
            url=f"http://127.0.0.1:{server.server_port}/file.hdf5",
            bytes=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
        )
        server.shutdown()
        thread.join()


def test_a_file_is_fetched_once_and_then_found(entry: CatalogueEntry, tmp_path: Path) -> None:
    assert fetch(entry, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert fetch(entry, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert Handler.requests == [None]


def test_a_broken_download_is_continued(entry: CatalogueEntry, tmp_path: Path) -> None:
    Handler.cut = 100_000
    with pytest.raises(InputError, match="100000 of 256000 bytes are kept"):
        fetch(entry, tmp_path, ignore_progress)
    Handler.cut = None
    assert fetch(entry, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert Handler.requests == [None, "bytes=100000-"]


def test_without_ranges_a_download_starts_again(entry: CatalogueEntry, tmp_path: Path) -> None:
    Handler.cut = 100_000
    with pytest.raises(InputError):
        fetch(entry, tmp_path, ignore_progress)
    Handler.cut, Handler.ranges = None, False
    assert fetch(entry, tmp_path, ignore_progress).read_bytes() == CONTENT


def test_a_download_that_only_lacks_its_name_is_not_fetched_again(
    entry: CatalogueEntry, tmp_path: Path
) -> None:
    path = fetch(entry, tmp_path, ignore_progress)
    path.rename(path.with_suffix(".part"))
    assert fetch(entry, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert Handler.requests == [None]


def test_a_part_that_is_too_long_is_fetched_again(entry: CatalogueEntry, tmp_path: Path) -> None:
    path = fetch(entry, tmp_path, ignore_progress)
    path.rename(path.with_suffix(".part")).write_bytes(CONTENT + b"x")
    assert fetch(entry, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert Handler.requests == [None, None]


def test_a_cache_that_cannot_be_made_is_an_input_error(
    entry: CatalogueEntry, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="could not be fetched"):
        fetch(entry, tmp_path / "file", ignore_progress)


def test_a_file_with_another_hash_is_removed(entry: CatalogueEntry, tmp_path: Path) -> None:
    wrong = CatalogueEntry(id=entry.id, url=entry.url, bytes=entry.bytes, sha256="0" * 64)
    with pytest.raises(InputError, match="expected 0000"):
        fetch(wrong, tmp_path, ignore_progress)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(
    entry: CatalogueEntry, tmp_path: Path
) -> None:
    path = fetch(entry, tmp_path, ignore_progress)
    path.write_bytes(b"x" * len(CONTENT))
    assert fetch(entry, tmp_path, ignore_progress).read_bytes() == CONTENT
    assert len(Handler.requests) == 2


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path) -> None:
    gone = CatalogueEntry(id="d4rl:x", url="http://127.0.0.1:9/x", bytes=1, sha256="0" * 64)
    with pytest.raises(InputError, match="fetch the file by other means and give its path"):
        fetch(gone, tmp_path, ignore_progress)


def test_the_catalogue_has_the_papers_datasets() -> None:
    for robot in ("hopper", "walker2d", "halfcheetah"):
        for quality in ("medium", "medium-replay"):
            entry = find_entry(f"d4rl:{robot}-{quality}-v2")
            assert len(entry.sha256) == 64
            assert entry.bytes > 10_000_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("d4rl:hopper-medum-v2", "d4rl:hopper-medium-v2"),
        ("nowhere.hdf5", "no file or folder"),
        ("rlds:hopper", "known are d4rl:, robomimic: and minari:"),
    ],
)
def test_an_unknown_source_is_refused_with_a_hint(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        locate(source, ignore_progress)
