"""An online run's learner with its data: views of two stores, updates, checkpoints."""

import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.diagnostics import measure_critic
from learner.divergence_guard import DivergenceGuard
from learner.online import OnlineLearner
from learner.process_group import ProcessGroup
from m3pc.config.overrides import replace
from m3pc.core.returns import ReturnRule
from m3pc.core.rng import CRITIC_BATCH, MEASURED_BATCH
from m3pc.model import checkpoint
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.device import prepare_compute
from m3pc.model.weights import Weights
from m3pc.online.run_folder import OnlineRun
from m3pc.online.staleness import Staleness
from m3pc.telemetry.catalogue import (
    ALPHA,
    CHECKPOINT_BYTES,
    CHECKPOINT_FAILURES,
    CHECKPOINT_SECONDS,
    CHECKPOINTS_PASSED_OVER,
    COLLECTED_SHARE,
    CRITIC_UPDATES,
    ENTROPY,
    GRADIENT_NORM,
    LAST_CHECKPOINT,
    LAST_UPDATE,
    LEARNER_WAIT,
    LOSS,
    NONFINITE_UPDATES,
    ROLLBACKS,
    UPDATE_SECONDS,
    UPDATES_DONE,
    VALUES,
)
from m3pc.telemetry.recorder import Recorder
from m3pc.training.dataset import envelope, split
from m3pc.types import DivergedError, Floats, InputError, TransitionBatch, Version, WindowBatch
from replay.sampling.buffers import trajectory_buffer, transition_buffers
from replay.sampling.mixture import Mixture, MixtureSource
from replay.sampling.sampler import WindowBatchBuilder
from replay.sampling.selectors import episode_weights
from replay.sampling.transitions import TransitionBatchBuilder
from replay.store.store import Store
from replay.store.view import FirstEpisodes, JoinedView, StoreView, drawable

log = logging.getLogger(__name__)


