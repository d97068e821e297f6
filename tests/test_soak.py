"""A live store may run for weeks: nothing that it holds grows with what went through it."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from replay.fs import Disk, DiskFile
from replay.writer import Options
from tests.leaks import LEAKS
from tests.soak import Before, Reading, check_counts, resident, slope, soaked

SHORT = Options(segment_bytes=50_000, keep_bytes=500_000, low_space=0, no_space=0)
LONG = Options(segment_bytes=300_000, keep_bytes=4_000_000, low_space=0, no_space=0)
MOST_TRACED = 4.0  # bytes of Python's and numpy's memory a transition, of which 16 are stored
MOST_RESIDENT = 1.0  # the same of the process; 0.1 MB in 100,000 transitions


def soak(
    path: Path,
    options: Options,
    *,
    rounds: int,
    episodes: int,
    length: int,
    measure: Callable[[], int],
) -> tuple[list[Reading], float]:
    """A reading after every round, each with the right counts; and by how much what is measured
    grows with a transition once a fifth of the rounds is over."""
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
            episodes=10,
            length=50,
            measure=lambda: tracemalloc.get_traced_memory()[0],
        )
    finally:
        tracemalloc.stop()
    assert readings[-1].steps == 100_000
    assert readings[-1].rolls - readings[-1].listed >= 20
    assert growth < MOST_TRACED, f"{growth:.2f} bytes a transition"


def test_what_a_store_holds_does_not_grow(tmp_path: Path) -> None:
    short(tmp_path / "store")


@pytest.mark.parametrize("leak", LEAKS)
def test_known_leaks_are_caught(leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFile, "sync", lambda self: None)  # quicker; nothing here needs it
    monkeypatch.setattr(Disk, "sync_folder", lambda self, path: None)
    LEAKS[leak](monkeypatch)
    with pytest.raises(AssertionError):
        short(tmp_path / "store")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_million_transitions_leave_memory_flat(tmp_path: Path) -> None:
    readings, growth = soak(
        tmp_path / "store", LONG, rounds=250, episodes=10, length=500, measure=resident
    )
    assert readings[-1].steps == 10**7
    assert readings[-1].rolls - readings[-1].listed >= 500
    assert growth < MOST_RESIDENT, f"{growth:.2f} bytes a transition"
