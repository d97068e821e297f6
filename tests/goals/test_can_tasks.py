"""Goals for a can: which episode guides, and where its way is made shorter. y is across."""

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
from m3pc.evaluation.goals import GoalRequest, trial
from m3pc.goals.can_tasks import (
    CAN,
    CAN_TURNED,
    CORRECT,
    ENV,
    HAND,
    NEARER,
    SEEN,
    SEEN_TURNED,
    TURNED,
    Box,
    _seen,
    begun_at,
    shortened,
    to_nearer,
)
from m3pc.goals.quaternions import applied, composed, inverse
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
    found = np.zeros((2 + len(end), 23), np.float32)
    found[:, 6] = 1  # x, y, z, w: not turned
    for row, place in enumerate((start, start, *end)):
        found[row, CAN] = place
        found[row, HAND] = place if row else (0, 0, 0)
        found[row, SEEN] = found[row, CAN] - found[row, HAND]
    return found


def episode(start: tuple[float, float, float], *end: tuple[float, float, float]) -> Episode:
    found = states(start, *end)
    length = len(found) - 1
    return Episode(
        states=found,
        actions=np.zeros((length, 7), np.float32),
        rewards=np.zeros(length, np.float32),
        terminated=False,
        truncated=True,
    )


def guided(name: str, first: tuple[float, float, float], *episodes: Episode) -> Floats:
    setting = GoalSetting(rows=5, episodes=episodes, source="cans")
    return TASKS[name].guidance("paper", setting).guide(states(first)[0])


LEFT, RIGHT = (0.0, -0.3, 0.86), (0.2, -0.1, 0.86)
DATA = (
    episode(LEFT, IN_BOX),
    episode(RIGHT, IN_BOX),
    episode(LEFT, BESIDE),
    episode(RIGHT, BESIDE),
)


@pytest.mark.parametrize(("name", "number"), [("can-place", 0), ("can-throw", 2)])
def test_the_guide_is_the_episode_of_its_kind_whose_can_lies_nearest(
    name: str, number: int
) -> None:
    assert np.array_equal(guided(name, LEFT, *DATA), DATA[number].states)
    assert np.array_equal(guided(name, RIGHT, *DATA), DATA[number + 1].states)


@pytest.mark.parametrize(
    ("first", "aside", "number"),
    [((0.05, -0.25, 0.9), (0.05, 0.05, 0), 0), ((0.15, -0.15, 0.8), (-0.05, -0.05, 0), 1)],
)
def test_the_guide_is_moved_to_where_the_can_lies_now(
    first: tuple[float, float, float], aside: tuple[float, float, float], number: int
) -> None:
    found, given = guided("can-place", first, *DATA), DATA[number].states
    for part in (HAND, CAN):
        assert found[:, part] - given[:, part] == pytest.approx(np.tile(aside, (3, 1)), abs=1e-6)
    rest = [d for d in range(23) if d not in (0, 1, 2, 9, 10, 11)]
    assert np.array_equal(found[:, rest], given[:, rest])  # it keeps its height and what it sees


def test_the_nearer_box_is_reached_by_the_same_way_made_shorter() -> None:
    found = guided("can-nearer", LEFT, *DATA)
    assert found[-1, CAN] == pytest.approx(NEAR, abs=1e-6)
    assert found[-1, HAND] == pytest.approx(NEAR, abs=1e-6)
    assert np.array_equal(found[:2], DATA[0].states[:2])  # until the can leaves its place
    assert NEARER.holds(found[-1, CAN])


def about_z(angle: float) -> NDArray[np.float64]:
    return np.array([0, 0, np.sin(angle / 2), np.cos(angle / 2)])


def test_the_guides_can_is_turned_as_the_present_one_lies() -> None:
    """The can lies at 0.3 rad and is turned by 1 rad on its way; the hand has turned by 0.5. The
    present one lies at 1.1 rad."""
    way, first = states(LEFT, IN_BOX), states(LEFT)[0]
    way[:, CAN_TURNED] = [about_z(0.3), about_z(0.3), about_z(1.3)]
    way[:, TURNED] = about_z(0.5)
    way[:, SEEN_TURNED] = [about_z(-0.2), about_z(-0.2), about_z(0.8)]
    first[CAN_TURNED] = -about_z(1.1)  # the same turn, as MuJoCo may as well say it
    found = begun_at(way, first)
    assert found[:, CAN_TURNED] == pytest.approx(-np.stack([about_z(1.1)] * 2 + [about_z(2.1)]))
    assert found[:, SEEN_TURNED] == pytest.approx(np.stack([about_z(0.6)] * 2 + [about_z(1.6)]))
    assert found[:, TURNED] == pytest.approx(way[:, TURNED])


def test_a_can_that_was_tipped_over_is_so_whatever_it_was_turned_by_before() -> None:
    tipped, way = np.array([0.5**0.5, 0, 0, 0.5**0.5]), states(LEFT, IN_BOX)
    way[:, CAN_TURNED] = [about_z(0), about_z(0), tipped]
    first = states(LEFT)[0]
    first[CAN_TURNED] = about_z(0.7)
    up, along = np.array([0.0, 0.0, 1.0]), np.array([0.0, -1.0, 0.0])  # upright, and as `tipped`
    assert applied(begun_at(way, first)[-1, CAN_TURNED], up) == pytest.approx(along, abs=1e-6)


