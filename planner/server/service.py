"""The planner server without Ray: weights that answer in batches and follow a run's newest."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from m3pc.config.schema import Config
from m3pc.model.device import prepare_compute
from m3pc.model.weights import Weights
from m3pc.telemetry.catalogue import PLANNER_VERSION, WEIGHTS_REJECTED
from m3pc.telemetry.recorder import Recorder, Snapshot
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason, Version
from planner.latency_model import LatencyModel, measured
from planner.policy import Policy
from planner.requests import AnswerFn
from planner.server.batcher import Batcher, OnScheduled, PlanReply
from planner.server.weights_loader import (
    PointerSource,
    RejectedError,
    WeightsLoader,
    canary,
    ordinary,
    successor,
)
from planner.server.wire import ask_from_bytes, decision_to_bytes


class PlannerService:
    """Any thread may submit. The configuration is the run's, or that of the weights. One that is
    `paced` measures itself first, and plans no longer than whoever asks can wait."""

    def __init__(
        self,
        weights: Weights,
        config: Config | None = None,
        *,
        paced: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or weights.config
        prepare_compute(config.compute)
        self._recorder, self._clock = Recorder(), clock
        self._policy = Policy(weights, config)
        try:
            canary(self._policy)
        except RejectedError as error:
            raise InputError(f"these weights cannot plan: {error.message}; give others") from None
        self._loader: WeightsLoader | None = None
        self.pace = _pace(self._policy) if paced else None
        self._batcher = Batcher(
            answering(self._policy),
            self._policy.check,
            rows=config.fleet.batch,
            wait=config.fleet.batch_wait,
            queue=config.fleet.queue,
            recorder=self._recorder,
            pace=self.pace,
            clock=clock,
        )
        self._serve(self._policy)

    def follow(self, coordinator: PointerSource, folder: Path) -> None:
        """Answer by the run's newest weights, now and from now on; paths start at `folder`."""
        self._loader = WeightsLoader(
            self._policy, self._serve, coordinator, folder, recorder=self._recorder
        )
        self._loader.poll(0.0)  # a successor does not answer by what is old
        self._loader.start()

    def take(self, weights: Weights) -> None:
        """Answer by these from the next batch on; an InputError where they are not sound or do
        not fit the place of those before, which then go on."""
        try:
            self._serve(successor(weights, self._policy))
        except RejectedError as error:
            self._recorder.add(WEIGHTS_REJECTED, label=error.reason)
            raise InputError(
                f"these weights are not taken ({error.reason}): {error.message}; give others, "
                f"those of version {Version.unpacked(self.version)} go on"
            ) from None

    def submit(
        self,
        ask: PlanRequest,
        seconds: float,
        *,
        soon: float | None = None,
        told: OnScheduled | None = None,
    ) -> "Future[PlanReply]":
        """The reply; `seconds` from now it would be too late. As of a Batcher."""
        return self._batcher.submit(ask, seconds, soon=soon, told=told)

    def plan(self, request: bytes, seconds: float) -> bytes | Rejection:
        """The same with bytes, as they come and go over a wire; waits."""
        try:
            ask = ask_from_bytes(request)
        except InputError as error:
            return Rejection(why=RejectReason.BAD, reason=str(error))
        future = self.submit(ask, seconds)
        try:
            reply = future.result(seconds)
        except TimeoutError:
            future.cancel()  # nobody will read it
            return Rejection(
                why=RejectReason.LATE, reason=f"not computed within {seconds:g} seconds"
            )
        return decision_to_bytes(reply) if isinstance(reply, Decision) else reply

    @property
    def policy(self) -> Policy:
        """That answers now."""
        return self._policy

    @property
    def version(self) -> int:
        """Of the weights that answer, packed."""
        return self._policy.weights.version

    @property
    def ready(self) -> bool:
        return self._batcher.alive

    def stuck_for(self) -> float:
        return self._batcher.stuck_for()

    def report(self) -> tuple[Snapshot, int, int, float]:
        """Totals, version, process, and seconds that the current batch has taken."""
        return self._recorder.snapshot(), self.version, os.getpid(), self.stuck_for()

    def close(self) -> None:
        """Everybody gets an answer."""
        if self._loader is not None:
            self._loader.close()
        self._batcher.close()

    def __enter__(self) -> "PlannerService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, policy: Policy) -> None:
        self._policy = policy
        self._batcher.swap(answering(policy), policy.check)
        self._recorder.set(PLANNER_VERSION, Version.unpacked(policy.weights.version).number)


def _pace(policy: Policy) -> LatencyModel:
    planner = policy.config.planner
    return measured(
        answering(policy), ordinary(policy), mode=planner.mode, candidates=planner.candidates
    )


def answering(policy: Policy) -> AnswerFn:
    """What a policy answers; a lack of memory, of whatever device, is a MemoryError."""

    def answer(asks: Sequence[PlanRequest]) -> list[Decision]:
        try:
            return policy.answer(asks)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise MemoryError(str(error)) from error
            raise

    return answer
