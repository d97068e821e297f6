"""Each layout of each publisher becomes exactly the episodes that it holds."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from m3pc.datagen.importing import ingest
from m3pc.datasets.robomimic import KEYS
from m3pc.datasets.sandbox import SandboxLimits
from m3pc.datasets.source import ImportOptions
from m3pc.types import Episode, InputError
from replay.store.store import Store
from tests.support.episodes.foreign_files import (
    HORIZON,
    LENGTHS,
    PARTS,
    Columns,
    as_v0,
    as_v1,
    demonstration,
    nothing_left,
    swing,
    transitions,
    without_successors,
    write_hdf5,
    write_minari,
    write_robomimic,
)
from tests.support.episodes.shared_data import ROOT, shared_file

LIMITS = SandboxLimits(memory=2 << 30, seconds=60)


def bring(source: Path | str, out: Path, **options: Any) -> list[Episode]:
    return list(bring_store(source, out, **options).episodes())


def bring_store(source: Path | str, out: Path, **options: Any) -> Store:
    return ingest(str(source), out, ImportOptions(**options), LIMITS, lambda progress: None)


def same(episode: Episode, **expected: NDArray[Any]) -> bool:
    """Whether these columns are equal to the bit, as float32."""
    return all(
        np.array_equal(getattr(episode, name), values.astype(np.float32))
        for name, values in expected.items()
    )


def endings(episodes: list[Episode]) -> str:
    """A letter per episode: t(erminated), c(lock) for truncated, a dash for neither."""
    assert not any(e.terminated and e.truncated for e in episodes)
    return "".join("t" if e.terminated else "c" if e.truncated else "-" for e in episodes)


def episodes_of(columns: Columns) -> list[Columns]:
    """The columns of each of the three episodes."""
    cuts = np.cumsum(LENGTHS)[:-1]
    split = {name: np.split(column, cuts) for name, column in columns.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(len(LENGTHS))]


@pytest.mark.parametrize("layout", [lambda columns: columns, as_v1], ids=["v2", "v1"])
def test_d4rl_with_successors_keeps_every_step_and_final_state(
    layout: Callable[[Columns], Columns], tmp_path: Path
) -> None:
    columns = transitions(np.random.default_rng(1))
    path = write_hdf5(tmp_path / "toy.hdf5", layout(columns))
    episodes = bring(path, tmp_path / "out", max_episode_steps=HORIZON)
    assert endings(episodes) == "tc-"
    for episode, part in zip(episodes, episodes_of(columns), strict=True):
        visited = np.concatenate([part["observations"], part["next_observations"][-1:]])
        assert same(episode, states=visited, actions=part["actions"], rewards=part["rewards"])


def test_d4rl_v0_ends_episodes_by_the_step_limit_and_drops_steps_without_a_successor(
    tmp_path: Path,
) -> None:
    columns = transitions(np.random.default_rng(2))
    path = write_hdf5(tmp_path / "toy.hdf5", as_v0(columns))
    terminated, timed_out, cut = bring(path, tmp_path / "out", max_episode_steps=HORIZON)
    assert endings([terminated, timed_out, cut]) == "tc-"
    first, second, third = episodes_of(columns)
    # A terminal's successor is unknown but never used, so its step stays.
    visited = np.concatenate([first["observations"], first["observations"][-1:]])
    assert same(terminated, states=visited, actions=first["actions"], rewards=first["rewards"])
    # The other two end in their last stored state; the step from it was never completed.
    for episode, part in ((timed_out, second), (cut, third)):
        assert same(episode, states=part["observations"])
        assert same(episode, actions=part["actions"][:-1], rewards=part["rewards"][:-1])


def test_without_time_outs_the_step_limit_counts_from_the_last_end(tmp_path: Path) -> None:
    columns = transitions(np.random.default_rng(3))
    del columns["timeouts"]
    path = write_hdf5(tmp_path / "toy.hdf5", columns)
    episodes = bring(path, tmp_path / "out", max_episode_steps=3)
    # 5 steps to the terminal, then 7 to where the states jump, then 4 to the end of the file.
    assert [len(e) for e in episodes] == [3, 2, 3, 3, 1, 3, 1]
    assert endings(episodes) == "ctcc-c-"


def test_a_jump_after_exactly_the_step_limit_is_a_time_out(tmp_path: Path) -> None:
    columns = transitions(np.random.default_rng(3))
    del columns["timeouts"]
    path = write_hdf5(tmp_path / "toy.hdf5", columns)
    assert endings(bring(path, tmp_path / "out", max_episode_steps=LENGTHS[1])) == "tc-"


def test_a_rounding_of_successors_is_no_jump(tmp_path: Path) -> None:
    columns = transitions(np.random.default_rng(4))
    for name in ("observations", "next_observations"):
        columns[name] *= 1000
    columns["next_observations"] = np.nextafter(columns["next_observations"], np.float32(np.inf))
    store = bring_store(write_hdf5(tmp_path / "toy.hdf5", columns), tmp_path / "out")
    assert tuple(store.lengths) == LENGTHS
    assert store.header.source["cuts_by_jump"] == 0


def test_a_jump_of_states_ends_an_episode_that_no_flag_ends(tmp_path: Path) -> None:
    columns = transitions(np.random.default_rng(4))
    columns["terminals"][:] = columns["timeouts"][:] = False
    path = write_hdf5(tmp_path / "toy.hdf5", columns)
    episodes = bring(path, tmp_path / "out")
    assert tuple(len(e) for e in episodes) == LENGTHS
    assert endings(episodes) == "---"


def test_a_row_with_both_flags_counts_as_terminated(tmp_path: Path) -> None:
    columns = transitions(np.random.default_rng(5))
    columns["timeouts"] |= columns["terminals"]
    path = write_hdf5(tmp_path / "toy.hdf5", columns)
    assert endings(bring(path, tmp_path / "out")) == "tc-"


def test_rounding_beyond_the_bounds_of_actions_is_clipped(tmp_path: Path) -> None:
    columns = transitions(np.random.default_rng(6))
    columns["actions"][3, 1] = 1.00005
    path = write_hdf5(tmp_path / "toy.hdf5", columns)
    assert bring(path, tmp_path / "out")[0].actions[3, 1] == 1.0


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("hopper_medium-v2.hdf5", "d4rl/Hopper-v2"),
        ("walker2d-expert-v0.hdf5", "d4rl/Walker2d-v2"),
        ("toy.hdf5", None),
    ],
)
def test_the_robot_is_read_from_the_file_name_and_the_origin_is_stored(
    name: str, env: str | None, tmp_path: Path
) -> None:
    path = write_hdf5(tmp_path / name, transitions(np.random.default_rng(7)))
    header = bring_store(path, tmp_path / "out").header
    assert (header.env, header.max_episode_steps, header.states, header.actions) == (
        env,
        1000,
        3,
        2,
    )
    assert header.source["name"] == name
    assert header.source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_robomimic_joins_the_default_keys_and_reads_its_task(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    demos = [demonstration(rng, 5, done=True), demonstration(rng, 3, done=False)]
    store = bring_store(write_robomimic(tmp_path / "toy.hdf5", demos), tmp_path / "out")
    episodes = list(store.episodes())
    assert (store.header.env, store.header.max_episode_steps) == ("robosuite/Lift", 400)
    assert store.header.states == sum(PARTS.values())
    assert endings(episodes) == "t-"  # 3 steps are not 400: it was cut short
    for episode, demo in zip(episodes, demos, strict=True):
        now, after = (
            np.concatenate([demo[f"{when}/{part}"] for part in PARTS], axis=1)
            for when in ("obs", "next_obs")
        )
        visited = np.concatenate([now, after[-1:]])
        assert same(episode, states=visited, actions=demo["actions"], rewards=demo["rewards"])


def test_robomimic_demonstrations_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    lengths = list(range(2, 14))  # demo_10 sorts before demo_2 as text
    demos = [demonstration(rng, length, done=True) for length in lengths]
    path = write_robomimic(tmp_path / "toy.hdf5", demos, env_name=None)
    store = bring_store(path, tmp_path / "out")
    assert store.lengths.tolist() == lengths
    assert store.header.env is None


def test_robomimic_without_successors_keeps_the_step_that_ended_the_task(tmp_path: Path) -> None:
    rng = np.random.default_rng(10)
    demos = [
        without_successors(demonstration(rng, 5, done=True)),
        without_successors(demonstration(rng, 5, done=False)),
    ]
    path = write_robomimic(tmp_path / "toy.hdf5", demos)
    success, stopped = bring(path, tmp_path / "out", keys=("object",), max_episode_steps=5)
    assert endings([success, stopped]) == "tc"
    objects = demos[0]["obs/object"]
    assert same(success, states=np.concatenate([objects, objects[-1:]]))
    assert same(success, actions=demos[0]["actions"], rewards=demos[0]["rewards"])
    assert success.rewards[-1] == 1.0  # the reward for success is on that step
    assert same(stopped, states=demos[1]["obs/object"], actions=demos[1]["actions"][:-1])


@pytest.mark.parametrize("keys", [("object", "eef_pos"), ("object", "robot0_eef_pos")])
def test_robomimic_keys_are_chosen_by_short_or_full_name_in_the_given_order(
    keys: tuple[str, ...], tmp_path: Path
) -> None:
    demo = demonstration(np.random.default_rng(11), 4, done=True)
    path = write_robomimic(tmp_path / "toy.hdf5", [demo])
    (episode,) = bring(path, tmp_path / "out", keys=keys)
    now = np.concatenate([demo["obs/object"], demo["obs/robot0_eef_pos"]], axis=1)
    assert same(episode, states=np.concatenate([now, episode.states[-1:]]))
    assert episode.states.shape == (5, 13)


def test_minari_maps_actions_from_their_bounds_to_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    recorded = [swing(rng, 4, ended=how) for how in ("terminated", "truncated", "cut")]
    recorded[0]["actions"][:, 0] = (-2.0, 0.0, 1.0, 2.0)
    folder = write_minari(tmp_path / "minari", recorded)
    episodes = bring(folder, tmp_path / "out", max_episode_steps=9)
    assert endings(episodes) == "tc-"
    assert episodes[0].actions[:, 0].tolist() == [-1.0, 0.0, 0.5, 1.0]
    for episode, swung in zip(episodes, recorded, strict=True):
        assert same(episode, states=swung["observations"], rewards=swung["rewards"])
        assert same(episode, actions=swung["actions"] / 2)


def test_environment_and_step_limit_are_read_from_minari(tmp_path: Path) -> None:
    recorded = [swing(np.random.default_rng(13), 4, ended="truncated")]
    spec = gymnasium.spec("Pendulum-v1")
    folder = write_minari(tmp_path / "minari", recorded, env=spec)
    header = bring_store(folder, tmp_path / "out").header
    assert (header.env, header.max_episode_steps, header.source["id"]) == (
        "Pendulum-v1",
        200,
        "toy/pendulum-v0",
    )


def test_a_minari_id_is_found_in_the_folder_that_minari_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = [swing(np.random.default_rng(14), 4, ended="truncated")]
    write_minari(tmp_path / "minari", recorded)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    (episode,) = bring("minari:toy/pendulum-v0", tmp_path / "out", max_episode_steps=9)
    assert same(episode, states=recorded[0]["observations"])


def test_the_same_file_gives_the_same_store_to_the_byte(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "toy.hdf5", transitions(np.random.default_rng(15)))
    first, second = (bring_store(path, tmp_path / name) for name in ("first", "second"))
    assert first.checksum == second.checksum


def test_only_the_file_with_the_expected_hash_is_accepted(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "toy.hdf5", transitions(np.random.default_rng(16)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()

    def pinned(expected: str, name: str) -> Store:
        return ingest(
            str(path),
            tmp_path / name,
            ImportOptions(),
            LIMITS,
            lambda progress: None,
            expected_sha256=expected,
        )

    assert pinned(digest.upper(), "good").totals.episodes == 3
    with nothing_left(tmp_path), pytest.raises(InputError, match=f"SHA-256 {digest}, expected 00"):
        pinned("0" * 64, "bad")


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_already_exists_at_out_is_refused_and_stays(kind: str, tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "toy.hdf5", transitions(np.random.default_rng(17)))
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("precious")
    else:
        out.symlink_to(tmp_path / "nowhere")
    command = [sys.executable, "-m", "m3pc", "data", "import", str(path), str(out)]
    with nothing_left(tmp_path):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
        )
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert "Traceback" not in done.stderr
    assert kind != "file" or out.read_text() == "precious"


def test_the_command_imports_with_all_its_options(tmp_path: Path) -> None:
    demo = demonstration(np.random.default_rng(18), 4, done=True)
    path = write_robomimic(tmp_path / "toy.hdf5", [demo])
    options = ["--keys", "eef_pos, object", "--horizon", "50", "--env", "some/Env-v0"]
    options += ["--sha256", hashlib.sha256(path.read_bytes()).hexdigest(), "--memory-limit", "2"]
    command = [sys.executable, "-m", "m3pc", "data", "import", str(path), str(tmp_path / "out")]
    done = subprocess.run(
        command + options, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 episodes, 4 steps" in done.stdout
    header = Store(tmp_path / "out").header
    assert (header.states, header.max_episode_steps, header.env) == (13, 50, "some/Env-v0")


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("d4rl/hopper_medium-v2.hdf5", (2, 911)),
        ("d4rl/walker2d_medium-v2.hdf5", (2, 2000)),
        ("d4rl/halfcheetah_medium_replay-v1.hdf5", (2, 2000)),
    ],
)
def test_real_d4rl_files_equal_their_arrays(
    name: str, counts: tuple[int, int], tmp_path: Path
) -> None:
    path = shared_file(name)
    episodes = bring(path, tmp_path / "out")
    assert (len(episodes), sum(map(len, episodes))) == counts
    with h5py.File(path) as file:
        columns: Columns = {
            key: file[key][()] for key in ("observations", "actions", "rewards", "terminals")
        }
        successors, timeouts = file["next_observations"][()], file["timeouts"][()]
    ends = np.flatnonzero((columns["terminals"] != 0) | (timeouts != 0)).tolist()
    assert [e for e in ends if e + 1 < counts[1]] == [len(episodes[0]) - 1]
    first = 0
    for episode in episodes:
        rows = slice(first, first + len(episode))
        first = rows.stop
        visited = np.concatenate([columns["observations"][rows], successors[first - 1 : first]])
        assert same(episode, states=visited)
        assert same(episode, actions=columns["actions"][rows])
        assert same(episode, rewards=columns["rewards"][rows].reshape(-1))
        assert episode.terminated == bool(columns["terminals"][first - 1])


@pytest.mark.parametrize(
    ("name", "counts", "terminated"),
    [
        ("robomimic/square_ph_low_dim.hdf5", (200, 29348), 200),
        ("robomimic/mg_can_low_dim.hdf5", (2, 300), 0),
        ("robomimic/ph_lift_low_dim.hdf5", (2, 109), 2),
        ("robomimic/robomimic_test.hdf5", (2, 107), 2),
    ],
)
def test_real_robomimic_files_equal_their_arrays_up_to_success(
    name: str, counts: tuple[int, int], terminated: int, tmp_path: Path
) -> None:
    path = shared_file(name)
    episodes = bring(path, tmp_path / "out")
    assert (len(episodes), sum(map(len, episodes))) == counts
    assert sum(e.terminated for e in episodes) == terminated
    names = [key if key == "object" else f"robot0_{key}" for key in KEYS]
    with h5py.File(path) as file:
        demos = sorted(file["data"], key=lambda demo: int(demo[5:]))
        for episode, demo in zip(episodes, demos, strict=True):
            group, steps = file["data"][demo], slice(len(episode))
            now = np.concatenate([group["obs"][key][steps] for key in names], axis=1)
            successors = np.concatenate([group["next_obs"][key][steps] for key in names], axis=1)
            assert same(episode, states=np.concatenate([now, successors[-1:]]))
            assert same(episode, actions=group["actions"][steps], rewards=group["rewards"][steps])
            assert episode.terminated == bool(group["dones"][len(episode) - 1])
