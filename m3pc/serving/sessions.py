"""A session is one episode of one robot, which sends it step by step.

A repeated step changes nothing, so a robot that lost an answer may ask again. S state, A action.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from m3pc.core.episode_recorder import EpisodeRecorder
from m3pc.core.history import HistoryBuffer
from m3pc.types import Decision, Episode, Floats, InputError, PlanRequest

ID_BYTES = 16


class StepConflictError(InputError):
    """The step is neither the next one nor a repetition of the last, or has wrong fields."""

    def __init__(self, message: str, expected: int) -> None:
        super().__init__(message)
        self.expected = expected  # the step that would be accepted


class UnknownSessionError(InputError):
    """There is no such session, or no longer."""


class SessionLimitError(InputError):
    """The session limit has been reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the model and of its inputs."""

    window: int
    horizon: int  # steps imagined by the planner
    states: int
    actions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What a robot requested for its episode."""

    step_limit: int
    deadline: float  # seconds for an answer
    name: str | None = None
    mode: str | None = None  # None: as the planner is configured
    ratio: float | None = None
    target: float | None = None  # target return, a sum of rewards, instead of a ratio
    explore: bool = False
    seed: int = 0
    waypoints: Floats | None = None  # [H, S], for backward plans


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """The answer to one step."""

    decision: Decision
    candidates: int  # plans that were weighed; 0 without planning
    hurried: bool  # whether the deadline reduced the candidates
    seconds: float  # from request to answer
    deadline: float  # seconds
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    steps: int
    total_reward: float
    episode: Episode | None  # None if episodes are not recorded, or without steps


class Session:
    """One robot's episode: `observe` and `record_answer` for each step, then `end`."""

    def __init__(self, config: SessionConfig, sizes: Sizes, *, record: bool) -> None:
        """`record`: keep the complete episode for a store, not only the planner's window."""
        self.id, self.config = secrets.token_hex(ID_BYTES), config
        self.total_reward = 0.0
        self.answer: StepAnswer | None = None  # None until the last observed step is answered
        self._history = HistoryBuffer(
            1,
            window=sizes.window,
            horizon=sizes.horizon,
            state_size=sizes.states,
            action_size=sizes.actions,
        )
        self._record = record
        self._recorder: EpisodeRecorder | None = None  # from the first observation on
        self._last_request: tuple[bytes | float | None, ...] = ()  # state, reward, action
        self._observed = 0  # number of observed steps
        self._earlier_reward = 0.0  # total before the last observed step
        self._planned: Floats | None = None  # last answered action [A]
        self._failed = False  # the last step got no decision and may be sent anew

    @property
    def steps(self) -> int:
        """Number of answered steps, and index of the step that is expected or being planned."""
        return self._observed - (self._observed > 0 and self.answer is None)

    def observe(
        self, step: int, state: Floats, reward: float | None, action: Floats | None = None
    ) -> None:
        """The robot is in `state` [S] at `step`. `reward` and `action` [A] belong to the previous
        step; give `action` only if the robot did not execute the answered one."""
        request = (state.tobytes(), reward, None if action is None else action.tobytes())
        repeated = step == self._observed - 1
        if repeated and not self._failed:
            self._require_same(step, request)
            return
        if not repeated:
            self._require_next(step)
        executed = self._executed(step, reward, action)
        if repeated:
            self._history.amend(0, executed, state)
            if self._recorder is not None:
                self._recorder.amend(state, executed, reward)
        else:
            self._earlier_reward = self.total_reward
            if executed is None:
                self._history.begin(0, state, self.config.seed, self.config.waypoints)
                if self._record:
                    self._recorder = EpisodeRecorder(state, seed=self.config.seed)
            else:
                self._history.record(0, executed, state)
                if self._recorder is not None:
                    self._add_step(self._recorder, state, executed, reward)
        self.total_reward = self._earlier_reward + (reward or 0.0)
        self._last_request, self._failed = request, False
        self._observed, self.answer = step + 1, None

    def plan_request(self) -> PlanRequest:
        """The request for a plan of the last observed step."""
        config, target = self.config, self.config.target
        return PlanRequest(
            window=self._history.window([0]),
            mode=config.mode,
            ratio=config.ratio,
            target_remaining=None if target is None else target - self.total_reward,
            explore=config.explore,
        )

    def record_answer(self, answer: StepAnswer) -> None:
        assert self._observed and self.answer is None, "no step waits for an answer"
        self.answer, self._planned = answer, answer.decision.actions[0]

    def record_failure(self) -> None:
        """The last observed step got no decision; it may be sent with another observation."""
        self._failed = self.answer is None

    def episode_end(
        self,
        step: int,
        state: Floats,
        reward: float | None,
        action: Floats | None = None,
        *,
        terminated: bool,
        truncated: bool,
    ) -> EpisodeEnd:
        """Return the episode, ended in `state` after `step` steps. The session does not change."""
        if not (self._failed and step == self.steps):
            self._require_next(step, limited=False)
        if step == 0:
            return EpisodeEnd(steps=0, total_reward=0.0, episode=None)
        executed, episode = self._executed(step, reward, action), None
        if self._recorder is not None and executed is not None:
            recorder = self._recorder.copy()
            if self._failed:  # the failed observation already recorded this transition
                recorder.amend(state, executed, reward)
            else:
                self._add_step(recorder, state, executed, reward)
            episode = recorder.episode(terminated=terminated, truncated=truncated)
        total = self._earlier_reward if self._failed else self.total_reward
        return EpisodeEnd(steps=step, total_reward=total + (reward or 0.0), episode=episode)

    def partial_episode(self) -> Episode | None:
        """Return the steps whose outcome is known, as an episode cut short; None without any."""
        if self._recorder is None or not len(self._recorder):
            return None
        return self._recorder.episode(terminated=False, truncated=False)

    def _add_step(
        self, recorder: EpisodeRecorder, state: Floats, action: Floats, reward: float | None
    ) -> None:
        """Record the last answered step, now that its outcome is known."""
        assert self.answer is not None and reward is not None, "the step has no outcome"
        recorder.add(action, reward, state, self.answer.decision)

    def _executed(self, step: int, reward: float | None, action: Floats | None) -> Floats | None:
        """Return the action executed at the previous step [A]; None at step 0."""
        if step == 0:
            for name, value in (("reward", reward), ("action", action)):
                if value is not None:
                    raise StepConflictError(
                        f"{name} is given at step 0, which has no previous step; leave it out", 0
                    )
            return None
        if reward is None and (self._record or self.config.target is not None):
            why = "episodes are stored here" if self._record else "a target was given"
            raise StepConflictError(
                f"reward is missing; {why}, so every step but the first must send the reward of "
                "the previous one",
                self.steps,
            )
        return self._planned if action is None else action

    def _require_next(self, step: int, *, limited: bool = True) -> None:
        if limited and step >= self.config.step_limit and step == self.steps:
            raise StepConflictError(
                f"step {step} was sent, but the episode has its {self.config.step_limit} steps: "
                "steps count from 0; end the session",
                self.steps,
            )
        if step == self.steps and (self.answer is not None or not self._observed):
            return
        repeat = f", or {self._observed - 1} again" if self._observed and self.answer else ""
        raise StepConflictError(
            f"step {step} was sent, expected {self.steps}{repeat}: steps count from 0, one by "
            "one, and each must be answered before the next",
            self.steps,
        )

    def _require_same(self, step: int, request: tuple[bytes | float | None, ...]) -> None:
        if self._last_request != request:
            raise StepConflictError(
                f"step {step} was sent before with another observation or reward; to repeat a "
                "step send the same again, to continue send the next step",
                self.steps,
            )


