"""Robots that ask step by step: a session is one episode of one of them, remembered here.

S state, A action, L steps, T of a window. Asking a step again changes nothing, so whoever lost an
answer may repeat the question.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from m3pc.core.history import HistoryBuffer
from m3pc.types import Decision, Episode, Floats, InputError, PlanRequest

ID_BYTES = 16


class ConflictError(InputError):
    """A step that is not the next one, nor the last one again, or not as it has to be."""

    def __init__(self, message: str, expected: int) -> None:
        super().__init__(message)
        self.expected = expected  # the step that would be taken


class UnknownSessionError(InputError):
    """There is no such session, or there is none any more."""


class NoRoomError(InputError):
    """As many robots as may be are here already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model and of the episodes that it plans for."""

    window: int
    horizon: int  # steps planned ahead
    states: int
    actions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What a robot asked for when it came."""

    step_limit: int
    deadline: float  # seconds for an answer
    name: str | None = None
    mode: str | None = None  # None: as the planner is configured
    ratio: float | None = None
    target: float | None = None  # reward of the whole episode that is wanted, instead of a ratio
    explore: bool = False
    seed: int = 0
    waypoints: Floats | None = None  # [H, S], for backward plans


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """What a robot was told at one step."""

    decision: Decision
    candidates: int  # plans that were weighed; 0 without planning
    hurried: bool  # whether there would have been more, had there been more time
    seconds: float  # since it was asked
    deadline: float  # seconds
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    steps: int
    total: float  # reward
    episode: Episode | None  # for a store, if there is one


@dataclass(slots=True, kw_only=True)
class _Tape:
    """The episode so far, for a store."""

    states: list[Floats] = field(default_factory=list)
    actions: list[Floats] = field(default_factory=list)  # as they were really done
    rewards: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def until(self, step: int) -> "_Tape":
        """A copy without what was told at `step` and later."""
        known = max(step - 1, 0)
        return _Tape(
            states=self.states[:step],
            actions=self.actions[:known],
            rewards=self.rewards[:known],
            decisions=self.decisions[:step],
        )

    def add(self, state: Floats, action: Floats | None, reward: float | None) -> "_Tape":
        """Where the robot is, and what it did and got on the way there; the tape itself."""
        self.states.append(state)
        self.actions += [] if action is None else [action]
        self.rewards += [] if reward is None else [reward]
        return self

    def episode(self, steps: int, seed: int, *, terminated: bool, truncated: bool) -> Episode:
        """The first steps of it, with the state that they led to."""
        decisions = self.decisions[:steps]
        utilities = np.asarray([float(each.utilities[0]) for each in decisions])
        planned = utilities[np.isfinite(utilities)]
        return Episode(
            states=np.stack(self.states[: steps + 1]),
            actions=np.stack(self.actions[:steps]),
            rewards=np.asarray(self.rewards[:steps], np.float32),
            terminated=terminated,
            truncated=truncated,
            seed=seed,
            version=decisions[0].version,
            last_version=decisions[-1].version,
            target_return=float(decisions[0].target_returns[0]),
            utility=float(planned.mean()) if len(planned) else float("nan"),
        )


