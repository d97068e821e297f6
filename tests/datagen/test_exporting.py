"""`m3pc replay export`: other tools read the store's episodes, bit for bit."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3pc.datasets.minari_writer import dataset_id
from m3pc.types import AppendKey, Episode
from replay.format.manifest import Header
from replay.format.payload import encode
from replay.store.store import Store, write_store
from replay.writing.writer import Writer
from tests.support.episodes.episodes import header, numbered
from tests.support.episodes.foreign_files import episode, nothing_left, write_small_store
from tests.support.episodes.live_store import EPISODES, closed, fill, left_by_kill
from tests.support.runs.commands import Command, assert_one_sentence

ALL = tuple(EPISODES.values())


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return closed(tmp_path / "live")


def assert_equal(episodes: Iterable[Episode], expected: Iterable[Episode]) -> None:
    """Everything that Minari keeps is equal, bit for bit: -0.0 is not 0.0."""
    for one, other in zip(episodes, expected, strict=True):
        for name in ("states", "actions", "rewards"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        assert (one.terminated, one.truncated) == (other.terminated, other.truncated)


def assert_parquet_holds(out: Path, episodes: Sequence[Episode]) -> None:
    steps, table = (pq.read_table(out / f"{name}.parquet") for name in ("steps", "episodes"))
    rows = zip(*(table[name].to_pylist() for name in ("first", "length", "episode")), strict=True)
    states = np.array(steps["states"].to_pylist(), np.float32)
    for k, ((first, length, number), expected) in enumerate(zip(rows, episodes, strict=True)):
        mine = slice(first, first + length)
        final = np.array(table["final_state"][k].as_py(), np.float32)
        assert (np.concatenate([states[mine], final[None]]) == expected.states).all()
        assert steps["rewards"].to_numpy()[mine].tobytes() == expected.rewards.tobytes()
        assert set(steps["episode"].to_pylist()[mine]) == {number}
        assert table["seed"][k].as_py() == expected.seed
        assert table["terminated"][k].as_py() == expected.terminated
    assert steps.num_rows == sum(map(len, episodes))


def test_parquet_has_the_columns_and_rows_of_the_segments(
    m3pc: Command, live: Path, tmp_path: Path
) -> None:
    with Writer(live, header()) as writer:
        writer.roll()  # so that all of it is in segments, to compare with
    out = tmp_path / "out"
    done = m3pc("replay", "export", live, out, "--format", "parquet")
    assert (done.code, done.out.split(";")[0]) == (0, f"{out}: 6 episodes, 45 steps")
    assert sorted(path.name for path in out.iterdir()) == ["episodes.parquet", "steps.parquet"]
    for kind in ("steps", "episodes"):
        files = sorted((live / "segments").glob(f"*.{kind}.arrow"))
        parts = [pa.ipc.open_file(path).read_all() for path in files]
        expected, exported = pa.concat_tables(parts), pq.read_table(out / f"{kind}.parquet")
        assert exported.schema.equals(expected.schema)
        numbers = [
            table.drop(["first"] * (kind == "episodes")).to_pydict()
            for table in (exported, expected)
        ]
        assert repr(numbers[0]) == repr(numbers[1])  # as text, because NaN differs from itself
        about = json.loads(exported.schema.metadata[b"m3pc"])
        assert Header(**about) == Store(live).header
    first = pq.read_table(out / "episodes.parquet")["first"].to_pylist()
    assert first == [0, 5, 11, 18, 26, 35]  # rows of the one steps file


def test_a_store_in_use_and_one_left_by_a_kill_are_exported_with_their_log(
    m3pc: Command, tmp_path: Path
) -> None:
    with fill(tmp_path / "open"):
        done = m3pc("replay", "export", tmp_path / "open", tmp_path / "one", "--format", "parquet")
        assert done.code == 0, done.errors
    left_by_kill(tmp_path / "dead")
    done = m3pc("replay", "export", tmp_path / "dead", tmp_path / "two", "--format", "parquet")
    assert done.code == 0, done.errors
    for name in ("one", "two"):
        assert_parquet_holds(tmp_path / name, ALL)
        numbers = pq.read_table(tmp_path / name / "episodes.parquet")["episode"].to_pylist()
        assert numbers == list(range(6))


@pytest.mark.parametrize("kind", ["parquet", "minari"])
def test_withdrawn_and_damaged_episodes_are_left_out_and_counted(
    kind: str, m3pc: Command, live: Path, tmp_path: Path
) -> None:
    with Writer(live, header()) as writer:
        writer.withdraw_producer(1)
    (live / "segments/000000.steps.arrow").write_bytes(b"no Arrow")
    out = tmp_path / "out"
    done = m3pc("replay", "export", live, out, "--format", kind)
    assert done.code == 0, done.errors
    assert "2 withdrawn episodes, 2 in damaged segments" in done.out
    assert "damaged, left out: segments/000000.steps.arrow" in done.errors
    kept = [ALL[2], ALL[4]]
    if kind == "parquet":
        assert_parquet_holds(out, kept)
    else:
        assert m3pc("data", "import", out, tmp_path / "back").code == 0
        assert_equal(Store(tmp_path / "back").episodes(), kept)


def test_minari_gives_back_the_same_episodes(m3pc: Command, tmp_path: Path) -> None:
    store = write_small_store(tmp_path / "store", np.random.default_rng(3))
    done = m3pc("replay", "export", store, tmp_path / "out", "--format", "minari")
    assert done.code == 0, done.errors
    done = m3pc("data", "import", tmp_path / "out", tmp_path / "back")
    assert done.code == 0, done.errors
    back = Store(tmp_path / "back")
    assert_equal(back.episodes(), Store(store).episodes())
    assert (back.header.max_episode_steps, back.header.env) == (10, None)


@pytest.mark.parametrize("kind", ["parquet", "minari"])
def test_relative_paths_start_at_the_working_folder(
    kind: str, m3pc: Command, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(live.parent)
    done = m3pc("replay", "export", "live", "out", "--format", kind)
    assert (done.code, done.out.split(";")[0]) == (0, "out: 6 episodes, 45 steps")
    files = {path.name for path in (live.parent / "out").rglob("*") if path.is_file()}
    assert files == (
        {"steps.parquet", "episodes.parquet"}
        if kind == "parquet"
        else {"main_data.hdf5", "metadata.json"}
    )


def test_the_shipped_set_survives_minari(m3pc: Command, tmp_path: Path) -> None:
    shipped = "shipped:hopper-medium-replay"
    assert m3pc("replay", "export", shipped, tmp_path / "out", "--format", "minari").code == 0
    assert m3pc("data", "import", tmp_path / "out", tmp_path / "back").code == 0
    from m3pc.cli.options import open_store

    back, before = Store(tmp_path / "back"), open_store(shipped)
    assert_equal(back.episodes(), before.episodes())
    assert back.header.env == before.header.env == "d4rl/Hopper-v2"
    assert back.header.max_episode_steps == before.header.max_episode_steps


def test_signs_of_zero_and_the_kind_of_end_are_kept(m3pc: Command, tmp_path: Path) -> None:
    sent = episode(np.random.default_rng(4), 4, terminated=True)
    sent.actions[:] = [[-0.0, 0.0], [-1.0, 1.0], [0.5, -0.5], [1e-40, -1e-40]]
    sent.rewards[:2] = -0.0, 1e-42
    with write_store(tmp_path / "store", header(states=3, actions=2)) as writer:
        writer.append(sent)
    out, back = tmp_path / "out", tmp_path / "back"
    assert m3pc("replay", "export", tmp_path / "store", out, "--format", "minari").code == 0
    assert m3pc("data", "import", out, back).code == 0
    assert_equal(Store(back).episodes(), [sent])


def test_minari_loads_it_by_id(
    m3pc: Command, live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import minari

    out = tmp_path / "sets" / "toy-v3"
    assert m3pc("replay", "export", live, out, "--format", "minari").code == 0
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    loaded = minari.load_dataset("toy-v3")
    assert (loaded.total_episodes, loaded.total_steps) == (6, 45)
    for one, expected in zip(loaded.iterate_episodes(), ALL, strict=True):
        assert (one.observations == expected.states).all()
        assert one.terminations.tolist() == [False] * (len(expected) - 1) + [expected.terminated]
    assert [entry["seed"] for entry in loaded.storage.get_episode_metadata(range(2))] == [100, 101]
    assert list(minari.list_local_datasets()) == ["toy-v3"]


def test_minari_makes_the_environment_again(m3pc: Command, tmp_path: Path) -> None:
    import minari

    about = header(states=3, actions=1, max_episode_steps=150, env="Pendulum-v1")
    with Writer(tmp_path / "live", about) as writer:
        writer.append(AppendKey(0, 0, 0), encode(numbered(0, 9, states=3)))
    out = tmp_path / "out"
    assert m3pc("replay", "export", tmp_path / "live", out, "--format", "minari").code == 0
    env = minari.MinariDataset(out / "data").recover_environment()
    assert env.spec is not None
    assert (env.spec.id, env.spec.max_episode_steps) == ("Pendulum-v1", 150)  # not the 200 it has
    env.close()


@pytest.mark.parametrize("env", ["Lift", "toy/Unheard-v7", "evil.module:Env-v0", "no id at all!"])
def test_an_unknown_environment_is_never_loaded(env: str, m3pc: Command, tmp_path: Path) -> None:
    about = header(max_episode_steps=77).model_copy(update={"env": env})
    with Writer(tmp_path / "live", about) as writer:
        writer.append(AppendKey(0, 0, 0), encode(numbered(0, 9)))
    out, back = tmp_path / "out", tmp_path / "back"
    assert m3pc("replay", "export", tmp_path / "live", out, "--format", "minari").code == 0
    assert m3pc("data", "import", out, back).code == 0
    assert Store(back).header.max_episode_steps == 77
    assert Store(back).header.env == (env if env in ("Lift", "toy/Unheard-v7") else None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hopper-v0", "hopper-v0"),
        ("hopper", "hopper-v0"),
        ("run 3.final", "run-3-final-v0"),
        ("-v2", "v2-v0"),
        ("...", "store-v0"),
    ],
)
def test_any_folder_name_gives_an_id_that_minari_accepts(name: str, expected: str) -> None:
    from minari.dataset.minari_dataset import parse_dataset_id

    assert dataset_id(name) == expected
    parse_dataset_id(expected)


@pytest.mark.parametrize("kind", ["parquet", "minari"])
def test_an_impossible_export_leaves_nothing(
    kind: str, m3pc: Command, live: Path, tmp_path: Path
) -> None:
    empty, taken, all_withdrawn = (tmp_path / name for name in ("empty", "taken", "withdrawn"))
    Writer(empty, header()).close()
    taken.mkdir()
    with fill(all_withdrawn) as writer:
        writer.withdraw_producer(0)
        writer.withdraw_producer(1)
    cases = [
        (live, taken, kind, "exists already"),
        (empty, tmp_path / "out", kind, "no episode"),
        (all_withdrawn, tmp_path / "out", kind, "no episode"),
        (live, tmp_path / "out", kind + "5", "give parquet or minari"),
        (tmp_path / "nowhere", tmp_path / "out", kind, "is not a store"),
        (live, live / "out", kind, "inside the store"),
    ]
    with nothing_left(tmp_path), nothing_left(live):
        for store, out, name, words in cases:
            assert_one_sentence(m3pc("replay", "export", store, out, "--format", name), words)


def test_an_export_that_fails_half_way_leaves_nothing(
    m3pc: Command, live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("m3pc.datagen.exporting.sync_directory", full)
    with nothing_left(tmp_path):
        for kind in ("parquet", "minari"):
            done = m3pc("replay", "export", live, tmp_path / "out", "--format", kind)
            assert (done.code, done.out) == (74, "")
