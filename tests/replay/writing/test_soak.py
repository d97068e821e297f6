"""A live store may run for weeks: its memory, files and threads do not grow with its traffic."""

import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from m3pc.types import AckStatus, AppendKey
from replay.format import manifest
from replay.format.fs import Disk, DiskFile
from replay.format.log import LogEntry
from replay.format.manifest import ParsedManifest
from replay.format.payload import encode
from replay.store.producers import Producers
from replay.store.store import Store
from replay.writing.writer import Writer, WriterOptions
from tests.support.episodes.episodes import header, numbered
from tests.support.faults.leaks import LEAKS
from tests.support.faults.soak import Before, Reading, check_counts, resident, slope, soaked

SHORT = WriterOptions(segment_bytes=50_000, keep_bytes=500_000, low_space=0, no_space=0)
LONG = WriterOptions(segment_bytes=280_000, keep_bytes=4_000_000, low_space=0, no_space=0)
MAX_TRACED = 4.0  # bytes of Python's and numpy's memory a transition, of which 16 are stored
MAX_RESIDENT = 1.0  # the same of the process; 0.1 MB in 100,000 transitions

log = logging.getLogger(__name__)


def soak(
    path: Path,
    options: WriterOptions,
    *,
    rounds: int,
    episodes: int,
    length: int,
    measure: Callable[[], int],
) -> tuple[list[Reading], float]:
    """A reading after every round, with checked counts; and how much `measure` grows per
    transition after the first fifth of the rounds."""
    before = Before.now()
    readings, measured = [], []
    with soaked(path, options, length) as run:
        for _ in range(rounds):
            run.round(episodes)
            readings.append(run.reading(before))
            measured.append(measure())
            check_counts(readings[-1], options)
    warm = slice(rounds // 5, None)
    return readings, slope([now.steps for now in readings[warm]], measured[warm])


def short(path: Path) -> None:
    """10^5 transitions."""
    tracemalloc.start()
    try:
        readings, growth = soak(
            path,
            SHORT,
            rounds=25,
            episodes=5,
            length=100,
            measure=lambda: tracemalloc.get_traced_memory()[0],
        )
    finally:
        tracemalloc.stop()
    assert readings[-1].steps == 100_000
    assert readings[-1].rolls - readings[-1].listed >= 20
    assert growth < MAX_TRACED, f"{growth:.2f} bytes a transition"


def test_what_a_store_holds_does_not_grow(tmp_path: Path) -> None:
    short(tmp_path / "store")


@pytest.mark.parametrize("leak", LEAKS)
def test_known_leaks_are_caught(leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFile, "sync", lambda self: None)  # quicker; nothing here needs it
    monkeypatch.setattr(Disk, "sync_folder", lambda self, path: None)
    LEAKS[leak].put_in(monkeypatch)
    with pytest.raises(AssertionError, match=LEAKS[leak].shows_in):
        short(tmp_path / "store")


def test_a_manifest_that_did_not_grow_is_not_parsed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = manifest.parse
    parsed: list[int] = []  # bytes

    def watched(content: bytes, path: Path) -> ParsedManifest:
        parsed.append(len(content))
        return parse(content, path)

    monkeypatch.setattr(manifest, "parse", watched)
    with Writer(tmp_path / "store", header(), SHORT) as writer:
        view, counts = Store(tmp_path / "store"), []
        parsed.clear()
        for sequence, action in enumerate(("append", "append", "roll", "append")):
            writer.append(AppendKey(0, 0, sequence), encode(numbered(sequence, 5)))
            if action == "roll":
                writer.roll()
            view = view.latest()
            counts.append((view.totals.episodes, len(parsed)))
    assert counts == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_invalid_episodes_are_counted_for_one_incarnation_of_a_slot() -> None:
    producers = Producers({}, max_refused=2)

    def refuse(*key: int) -> None:
        producers.advance([LogEntry(AppendKey(*key), None, "head")])

    for key in ((0, 0, 0), (0, 0, 1), (1, 0, 0)):
        refuse(*key)
    assert producers.judge(AppendKey(0, 0, 2), {}).refusal is AckStatus.FENCED
    assert producers.judge(AppendKey(1, 0, 1), {}).refusal is None
    assert producers.judge(AppendKey(0, 1, 0), {}).refusal is None
    refuse(0, 1, 0)
    assert producers.judge(AppendKey(0, 1, 1), {}).refusal is None
    refuse(0, 1, 1)
    assert producers.judge(AppendKey(0, 1, 2), {}).refusal is AckStatus.FENCED


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_million_transitions_leave_memory_flat(tmp_path: Path) -> None:
    readings, growth = soak(
        tmp_path / "store", LONG, rounds=250, episodes=10, length=500, measure=resident
    )
    end = readings[-1]
    log.info(
        "bytes_a_transition=%.2f rolls=%d dropped=%d manifest_bytes=%d files=%d descriptors=%d",
        growth,
        end.rolls,
        end.rolls - end.listed,
        end.manifest_bytes,
        end.files,
        end.descriptors,
    )
    assert end.steps == 10**7
    assert end.rolls - end.listed >= 500
    assert growth < MAX_RESIDENT, f"{growth:.2f} bytes a transition"