class Session:
    """One robot's episode: `observe`, then `answered`, and so on; `end` at the end of it."""

    def __init__(self, terms: SessionConfig, sizes: Sizes, *, keep: bool) -> None:
        """`keep`: the whole episode for a store, not only what the next step needs."""
        self.id, self.terms = secrets.token_hex(ID_BYTES), terms
        self.total = 0.0  # reward so far
        self.answer: StepAnswer | None = None  # to the last step that was observed
        self._histories = HistoryBuffer(
            1,
            window=sizes.window,
            horizon=sizes.horizon,
            state_size=sizes.states,
            action_size=sizes.actions,
        )
        self._tape = _Tape() if keep else None
        self._last: tuple[bytes | float | None, ...] = ()  # what was told of the last step
        self._observed = 0  # steps whose observation is known
        self._earned = 0.0  # reward up to the step before the last that was observed
        self._planned: Floats | None = None  # [A] of the last answer
        self._failed = False  # nothing was decided at the last step: it may be told anew

    @property
    def steps(self) -> int:
        """That were answered: the number of the next one, or of one that has no answer yet."""
        return self._observed - (self._observed > 0 and self.answer is None)

    def observe(
        self, step: int, state: Floats, reward: float | None, action: Floats | None = None
    ) -> None:
        """At `step` the robot is in `state` [S]. Of the step before are `reward` and `action` [A]:
        what was really done, if that is not what was planned."""
        said = (state.tobytes(), reward, None if action is None else action.tobytes())
        again = step == self._observed - 1
        if again and not self._failed:
            self._require_same(step, said)
            return
        if not again:
            self._require_next(step)
        done = self._done(step, reward, action)
        if again:
            self._histories.amend(0, done, state)
            self._tape = self._tape and self._tape.until(step)
        else:
            self._earned = self.total
            if done is None:
                self._histories.begin(0, state, self.terms.seed, self.terms.waypoints)
            else:
                self._histories.record(0, done, state)
        if self._tape is not None:
            self._tape.add(state, done, reward)
        self.total = self._earned + (reward or 0.0)
        self._last, self._failed = said, False
        self._observed, self.answer = step + 1, None

    def ask(self) -> PlanRequest:
        """What a planner has to be asked now."""
        terms = self.terms
        return PlanRequest(
            window=self._histories.window([0]),
            mode=terms.mode,
            ratio=terms.ratio,
            target_remaining=None if terms.target is None else terms.target - self.total,
            explore=terms.explore,
        )

    def answered(self, answer: StepAnswer) -> None:
        assert self._observed and self.answer is None, "nothing was asked"
        self.answer, self._planned = answer, answer.decision.actions[0]
        if self._tape is not None:
            self._tape.decisions.append(answer.decision)

    def failed(self) -> None:
        """There is no answer: nothing was decided at the last step that was observed."""
        self._failed = self.answer is None

    def end(
        self,
        step: int,
        state: Floats,
        reward: float | None,
        action: Floats | None = None,
        *,
        terminated: bool,
        truncated: bool,
    ) -> Ending:
        """After `step` steps it ended in `state`. Changes nothing, so it may be asked again."""
        if not (self._failed and step == self.steps):
            self._require_next(step, limited=False)
        if step == 0:
            return Ending(steps=0, total=0.0, episode=None)
        done, episode = self._done(step, reward, action), None
        if self._tape is not None:
            whole = self._tape.until(step).add(state, done, reward)
            episode = whole.episode(
                step, self.terms.seed, terminated=terminated, truncated=truncated
            )
        earned = self._earned if self._failed else self.total
        return Ending(steps=step, total=earned + (reward or 0.0), episode=episode)

    def abandoned(self) -> Episode | None:
        """What is known of an episode that nobody ended: as far as a step's outcome was told."""
        steps = self._observed - 1
        if self._tape is None or steps < 1:
            return None
        return self._tape.episode(steps, self.terms.seed, terminated=False, truncated=False)

    def _done(self, step: int, reward: float | None, action: Floats | None) -> Floats | None:
        """What was done at the step before [A]; None before anything was."""
        if step == 0:
            for name, given in (("reward", reward), ("action", action)):
                if given is not None:
                    raise ConflictError(
                        f"{name} is given at step 0, before anything was done; leave it out", 0
                    )
            return None
        if reward is None and (self._tape is not None or self.terms.target is not None):
            why = "episodes are stored here" if self._tape is not None else "a target was given"
            raise ConflictError(
                f"reward is missing; {why}, so each step but the first has to say what the step "
                "before it brought",
                self.steps,
            )
        return self._planned if action is None else action

    def _require_next(self, step: int, *, limited: bool = True) -> None:
        if limited and step >= self.terms.step_limit and step == self.steps:
            raise ConflictError(
                f"step {step} was sent, but the episode has its {self.terms.step_limit} steps: "
                "steps count from 0; end the session",
                self.steps,
            )
        if step == self.steps and (self.answer is not None or not self._observed):
            return
        again = f", or {self._observed - 1} again" if self._observed and self.answer else ""
        raise ConflictError(
            f"step {step} was sent, expected {self.steps}{again}: steps count from 0, one by "
            "one, and each has to be answered before the next",
            self.steps,
        )

    def _require_same(self, step: int, said: tuple[bytes | float | None, ...]) -> None:
        if self._last != said:
            raise ConflictError(
                f"step {step} was sent before with another observation or reward; to repeat a "
                "step send the same again, to go on send the next step",
                self.steps,
            )


class Sessions:
    """The open ones: so many at most, none idle for longer than `idle` seconds."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        most: int,
        idle: float,
        keep: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes, self._most, self._idle, self._keep = sizes, most, idle, keep
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._used: dict[str, float] = {}  # when each was used last

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session: Session) -> bool:
        return session.id in self._open

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def open(self, terms: SessionConfig) -> Session:
        if len(self._open) >= self._most:
            raise NoRoomError(
                f"{len(self._open)} sessions are open, as many as may be; end one, or wait until "
                f"one has been idle for {self._idle:g} seconds"
            )
        session = Session(terms, self._sizes, keep=self._keep)
        self._open[session.id] = session
        self._used[session.id] = self._clock()
        return session

    def find(self, id: str) -> Session:
        """It counts as used now."""
        if id not in self._open:
            raise UnknownSessionError(
                "there is no such session: it was left, was over long ago, or is of another "
                "server; open a new one"
            )
        self._used[id] = self._clock()
        return self._open[id]

    def named(self, name: str) -> Session | None:
        return next((each for each in self._open.values() if each.terms.name == name), None)

    def remove(self, session: Session) -> None:
        self._open.pop(session.id, None)
        self._used.pop(session.id, None)

    def expired(self) -> list[Session]:
        """Those that were idle for too long."""
        until = self._clock() - self._idle
        return [each for each in self if self._used[each.id] <= until]
