"""Environments that step together, and the episodes that run in them.

E environments, L steps of an episode, H rows of a waypoint table, S state, A action. A slot is an
environment's place among the E.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from m3pc.core.history import HistoryBuffer, Waypoints
from m3pc.core.seeding import EpisodeStart
from m3pc.envs.registry import FloatVectorEnv
from m3pc.types import Decision, Episode, Floats, Window

BoolArray = NDArray[np.bool_]


class Stepped(NamedTuple):
    """What one step of all environments led to. What a faulty one gave is not handed out."""

    states: Floats  # [E, S]
    rewards: NDArray[np.float64]  # [E]
    terminated: BoolArray  # [E]
    truncated: BoolArray  # [E]
    faulty: BoolArray  # [E] neither terminated nor truncated

    @property
    def ended(self) -> BoolArray:
        return self.terminated | self.truncated | self.faulty


class VectorEnvs(Protocol):
    count: int
    state_size: int
    action_size: int

    def reset(self, seeds: Sequence[int | None], mask: BoolArray) -> tuple[Floats, BoolArray]:
        """Those that the mask names: states [E, S], and which were faulty [E]."""

    def step(self, actions: Floats) -> Stepped: ...


class GymVectorAdapter:
    """A vector of gymnasium as it is: a fault in one environment is an exception for all."""

    def __init__(self, vector: FloatVectorEnv) -> None:
        assert vector.single_observation_space.shape and vector.single_action_space.shape
        self._vector = vector
        self.count = vector.num_envs
        self.state_size = vector.single_observation_space.shape[0]
        self.action_size = vector.single_action_space.shape[0]
        self._none = np.zeros(self.count, np.bool_)

    def reset(self, seeds: Sequence[int | None], mask: BoolArray) -> tuple[Floats, BoolArray]:
        """Always by mask: some environments tell options {} from None."""
        options = {"reset_mask": mask}
        states, _ = self._vector.reset(seed=list(seeds), options=options)  # type: ignore[arg-type]
        return states.astype(np.float32), self._none

    def step(self, actions: Floats) -> Stepped:
        states, rewards, terminated, truncated, _ = self._vector.step(actions)
        return Stepped(states.astype(np.float32), rewards, terminated, truncated, self._none)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An episode, and what the planner said at each of its steps (see `Decision`)."""

    number: int  # of the episode, in the order of the starts
    episode: Episode
    conditions: Floats  # [L]
    utilities: Floats  # [L]
    effective: Floats  # [L]
    spread: Floats  # [L]


@dataclass(slots=True, kw_only=True)
class _Tape:
    """An episode so far."""

    number: int
    seed: int
    states: list[Floats]
    actions: list[Floats] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    answers: list[Floats] = field(default_factory=list)  # each [4]
    versions: tuple[int, int] = (-1, -1)  # at the first step, at the last

    def add(
        self, *, action: Floats, reward: float, state: Floats, answer: Floats, version: int
    ) -> None:
        self.versions = (self.versions[0] if self.actions else version, version)
        self.actions.append(action)
        self.rewards.append(reward)
        self.states.append(state)
        self.answers.append(answer)

    def rollout(self, *, terminated: bool, truncated: bool) -> Rollout:
        conditions, utilities, effective, spread = np.stack(self.answers, axis=1)
        episode = Episode(
            states=np.stack(self.states),
            actions=np.stack(self.actions),
            rewards=np.asarray(self.rewards, np.float32),
            terminated=terminated,
            truncated=truncated,
            seed=self.seed,
            version=self.versions[0],
            last_version=self.versions[1],
            target_return=float(conditions[0]),
            utility=float(utilities.mean(dtype=np.float64)),
        )
        return Rollout(
            number=self.number,
            episode=episode,
            conditions=conditions,
            utilities=utilities,
            effective=effective,
            spread=spread,
        )


class VectorRollout:
    """The environments, and the episodes that run in some of the slots; the others idle."""

    def __init__(
        self, envs: VectorEnvs, *, window: int, horizon: int, waypoints: Waypoints | None = None
    ) -> None:
        self._envs, self._waypoints = envs, waypoints
        self._tapes: dict[int, _Tape] = {}
        self._histories = HistoryBuffer(
            envs.count,
            window=window,
            horizon=horizon,
            state_size=envs.state_size,
            action_size=envs.action_size,
        )

    def begin(self, free: BoolArray, numbered: Iterator[tuple[int, EpisodeStart]]) -> bool:
        """Reset the free slots and give them the next episodes; False if no episode runs now.

        A slot that is faulty at once takes the episode after it, until the environments raise.
        """
        while free.any():
            slots = np.flatnonzero(free).tolist()
            begun = dict(zip(slots, numbered, strict=False))
            if not (begun or self._tapes):
                break
            # A slot that idles has no seed, but must be reset: no step is taken after an end.
            seeds = [begun[slot][1][0] if slot in begun else None for slot in range(len(free))]
            states, faulty = self._envs.reset(seeds, free)
            for slot, (number, (reset_seed, planning_seed)) in begun.items():
                if not faulty[slot]:
                    self._tapes[slot] = _Tape(number=number, seed=reset_seed, states=[states[slot]])
                    self._histories.begin(slot, states[slot], planning_seed, self._waypoints)
            free = free & faulty
        return bool(self._tapes)

    def question(self) -> Window:
        return self._histories.window(self._running)

    def step(self, decision: Decision) -> Stepped:
        """Act, and record what is sound."""
        running, answers = self._running, _answers(decision)
        assert len(answers) == len(running), f"{len(answers)} answers for {len(running)} slots"
        actions = np.zeros((self._envs.count, self._envs.action_size), np.float32)
        actions[running] = decision.actions
        stepped = self._envs.step(actions)
        for slot, answer in zip(running, answers, strict=True):
            if not stepped.faulty[slot]:
                action, state = actions[slot], stepped.states[slot]
                self._tapes[slot].add(
                    action=action,
                    reward=float(stepped.rewards[slot]),
                    state=state,
                    answer=answer,
                    version=decision.version,
                )
                self._histories.record(slot, action, state)
        return stepped

    def ended(self, stepped: Stepped) -> Iterator[Rollout]:
        """A faulty slot's episode ended with the step before, if there was one."""
        for slot in self._running:
            if stepped.ended[slot]:
                tape = self._tapes.pop(slot)
                if tape.actions:
                    yield tape.rollout(
                        terminated=bool(stepped.terminated[slot]),
                        truncated=bool(stepped.truncated[slot]),
                    )

    def cut(self) -> Iterator[Rollout]:
        """End all episodes where they are."""
        for slot in self._running:
            tape = self._tapes.pop(slot)
            if tape.actions:
                yield tape.rollout(terminated=False, truncated=False)

    @property
    def _running(self) -> list[int]:
        return sorted(self._tapes)


def _answers(decision: Decision) -> Floats:
    """[asked, 4], in the order that `_Tape.rollout` takes apart."""
    parts = (
        decision.target_returns,
        decision.utilities,
        decision.effective_candidates,
        decision.utility_std,
    )
    return np.stack(parts, axis=1).astype(np.float32)
