"""Stores of every format that was ever written: the older ones are read, and not changed."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from m3pc.datagen.exporting import export
from m3pc.types import AppendKey, Episode, InputError
from replay.format.payload import encode
from replay.format.schema import FORMAT, READABLE
from replay.format.watermark import NAME as MARK
from replay.store.inspect import StoreState, inspect_store
from replay.store.store import Store, write_store
from replay.store.verify import verify
from replay.writing.writer import Writer
from tests.support.episodes.episodes import header, numbered, same
from tests.support.episodes.live_store import EPISODES, REFUSED, closed
from tests.support.episodes.shared_data import ROOT
from tests.support.faults.live_writer import ROOMY

OLD = ROOT / "tests" / "artifacts"  # written by the versions of m3pc that had the format
SHIPPED = ROOT / "m3pc" / "datasets" / "shipped" / "hopper-medium-replay"
FINISHED = [numbered(k, 4 + k, terminated=k == 1) for k in range(3)]
TAGS = {"last_version", "condition", "utility"}


def write_finished(path: Path) -> Path:
    with write_store(path, header()) as writer:
        for episode in FINISHED:
            writer.append(episode)
    return path


@pytest.fixture(params=READABLE)
def store_format(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def live(store_format: int, tmp_path: Path) -> Path:
    if store_format == FORMAT:
        return closed(tmp_path / "live")
    return shutil.copytree(OLD / f"format_{store_format}" / "live", tmp_path / "live")


@pytest.fixture
def finished(store_format: int, tmp_path: Path) -> Path:
    if store_format == FORMAT:
        return write_finished(tmp_path / "finished")
    return shutil.copytree(OLD / f"format_{store_format}" / "finished", tmp_path / "finished")


def as_kept(episode: Episode, store_format: int) -> Episode:
    """What a store of this format knows of an episode."""
    if store_format > 1:
        return episode
    return replace(episode, last_version=-1, target_return=math.nan, utility=math.nan)


def assert_holds(path: Path, expected: Sequence[Episode], store_format: int) -> Store:
    store = Store(path)
    assert store.header.format == store_format
    kept = [as_kept(episode, store_format) for episode in expected]
    assert all(map(same, store.episodes(), kept))
    assert len(store.lengths) == len(expected)
    versions = [(episode.version, episode.last_version) for episode in store.episodes()]
    assert versions == [(episode.version, episode.last_version) for episode in kept]
    return store


def test_a_finished_data_set_is_read(finished: Path, store_format: int) -> None:
    assert assert_holds(finished, FINISHED, store_format).keys == []
    assert verify(finished) == []


def test_a_live_store_is_read_with_its_log(live: Path, store_format: int) -> None:
    store = assert_holds(live, list(EPISODES.values()), store_format)
    assert store.keys == list(EPISODES)
    assert store.producers[REFUSED.slot].expected == REFUSED.sequence + 1
    assert verify(live) == []


def test_a_live_store_that_a_crash_left_is_read(live: Path, store_format: int) -> None:
    (live / MARK).unlink()
    with (live / "log" / "000002.log").open("ab") as log:
        log.write(b"m3pf torn")
    assert_holds(live, list(EPISODES.values()), store_format)
    inspection = inspect_store(live)
    assert (inspection.state, inspection.episodes, inspection.damaged) == (
        StoreState.CRASHED,
        6,
        [],
    )


def test_an_inspection_names_the_newest_policy_that_acted(live: Path, store_format: int) -> None:
    assert inspect_store(live).versions == (7, 14 if store_format > 1 else 12)


def test_parquet_has_the_tags_that_the_store_has(
    live: Path, store_format: int, tmp_path: Path
) -> None:
    export(inspect_store(live), tmp_path / "out", "parquet", lambda _: None)
    table = pq.read_table(tmp_path / "out" / "episodes.parquet")
    assert table.num_rows == 6
    assert TAGS & set(table.column_names) == (TAGS if store_format > 1 else set())
    if store_format > 1:
        assert table["last_version"].to_pylist() == [k + 9 for k in range(6)]
        assert table["utility"].to_pylist() == [-k / 4 for k in range(6)]
        assert math.isnan(table["condition"].to_pylist()[3])
        assert table["condition"].to_pylist()[4] == 2.0


def test_only_the_newest_format_is_written_to(live: Path, store_format: int) -> None:
    before = {path: path.read_bytes() for path in live.rglob("*") if path.is_file()}
    if store_format == FORMAT:
        with Writer(live, header(), ROOMY) as writer:
            assert writer.totals.episodes == 6
        return
    with pytest.raises(InputError, match=f"has format {store_format}.*can be read and exported"):
        Writer(live, Store(live).header, ROOMY)
    assert {path: path.read_bytes() for path in live.rglob("*") if path.is_file()} == before


def test_the_shipped_data_set_is_what_it_was() -> None:
    store = Store(SHIPPED)
    assert store.header.format == 1
    assert store.checksum == "90c1a24327eaf9cc2a6b6d83b1e137d100f3f71f3b37be28f0c8fbaefc5e6292"
    assert {episode.last_version for episode in store.episodes()} == {-1}


def test_the_same_tags_come_back_from_log_and_segment(tmp_path: Path) -> None:
    plain = replace(numbered(1, 3), target_return=math.nan, utility=math.nan, last_version=2**62)
    with Writer(tmp_path / "store", header(), ROOMY) as writer:
        writer.append(AppendKey(0, 0, 0), encode(plain))
        in_log = list(Store(tmp_path / "store").episodes())
        writer.roll()
        in_segment = list(Store(tmp_path / "store").episodes())
    assert [same(stored[0], plain) for stored in (in_log, in_segment)] == [True, True]


@pytest.mark.parametrize("name", ["target_return", "utility"])
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_tag_is_refused(name: str, value: float, tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=f"its {name} is infinite"),
        write_store(tmp_path / "store", header()) as writer,
    ):
        tags: dict[str, Any] = {name: value}
        writer.append(replace(numbered(0, 3), **tags))
