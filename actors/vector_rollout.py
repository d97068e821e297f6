"""Environments that step together, and the episodes that run in them.

E environments, L steps of an episode, H rows of a waypoint table, S state, A action. A slot is an
environment's place among the E.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from m3pc.core.episode_recorder import EpisodeRecorder, PlanningTrace
from m3pc.core.history import HistoryBuffer, Waypoints
from m3pc.core.seeding import EpisodeStart
from m3pc.envs.registry import FloatVectorEnv, env_sizes
from m3pc.types import Booleans, Decision, Doubles, Episode, Floats, Window


class VectorStep(NamedTuple):
    """The outcome of one step of all environments. The rows of faulty ones hold zeros."""

    states: Floats  # [E, S]
    rewards: Doubles  # [E]
    terminated: Booleans  # [E]
    truncated: Booleans  # [E]
    faulty: Booleans  # [E] neither terminated nor truncated

    @property
    def ended(self) -> Booleans:
        return self.terminated | self.truncated | self.faulty


class VectorEnvs(Protocol):
    """E environments, of which each may fail without harm to the others."""

    count: int
    state_size: int
    action_size: int

    def reset(self, seeds: Sequence[int | None], mask: Booleans) -> tuple[Floats, Booleans]:
        """Reset the environments in the mask [E]. Returns states [E, S], and which failed [E]."""

    def step(self, actions: Floats) -> VectorStep: ...


class GymVectorAdapter:
    """Adapts a gymnasium vector to `VectorEnvs`. A fault in one environment raises for all."""

    def __init__(self, vector: FloatVectorEnv) -> None:
        self._vector = vector
        self.count = vector.num_envs
        self.state_size, self.action_size = env_sizes(vector)
        self._none_faulty = np.zeros(self.count, np.bool_)

    def reset(self, seeds: Sequence[int | None], mask: Booleans) -> tuple[Floats, Booleans]:
        """A mask is always given: some environments treat options {} unlike None."""
        options = {"reset_mask": mask}
        states, _ = self._vector.reset(seed=list(seeds), options=options)  # type: ignore[arg-type]
        return states.astype(np.float32), self._none_faulty

    def step(self, actions: Floats) -> VectorStep:
        states, rewards, terminated, truncated, _ = self._vector.step(actions)
        faulty = self._none_faulty
        return VectorStep(states.astype(np.float32), rewards, terminated, truncated, faulty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An episode, and what the planner reported at each of its steps."""

    number: int  # index of the episode's start
    episode: Episode
    planning: PlanningTrace


class VectorRollout:
    """Plays episodes in environments that step together, one episode per slot.

    The caller gives each window to a planner, and the decision to `step`: `RolloutLoop` in a run,
    `actors.episodes.rollouts` in an evaluation. Slots without an episode idle.
    """

    def __init__(
        self, envs: VectorEnvs, *, window: int, horizon: int, waypoints: Waypoints | None = None
    ) -> None:
        self._envs, self._waypoints = envs, waypoints
        self._numbers: dict[int, int] = {}  # episode numbers by slot
        self._recorders: dict[int, EpisodeRecorder] = {}  # by slot
        self._histories = HistoryBuffer(
            envs.count,
            window=window,
            horizon=horizon,
            state_size=envs.state_size,
            action_size=envs.action_size,
        )

    def begin(self, free: Booleans, numbered: Iterator[tuple[int, EpisodeStart]]) -> bool:
        """Reset the free slots and give them the next episodes; False if no episode runs now.

        A slot whose environment fails at the reset takes the next episode, until `reset` raises.
        """
        while free.any():
            slots = np.flatnonzero(free).tolist()
            begun = dict(zip(slots, numbered, strict=False))
            if not (begun or self._recorders):
                break
            # Idle slots are reset, too, without a seed: they must not be stepped after an end.
            seeds = [begun[slot][1][0] if slot in begun else None for slot in range(len(free))]
            states, faulty = self._envs.reset(seeds, free)
            for slot, (number, (reset_seed, planning_seed)) in begun.items():
                if not faulty[slot]:
                    self._numbers[slot] = number
                    self._recorders[slot] = EpisodeRecorder(states[slot], seed=reset_seed)
                    self._histories.begin(slot, states[slot], planning_seed, self._waypoints)
            free = free & faulty
        return bool(self._recorders)

    def window(self) -> Window:
        """The planner's next input: one row per running episode."""
        return self._histories.window(self._running)

    def step(self, decision: Decision) -> VectorStep:
        """Act on the decision, and record the steps of the environments that did not fail."""
        running, rows = self._running, len(decision.actions)
        assert rows == len(running), f"{rows} decisions for {len(running)} running episodes"
        actions = np.zeros((self._envs.count, self._envs.action_size), np.float32)
        actions[running] = decision.actions
        step = self._envs.step(actions)
        for row, slot in enumerate(running):
            if not step.faulty[slot]:
                action, state, reward = actions[slot], step.states[slot], float(step.rewards[slot])
                self._recorders[slot].add(action, reward, state, decision, row)
                self._histories.record(slot, action, state)
        return step

    def ended(self, step: VectorStep) -> Iterator[Rollout]:
        """The episodes that this step ended. A fault cuts an episode short before this step."""
        for slot in self._running:
            if step.ended[slot]:
                terminated, truncated = bool(step.terminated[slot]), bool(step.truncated[slot])
                yield from self._finish(slot, terminated=terminated, truncated=truncated)

    def cut(self) -> Iterator[Rollout]:
        """Cut all running episodes short."""
        for slot in self._running:
            yield from self._finish(slot, terminated=False, truncated=False)

    def _finish(self, slot: int, *, terminated: bool, truncated: bool) -> Iterator[Rollout]:
        """Yield the slot's episode, unless it has no step."""
        recorder, number = self._recorders.pop(slot), self._numbers.pop(slot)
        if len(recorder):
            yield Rollout(
                number=number,
                episode=recorder.episode(terminated=terminated, truncated=truncated),
                planning=recorder.trace(),
            )

    @property
    def _running(self) -> list[int]:
        return sorted(self._recorders)
