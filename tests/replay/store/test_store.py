from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from m3pc.types import InputError
from replay.format import manifest
from replay.store.statistics import statistics
from replay.store.store import Store, write_store
from tests.support.episodes.episodes import header, numbered, same

EPISODES = [numbered(0, 5), numbered(1, 3, terminated=True), numbered(2, 9)]


def make(path: Path, *, segment_bytes: int = 1 << 20) -> Store:
    with write_store(path, header(), segment_bytes=segment_bytes) as writer:
        for episode in EPISODES:
            writer.append(episode)
    return Store(path)


@pytest.mark.parametrize("segment_bytes", [1, 100, 1 << 20])
def test_what_was_written_is_read_back(tmp_path: Path, segment_bytes: int) -> None:
    store = make(tmp_path / "store", segment_bytes=segment_bytes)
    read = list(store.episodes())
    assert len(read) == 3
    assert all(same(one, other) for one, other in zip(read, EPISODES, strict=True))
    assert (store.totals.steps, store.totals.episodes) == (17, 3)


def test_an_episode_never_spans_two_segments(tmp_path: Path) -> None:
    store = make(tmp_path / "store", segment_bytes=1)
    assert [segment.lengths.tolist() for segment in store.segments] == [[5], [3], [9]]


def test_a_segment_is_a_plain_arrow_file_with_named_columns(tmp_path: Path) -> None:
    make(tmp_path / "store")
    file = tmp_path / "store" / "segments" / "000000.steps.arrow"
    table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    assert table.column_names == ["states", "actions", "rewards", "episode", "step"]
    assert table.schema.field("states").type == pa.list_(pa.float32(), 2)
    assert table["episode"].to_pylist() == [0] * 5 + [1] * 3 + [2] * 9
    assert table["step"].to_pylist() == [*range(5), *range(3), *range(9)]
    episodes = pa.ipc.open_file(file.with_name("000000.episodes.arrow")).read_all()
    assert episodes["terminated"].to_pylist() == [False, True, False]
    assert episodes["truncated"].to_pylist() == [True, False, True]
    assert episodes["final_state"].to_pylist() == [[0, 5], [1, 3], [2, 9]]
    assert episodes["episode_return"].to_pylist() == [15, 6, 45]


def test_columns_are_views_of_the_file_not_copies(tmp_path: Path) -> None:
    segment = make(tmp_path / "store").segments[0]
    assert not segment.states.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        segment.states[0, 0] = 1


def test_the_same_episodes_give_the_same_bytes(tmp_path: Path) -> None:
    assert make(tmp_path / "one").checksum == make(tmp_path / "two").checksum


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="midway"),
        write_store(tmp_path / "new" / "deep" / "store", header(), segment_bytes=1) as writer,
    ):
        writer.append(EPISODES[0])
        raise RuntimeError("midway")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_written_over(tmp_path: Path) -> None:
    make(tmp_path / "store")
    before = (tmp_path / "store" / manifest.NAME).read_bytes()
    with pytest.raises(InputError, match="exists already"):
        make(tmp_path / "store")
    assert (tmp_path / "store" / manifest.NAME).read_bytes() == before


def test_two_writers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    with write_store(tmp_path / "store", header()) as writer:
        writer.append(EPISODES[0])
        with pytest.raises(InputError, match="being written"):
            make(tmp_path / "store")
    assert Store(tmp_path / "store").totals.episodes == 1


BAD = {
    "no step": numbered(0, 0),
    "float32 [6, 2]": replace(EPISODES[0], states=EPISODES[0].states[:-1]),
    "float64": replace(EPISODES[0], rewards=EPISODES[0].rewards.astype(np.float64)),
    "NaN or Inf at step 2": replace(
        EPISODES[0], rewards=np.array([0, 0, np.nan, 0, 0], np.float32)
    ),
    "an action reaches 1.5": replace(EPISODES[0], actions=np.full((5, 1), -1.5, np.float32)),
    "more than the step limit": numbered(0, 1001),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_episode_is_refused_by_name(tmp_path: Path, message: str) -> None:
    with (
        pytest.raises(InputError) as caught,
        write_store(tmp_path / "store", header()) as writer,
    ):
        writer.append(BAD[message])
    assert message in str(caught.value)
    assert "episode 0" in str(caught.value)


def test_rounding_beyond_the_bounds_is_clipped(tmp_path: Path) -> None:
    actions = np.full((5, 1), 1 + 5e-5, np.float32)
    with write_store(tmp_path / "store", header()) as writer:
        writer.append(replace(EPISODES[0], actions=actions))
    assert next(Store(tmp_path / "store").episodes()).actions.max() == 1


def test_an_empty_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no episode"), write_store(tmp_path / "s", header()):
        pass


def test_statistics_are_those_of_all_steps(tmp_path: Path) -> None:
    numbers = statistics(make(tmp_path / "store", segment_bytes=1))
    states = np.concatenate([e.states[:-1] for e in EPISODES]).astype(np.float64)
    assert numbers.states.mean == pytest.approx(states.mean(axis=0))
    assert numbers.states.std == pytest.approx(states.std(axis=0))
    assert numbers.states.low.tolist() == states.min(axis=0).tolist()
    assert numbers.states.high.tolist() == states.max(axis=0).tolist()
    assert (numbers.terminated, numbers.truncated, numbers.cut) == (1, 2, 0)