def test_a_way_is_shortened_from_where_the_can_lay() -> None:
    way = states((0, -0.4, 0.86), (0.1, 0.0, 1.0), (0.2, 0.4, 0.85))
    way[3, 0:3] += [0.3, 0.2, 0.1]  # at the end the hand is elsewhere
    found = shortened(way, 0.5)
    assert found[:, 10] == pytest.approx([-0.4, -0.4, -0.2, 0.0])
    assert found[3, HAND] == pytest.approx([0.5, 0.1, 0.95])
    assert found[3, SEEN] == pytest.approx([-0.3, -0.1, -0.1])  # as the hand would see it
    rest = [d for d in range(23) if d not in (0, 1, 2, 9, 10, 11, 16, 17, 18)]
    assert np.array_equal(found[:, rest], way[:, rest])
    assert way[3, 10] == pytest.approx(0.4)  # the way given is left alone


def test_what_a_turned_hand_sees_turns_with_it() -> None:
    way = states((0, -0.4, 0.86), (0, 0, 0.86))
    way[2, HAND] = (0, -0.1, 0.86)
    way[2, 3:7] = (0, 0, 0.5**0.5, 0.5**0.5)  # a quarter turn about z: it sees y as x
    found = shortened(way, 1.0)
    assert found[2, SEEN] == pytest.approx([0.1, 0, 0], abs=1e-6)


def test_a_can_that_is_not_moved_keeps_its_way() -> None:
    way = states(LEFT, LEFT)
    assert np.array_equal(shortened(way, 0.5), way)


def test_the_limited_can_has_no_view_from_the_hand() -> None:
    way = states(LEFT, IN_BOX)[:, :12]
    assert to_nearer(way)[-1, CAN] == pytest.approx(NEAR, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "end"), [("can-place", IN_BOX), ("can-throw", BESIDE), ("can-nearer", NEAR)]
)
def test_where_the_can_ends_is_what_counts(name: str, end: tuple[float, float, float]) -> None:
    for place in (IN_BOX, BESIDE, NEAR):
        task, found = TASKS[name], states(LEFT, place)
        assert task.succeeded(task, found, found) == (place == end)


def test_data_without_such_an_episode_are_refused() -> None:
    with pytest.raises(InputError, match=r"none of the 1 episodes .* the can ends beside the bins"):
        guided("can-throw", LEFT, DATA[0])


def test_the_hands_view_is_that_of_recorded_data() -> None:
    recorded = _recorded()
    assert _seen(recorded) == pytest.approx(recorded[:, SEEN], abs=2e-6)


def test_what_the_hand_sees_of_a_turn_is_that_of_recorded_data() -> None:
    """Also where the can is turned a little further than it was recorded."""
    way = _recorded()
    first = way[0].copy()
    first[CAN_TURNED] = composed(first[CAN_TURNED], about_z(0.5))
    found = begun_at(way, first)
    expected = composed(inverse(found[:, TURNED]), found[:, CAN_TURNED])
    sign = np.sign((expected * found[:, SEEN_TURNED]).sum(axis=1, keepdims=True))
    assert found[:, SEEN_TURNED] == pytest.approx(sign * expected, abs=2e-6)
    assert (found[:, SEEN_TURNED.stop - 1] >= 0).all()
    assert begun_at(way, way[0]) == pytest.approx(way, abs=2e-6)


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


def order(folder: Path, width: int, env: str) -> GoalRequest:
    """A checkpoint of that environment and a data set of its states, in which a can is placed."""
    weights = tiny_weights(tiny_config(), states=width, actions=7, env=env)
    checkpoint.write(folder / "run", weights, {}, {})
    with write_store(folder / "data", header(states=width, actions=7, env=env)) as writer:
        whole = DATA[0]
        writer.append(replace(whole, states=np.ascontiguousarray(whole.states[:, :width])))
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
def test_a_can_is_played_where_the_checkpoint_learned(width: int, env: str, tmp_path: Path) -> None:
    ready = trial(order(tmp_path, width, env))
    assert ready.task.env == env
    assert ready.cases[0].guide(DATA[0].states[0])[-1, CAN] == pytest.approx(IN_BOX)


@needs_robosuite
def test_a_can_has_one_kind_of_waypoints_whatever_is_configured(tmp_path: Path) -> None:
    plain = order(tmp_path, 12, "robosuite/CanLim")
    assert trial(replace(plain, sets=("goal.waypoints=released",))).kind == "paper"
    with pytest.raises(InputError, match="can-place has no waypoints 'released'"):
        trial(replace(plain, waypoints="released"))


@needs_robosuite
def test_a_can_is_played_in_processes_and_the_same_in_one(
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
    few = replace(order(tmp_path, 12, "robosuite/CanLim"), steps=5, episodes=3)
    ready = trial(few)
    shared, alone = (
        ready.play(ready.cases[0], "goal", lambda numbers: None, processes) for processes in (0, 1)
    )
    assert made == [2]
    for one, other in zip(shared.episodes, alone.episodes, strict=True):
        assert one.states.tobytes() == other.states.tobytes()
    assert [len(one) for one in shared.episodes] == [5, 5, 5]


def test_a_checkpoint_does_not_choose_a_file_for_its_can(tmp_path: Path) -> None:
    stranger = order(tmp_path, 12, 'robosuite/CanLim {"robots": "/home/robot.xml"}')
    with pytest.raises(InputError, match=r"whose arguments \['robots'\] may open any file"):
        trial(stranger)


@needs_robosuite
def test_the_boxes_are_robosuites() -> None:
    with closing(make(ENV)) as env:
        simulator: Any = env.unwrapped
        for number, box in ((3, CORRECT), (1, NEARER)):
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
