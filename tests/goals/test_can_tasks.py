"""Goals for a can: which episode gives the waypoints, and how its path is changed. y is index 1."""

from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from m3pc.envs import make
from m3pc.envs.subproc_vector import SubprocVectorEnv
from m3pc.evaluation.goals import GoalRequest, make_goal_job
from m3pc.goals.can_tasks import (
    CAN_BOX,
    CAN_IN_HAND,
    CAN_POSITION,
    CAN_ROTATION,
    CAN_ROTATION_IN_HAND,
    ENV,
    HAND_POSITION,
    HAND_ROTATION,
    NEARER_BOX,
    Box,
    can_in_hand,
    end_in_nearer_box,
    move_to_start,
    scale_path,
)
from m3pc.goals.quaternions import compose, inverse, rotate
from m3pc.goals.registry import TASKS
from m3pc.goals.task import GoalSetting
from m3pc.model import checkpoint
from m3pc.types import Episode, Floats, InputError
from replay.store.store import write_store
from tests.support.episodes.episodes import header
from tests.support.episodes.shared_data import shared_file
from tests.support.models.small_weights import tiny_config, tiny_weights

IN_BOX, BESIDE, NEAR = (0.18, 0.37, 0.85), (0.06, -0.6, 0.1), (0.18, 0.1575, 0.85)


def states(start: tuple[float, float, float], *end: tuple[float, float, float]) -> Floats:
    """The hand waits at 0 for one step, then stands where the can does and does not turn."""
    table = np.zeros((2 + len(end), 23), np.float32)
    table[:, 6] = 1  # x, y, z, w: not turned
    for row, place in enumerate((start, start, *end)):
        table[row, CAN_POSITION] = place
        table[row, HAND_POSITION] = place if row else (0, 0, 0)
        table[row, CAN_IN_HAND] = table[row, CAN_POSITION] - table[row, HAND_POSITION]
    return table


def episode(start: tuple[float, float, float], *end: tuple[float, float, float]) -> Episode:
    table = states(start, *end)
    length = len(table) - 1
    return Episode(
        states=table,
        actions=np.zeros((length, 7), np.float32),
        rewards=np.zeros(length, np.float32),
        terminated=False,
        truncated=True,
    )


def guided(name: str, first: tuple[float, float, float], *episodes: Episode) -> Floats:
    setting = GoalSetting(rows=5, episodes=episodes, source="cans")
    return TASKS[name].waypoints("paper", setting).waypoints(states(first)[0])


LEFT, RIGHT = (0.0, -0.3, 0.86), (0.2, -0.1, 0.86)
DATA = (
    episode(LEFT, IN_BOX),
    episode(RIGHT, IN_BOX),
    episode(LEFT, BESIDE),
    episode(RIGHT, BESIDE),
)


@pytest.mark.parametrize(("name", "number"), [("can-place", 0), ("can-throw", 2)])
def test_waypoints_are_the_episode_of_the_wanted_end_whose_can_begins_nearest(
    name: str, number: int
) -> None:
    assert np.array_equal(guided(name, LEFT, *DATA), DATA[number].states)
    assert np.array_equal(guided(name, RIGHT, *DATA), DATA[number + 1].states)


@pytest.mark.parametrize(
    ("first", "aside", "number"),
    [((0.05, -0.25, 0.9), (0.05, 0.05, 0), 0), ((0.15, -0.15, 0.8), (-0.05, -0.05, 0), 1)],
)
def test_waypoints_are_shifted_to_the_present_can(
    first: tuple[float, float, float], aside: tuple[float, float, float], number: int
) -> None:
    table, recorded = guided("can-place", first, *DATA), DATA[number].states
    for part in (HAND_POSITION, CAN_POSITION):
        assert table[:, part] - recorded[:, part] == pytest.approx(np.tile(aside, (3, 1)), abs=1e-6)
    rest = [d for d in range(23) if d not in (0, 1, 2, 9, 10, 11)]
    assert np.array_equal(table[:, rest], recorded[:, rest])  # it keeps its height and what it sees


def test_the_nearer_box_is_reached_by_the_same_path_made_shorter() -> None:
    table = guided("can-nearer", LEFT, *DATA)
    assert table[-1, CAN_POSITION] == pytest.approx(NEAR, abs=1e-6)
    assert table[-1, HAND_POSITION] == pytest.approx(NEAR, abs=1e-6)
    assert np.array_equal(table[:2], DATA[0].states[:2])  # until the can moves
    assert NEARER_BOX.contains(table[-1, CAN_POSITION])


def about_z(angle: float) -> NDArray[np.float64]:
    return np.array([0, 0, np.sin(angle / 2), np.cos(angle / 2)])