class Trainer:
    """The state of a run after `updates` updates. It sees the episodes collected up to the last
    `refresh`."""

    def __init__(
        self,
        run: OnlineRun,
        *,
        group: ProcessGroup | None = None,
        recorder: Recorder | None = None,
        visible_episodes: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continues from the newest complete checkpoint. `visible_episodes()` is the number of
        collected episodes that may be sampled (default: all)."""
        self.run, self.config, self._clock = run, run.config, clock
        self.recorder = recorder or Recorder()
        prepare_compute(self.config.compute)
        last = checkpoint.read_newest(run.checkpoints)
        self._group = group or ProcessGroup()
        self.learner = OnlineLearner(last.weights, {}, self.config, self._group)
        self.learner.restore(last.weights, last.training)
        self.recorder.add(CHECKPOINTS_PASSED_OVER, last.passed_over)
        self.updates, self.progress = _updates(last), dict(last.progress)
        self.skipped = int(last.progress.get("left_out", 0))
        self._guard = DivergenceGuard(
            last.progress.get("bad", ()), int(last.progress.get("rollbacks", 0))
        )
        self._collected = Store(run.replay)
        view: StoreView = self._collected
        if visible_episodes is not None:
            view = FirstEpisodes(view, visible_episodes)
        self._build(run.logged_store(), view)
        self._envelope = self._upper_envelope()
        self._staleness = Staleness(self.recorder, self._joined.online.segments)

    def _build(self, logged: Store, collected: StoreView) -> None:
        config = self.config
        train, _ = split(logged, replace(config, {"seed": self.run.info.split_seed}))
        self._rule = ReturnRule.of(config.returns, self.run.info.max_episode_steps)
        self._buffer = trajectory_buffer(
            logged,
            collected,
            config.replay,
            min_length=config.dataset.min_length,
            seed=config.seed,
            train=train,
        )
        self.windows: Mixture[WindowBatch[NDArray[Any]]] = Mixture(
            [self._buffer],
            WindowBatchBuilder(config.model.window, self._rule),
            batch=config.online.batch,
            seed=config.seed,
        )
        self.transitions = self._mixture(
            transition_buffers(logged, collected, config.replay, train=train), CRITIC_BATCH
        )

    def _mixture(
        self, sources: Sequence[MixtureSource[Any]], purpose: int
    ) -> Mixture[TransitionBatch[NDArray[Any]]]:
        config = self.config
        return Mixture(
            sources,
            TransitionBatchBuilder(config.critic.discount, config.critic.terminals),
            batch=config.critic.batch,
            seed=config.seed,
            purpose=purpose,
        )

    def count_collected(self) -> int:
        """Number of episodes collected so far, including those after the last `refresh`."""
        self._collected = self._collected.latest()
        return len(self._collected.lengths)

    def fingerprint(self) -> int:
        """A checksum of the number of updates and of the episodes that may be sampled. Learners
        that share batches compare their checksums."""
        checksum = zlib.crc32(str(self.updates).encode())
        for source in (*self.windows.sources, *self.transitions.sources):
            chosen = drawable(source.view)
            checksum = zlib.crc32(source.view.lengths[chosen].tobytes(), checksum)
            checksum = zlib.crc32(source.view.episode_returns[chosen].tobytes(), checksum)
        return checksum

    def refresh(self) -> None:
        """See the episodes collected since the last call."""
        self.windows, self.transitions = self.windows.latest(), self.transitions.latest()
        self._envelope = self._upper_envelope()
        self._staleness.poll(self._joined.online.segments, self.updates)

    def update(self) -> dict[str, float]:
        """Sample, learn, record. If a loss or gradient is not finite, the update is skipped and
        returns no numbers."""
        number, start = self.updates, self._clock()
        # Batches are functions of their numbers; the critic has several in each update.
        first = number * self.config.online.critic_updates
        windows = self.windows.batch(number)
        transitions = [
            self.transitions.batch(first + k) for k in range(self.config.online.critic_updates)
        ]
        self.recorder.add(LEARNER_WAIT, self._clock() - start, "batch")
        try:
            numbers = self.learner.update(number, windows, transitions)
        except DivergedError as error:
            self._skip(number, error)
            numbers = {}
        self.updates += 1
        self._record(numbers, self._clock() - start)
        return numbers

    def record_values(self) -> None:
        """Record V, Q and the observed returns on collected steps, if there are any."""
        source = self.transitions.source("online")
        if source.view.lengths[drawable(source.view)].any():
            collected = self._mixture([dataclasses.replace(source, min_steps=0)], MEASURED_BATCH)
            means = measure_critic(self.learner.critic.critic, [collected.batch(self.updates)])
            for name in VALUES.values:
                self.recorder.set(VALUES, means[f"{name}_mean"], name)

    def weights(self, epoch: int = 0) -> Weights:
        """A copy of the current weights; `epoch` is the publishing learner's, or 0."""
        version = Version(epoch=epoch, number=self.updates)
        return self.learner.weights(version.packed, envelope=self._envelope)

    def save(self, **progress: int) -> None:
        """Write a checkpoint, with the caller's own counts in `progress`."""
        start = self._clock()
        self.progress |= progress | {
            "updates": self.updates,
            "left_out": self.skipped,
            "bad": self._guard.recent,
            "rollbacks": self._guard.rollbacks,
        }
        try:
            path = checkpoint.write_next(
                self.run.checkpoints,
                self.weights(),
                self.learner.state(),
                self.progress,
                number=self.updates,
                keep=self.config.online.keep,
            )
        except OSError:
            self.recorder.add(CHECKPOINT_FAILURES)
            raise
        self.recorder.set(LAST_CHECKPOINT, time.time())
        self.recorder.set(CHECKPOINT_BYTES, sum(file.stat().st_size for file in path.iterdir()))
        seconds = self._clock() - start
        self.recorder.observe(CHECKPOINT_SECONDS, seconds)
        self.recorder.add(LEARNER_WAIT, seconds, "disk")

    def _skip(self, number: int, error: DivergedError) -> None:
        """Count an update that was not finite; after too many, return to the last checkpoint."""
        log.warning("event=update-left-out number=%d reason=%s", number, error)
        self.skipped += 1
        self.recorder.add(NONFINITE_UPDATES)
        if self._guard.skip(number):
            self._guard.roll_back()
            last = checkpoint.read_newest(self.run.checkpoints)
            # The count of updates goes on: the same batches would diverge again.
            self.learner.restore(last.weights, last.training)
            self._group.barrier()  # all have read the checkpoint before any learner replaces it
            self.recorder.add(ROLLBACKS)
            log.warning("event=rolled-back to=%d at=%d", _updates(last), number)

    def _record(self, numbers: dict[str, float], seconds: float) -> None:
        recorder = self.recorder
        recorder.add(UPDATES_DONE)
        recorder.add(CRITIC_UPDATES, self.config.online.critic_updates)
        recorder.observe(UPDATE_SECONDS, seconds)
        recorder.set(LAST_UPDATE, time.time())
        for name in LOSS.values:
            if name in numbers:
                recorder.set(LOSS, numbers[name], name)
        for metric, name in ((ENTROPY, "entropy"), (ALPHA, "alpha"), (GRADIENT_NORM, "gradient")):
            if name in numbers:
                recorder.set(metric, numbers[name])

    def _upper_envelope(self) -> Floats:
        """The best return at each step over the episodes that the model learns from: [H]."""
        view = self._joined
        chosen = episode_weights(view, self._buffer.selector, length=self.config.model.window)
        collected = chosen[len(view.offline.lengths) :]
        self.recorder.set(COLLECTED_SHARE, float(collected.sum() / max(chosen.sum(), 1)))
        return envelope(
            view,
            [segment.returns(self._rule) for segment in view.segments],
            np.flatnonzero(chosen),
            self.run.info.max_episode_steps,
        )

    @property
    def _joined(self) -> JoinedView:
        """The logged episodes, then the collected ones."""
        view: JoinedView = self.windows.source(self._buffer.name).view
        return view


def _updates(last: Checkpoint) -> int:
    count = last.progress.get("updates")
    if type(count) is not int or count < 0:
        raise InputError(f"{last.path}: updates are {count!r}, expected 0 or more; use another")
    return count