class Sessions:
    """The open sessions."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        max_sessions: int,
        idle_seconds: float,
        record: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A session without a request for `idle_seconds` is `expired`."""
        self._sizes, self._record, self._clock = sizes, record, clock
        self._max_sessions, self._idle_seconds = max_sessions, idle_seconds
        self._open: dict[str, Session] = {}
        self._last_used: dict[str, float] = {}  # by session id; time of `clock`

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session: Session) -> bool:
        return session.id in self._open

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    def open(self, config: SessionConfig) -> Session:
        if len(self._open) >= self._max_sessions:
            raise SessionLimitError(
                f"{len(self._open)} sessions are open, which is the limit; end one, or wait until "
                f"one has been idle for {self._idle_seconds:g} seconds"
            )
        session = Session(config, self._sizes, record=self._record)
        self._open[session.id] = session
        self._last_used[session.id] = self._clock()
        return session

    def find(self, id: str) -> Session:
        """Return an open session, which counts as used now."""
        if id not in self._open:
            raise UnknownSessionError(
                "there is no such session: it was dropped, ended long ago, or is of another "
                "server; open a new one"
            )
        self._last_used[id] = self._clock()
        return self._open[id]

    def find_by_name(self, name: str) -> Session | None:
        sessions = self._open.values()
        return next((session for session in sessions if session.config.name == name), None)

    def remove(self, session: Session) -> None:
        self._open.pop(session.id, None)
        self._last_used.pop(session.id, None)

    def expired(self) -> list[Session]:
        """Sessions that were idle for too long."""
        until = self._clock() - self._idle_seconds
        return [session for session in self if self._last_used[session.id] <= until]
