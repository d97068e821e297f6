"""Builds the window for a planner from the last steps of episodes.

E environments to decide for, T steps of a window, C steps of context, H rows of a waypoint table,
S state, A action.
"""

from collections.abc import Callable, Sequence

import numpy as np

from m3pc.types import Floats, InputError, Window

WaypointFn = Callable[[Floats], Floats]  # an episode's first state [S] -> its waypoints [H, S]
Waypoints = Floats | WaypointFn  # one table for all episodes, or by their first state


class HistoryBuffer:
    """The last steps of the episodes in a fixed number of slots, one episode per slot.

    `begin` starts an episode, `record` adds a step, `amend` corrects the last one, and `window` is
    what the planner gets. (An `EpisodeRecorder` keeps all steps, for the store.)

    At step t the current state is at position min(t, C) of the window, with C = window - horizon.
    The past is not padded, so an episode's first steps plan further ahead.
    """

    def __init__(
        self, slots: int, *, window: int, horizon: int, state_size: int, action_size: int
    ) -> None:
        assert 1 <= horizon <= window, f"a horizon of {horizon} in a window of {window}"
        self._window, self._context = window, window - horizon
        # C past steps and the current one, whose action is not known yet and stays 0.
        self._states = np.zeros((slots, self._context + 1, state_size), np.float32)
        self._actions = np.zeros((slots, self._context + 1, action_size), np.float32)
        self._steps = np.full(slots, -1, np.int64)  # -1 where no episode has begun
        self._seeds = np.zeros(slots, np.int64)
        self._waypoints: list[Floats | None] = [None] * slots

    def begin(
        self, slot: int, state: Floats, seed: int, waypoints: Waypoints | None = None
    ) -> None:
        """Replace the slot's episode by a new one; `seed` is for its planning."""
        table = waypoints(state) if callable(waypoints) else waypoints
        if table is not None and table.shape[1:] != state.shape:
            raise InputError(
                f"the waypoints have shape {list(table.shape)}; "
                f"give a table with one row a step and {len(state)} numbers a row, as in a state"
            )
        self._states[slot] = self._actions[slot] = 0
        self._states[slot, 0] = state
        self._steps[slot], self._seeds[slot] = 0, seed
        self._waypoints[slot] = table

    def record(self, slot: int, action: Floats, next_state: Floats) -> None:
        """Add a step: the executed action [A], and the next state [S], which becomes current."""
        assert self._steps[slot] >= 0, f"no episode has begun in slot {slot}"
        states, actions = self._states[slot], self._actions[slot]
        actions[min(self._steps[slot], self._context)] = action
        if self._steps[slot] >= self._context:  # full: drop the oldest step
            states[:-1], actions[:-1] = states[1:], actions[1:]
            actions[-1] = 0
        self._steps[slot] += 1
        states[min(self._steps[slot], self._context)] = next_state

    def amend(self, slot: int, action: Floats | None, state: Floats) -> None:
        """Correct the current state [S] and, if given, the action [A] that led to it."""
        now = min(self._steps[slot], self._context)
        self._states[slot, now] = state
        if now and action is not None:
            self._actions[slot, now - 1] = action

    def window(self, slots: Sequence[int]) -> Window:
        """The planner's input: one row per slot, in this order."""
        index = np.asarray(slots, np.int64)
        steps = self._steps[index]
        assert (steps >= 0).all(), f"an episode has not begun in one of the slots {list(slots)}"
        now = np.minimum(steps, self._context)
        states = self._padded(self._states[index])
        for row, waypoints in enumerate(self._waypoints[slot] for slot in slots):
            if waypoints is not None:
                # The waypoints after the current step fill the window as far as they go.
                first = int(now[row]) + 1
                ahead = waypoints[steps[row] + 1 :][: self._window - first]
                states[row, first : first + len(ahead)] = ahead
        actions = self._padded(self._actions[index])
        return Window(
            states=states, actions=actions, now=now, steps=steps, seeds=self._seeds[index]
        )

    def _padded(self, past: Floats) -> Floats:
        """[E, C + 1, size] -> [E, T, size], with zeros for the future."""
        padded = np.zeros((len(past), self._window, past.shape[-1]), np.float32)
        padded[:, : past.shape[1]] = past
        return padded


def block_subgoals(waypoints: Floats, spacing: int) -> Floats:
    """A copy of the table [H, S] in which each row is the last row of its block of `spacing` rows.

    The block with the table's last row stays unchanged, complete or not, as in the released code:
    with 20 rows and spacing 5, three blocks become rows 4, 9 and 14; rows 15 to 19 remain.
    """
    assert spacing >= 1, f"a spacing of {spacing} rows"
    rows = (len(waypoints) - 1) // spacing * spacing
    table = waypoints.copy()
    table[:rows] = np.repeat(waypoints[spacing - 1 : rows : spacing], spacing, axis=0)
    return table