def test_waypoints_are_turned_to_the_present_can() -> None:
    """The can lies at 0.3 rad and is turned by 1 rad on its path; the hand has turned by 0.5. The
    present one lies at 1.1 rad."""
    path, first = states(LEFT, IN_BOX), states(LEFT)[0]
    path[:, CAN_ROTATION] = [about_z(0.3), about_z(0.3), about_z(1.3)]
    path[:, HAND_ROTATION] = about_z(0.5)
    path[:, CAN_ROTATION_IN_HAND] = [about_z(-0.2), about_z(-0.2), about_z(0.8)]
    first[CAN_ROTATION] = -about_z(1.1)  # the same turn, as MuJoCo may as well say it
    table = move_to_start(path, first)
    assert table[:, CAN_ROTATION] == pytest.approx(-np.stack([about_z(1.1)] * 2 + [about_z(2.1)]))
    assert table[:, CAN_ROTATION_IN_HAND] == pytest.approx(
        np.stack([about_z(0.6)] * 2 + [about_z(1.6)])
    )
    assert table[:, HAND_ROTATION] == pytest.approx(path[:, HAND_ROTATION])


def test_a_tipped_can_stays_tipped_when_its_first_turn_changes() -> None:
    tipped, path = np.array([0.5**0.5, 0, 0, 0.5**0.5]), states(LEFT, IN_BOX)
    path[:, CAN_ROTATION] = [about_z(0), about_z(0), tipped]
    first = states(LEFT)[0]
    first[CAN_ROTATION] = about_z(0.7)
    up, along = np.array([0.0, 0.0, 1.0]), np.array([0.0, -1.0, 0.0])  # upright, and as `tipped`
    assert rotate(move_to_start(path, first)[-1, CAN_ROTATION], up) == pytest.approx(
        along, abs=1e-6
    )


def test_a_path_is_scaled_from_the_cans_first_position() -> None:
    path = states((0, -0.4, 0.86), (0.1, 0.0, 1.0), (0.2, 0.4, 0.85))
    path[3, 0:3] += [0.3, 0.2, 0.1]  # at the end the hand is not where the can is
    table = scale_path(path, 0.5)
    assert table[:, 10] == pytest.approx([-0.4, -0.4, -0.2, 0.0])
    assert table[3, HAND_POSITION] == pytest.approx([0.5, 0.1, 0.95])
    assert table[3, CAN_IN_HAND] == pytest.approx([-0.3, -0.1, -0.1])  # as the hand would see it
    rest = [d for d in range(23) if d not in (0, 1, 2, 9, 10, 11, 16, 17, 18)]
    assert np.array_equal(table[:, rest], path[:, rest])
    assert path[3, 10] == pytest.approx(0.4)  # the argument is not changed


def test_a_turned_hand_sees_the_can_in_its_own_frame() -> None:
    path = states((0, -0.4, 0.86), (0, 0, 0.86))
    path[2, HAND_POSITION] = (0, -0.1, 0.86)
    path[2, 3:7] = (0, 0, 0.5**0.5, 0.5**0.5)  # a quarter turn about z: it sees y as x
    table = scale_path(path, 1.0)
    assert table[2, CAN_IN_HAND] == pytest.approx([0.1, 0, 0], abs=1e-6)


def test_a_can_that_does_not_move_keeps_its_path() -> None:
    path = states(LEFT, LEFT)
    assert np.array_equal(scale_path(path, 0.5), path)


def test_the_limited_can_has_no_columns_in_the_hands_frame() -> None:
    path = states(LEFT, IN_BOX)[:, :12]
    assert end_in_nearer_box(path)[-1, CAN_POSITION] == pytest.approx(NEAR, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "end"), [("can-place", IN_BOX), ("can-throw", BESIDE), ("can-nearer", NEAR)]
)
def test_success_depends_on_where_the_can_ends(name: str, end: tuple[float, float, float]) -> None:
    for position in (IN_BOX, BESIDE, NEAR):
        task, table = TASKS[name], states(LEFT, position)
        assert task.succeeded(task, table, table) == (position == end)


def test_data_without_an_episode_of_the_wanted_end_are_refused() -> None:
    with pytest.raises(InputError, match=r"none of the 1 episodes .* the can ends beside the bins"):
        guided("can-throw", LEFT, DATA[0])


def test_the_can_in_the_hands_frame_matches_recorded_data() -> None:
    recorded = _recorded()
    assert can_in_hand(recorded) == pytest.approx(recorded[:, CAN_IN_HAND], abs=2e-6)


def test_the_cans_rotation_in_the_hands_frame_matches_recorded_data() -> None:
    """Also where the can is turned a little further than it was recorded."""
    path = _recorded()
    first = path[0].copy()
    first[CAN_ROTATION] = compose(first[CAN_ROTATION], about_z(0.5))
    table = move_to_start(path, first)
    expected = compose(inverse(table[:, HAND_ROTATION]), table[:, CAN_ROTATION])
    sign = np.sign((expected * table[:, CAN_ROTATION_IN_HAND]).sum(axis=1, keepdims=True))
    assert table[:, CAN_ROTATION_IN_HAND] == pytest.approx(sign * expected, abs=2e-6)
    assert (table[:, CAN_ROTATION_IN_HAND.stop - 1] >= 0).all()
    assert move_to_start(path, path[0]) == pytest.approx(path, abs=2e-6)


