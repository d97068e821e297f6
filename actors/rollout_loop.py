"""Collects episodes until `stop` is called. E environments in a buffer, A action.

The environments form two buffers that take turns (double buffering): one steps while a planner
decides for the other.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from actors.outbox import Outbox
from actors.reports import FinishedEpisode, outcome
from actors.vector_rollout import Rollout, VectorEnvs, VectorRollout
from m3pc.config.schema import Mode
from m3pc.core.rng import NOISE, counter_stream
from m3pc.core.seeding import EpisodeStart
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, ACTOR_STEPPING, ENV_STEPS, EPISODES
from m3pc.telemetry.recorder import Recorder
from m3pc.types import (
    Booleans,
    Decision,
    Episode,
    Floats,
    PendingDecision,
    PlannerEndpoint,
    PlannerGoneError,
    PlanRequest,
    Version,
    Window,
)

MAX_FINISHED: Final = 512  # finished episodes that are kept for reports
PUT_SECONDS: Final = 0.1  # how long to wait for a full outbox before testing whether to stop
RETRY_SECONDS: Final = 0.2  # pause before asking again after a lost planner or an old policy
FAILED_SECONDS: Final = 5.0  # time to send the remaining episodes, unless `stop` gave one

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorationConfig:
    """How actions are chosen while data are collected."""

    mode: Mode | None = None  # planner's mode; None: as the weights are configured
    discount: float = 1.0  # as in the planner's utilities; reports compare returns with them
    noise_scale: float = 0.0  # std of Gaussian noise on the actions of mode rcbc; 0: planning
    planner_timeout: float = 10.0  # seconds to wait for a decision before asking again
    max_policy_lag: int = 5000  # updates behind the learner; older decisions are dropped

    def request(self, window: Window) -> PlanRequest:
        """With noise, ask for the policy's median at the return that planning would target."""
        noisy = bool(self.noise_scale)
        return PlanRequest(
            window=window, mode="rcbc" if noisy else self.mode, explore=True, mean=noisy
        )

    def add_noise(self, decision: Decision, window: Window) -> Decision:
        """Draw each row's noise from a stream of its episode's seed and step, so that an episode
        does not depend on the other rows."""
        if not self.noise_scale:
            return decision
        rows = zip(window.seeds.tolist(), window.steps.tolist(), strict=True)
        streams = (counter_stream(seed, step, NOISE) for seed, step in rows)
        size = decision.actions.shape[1]
        noise = np.stack([rng.standard_normal(size, dtype=np.float32) for rng in streams])
        noisy: Floats = np.clip(decision.actions + np.float32(self.noise_scale) * noise, -1, 1)
        return replace(decision, actions=noisy)


@dataclass(slots=True)
class _EnvBuffer:
    """Environments that step together, and their open planner request."""

    rollout: VectorRollout
    free: Booleans  # [E] slots without an episode
    window: Window | None = None
    pending: PendingDecision | None = None


