"""The learner of a run with what it learns from: views of two stores, updates, checkpoints."""

import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.diagnostics import measure_critic
from learner.divergence_guard import DivergenceGuard
from learner.online import OnlineLearner
from learner.process_group import ProcessGroup
from m3pc.config.overrides import replace
from m3pc.core.returns import ReturnRule, returns_to_go
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
    COLLECTED_SHARE,
    CRITIC_UPDATES,
    ENTROPY,
    GRADIENT,
    LAST_CHECKPOINT,
    LAST_UPDATE,
    LEARNER_WAIT,
    LOSS,
    NONFINITE,
    PASSED_OVER,
    ROLLBACKS,
    UPDATE_SECONDS,
    UPDATES_DONE,
    VALUES,
)
from m3pc.telemetry.recorder import Recorder
from m3pc.training.dataset import envelope, split
from m3pc.types import DivergedError, Floats, InputError, TransitionBatch, WindowBatch
from replay.format.segment import Segment
from replay.sampling.buffers import trajectory_buffer, transition_buffers
from replay.sampling.mixture import Mixture, MixtureSource
from replay.sampling.sampler import SegmentCache, WindowBatchBuilder, per_segment
from replay.sampling.selectors import weights as selected
from replay.sampling.transitions import TransitionBatchBuilder
from replay.store.store import Store
from replay.store.view import FirstEpisodes, JoinedView, StoreView, drawable

log = logging.getLogger(__name__)


