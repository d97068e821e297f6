"""Collects episodes until it is told to stop: half of the environments step while a planner
thinks about the other half. E environments of a half, A action.
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
from actors.vector_rollout import BoolArray, Rollout, VectorEnvs, VectorRollout
from m3pc.config.schema import Mode
from m3pc.core.rng import NOISE, counter_stream
from m3pc.core.seeding import EpisodeStart
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, ACTOR_STEPPING, ENV_STEPS, EPISODES
from m3pc.telemetry.recorder import Recorder
from m3pc.types import (
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

RECENT: Final = 512  # finished episodes that are told
PUT_SECONDS: Final = 0.1  # between two looks at whether to go on, while the outbox is full
PAUSE_SECONDS: Final = 0.2  # before a planner is asked anew that is gone, or whose policy is old
FAILED_SECONDS: Final = 5.0  # for the store to take what there is, if nobody gave a time

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorationConfig:
    """How a worker acts."""

    window: int
    horizon: int
    mode: Mode | None = None  # None: as the weights are configured
    ratio: float | None = None  # times the best return; None: as the weights are configured
    explore: bool = True
    discount: float = 1.0  # of the returns that planning speaks of
    noise: float = 0.0  # sigma of Gaussian noise on the actions of mode rcbc, instead of planning
    patience: float = 10.0  # seconds without an answer, after which it is asked anew
    pause_after: int = 5000  # updates behind the learner that stop acting by a policy

    def ask(self, window: Window) -> PlanRequest:
        """With noise the policy's median, asked for the return that planning would ask for."""
        noisy = bool(self.noise)
        return PlanRequest(
            window=window,
            mode="rcbc" if noisy else self.mode,
            ratio=self.ratio,
            explore=self.explore,
            mean=noisy,
        )

    def noisy(self, decision: Decision, window: Window) -> Decision:
        """The answer with its noise: each row from its own episode's stream at its own step, so
        the same in whatever company."""
        if not self.noise:
            return decision
        rows = zip(window.seeds.tolist(), window.steps.tolist(), strict=True)
        streams = (counter_stream(seed, step, NOISE) for seed, step in rows)
        size = decision.actions.shape[1]
        drawn = np.stack([rng.standard_normal(size, dtype=np.float32) for rng in streams])
        actions: Floats = np.clip(decision.actions + np.float32(self.noise) * drawn, -1, 1)
        return replace(decision, actions=actions)


@dataclass(slots=True)
class _EnvBuffer:
    fleet: VectorRollout
    free: BoolArray
    window: Window | None = None
    pending: PendingDecision | None = None


