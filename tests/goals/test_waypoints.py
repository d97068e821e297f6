"""Waypoint tables, by hand."""

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m3pc.config.presets import PRESETS
from m3pc.core.history import block_subgoals
from m3pc.envs import make
from m3pc.goals.locomotion_tasks import (
    FLIP_STEPS,
    HOPPER,
    SPLIT_STEPS,
    STEPS_AFTER_FLIP,
    WAIT_ROWS,
    WALKER,
)
from m3pc.goals.registry import TASKS, rows_per_subgoal
from m3pc.goals.task import GoalSetting, WaypointSource
from m3pc.goals.waypoints import (
    Ramp,
    Wiggle,
    apply_ramps,
    closest_stretch,
    pad_rows,
    simulate_constant_action,
)
from m3pc.types import Episode, Floats, InputError

ROWS = 1001
NOWHERE = np.zeros(17, np.float32)


def episode(length: int, *, reward: float, angles: dict[int, float] | None = None) -> Episode:
    """Dimension d of the state at step t is t + d / 100; dimension 1 as said."""
    states = np.arange(length + 1)[:, None] + np.arange(17) / 100
    states[:, 1] = 0
    for step, angle in (angles or {}).items():
        states[step:, 1] = angle
    return Episode(
        states=states.astype(np.float32),
        actions=np.zeros((length, 6), np.float32),
        rewards=np.full(length, reward, np.float32),
        terminated=False,
        truncated=True,
    )


def source_of(
    name: str, kind: str, *episodes: Episode, cycles: float | None = None
) -> WaypointSource:
    setting = GoalSetting(rows=ROWS, cycles=cycles, episodes=episodes, source="walks")
    return TASKS[name].waypoints(kind, setting)


def table(name: str, kind: str, *episodes: Episode, cycles: float | None = None) -> Floats:
    return source_of(name, kind, *episodes, cycles=cycles).waypoints(NOWHERE)


# Hopper


def test_the_papers_wiggle_starts_upright_and_leans_back_with_its_foot() -> None:
    waypoints = table("hopper-wiggle", "paper", cycles=2)
    rate = -0.05 * 2 * np.pi * 2 / 8  # rad a second: two cycles in 1000 steps of 8 ms
    assert waypoints.shape == (ROWS, 11)
    assert waypoints[0] == pytest.approx([1.205, 0, 0, 0, 0, 1.15 * rate, 0, rate, 0, 0, rate])
    quarter = [0.055 + 1.15 * np.cos(0.05), -0.05, 0, 0, -0.05, 0, 0, 0, 0, 0, 0]
    assert waypoints[125] == pytest.approx(quarter, abs=1e-6)
    assert waypoints[500] == pytest.approx(waypoints[0], abs=1e-6)


def test_rates_of_the_papers_wiggle_are_those_of_its_positions() -> None:
    waypoints = Wiggle(amplitude=0.5).table(ROWS, 6).astype(np.float64)
    angle, height = waypoints[:, 1], waypoints[:, 0]
    assert np.gradient(angle, 0.008)[1:-1] == pytest.approx(waypoints[1:-1, 7], abs=2e-3)
    assert np.gradient(height, 0.008)[1:-1] == pytest.approx(waypoints[1:-1, 6], abs=2e-3)
    forwards = np.gradient(1.15 * np.sin(angle), 0.008)[1:-1]
    assert forwards == pytest.approx(waypoints[1:-1, 5], abs=2e-3)


def test_the_foot_of_the_papers_wiggle_stays_flat_and_where_it_is() -> None:
    waypoints = table("hopper-wiggle", "paper", cycles=6).astype(np.float64)
    with closing(make("d4rl/Hopper-v2")) as env:
        simulator: Any = env.unwrapped
        for row in waypoints[::40]:
            simulator.set_state(np.insert(row[:5], 0, 0.0), row[5:])
            foot, ankle = simulator.data.body("foot"), simulator.data.joint("foot_joint")
            assert foot.xmat.reshape(3, 3) == pytest.approx(np.eye(3), abs=1e-6)
            assert ankle.xanchor[2] == pytest.approx(0.055, abs=1e-6)
            assert foot.cvel == pytest.approx(np.zeros(6), abs=1e-6)  # neither turns nor slides