class Trainer:
    """At some number of updates of a run. What was collected is seen as of the last `refresh`."""

    def __init__(
        self,
        run: OnlineRun,
        *,
        group: ProcessGroup | None = None,
        recorder: Recorder | None = None,
        visible: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Goes on from the newest whole checkpoint. `visible` says how many of the collected
        episodes may be learnt from; without it, all that are there."""
        self.run, self.config, self._clock = run, run.config, clock
        self.recorder = recorder or Recorder()
        prepare_compute(self.config.compute)
        last = checkpoint.newest(run.checkpoints)
        self._group = group or ProcessGroup()
        self.learner = OnlineLearner(last.weights, {}, self.config, self._group)
        self.learner.restore(last.weights, last.training)
        self.recorder.add(PASSED_OVER, last.passed_over)
        self.updates, self.progress = _updates(last), dict(last.progress)
        self.left_out = int(last.progress.get("left_out", 0))
        self._health = DivergenceGuard(
            last.progress.get("bad", ()), int(last.progress.get("rollbacks", 0))
        )
        self._collected = Store(run.replay)
        view: StoreView = (
            self._collected if visible is None else FirstEpisodes(self._collected, visible)
        )
        self._build(run.logged(), view)
        self._returns: SegmentCache[Floats] = {}
        self._envelope = self._upper_envelope()
        self._staleness = Staleness(self.recorder, self._joined.second.segments)

    def _build(self, logged: Store, collected: StoreView) -> None:
        config = self.config
        as_pretrained = replace(config, {"seed": self.run.facts.split_seed})
        train, _ = split(logged, as_pretrained)
        self._rule = ReturnRule.of(config.returns, self.run.facts.max_episode_steps)
        self._buffer = trajectory_buffer(
            logged,
            collected,
            config.replay,
            minimum=config.dataset.min_length,
            seed=config.seed,
            train=train,
        )
        self._pieces: Mixture[WindowBatch[NDArray[Any]]] = Mixture(
            [self._buffer],
            WindowBatchBuilder(config.model.window, self._rule),
            batch=config.online.batch,
            seed=config.seed,
        )
        self._transitions = self._mixture(
            transition_buffers(logged, collected, config.replay, train=train), CRITIC_BATCH
        )

    def _mixture(
        self, sources: Sequence[MixtureSource], purpose: int
    ) -> Mixture[TransitionBatch[NDArray[Any]]]:
        config = self.config
        return Mixture(
            sources,
            TransitionBatchBuilder(config.critic.discount, config.critic.terminals),
            batch=config.critic.batch,
            seed=config.seed,
            purpose=purpose,
        )

    def collected(self) -> int:
        """How many episodes have been collected by now, seen or not."""
        self._collected = self._collected.later()
        return len(self._collected.lengths)

    def seen(self) -> int:
        """A number that stays the same only while the same updates were done and the same episodes
        may be drawn."""
        found = zlib.crc32(str(self.updates).encode())
        for source in (*self._pieces.sources, *self._transitions.sources):
            chosen = drawable(source.view)
            found = zlib.crc32(source.view.lengths[chosen].tobytes(), found)
            found = zlib.crc32(source.view.episode_returns[chosen].tobytes(), found)
        return found

    def refresh(self) -> None:
        """See what was collected since."""
        self._pieces, self._transitions = self._pieces.later(), self._transitions.later()
        self._envelope = self._upper_envelope()
        self._staleness.poll(self._joined.second.segments, self.updates)

    def update(self) -> dict[str, float]:
        """The next update. One that is not finite is left out: its numbers are empty."""
        number, critic = self.updates, self.config.online.critic_updates
        start = self._clock()
        batches = map(self._transition_batch, range(number * critic, (number + 1) * critic))
        try:
            numbers = self.learner.update(number, self._piece_batch(number), batches)
        except DivergedError as error:
            self._leave_out(number, error)
            numbers = {}
        self.updates += 1
        self._record(numbers, self._clock() - start)
        return numbers

    def _piece_batch(self, number: int) -> WindowBatch[NDArray[Any]]:
        with self._waiting_for("batch"):
            return self._pieces.batch(number)

    def _transition_batch(self, number: int) -> TransitionBatch[NDArray[Any]]:
        with self._waiting_for("batch"):
            return self._transitions.batch(number)

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        start = self._clock()
        yield
        self.recorder.add(LEARNER_WAIT, self._clock() - start, what)

    def measure(self) -> None:
        """The critic beside what was seen, on steps that were collected, if any were."""
        source = self._transitions.sources[1]
        if source.view.lengths[drawable(source.view)].any():
            alone = self._mixture([dataclasses.replace(source, after=0)], MEASURED_BATCH)
            found = measure_critic(self.learner.critic.critic, [alone.batch(self.updates)])
            for name in VALUES.values:
                self.recorder.set(VALUES, found[f"{name}_mean"], name)

    def weights(self, version: int) -> Weights:
        return self.learner.weights(version, envelope=self._envelope)

    def save(self, **progress: int) -> None:
        """A checkpoint; `progress` is what the caller counts."""
        start = self._clock()
        self.progress |= progress | {
            "updates": self.updates,
            "left_out": self.left_out,
            "bad": self._health.recent,
            "rollbacks": self._health.rollbacks,
        }
        try:
            path = checkpoint.write_next(
                self.run.checkpoints,
                self.weights(self.updates),
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

    def _leave_out(self, number: int, error: DivergedError) -> None:
        log.warning("event=update-left-out number=%d reason=%s", number, error)
        self.left_out += 1
        self.recorder.add(NONFINITE)
        if self._health.skipped(number):
            self._health.rolled_back()
            last = checkpoint.newest(self.run.checkpoints)
            # The count goes on: the same batches would lead to the same place.
            self.learner.restore(last.weights, last.training)
            self._group.barrier()  # or the first might replace what others still read
            self.recorder.add(ROLLBACKS)
            log.warning("event=rolled-back to=%d at=%d", _updates(last), number)

    def _record(self, numbers: dict[str, float], seconds: float) -> None:
        record = self.recorder
        record.add(UPDATES_DONE)
        record.add(CRITIC_UPDATES, self.config.online.critic_updates)
        record.observe(UPDATE_SECONDS, seconds)
        record.set(LAST_UPDATE, time.time())
        for name in LOSS.values:
            if name in numbers:
                record.set(LOSS, numbers[name], name)
        for metric, name in ((ENTROPY, "entropy"), (ALPHA, "alpha"), (GRADIENT, "gradient")):
            if name in numbers:
                record.set(metric, numbers[name])

    def _upper_envelope(self) -> Floats:
        """Best return at each step over the episodes that the model learns from."""
        view = self._joined
        self._returns = per_segment(view.segments, self._returns, self._segment_returns)
        chosen = selected(view, self._buffer.selection, length=self.config.model.window)
        collected = chosen[len(view.first.lengths) :]
        self.recorder.set(COLLECTED_SHARE, float(collected.sum() / max(chosen.sum(), 1)))
        return envelope(
            view,
            [self._returns[id(segment)][1] for segment in view.segments],
            np.flatnonzero(chosen),
            self.run.facts.max_episode_steps,
        )

    @property
    def _joined(self) -> JoinedView:
        """The logged episodes, then the collected ones."""
        view = self._pieces.sources[0].view
        assert isinstance(view, JoinedView)
        return view

    def _segment_returns(self, segment: Segment) -> Floats:
        return returns_to_go(segment.rewards, segment.lengths, self._rule)


def _updates(last: Checkpoint) -> int:
    count = last.progress.get("updates")
    if type(count) is not int or count < 0:
        raise InputError(f"{last.path}: updates are {count!r}, expected 0 or more; use another")
    return count
