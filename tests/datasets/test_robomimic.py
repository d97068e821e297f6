"""robomimic's files of known tasks: where they come from, where episodes end, which are read."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from m3pc.core.manipulation_tasks import CAN, CAN_LIMITED, LIFT, SQUARE, ManipulationTask
from m3pc.datagen.importing import ingest
from m3pc.datasets.env_args import EnvArgs
from m3pc.datasets.robomimic import BY_SIZES
from m3pc.datasets.sandbox import SandboxLimits
from m3pc.datasets.source import ImportOptions
from m3pc.types import Episode, InputError
from replay.store.store import Store
from tests.support.episodes.foreign_files import Columns, transitions, write_hdf5, write_robomimic
from tests.support.episodes.shared_data import shared_file

LIMITS = SandboxLimits(memory=2 << 30, seconds=60)
ARM_SIZES = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2}


def bring(source: Path, out: Path, **options: Any) -> Store:
    return ingest(str(source), out, ImportOptions(**options), LIMITS, lambda progress: None)


def refusal(source: Path, out: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        bring(source, out, **options)
    assert not out.exists()
    return str(caught.value)


def demo(
    task: ManipulationTask, length: int, *, reward_at: int | None = None, seed: int = 0
) -> Columns:
    """Sizes and object of the task as robosuite 1.4 has them; a reward from that step on."""
    rng = np.random.default_rng(seed)
    walk = {name: rng.standard_normal((length + 1, size)) for name, size in ARM_SIZES.items()}
    sim = rng.standard_normal((length + 1, task.sim_size))
    objects = rng.standard_normal((length + 1, task.object_size))
    objects[:, :3] = sim[:, task.object_at : task.object_at + 3]
    if task == LIFT:
        objects[:, 7:] = walk["robot0_eef_pos"] - objects[:, :3]
    walk["object"] = objects
    rewards = np.zeros(length)
    if reward_at is not None:
        rewards[reward_at:] = 1
    return {
        **{f"obs/{name}": rows[:-1] for name, rows in walk.items()},
        **{f"next_obs/{name}": rows[1:] for name, rows in walk.items()},
        "actions": rng.uniform(-1, 1, (length, 7)),
        "rewards": rewards,
        "dones": (rewards > 0).astype(np.int64),
        "states": sim[:-1],
    }


def one(task: ManipulationTask, tmp_path: Path, change: Columns, **options: Any) -> Episode:
    """The episode of a demonstration of 8 steps that succeeds at step 5, if nothing is changed."""
    path = write_robomimic(tmp_path / "x.hdf5", [demo(task, 8, reward_at=5) | change], None)
    (episode,) = bring(path, tmp_path / "out", **options).episodes()
    return episode


# The environment of a recording


@pytest.mark.parametrize("task", [LIFT, CAN, SQUARE], ids=lambda task: task.name)
def test_the_task_and_its_step_limit_are_recognised_by_sizes(
    task: ManipulationTask, tmp_path: Path
) -> None:
    path = write_robomimic(tmp_path / "x.hdf5", [demo(task, 8, reward_at=5)], None)
    header = bring(path, tmp_path / "out").header
    assert header.env == f"robosuite/{task.name}"
    assert (
        header.max_episode_steps
        == {"Lift": 400, "PickPlaceCan": 400, "NutAssemblySquare": 500}[task.name]
    )
    assert header.states == 9 + task.object_size
    assert header.source["environment"] == BY_SIZES
    assert header.source["recorded by"] == "not said: robosuite 1.4 or before is assumed"


@pytest.mark.parametrize(
    "options",
    [{"env": "robosuite/CanLim"}, {"keys": CAN_LIMITED.keys}],
    ids=["by its name", "by its keys"],
)
def test_the_limited_can_reads_the_cans_file_with_fewer_observations(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = write_robomimic(tmp_path / "x.hdf5", [demo(CAN, 8)], None)
    store = bring(path, tmp_path / "out", **options)
    assert (store.header.env, store.header.states) == ("robosuite/CanLim", 12)
    full = bring(path, tmp_path / "full")
    (limited,), (unlimited,) = store.episodes(), full.episodes()
    np.testing.assert_array_equal(limited.states, unlimited.states[:, :12])


def test_other_keys_are_of_no_environment(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "x.hdf5", [demo(CAN, 8)], None)
    header = bring(path, tmp_path / "out", keys=("object[3:7]", "eef_pos")).header
    assert (header.env, header.states) == (None, 7)
    assert header.source["environment"] == "none: --keys are not those of robosuite/PickPlaceCan"
    message = refusal(path, tmp_path / "x", keys=("object",), env="robosuite/PickPlaceCan")
    assert (
        "the states of robosuite/PickPlaceCan are eef_pos,eef_quat,gripper_qpos,object" in message
    )
    assert "has no numbers in object[20:]" in refusal(path, tmp_path / "x", keys=("object[20:]",))


# As in the files that robomimic calls v141.
KWARGS: dict[str, Any] = {
    "has_renderer": False,
    "has_offscreen_renderer": False,
    "ignore_done": True,
    "use_object_obs": True,
    "use_camera_obs": False,
    "control_freq": 20,
    "controller_configs": {
        "type": "OSC_POSE",
        "input_max": 1,
        "input_min": -1,
        "output_max": [0.05, 0.05, 0.05, 0.5, 0.5, 0.5],
        "output_min": [-0.05, -0.05, -0.05, -0.5, -0.5, -0.5],
        "kp": 150,
        "damping": 1,
        "impedance_mode": "fixed",
        "kp_limits": [0, 300],
        "damping_limits": [0, 10],
        "position_limits": None,
        "orientation_limits": None,
        "uncouple_pos_ori": True,
        "control_delta": True,
        "interpolation": None,
        "ramp_ratio": 0.2,
    },
    "robots": ["Panda"],
    "gripper_types": "default",
    "camera_depths": False,
    "camera_heights": 84,
    "camera_widths": 84,
    "render_gpu_device_id": 0,
    "reward_shaping": False,
}


def env_args(version: str | None = "1.4.1", **changes: Any) -> str:
    args = {"env_name": "PickPlaceCan", "type": 1, "env_kwargs": KWARGS | changes}
    return json.dumps(args | ({"env_version": version} if version else {}))


def with_args(path: Path, text: str, task: ManipulationTask = CAN) -> Path:
    write_robomimic(path, [demo(task, 8, reward_at=5)], None)
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = text
    return path


NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "ours": ({}, ""),
    "slower": ({"control_freq": 10}, ' {"control_freq": 10}'),
    "another robot": ({"robots": "Sawyer"}, ' {"robots": "Sawyer"}'),
    "softer": (
        {"controller_configs": KWARGS["controller_configs"] | {"damping": 2, "kp": 50}},
        ' {"controller": {"damping_ratio": 2, "kp": 50}}',
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_env_args_become_a_name_with_what_differs(case: str, tmp_path: Path) -> None:
    changes, ending = NAMES[case]
    header = bring(with_args(tmp_path / "x.hdf5", env_args(**changes)), tmp_path / "out").header
    assert header.env == f"robosuite/PickPlaceCan{ending}"
    assert header.source["environment"] == "named in env_args"
    assert header.source["recorded by"] == "robosuite 1.4.1"


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "table_full_size": {"table_full_size": [1, 1, 1]},
    "controller": {"controller_configs": KWARGS["controller_configs"] | {"type": "IK_POSE"}},
    "robots": {"robots": ["Panda", "Panda"]},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_arguments_are_named(name: str, tmp_path: Path) -> None:
    path = with_args(tmp_path / "x.hdf5", env_args(**UNSUPPORTED[name]))
    message = refusal(path, tmp_path / "out")
    assert f"env_args has {{'{name}'" in message
    assert "--env robosuite/PickPlaceCan" in message
    given = bring(path, tmp_path / "out", env="robosuite/PickPlaceCan")
    assert given.header.env == "robosuite/PickPlaceCan"


@pytest.mark.parametrize("case", NAMES)
def test_the_limited_can_keeps_the_files_arguments(case: str, tmp_path: Path) -> None:
    changes, ending = NAMES[case]
    path = with_args(tmp_path / "x.hdf5", env_args(**changes))
    header = bring(path, tmp_path / "out", env="robosuite/CanLim").header
    assert (header.env, header.states) == (f"robosuite/CanLim{ending}", 12)
    assert header.source["environment"] == "given"


def test_only_unsupported_arguments_of_the_file_are_left_out(tmp_path: Path) -> None:
    text = env_args(control_freq=10, table_full_size=[1, 1, 1])
    path = with_args(tmp_path / "x.hdf5", text)
    header = bring(path, tmp_path / "out", env="robosuite/CanLim").header
    assert header.env == 'robosuite/CanLim {"control_freq": 10}'
    assert header.source["environment"] == "given; left out of env_args: ['table_full_size']"
    own = 'robosuite/CanLim {"control_freq": 50}'
    assert bring(path, tmp_path / "own", env=own).header.env == own


def test_env_args_may_be_a_text_of_one_size(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "x.hdf5", [demo(CAN, 8)], None)
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = np.bytes_(env_args(control_freq=10))
    header = bring(path, tmp_path / "out").header
    assert header.env == 'robosuite/PickPlaceCan {"control_freq": 10}'
    assert header.source["recorded by"] == "robosuite 1.4.1"


OTHERS: dict[str, tuple[ManipulationTask, str, str]] = {
    "a nut as a can": (SQUARE, "robosuite/PickPlaceCan", "the sizes of NutAssemblySquare"),
    "a cube as a can": (LIFT, "robosuite/CanLim", "the sizes of Lift"),
    "a can as a cube": (CAN, "robosuite/Lift", "the sizes of PickPlaceCan"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_task_is_not_imported_as_another(case: str, tmp_path: Path) -> None:
    task, env, words = OTHERS[case]
    path = write_robomimic(tmp_path / "x.hdf5", [demo(task, 8)], None)
    assert words in refusal(path, tmp_path / "out", env=env)
    assert bring(path, tmp_path / "out", env="my/Arm-v0").header.env == "my/Arm-v0"


def test_a_task_that_env_args_names_is_not_imported_as_another(tmp_path: Path) -> None:
    path = with_args(tmp_path / "x.hdf5", env_args().replace("PickPlaceCan", "ToolHang"), CAN)
    message = refusal(path, tmp_path / "out", env="robosuite/PickPlaceCan")
    assert "the environment is robosuite/PickPlaceCan, but env_args names ToolHang" in message
    message = refusal(with_args(tmp_path / "y.hdf5", env_args(), SQUARE), tmp_path / "out")
    assert "but object and states have the sizes of NutAssemblySquare" in message


@pytest.mark.parametrize("named", [None, "PickPlaceCan"])
def test_states_have_the_width_of_the_environments(named: str | None, tmp_path: Path) -> None:
    """Without simulator states, the task cannot be recognised by its sizes."""
    columns = demo(LIFT, 8)
    del columns["states"]
    path = write_robomimic(tmp_path / "x.hdf5", [columns], named)
    message = refusal(path, tmp_path / "out", env="robosuite/PickPlaceCan")
    assert "have 19 numbers, but a state of robosuite/PickPlaceCan has 23" in message
    assert (LIFT.state_size, CAN.state_size, SQUARE.state_size) == (19, 23, 23)
    assert CAN_LIMITED.state_size == 12


LATER = {
    "by its version": env_args("1.5.1"),
    "by its controller": env_args(None, controller_configs={"type": "BASIC", "body_parts": {}}),
}


@pytest.mark.parametrize("how", LATER)
def test_data_of_a_later_robosuite_are_refused(how: str, tmp_path: Path) -> None:
    path = with_args(tmp_path / "x.hdf5", LATER[how])
    for options in ({}, {"env": "robosuite/PickPlaceCan"}):
        assert "of robosuite 1.5 or later" in refusal(path, tmp_path / "out", **options)
    assert bring(path, tmp_path / "out", env="my/Arm-v0").header.env == "my/Arm-v0"


@pytest.mark.parametrize("task", [CAN, SQUARE, LIFT], ids=lambda task: task.name)
def test_a_later_layout_is_recognised_without_a_version(
    task: ManipulationTask, tmp_path: Path
) -> None:
    columns = demo(task, 8)
    for when in ("obs", "next_obs"):
        objects = columns[f"{when}/object"]
        if task == LIFT:
            objects[:, 7:] *= -1
        else:
            columns[f"{when}/object"] = np.roll(objects, 7, axis=1)
    path = write_robomimic(tmp_path / "x.hdf5", [columns], None)
    assert "of robosuite 1.5 or later" in refusal(path, tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"env_name": 1}', '{"env_name": "Lift", "env_version": 1}']
)
def test_env_args_without_a_task_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="not JSON with an env_name"):
        EnvArgs.parse(text, "/data")


def test_a_version_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(InputError, match=r"such as 1\.4\.1"):
        assert EnvArgs(version="new").is_later_robosuite


def test_another_task_of_robosuite_keeps_its_name(tmp_path: Path) -> None:
    text = env_args().replace("PickPlaceCan", "ToolHang")
    header = bring(with_args(tmp_path / "x.hdf5", text), tmp_path / "out").header
    assert (header.env, header.max_episode_steps) == ("robosuite/ToolHang", 400)


# Ends of episodes


def test_an_episode_ends_with_its_first_success(tmp_path: Path) -> None:
    episode = one(CAN, tmp_path, {})
    assert len(episode) == 6
    assert episode.rewards.tolist() == [0, 0, 0, 0, 0, 1]
    assert (episode.terminated, episode.truncated) == (True, False)
    after = demo(CAN, 8, reward_at=5)["obs/object"][6].astype(np.float32)
    np.testing.assert_array_equal(episode.states[6, 9:], after)


def test_a_demonstration_that_never_succeeds_stays_complete(tmp_path: Path) -> None:
    episode = one(CAN, tmp_path, {"rewards": np.zeros(8), "dones": np.zeros(8)})
    assert len(episode) == 8
    assert (episode.terminated, episode.truncated) == (False, False)


def test_the_end_of_a_recording_is_no_success(tmp_path: Path) -> None:
    """robomimic may mark the last step of each demonstration as done."""
    episode = one(CAN, tmp_path, {"rewards": np.zeros(8), "dones": np.eye(8)[7]})
    assert len(episode) == 8
    assert (episode.terminated, episode.truncated) == (False, False)


def test_a_longer_demonstration_ends_at_the_limit(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "x.hdf5", [demo(LIFT, 430, reward_at=420)], None)
    (episode,) = bring(path, tmp_path / "out").episodes()
    assert len(episode) == 400
    assert (episode.terminated, episode.truncated) == (False, True)
    (longer,) = bring(path, tmp_path / "longer", max_episode_steps=1000).episodes()
    assert (len(longer), longer.terminated) == (421, True)


def test_rounding_of_actions_is_clipped_and_more_is_refused(tmp_path: Path) -> None:
    actions = demo(CAN, 8)["actions"]
    actions[0, 0], actions[1, 0] = 1.0004, -1.00001
    episode = one(CAN, tmp_path, {"actions": actions})
    assert episode.actions[:2, 0].tolist() == [1, -1]
    actions[0, 0] = 1.2
    path = write_robomimic(tmp_path / "y.hdf5", [demo(CAN, 8) | {"actions": actions}], None)
    assert "an action reaches 1.2, expected [-1, 1]" in refusal(path, tmp_path / "other")


def test_shaped_rewards_are_refused(tmp_path: Path) -> None:
    path = write_robomimic(tmp_path / "x.hdf5", [demo(CAN, 8) | {"rewards": np.full(8, 0.3)}], None)
    assert "rewards other than 0 and 1" in refusal(path, tmp_path / "out")


# Subsets


def with_masks(path: Path) -> Path:
    """Four demonstrations of 3, 4, 5 and 6 steps."""
    write_robomimic(path, [demo(LIFT, 3 + i, seed=i) for i in range(4)], None)
    with h5py.File(path, "a") as file:
        file["mask/good"] = np.array([b"demo_4", b"demo_2", b"demo_77"])
        file["mask/none"] = np.array([b"demo_77"])
        file["mask/wrong"] = np.array([1, 2])
    return path


def test_a_subset_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    path = with_masks(tmp_path / "x.hdf5")
    store = bring(path, tmp_path / "out", subset="good")
    assert store.lengths.tolist() == [4, 6]
    assert store.header.source["subset"] == "good"
    assert bring(path, tmp_path / "all").lengths.tolist() == [3, 4, 5, 6]


WRONG_SUBSETS = {
    "bad": "no subset 'bad'; the file has ['good', 'none', 'wrong']",
    "none": "of the 1 demonstrations in 'none' the file has none",
    "wrong": "/mask/wrong holds int64, expected texts",
}


@pytest.mark.parametrize("subset", WRONG_SUBSETS)
def test_a_missing_subset_is_refused(subset: str, tmp_path: Path) -> None:
    path = with_masks(tmp_path / "x.hdf5")
    assert WRONG_SUBSETS[subset] in refusal(path, tmp_path / "out", subset=subset)


def test_only_robomimic_has_subsets(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "x.hdf5", transitions(np.random.default_rng(0)))
    assert "only robomimic's files have subsets" in refusal(path, tmp_path / "out", subset="train")
    bare = write_robomimic(tmp_path / "y.hdf5", [demo(LIFT, 4)], None)
    assert "the file has none" in refusal(bare, tmp_path / "out", subset="train")


def test_the_subsets_of_a_real_file_add_up(tmp_path: Path) -> None:
    path = shared_file("robomimic/ph_lift_low_dim.hdf5")
    parts = [bring(path, tmp_path / name, subset=name).lengths for name in ("train", "valid")]
    lengths = bring(path, tmp_path / "all").lengths
    assert sorted(np.concatenate(parts)) == sorted(lengths)