def test_the_papers_wiggle_is_as_high_as_a_hopper_that_stands() -> None:
    with closing(make("d4rl/Hopper-v2")) as env:
        env.reset(seed=0)
        heights = [env.step(np.zeros(3, np.float32))[0][0] for _ in range(50)]
    assert heights[-1] == pytest.approx(Wiggle().height, abs=0.003)


def test_the_released_wiggle_has_its_own_clock_and_rates() -> None:
    waypoints = table("hopper-wiggle", "released", cycles=6)
    rate = -0.05 * 2 * np.pi * 6 / 1000 * 10  # ten times that of a step
    assert waypoints[0] == pytest.approx([1.25, 0, 0, 0, 0, 1.25 * rate, 0, rate, 0, 0, rate])
    angle = -0.05 * np.sin(2 * np.pi * 6 * 100 / 999)  # 1000 rows from 0 to 1000
    now = 10 * -0.05 * 2 * np.pi * 6 / 1000 * np.cos(2 * np.pi * 6 * 100 / 999)
    high, wide = 1.25 * np.cos(angle), 1.25 * np.sin(angle)
    expected = [high, angle, 0, 0, angle, high * now, -wide * now, now, 0, 0, now]
    assert waypoints[100] == pytest.approx(expected, abs=1e-6)
    assert waypoints[999, 1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("cycles", [2.0, 6.0])
def test_the_released_wiggle_turns_about_the_ground_to_the_bit(cycles: float) -> None:
    pace = 2 * np.pi * cycles / 1000
    phase = pace * (1000 / 999) * np.arange(ROWS)
    angle, rate = -0.05 * np.sin(phase), -0.05 * np.cos(phase) * pace * 10.0
    high, wide, none = 1.25 * np.cos(angle), 1.25 * np.sin(angle), np.zeros(ROWS)
    columns = [high, angle, none, none, angle, high * rate, -wide * rate, rate, none, none, rate]
    expected = np.stack(columns, axis=1).astype(np.float32)
    assert np.array_equal(table("hopper-wiggle", "released", cycles=cycles), expected)


def test_only_the_slowest_released_wiggle_leans() -> None:
    slowest = table("hopper-wiggle", "released", cycles=0.001)
    assert slowest[0, [1, 4, 7, 10]] == pytest.approx(-0.02, abs=1e-5)
    assert slowest[0, [2, 3, 8, 9]].tolist() == [0, 0, 0, 0]
    assert table("hopper-wiggle", "paper", cycles=0.001)[:, 1] == pytest.approx(0, abs=1e-3)


def test_every_fifth_row_of_a_wiggle_is_a_subgoal() -> None:
    config = PRESETS["paper"].goal
    assert [rows_per_subgoal(config, task.env) for task in TASKS.values()][:3] == [5, 30, 1]
    assert rows_per_subgoal(PRESETS["parity"].goal, WALKER) == 41
    assert rows_per_subgoal(config, "Pendulum-v1") == 1
    waypoints = table("hopper-wiggle", "paper", cycles=6)
    assert block_subgoals(waypoints, 5)[:5] == pytest.approx(np.repeat(waypoints[4:5], 5, axis=0))


# Walker2d


def test_the_papers_split_is_the_walk_whose_thigh_rises_most_evenly_made_even() -> None:
    like, late = episode(200, reward=1), episode(200, reward=9)
    like.states[:, 2] = np.linspace(0, -4, 201)
    late.states[:, 2] = np.maximum(np.linspace(1, -2.6, 201), -2.6)
    others = episode(200, reward=2), late, episode(30, reward=9)
    waypoints = table("walker-split", "paper", others[0], like, *others[1:])
    assert waypoints.shape == (ROWS, 17)
    assert waypoints[[0, 60, SPLIT_STEPS], 2] == pytest.approx([0, -1.3, -2.6])
    assert waypoints[: SPLIT_STEPS + 1, 11] == pytest.approx(-2.6 / (SPLIT_STEPS * 0.008))
    rest = [d for d in range(17) if d not in (2, 11)]
    assert np.array_equal(waypoints[: SPLIT_STEPS + 1, rest], like.states[: SPLIT_STEPS + 1, rest])
    end = np.append(waypoints[SPLIT_STEPS, :8], np.zeros(9))  # where it stood, but at rest
    assert (waypoints[SPLIT_STEPS + 1 :] == end.astype(np.float32)).all()
    note = source_of("walker-split", "paper", others[0], like).note
    assert "episode 1 of walks, whose thigh goes most like that (off by 0.12 rad)" in note


def test_a_split_begins_with_its_episode() -> None:
    """One whose thigh goes just so, but later, is not taken."""
    later, near = episode(300, reward=1), episode(300, reward=1)
    later.states[:, 2] = 0
    later.states[100 : 100 + SPLIT_STEPS + 1, 2] = np.linspace(0, -2.6, SPLIT_STEPS + 1)
    near.states[:, 2] = np.linspace(0, -5, 301)
    assert "episode 1 " in source_of("walker-split", "paper", later, near).note


def test_the_released_split_is_simulated() -> None:
    waypoints = table("walker-split", "released")
    assert waypoints.shape == (ROWS, 17)
    assert waypoints[0, 0] == pytest.approx(1.25, abs=0.01)
    assert waypoints[110, [0, 2]] == pytest.approx(
        [0.23, -2.64], abs=0.02
    )  # on the ground, legs apart
    assert waypoints[999, [0, 2]] == pytest.approx([0.23, -2.64], abs=0.02)
    assert np.abs(waypoints[999, 8:]).max() < 0.05


def test_a_constant_action_is_the_same_every_time() -> None:
    once, again = (simulate_constant_action(HOPPER, (0.1, 0, 0), rows=5) for _ in range(2))
    assert once.shape == (5, 11)
    assert np.array_equal(once, again)
    assert not np.array_equal(once, simulate_constant_action(HOPPER, (0.2, 0, 0), rows=5))


# HalfCheetah


def test_the_papers_flip_follows_the_steps_that_turn_most_like_it_and_their_way() -> None:
    upright, over = episode(200, reward=-5), episode(200, reward=1, angles={100: 3.0})
    waypoints = table("cheetah-flip", "paper", upright, over)
    assert waypoints[[0, 35, FLIP_STEPS], 0] == pytest.approx([0, -0.25, -0.5])
    assert waypoints[[0, 35, FLIP_STEPS], 1] == pytest.approx([0, np.pi / 2, np.pi])
    assert waypoints[: FLIP_STEPS + 1, 9] == pytest.approx(-0.5 / (FLIP_STEPS * 0.05))
    assert waypoints[: FLIP_STEPS + 1, 10] == pytest.approx(np.pi / (FLIP_STEPS * 0.05))
    others = [d for d in range(17) if d not in (0, 1, 9, 10)]
    start = 100 - 34  # from row 34 on the ramp is nearer to 3 than to 0
    rows = slice(start, start + FLIP_STEPS + 1)
    assert np.array_equal(waypoints[: FLIP_STEPS + 1, others], over.states[rows, others])
    assert not waypoints[FLIP_STEPS + 1 :, 8:].any()
    note = source_of("cheetah-flip", "paper", upright, over).note
    assert "steps 66 to 136 of episode 1 of walks, which turns most like that" in note
    backwards = table("cheetah-flip", "paper", episode(200, reward=1, angles={100: -3.0}))
    assert backwards[FLIP_STEPS, 1] == pytest.approx(-np.pi)


def test_where_nothing_turns_over_the_flip_says_how_far_off_it_is() -> None:
    leaning = episode(80, reward=-1, angles={0: -0.5})
    source = source_of("cheetah-flip", "paper", episode(200, reward=0), leaning)
    off = np.sqrt(((np.linspace(0, -np.pi, FLIP_STEPS + 1) + 0.5) ** 2).mean())
    assert f"episode 1 of walks, which turns most like that (off by {off:.2f} rad)" in source.note
    made = source.waypoints(NOWHERE)
    assert made[5, 5] == leaning.states[5, 5]
    assert made[FLIP_STEPS, 1] == pytest.approx(-np.pi)  # the way that it leans


def test_a_recorded_flip_is_the_one_that_begins_nearest_unchanged() -> None:
    upright, near, far = (
        episode(200, reward=1, angles=angles) for angles in ({}, {50: 3.1}, {120: -3.1})
    )
    far.states[0, 0] += 5
    waypoints = table("cheetah-flip", "recorded", upright, far, near)
    assert np.array_equal(waypoints, near.states[: 50 + STEPS_AFTER_FLIP + 1])
    there = source_of("cheetah-flip", "recorded", upright, far, near).waypoints(far.states[0])
    assert np.array_equal(there, far.states[: 120 + STEPS_AFTER_FLIP + 1])
    assert (
        "of 2 episodes of walks" in source_of("cheetah-flip", "recorded", upright, far, near).note
    )
    with pytest.raises(InputError, match="no episode of --data turns over"):
        source_of("cheetah-flip", "recorded", upright)


def test_the_released_flip_waits_turns_and_freezes() -> None:
    worst = episode(200, reward=-1)
    waypoints = table("cheetah-flip", "released", episode(200, reward=0), worst)
    assert waypoints[0, :2] == pytest.approx([0, 0.5])
    assert waypoints[WAIT_ROWS - 1, :2] == pytest.approx([0, 0.5])
    assert waypoints[[WAIT_ROWS, WAIT_ROWS + FLIP_STEPS - 1], 1] == pytest.approx([0.5, -3.14])
    assert waypoints[WAIT_ROWS + FLIP_STEPS - 1, 0] == pytest.approx(-0.5)
    assert np.array_equal(waypoints[:100, 2:], worst.states[:100, 2:])
    assert (waypoints[100:] == waypoints[99]).all()


@pytest.mark.parametrize("name", ["walker-split", "cheetah-flip"])
def test_waypoints_from_data_say_what_data_they_need(name: str) -> None:
    with pytest.raises(InputError, match="give --data"):
        table(name, "paper")
    with pytest.raises(InputError, match="no episode of --data has"):
        table(name, "paper", episode(20, reward=1))


def test_waypoints_that_a_task_does_not_have_are_refused() -> None:
    with pytest.raises(InputError, match="no waypoints 'best'; give --waypoints paper or released"):
        table("walker-split", "best")


# Parts


def test_a_ramp_goes_evenly_and_ends_at_rest() -> None:
    states = np.ones((3, 4), np.float32)
    made = apply_ramps(
        states, [Ramp(dimension=0, rate=2, first=1, last=5)], seconds=0.5, positions=2
    )
    assert made.tolist() == [[1, 1, 4, 1], [3, 1, 4, 1], [5, 1, 4, 1], [5, 1, 0, 0]]
    assert (states == 1).all()


def test_a_table_is_held_at_its_end_and_never_cut() -> None:
    rows = np.array([[1], [2]], np.float32)
    assert pad_rows(rows, 4).tolist() == [[1], [2], [2], [2]]
    assert pad_rows(rows, 1).tolist() == [[1], [2]]


def test_the_stretch_that_goes_most_like_a_line_is_found() -> None:
    flat, rising = np.zeros(5, np.float32), np.array([0, 0, 1, 2, 2], np.float32)
    assert closest_stretch([flat, rising], np.array([0, 1, 2])) == (1, 1, 0.0)
    assert closest_stretch([flat, rising], np.array([0, 0, 0.5])) == (0, 0, np.sqrt(0.25 / 3))


def test_success_is_decided_by_the_last_steps_alone() -> None:
    task = replace(TASKS["cheetah-flip"], steps=4, judged_from=3, tolerance=0.5)
    wanted = np.zeros((5, 17), np.float32)
    states = wanted.copy()
    states[:3, 1] = 9  # far off before
    states[3:, 1] = 0.4
    assert task.succeeded(task, states, wanted)
    states[4, 1] = 0.7
    assert not task.succeeded(task, states, wanted)
    assert "body angle, rad of at most 0.5 over steps 3 to 4" in task.success_rule
