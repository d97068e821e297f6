"""Windows of eight steps with a horizon of four, by hand."""

import numpy as np
import pytest

from m3pc.core.history import HistoryBuffer, block_subgoals
from m3pc.types import Floats, InputError

# Step: position of the current state, states, actions. The state at step t is t + 1, the action
# -(t + 1), so that neither is 0.
PICTURES = {
    0: (0, [1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]),
    1: (1, [1, 2, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]),
    2: (2, [1, 2, 3, 0, 0, 0, 0, 0], [-1, -2, 0, 0, 0, 0, 0, 0]),
    3: (3, [1, 2, 3, 4, 0, 0, 0, 0], [-1, -2, -3, 0, 0, 0, 0, 0]),
    4: (4, [1, 2, 3, 4, 5, 0, 0, 0], [-1, -2, -3, -4, 0, 0, 0, 0]),
    5: (4, [2, 3, 4, 5, 6, 0, 0, 0], [-2, -3, -4, -5, 0, 0, 0, 0]),
    6: (4, [3, 4, 5, 6, 7, 0, 0, 0], [-3, -4, -5, -6, 0, 0, 0, 0]),
}
AHEAD = {  # with ten waypoints, 100 to 109
    0: [1, 101, 102, 103, 104, 105, 106, 107],
    3: [1, 2, 3, 4, 104, 105, 106, 107],
    4: [1, 2, 3, 4, 5, 105, 106, 107],
    6: [3, 4, 5, 6, 7, 107, 108, 109],
    7: [4, 5, 6, 7, 8, 108, 109, 0],
    9: [6, 7, 8, 9, 10, 0, 0, 0],
    12: [9, 10, 11, 12, 13, 0, 0, 0],
}


def one(value: float) -> Floats:
    return np.array([value], np.float32)


def table(first: int, rows: int) -> Floats:
    return np.arange(first, first + rows, dtype=np.float32)[:, None]


def histories(slots: int = 1, *, window: int = 8, horizon: int = 4) -> HistoryBuffer:
    return HistoryBuffer(slots, window=window, horizon=horizon, state_size=1, action_size=1)


def play(
    past: HistoryBuffer, slot: int, steps: int, *, seed: int = 0, waypoints: Floats | None = None
) -> None:
    past.begin(slot, one(1), seed, waypoints)
    for step in range(steps):
        past.record(slot, one(-(step + 1)), one(step + 2))


@pytest.mark.parametrize("step", PICTURES)
def test_each_step_has_the_window_of_its_picture(step: int) -> None:
    past = histories()
    play(past, 0, step, seed=2**63 - 1)
    window = past.window([0])
    picture = (
        int(window.now[0]),
        window.states[0, :, 0].tolist(),
        window.actions[0, :, 0].tolist(),
    )
    assert picture == PICTURES[step]
    assert (window.steps.tolist(), window.seeds.tolist()) == ([step], [2**63 - 1])
    assert window.states.dtype == window.actions.dtype == np.float32


@pytest.mark.parametrize("step", AHEAD)
def test_waypoints_fill_the_future_as_far_as_they_go(step: int) -> None:
    past = histories()
    play(past, 0, step, waypoints=table(100, 10))
    window = past.window([0])
    assert window.states[0, :, 0].tolist() == AHEAD[step]
    assert not window.actions[0, min(step, 4) :].any()


def test_slots_at_different_steps_share_a_window_in_the_given_order() -> None:
    past = histories(4)
    play(past, 0, 5, seed=10)
    play(past, 2, 1, seed=12, waypoints=table(100, 10))
    play(past, 3, 2, seed=13)
    window = past.window([2, 0])
    assert len(window) == 2
    assert window.states[..., 0].tolist() == [
        [1, 2, 102, 103, 104, 105, 106, 107],
        PICTURES[5][1],
    ]
    assert window.actions[..., 0].tolist() == [PICTURES[1][2], PICTURES[5][2]]
    assert window.now.tolist() == [1, 4]
    assert window.steps.tolist() == [1, 5]
    assert window.seeds.tolist() == [12, 10]


def test_a_new_episode_knows_nothing_of_the_one_before() -> None:
    past = histories()
    play(past, 0, 6, waypoints=table(100, 10))
    play(past, 0, 1)
    window = past.window([0])
    assert window.states[0, :, 0].tolist() == PICTURES[1][1]
    assert window.actions[0, :, 0].tolist() == PICTURES[1][2]


def test_a_window_stays_as_it_was_when_the_episode_goes_on() -> None:
    past = histories()
    play(past, 0, 4)
    window = past.window([0])
    past.record(0, one(-5), one(6))
    assert window.states[0, :, 0].tolist() == PICTURES[4][1]
    assert window.steps.tolist() == [4]


def test_a_horizon_as_long_as_the_window_leaves_the_current_state_alone() -> None:
    past = histories(window=3, horizon=3)
    play(past, 0, 2)
    window = past.window([0])
    assert window.states[0, :, 0].tolist() == [3, 0, 0]
    assert not window.actions.any()
    assert (window.now.tolist(), window.steps.tolist()) == ([0], [2])


def test_a_long_episode_takes_no_more_room_than_its_context() -> None:
    past = histories(2)
    play(past, 0, 1000)
    arrays = [value for value in vars(past).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) == 2 * (5 * 4 + 5 * 4 + 8 + 8)


@pytest.mark.parametrize("shape", [(10,), (10, 2), (5, 2, 1)])
def test_waypoints_of_another_robot_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="one row a step and 1 numbers a row"):
        histories().begin(0, one(1), 0, np.zeros(shape, np.float32))


def test_a_slot_without_an_episode_has_no_window() -> None:
    with pytest.raises(AssertionError, match="not begun"):
        histories(2).window([1])


@pytest.mark.parametrize(
    ("rows", "spacing", "expected"),
    [
        (20, 5, [4] * 5 + [9] * 5 + [14] * 5 + [15, 16, 17, 18, 19]),  # ALGORITHM.md 5.1
        (21, 5, [4] * 5 + [9] * 5 + [14] * 5 + [19] * 5 + [20]),
        (12, 5, [4] * 5 + [9] * 5 + [10, 11]),
        (4, 1, [0, 1, 2, 3]),
        (3, 5, [0, 1, 2]),
        (0, 5, []),
    ],
)
def test_rows_share_the_last_of_their_block_but_for_the_tail(
    rows: int, spacing: int, expected: list[int]
) -> None:
    waypoints = table(0, rows)
    assert block_subgoals(waypoints, spacing)[:, 0].tolist() == expected
    assert waypoints[:, 0].tolist() == list(range(rows))  # the table given is left alone


def test_walkers_table_has_24_subgoals_and_a_tail_of_16_rows() -> None:
    levelled = block_subgoals(table(0, 1000), 41)[:, 0].tolist()
    assert sorted(set(levelled)) == [*range(40, 984, 41), *range(984, 1000)]
    assert levelled[943:984] == [983] * 41