class RolloutLoop:
    """Steps a `RolloutWorker`'s environments by the planner's decisions and fills the outbox.

    One thread calls `run`; any thread may call the other public methods.
    """

    def __init__(
        self,
        buffers: Sequence[VectorEnvs],
        exploration: ExplorationConfig,
        *,
        planner: PlannerEndpoint,
        outbox: Outbox,
        encode: Callable[[Episode], bytes],
        starts: Iterator[EpisodeStart],
        recorder: Recorder,
        newest: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`newest()`: number of updates in the newest published weights; None if unknown."""
        self._exploration, self._planner = exploration, planner
        self._outbox, self._encode = outbox, encode
        self._recorder, self._newest, self._clock = recorder, newest, clock
        self._numbered = enumerate(starts)
        self._buffers = [
            _EnvBuffer(
                VectorRollout(envs, window=planner.window, horizon=planner.horizon),
                np.ones(envs.count, np.bool_),
            )
            for envs in buffers
        ]
        self._unsent: deque[tuple[bytes, int]] = deque()  # payload, steps
        self._stop, self._ended = threading.Event(), threading.Event()
        self._until: float | None = None  # after `stop`: when to give up unsent episodes
        self._finished: deque[FinishedEpisode] = deque(maxlen=MAX_FINISHED)
        self._steps = self._episodes = 0

    def run(self) -> None:
        """Collect until `stop` is called or the outbox ends; then cut and send all episodes."""
        try:
            self._collect()
        finally:
            left = FAILED_SECONDS if self._until is None else self._until - self._clock()
            try:
                self.save(left)
            finally:
                self._ended.set()

    def stop(self, seconds: float = 0.0) -> None:
        """Stop stepping; `run` then has `seconds` to send the remaining episodes."""
        self._until = self._clock() + seconds
        self._stop.set()

    def drain(self, seconds: float) -> int:
        """Stop and wait. Returns how many episodes the store has not acknowledged."""
        self.stop(seconds)
        self._ended.wait(seconds)
        return self.unacked

    @property
    def unacked(self) -> int:
        return self._outbox.unacked + len(self._unsent)

    def finished(self, after: int = -1) -> list[FinishedEpisode]:
        """Episodes that ended, with numbers above `after`."""
        return [episode for episode in tuple(self._finished) if episode.number > after]

    def save(self, seconds: float) -> None:
        """Cut all episodes short and send as many as possible within `seconds`."""
        until = self._clock() + seconds
        for buffer in self._buffers:
            for rollout in buffer.rollout.cut():
                self._finish(rollout)
        while self._unsent and self._put(max(0.0, until - self._clock())):
            pass
        if seconds > 0:
            self._outbox.flush(max(0.0, until - self._clock()))

    def _collect(self) -> None:
        for buffer in self._buffers:
            self._request(buffer)
        while True:
            for buffer in self._buffers:
                decision = self._decision(buffer)
                if decision is None:
                    return
                self._step(buffer, decision)
                while self._unsent and not self._stopping:
                    self._put(PUT_SECONDS)
                if not self._stopping:
                    self._request(buffer)

    def _request(self, buffer: _EnvBuffer) -> None:
        """Begin episodes in the free slots, and ask the planner."""
        with self._timed_stepping():
            buffer.rollout.begin(buffer.free, self._numbered)
        buffer.window = buffer.rollout.window()
        buffer.pending = self._planner.ask(self._exploration.request(buffer.window))

    def _decision(self, buffer: _EnvBuffer) -> Decision | None:
        """Ask until the planner gives a decision that is not stale; None once stopping."""
        assert buffer.window is not None
        while not self._stopping:
            decision = self._result(buffer)
            if decision is not None and not self._is_stale(decision):
                return decision
            with self._blocked("planner" if decision is None else "stale"):
                self._stop.wait(RETRY_SECONDS)
            buffer.pending = self._planner.ask(self._exploration.request(buffer.window))
        return None

    def _result(self, buffer: _EnvBuffer) -> Decision | None:
        """The decision for the open request; None if no planner answers."""
        assert buffer.pending is not None and buffer.window is not None
        try:
            with self._blocked("planner"):
                decision = buffer.pending.result(
                    self._exploration.planner_timeout, lambda: self._stopping
                )
        except PlannerGoneError as error:
            if not self._stopping:
                log.warning("event=planner-gone reason=%s", error)
            return None
        return _checked(decision, len(buffer.window))

    def _is_stale(self, decision: Decision) -> bool:
        newest = self._newest()
        if newest is None or decision.version < 0:
            return False
        lag = newest - Version.unpacked(decision.version).number
        return lag > self._exploration.max_policy_lag

    def _step(self, buffer: _EnvBuffer, decision: Decision) -> None:
        assert buffer.window is not None
        with self._timed_stepping():
            step = buffer.rollout.step(self._exploration.add_noise(decision, buffer.window))
        valid_steps = int((~step.faulty).sum())
        self._steps += valid_steps
        self._recorder.add(ENV_STEPS, valid_steps)
        for rollout in buffer.rollout.ended(step):
            self._finish(rollout)
        buffer.free = step.ended

    @property
    def _stopping(self) -> bool:
        return self._stop.is_set() or self._outbox.ended

    def _finish(self, rollout: Rollout) -> None:
        episode = rollout.episode
        self._unsent.append((self._encode(episode), len(episode)))
        self._recorder.add(EPISODES, label=outcome(episode))
        discounts = self._exploration.discount ** np.arange(len(episode), dtype=np.float64)
        self._finished.append(
            FinishedEpisode(
                number=self._episodes,
                outcome=outcome(episode),
                total=float(episode.rewards.sum(dtype=np.float64)),
                length=len(episode),
                version=episode.version,
                steps=self._steps,
                planned=float(rollout.planning.utilities[0]),
                realised=float(episode.rewards @ discounts),
            )
        )
        self._episodes += 1

    def _put(self, seconds: float) -> bool:
        """Hand the oldest unsent episode to the outbox, if it has room in time."""
        payload, steps = self._unsent[0]
        if self._outbox.put(payload, seconds, steps=steps):
            self._unsent.popleft()
            return True
        return False

    @contextmanager
    def _timed_stepping(self) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._recorder.add(ACTOR_STEPPING, self._clock() - begin)

    @contextmanager
    def _blocked(self, on: str) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self._recorder.add(ACTOR_BLOCKED, self._clock() - begin, label=on)


def _checked(decision: Decision, rows: int) -> Decision:
    """Validate the decision, which comes from another process, and clip its actions."""
    actions = decision.actions
    if len(actions) != rows or not np.isfinite(actions).all():
        raise ValueError(
            f"the planner answered {rows} environments with actions {list(actions.shape)}, "
            f"{np.isnan(actions).sum()} numbers of them NaN; expected a finite one for each"
        )
    return replace(decision, actions=np.clip(actions, -1, 1))
