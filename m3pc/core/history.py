"""How the window for a planner is built from the last steps of episodes.

E environments to decide for, T steps of a window, C steps of context, H rows of a waypoint table,
S state, A action.
"""

from collections.abc import Callable, Sequence

import numpy as np

from m3pc.types import Floats, InputError, Window

WaypointFn = Callable[[Floats], Floats]  # an episode's first state [S] -> its waypoints [H, S]
Waypoints = Floats | WaypointFn  # the same for every episode, or by where it begins


class HistoryBuffer:
    """The last steps of the episodes in a fixed number of slots, one episode a slot.

    `begin` starts an episode, `record` adds a step, `amend` corrects the last one, and `window` is
    what the planner gets. (An `EpisodeRecorder` keeps all steps, for the store.)

    At step t the current state is at position min(t, C) of the window with C = window - horizon,
    after as many past steps: nothing is padded on the left, so an episode's first steps plan
    further ahead.
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
        """Forget the slot's episode and start another: first state [S], waypoints [H, S], and the
        seed of its planning."""
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
        """Add a step: the action [A] that was executed in the current state, and the state [S] that
        it led to, which becomes the current one."""
        assert self._steps[slot] >= 0, f"no episode has begun in slot {slot}"
        states, actions = self._states[slot], self._actions[slot]
        actions[min(self._steps[slot], self._context)] = action
        if self._steps[slot] >= self._context:  # full: drop the oldest step
            states[:-1], actions[:-1] = states[1:], actions[1:]
            actions[-1] = 0
        self._steps[slot] += 1
        states[min(self._steps[slot], self._context)] = next_state

    def amend(self, slot: int, action: Floats | None, state: Floats) -> None:
        """Replace the current state [S], and the action [A] of the step that led to it, if any: the
        caller reported them before, and corrects the report."""
        now = min(self._steps[slot], self._context)
        self._states[slot, now] = state
        if now and action is not None:
            self._actions[slot, now - 1] = action

    def window(self, slots: Sequence[int]) -> Window:
        """What a planner has to decide on for these slots, in this order."""
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
        """[E, C + 1, size] -> [E, T, size]: zeros where the future is."""
        padded = np.zeros((len(past), self._window, past.shape[-1]), np.float32)
        padded[:, : past.shape[1]] = past
        return padded


def block_subgoals(waypoints: Floats, spacing: int) -> Floats:
    """The table [H, S] with every row of a block of `spacing` rows replaced by the block's last.

    A block that contains the table's last row stays as it is, complete or not, as in the released
    code: of 20 rows by 5 the first three blocks become 4, 9 and 14, and 15 to 19 remain.
    """
    assert spacing >= 1, f"a spacing of {spacing} rows"
    rows = (len(waypoints) - 1) // spacing * spacing
    table = waypoints.copy()
    table[:rows] = np.repeat(waypoints[spacing - 1 : rows : spacing], spacing, axis=0)
    return table