class RolloutLoop:
    """One thread calls `run`; any other may call the rest."""

    def __init__(
        self,
        halves: Sequence[VectorEnvs],
        acting: ExplorationConfig,
        *,
        planner: PlannerEndpoint,
        outbox: Outbox,
        encode: Callable[[Episode], bytes],
        starts: Iterator[EpisodeStart],
        recorder: Recorder,
        newest: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`newest`: updates of the learner, None where nobody knows."""
        self._acting, self._planner, self._outbox, self._encode = acting, planner, outbox, encode
        self._recorder, self._newest, self._clock = recorder, newest, clock
        self._numbered = enumerate(starts)
        self._halves = [
            _EnvBuffer(
                VectorRollout(envs, window=acting.window, horizon=acting.horizon),
                np.ones(envs.count, np.bool_),
            )
            for envs in halves
        ]
        self._unsent: deque[tuple[bytes, int]] = deque()  # payload, steps
        self._stop, self._ended = threading.Event(), threading.Event()
        self._until: float | None = None  # when unsent episodes are given up, once stopped
        self._finished: deque[FinishedEpisode] = deque(maxlen=RECENT)
        self._steps = self._count = 0

    def run(self) -> None:
        """Until somebody says stop or the outbox ends; then unfinished episodes are cut."""
        try:
            self._collect()
        finally:
            left = FAILED_SECONDS if self._until is None else self._until - self._clock()
            try:
                self.save(left)
            finally:
                self._ended.set()

    def stop(self, seconds: float = 0.0) -> None:
        """Step no more; the store has so long to take what there is."""
        self._until = self._clock() + seconds
        self._stop.set()

    def drain(self, seconds: float) -> int:
        """Stop and wait; how many episodes the store has not acknowledged."""
        self.stop(seconds)
        self._ended.wait(seconds)
        return self.unacked

    @property
    def unacked(self) -> int:
        return self._outbox.unacked + len(self._unsent)

    def finished(self, after: int = -1) -> list[FinishedEpisode]:
        """Episodes that ended, with numbers above `after`."""
        return [found for found in tuple(self._finished) if found.number > after]

    def save(self, seconds: float) -> None:
        """Cut all episodes and hand them in, as far as that goes within so many seconds."""
        until = self._clock() + seconds
        for half in self._halves:
            for rollout in half.fleet.cut():
                self._note(rollout)
        while self._unsent and self._post(max(0.0, until - self._clock())):
            pass
        if seconds > 0:
            self._outbox.flush(max(0.0, until - self._clock()))

    def _collect(self) -> None:
        for half in self._halves:
            self._open(half)
        while True:
            for half in self._halves:
                decision = self._decision(half)
                if decision is None:
                    return
                self._advance(half, decision)

    def _open(self, half: _EnvBuffer) -> None:
        """Begin episodes where none runs, and ask."""
        with self._timed_stepping():
            half.fleet.begin(half.free, self._numbered)
        half.window = half.fleet.question()
        self._ask(half)

    def _ask(self, half: _EnvBuffer) -> None:
        assert half.window is not None
        half.pending = self._planner.ask(self._acting.ask(half.window))

    def _advance(self, half: _EnvBuffer, decision: Decision) -> None:
        assert half.window is not None
        with self._timed_stepping():
            stepped = half.fleet.step(self._acting.noisy(decision, half.window))
        sound = int((~stepped.faulty).sum())
        self._steps += sound
        self._recorder.add(ENV_STEPS, sound)
        for rollout in half.fleet.ended(stepped):
            self._note(rollout)
        half.free = stepped.ended
        while self._unsent and not self._over:
            self._post(PUT_SECONDS)
        if not self._over:
            self._open(half)

    def _decision(self, half: _EnvBuffer) -> Decision | None:
        """None when it is time to end."""
        while not self._over:
            decision = self._answer(half)
            if decision is not None and not self._is_stale(decision):
                return decision
            with self._blocked("planner" if decision is None else "stale"):
                self._stop.wait(PAUSE_SECONDS)
            self._ask(half)
        return None

    def _answer(self, half: _EnvBuffer) -> Decision | None:
        """None where there is no planner: it is asked anew, for as long as it takes."""
        assert half.pending is not None and half.window is not None
        try:
            with self._blocked("planner"):
                decision = half.pending.result(self._acting.patience, lambda: self._over)
        except PlannerGoneError as error:
            if not self._over:
                log.warning("event=planner-gone reason=%s", error)
            return None
        return _sound(decision, len(half.window))

    def _is_stale(self, decision: Decision) -> bool:
        newest = self._newest()
        if newest is None or decision.version < 0:
            return False
        return newest - Version.unpacked(decision.version).number > self._acting.pause_after

    @property
    def _over(self) -> bool:
        return self._stop.is_set() or self._outbox.ended

    def _note(self, rollout: Rollout) -> None:
        episode = rollout.episode
        self._unsent.append((self._encode(episode), len(episode)))
        self._recorder.add(EPISODES, label=outcome(episode))
        self._finished.append(
            FinishedEpisode(
                number=self._count,
                outcome=outcome(episode),
                total=float(episode.rewards.sum(dtype=np.float64)),
                length=len(episode),
                version=episode.version,
                steps=self._steps,
                planned=float(rollout.utilities[0]),
                realised=_discounted(episode.rewards, self._acting.discount),
            )
        )
        self._count += 1

    def _post(self, seconds: float) -> bool:
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


def _discounted(rewards: Floats, discount: float) -> float:
    return float(rewards @ discount ** np.arange(len(rewards), dtype=np.float64))


def _sound(decision: Decision, rows: int) -> Decision:
    """A planner is another process: nothing it says may poison an episode."""
    actions = decision.actions
    if len(actions) != rows or not np.isfinite(actions).all():
        raise ValueError(
            f"the planner answered {rows} environments with actions {list(actions.shape)}, "
            f"{np.isnan(actions).sum()} numbers of them NaN; expected a finite one for each"
        )
    return replace(decision, actions=np.clip(actions, -1, 1))