def _recorded() -> Floats:
    with h5py.File(shared_file("robomimic/mg_can_low_dim.hdf5")) as file:
        demo: Any = next(iter(file["data"].values()))["obs"]
        names = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object")
        return np.concatenate([demo[name][:] for name in names], axis=1).astype(np.float32)


# In robosuite

needs_robosuite = pytest.mark.skipif(
    find_spec("robosuite") is None,
    reason="robosuite is not installed: pip install 'm3pc[robosuite]'",
)


def request(folder: Path, width: int, env: str) -> GoalRequest:
    """A checkpoint of that environment and a data set of its states, in which a can is placed."""
    weights = tiny_weights(tiny_config(), states=width, actions=7, env=env)
    checkpoint.write(folder / "run", weights, {}, {})
    with write_store(folder / "data", header(states=width, actions=7, env=env)) as writer:
        complete = DATA[0]
        limited = np.ascontiguousarray(complete.states[:, :width])
        writer.append(replace(complete, states=limited))
    return GoalRequest(path=folder / "run", task="can-place", data=folder / "data")


@needs_robosuite
@pytest.mark.parametrize(
    ("width", "env"),
    [
        (23, ENV),
        (12, "robosuite/CanLim"),
        (12, 'robosuite/CanLim {"control_freq": 10}'),
        (23, 'robosuite/PickPlaceCan {"control_freq": 10}'),
    ],
)
def test_a_can_task_is_played_in_the_checkpoints_environment(
    width: int, env: str, tmp_path: Path
) -> None:
    ready = make_goal_job(request(tmp_path, width, env))
    assert ready.task.env == env
    assert ready.cases[0].waypoints(DATA[0].states[0])[-1, CAN_POSITION] == pytest.approx(IN_BOX)


@needs_robosuite
def test_a_can_has_one_kind_of_waypoints_whatever_the_configuration_says(tmp_path: Path) -> None:
    plain = request(tmp_path, 12, "robosuite/CanLim")
    assert make_goal_job(replace(plain, sets=("goal.waypoints=released",))).waypoint_kind == "paper"
    with pytest.raises(InputError, match="can-place has no waypoints 'released'"):
        make_goal_job(replace(plain, waypoints="released"))


@needs_robosuite
def test_a_can_task_gives_the_same_episodes_in_processes_and_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = SubprocVectorEnv.__init__

    def init(
        self: SubprocVectorEnv, env_id: str, count: int, *, processes: int, **kwargs: Any
    ) -> None:
        made.append(processes)
        real(self, env_id, count, processes=processes, **kwargs)

    monkeypatch.setattr(SubprocVectorEnv, "__init__", init)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    few = replace(request(tmp_path, 12, "robosuite/CanLim"), steps=5, episodes=3)
    ready = make_goal_job(few)
    shared, alone = (
        ready.play(ready.cases[0], "goal", lambda numbers: None, processes) for processes in (0, 1)
    )
    assert made == [2]
    for one, other in zip(shared.episodes, alone.episodes, strict=True):
        assert one.states.tobytes() == other.states.tobytes()
    assert [len(one) for one in shared.episodes] == [5, 5, 5]


def test_a_checkpoint_does_not_choose_a_file_for_its_can(tmp_path: Path) -> None:
    hostile = request(tmp_path, 12, 'robosuite/CanLim {"robots": "/home/robot.xml"}')
    with pytest.raises(InputError, match=r"whose arguments \['robots'\] may open any file"):
        make_goal_job(hostile)


@needs_robosuite
def test_the_boxes_are_robosuites() -> None:
    with closing(make(ENV)) as env:
        simulator: Any = env.unwrapped
        for number, box in ((3, CAN_BOX), (1, NEARER_BOX)):
            for corner in _inside(box):
                assert simulator._box(np.array(corner)) == number
            for corner in _outside(box):
                assert simulator._box(np.array(corner)) != number


def _inside(box: Box) -> list[list[float]]:
    return [[v + 1e-6 for v in box.low], [v - 1e-6 for v in box.high]]


def _outside(box: Box) -> list[list[float]]:
    middle = [(low + high) / 2 for low, high in zip(box.low, box.high, strict=True)]
    ends = [
        (axis, end) for axis in range(3) for end in (box.low[axis] - 1e-6, box.high[axis] + 1e-6)
    ]
    return [[end if d == axis else middle[d] for d in range(3)] for axis, end in ends]
