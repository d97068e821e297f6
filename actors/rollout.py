"""Whole episodes of many environments that ask one planner.

E environments, L steps of an episode, H rows of a waypoint table, S state, A action. A slot is an
environment's place among the E.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.collect import episode_streams
from m3pc.envs.make import Vector, step_limit
from m3pc.types import Decision, Episode, Floats, Planner, Window
from m3pc.windows import Histories

Start = tuple[int, int]  # seeds of an episode: the environment's reset, the planning
OnStep = Callable[[Vector, Decision], None]  # before any environment that ended is reset
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """An episode, and what the planner said at each of its steps (see `Decision`)."""

    number: int  # of the episode, in the order of the starts
    episode: Episode
    conditions: Floats  # [L]
    utilities: Floats  # [L]
    effective: Floats  # [L]
    spread: Floats  # [L]


def episode_start(seed: int, number: int) -> Start:
    """From (run seed, episode) alone: the reset of `collect`, and a planning seed of its own."""
    reset_seed, _ = episode_streams(seed, number)
    # `episode_streams` spawns the children 0 and 1 of this sequence.
    child = np.random.SeedSequence([seed, number], spawn_key=(2,))
    return reset_seed, int(child.generate_state(1, np.uint64)[0] >> 1)  # fits an int64


def rollouts(
    envs: Vector,
    planner: Planner,
    starts: Iterable[Start],
    *,
    window: int,
    horizon: int,
    explore: bool = False,
    waypoints: Floats | None = None,
    on_step: OnStep = lambda envs, decision: None,
) -> Iterator[Rollout]:
    """Play one episode a start; each comes out when it ends, until the starts run out.

    A slot whose episode ended takes the next start. The planner is asked once a step, about the
    slots with an episode only; so if it answers row by row, an episode depends on its start alone,
    not on the number of slots.
    """
    step_limit(envs)  # refuses environments whose episodes may never end
    fleet = _Fleet(envs, window=window, horizon=horizon, waypoints=waypoints)
    numbered = enumerate(starts)
    free = np.ones(envs.num_envs, np.bool_)
    while fleet.begin(free, numbered):
        decision = planner.decide(fleet.question(), explore=explore)
        terminated, truncated = fleet.step(decision)
        on_step(envs, decision)
        yield from fleet.ended(terminated, truncated)
        free = terminated | truncated


@dataclass(slots=True, kw_only=True)
class _Tape:
    """An episode so far."""

    number: int
    seed: int
    states: list[Floats]
    actions: list[Floats] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    answers: list[Floats] = field(default_factory=list)  # each [4]
    version: int = -1

    def add(self, *, action: Floats, reward: float, state: Floats, answer: Floats) -> None:
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
            version=self.version,
        )
        return Rollout(
            number=self.number,
            episode=episode,
            conditions=conditions,
            utilities=utilities,
            effective=effective,
            spread=spread,
        )


class _Fleet:
    """The environments, and the episodes that run in some of the slots; the others idle."""

    def __init__(
        self, envs: Vector, *, window: int, horizon: int, waypoints: Floats | None
    ) -> None:
        assert envs.single_observation_space.shape and envs.action_space.shape
        self._envs, self._waypoints = envs, waypoints
        self._no_actions = np.zeros(envs.action_space.shape, np.float32)  # [E, A]
        self._tapes: dict[int, _Tape] = {}
        self._histories = Histories(
            envs.num_envs,
            window=window,
            horizon=horizon,
            state_size=envs.single_observation_space.shape[0],
            action_size=self._no_actions.shape[1],
        )

    def begin(self, free: Flags, numbered: Iterator[tuple[int, Start]]) -> bool:
        """Reset the free slots and give them the next episodes; False if no episode runs now."""
        slots = np.flatnonzero(free).tolist()
        begun = dict(zip(slots, numbered, strict=False))
        # A slot that idles has no seed, but must be reset: no step is taken after an end.
        if slots and (begun or self._tapes):
            seeds = [begun[slot][1][0] if slot in begun else None for slot in range(len(free))]
            states = self._reset(seeds, free)
            for slot, (number, (reset_seed, planning_seed)) in begun.items():
                self._tapes[slot] = _Tape(number=number, seed=reset_seed, states=[states[slot]])
                self._histories.begin(slot, states[slot], planning_seed, self._waypoints)
        return bool(self._tapes)

    def question(self) -> Window:
        return self._histories.window(self._running)

    def step(self, decision: Decision) -> tuple[Flags, Flags]:
        """Act and record; which environments terminated and truncated, [E] each."""
        running, answers = self._running, _answers(decision)
        assert len(answers) == len(running), f"{len(answers)} answers for {len(running)} slots"
        actions = self._no_actions.copy()
        actions[running] = decision.actions
        observations, rewards, terminated, truncated, _ = self._envs.step(actions)
        states = observations.astype(np.float32)
        for slot, answer in zip(running, answers, strict=True):
            tape, action, state = self._tapes[slot], actions[slot], states[slot]
            if not tape.actions:
                tape.version = decision.version
            tape.add(action=action, reward=float(rewards[slot]), state=state, answer=answer)
            self._histories.record(slot, action, state)
        return terminated, truncated

    def ended(self, terminated: Flags, truncated: Flags) -> Iterator[Rollout]:
        for slot in self._running:
            if terminated[slot] or truncated[slot]:
                yield self._tapes.pop(slot).rollout(
                    terminated=bool(terminated[slot]), truncated=bool(truncated[slot])
                )

    @property
    def _running(self) -> list[int]:
        return sorted(self._tapes)

    def _reset(self, seeds: list[int | None], mask: Flags) -> Floats:
        """States [E, S]. Always by mask: some environments tell options {} from None."""
        options = {"reset_mask": mask}
        observations, _ = self._envs.reset(seed=seeds, options=options)  # type: ignore[arg-type]
        states: Floats = observations.astype(np.float32)
        return states


def _answers(decision: Decision) -> Floats:
    """[asked, 4], in the order that `_Tape.rollout` takes apart."""
    parts = (decision.conditions, decision.utilities, decision.effective, decision.spread)
    return np.stack(parts, axis=1).astype(np.float32)
