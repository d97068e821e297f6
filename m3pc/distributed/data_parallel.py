"""The learners of a run on Ray: the first, whom the driver knows, and its mates, whom it owns."""

import logging
import threading
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from learner.process_group import PeersLostError, ProcessGroup
from learner.remote import FollowerActor, LearnerProcess
from learner.rendezvous import Rendezvous, invite, join
from m3pc.distributed.endpoints import NAMESPACE, RunEndpoints
from m3pc.online.lead_learner import FollowerLearner
from m3pc.online.learner_loop import LearnerLoop, LearnerReport
from m3pc.online.run_folder import OnlineRun, open_run
from replay.server.client import StoreClient

# That a learner waits for another: more than the first ever takes between two orders, with a store
# and a coordinator that do not answer.
PATIENCE = 120.0
REASON_SECONDS = 2.0  # for a mate that ended to say why

log = logging.getLogger(__name__)


def build_learner(place: RunEndpoints) -> LearnerProcess:
    """In the process that the driver made."""
    run = open_run(place.run)
    return (
        _learning(run, place) if run.config.fleet.learners == 1 else DataParallelLearner(run, place)
    )


class DataParallelLearner:
    """Works as one learner does, and ends when any of them does."""

    def __init__(self, run: OnlineRun, place: RunEndpoints) -> None:
        fleet = run.config.fleet
        meeting, table = invite(
            cast(Any, ray.util).get_node_ip_address(),
            size=fleet.learners,
            device=run.config.compute.device,
            seconds=PATIENCE + 2 * fleet.deadline,
        )
        kind = cast(Any, FollowerActor).options(
            num_gpus=fleet.learner_gpus, resources=place.resources("learner")
        )
        self.mates = [kind.remote() for _ in range(1, fleet.learners)]
        self._ends = [
            mate.work.remote(partial(work_along, place, meeting, rank))
            for rank, mate in enumerate(self.mates, start=1)
        ]
        try:
            self._group = join(meeting, 0, table)
            self._learning = _learning(run, place, self._group)
        except PeersLostError as error:
            raise self._explained(error) from error
        log.info("event=learners-met count=%d", fleet.learners)

    def work(self, stop: threading.Event) -> None:
        try:
            self._learning.work(stop)
        except PeersLostError as error:
            raise self._explained(error) from error
        finally:
            self._group.leave()

    def report(self, error: str = "") -> LearnerReport:
        return self._learning.report(error)

    def _explained(self, error: PeersLostError) -> PeersLostError:
        """With what the mates that ended say of it."""
        ended, _ = ray.wait(self._ends, num_returns=len(self._ends), timeout=REASON_SECONDS)
        reasons = [f"learner {self._ends.index(end) + 1}: {_reason(end)}" for end in ended]
        return PeersLostError("; ".join([str(error), *reasons]))


def work_along(place: RunEndpoints, meeting: Rendezvous, rank: int) -> None:
    """In the process of a mate."""
    run = open_run(place.run)
    group = join(meeting, rank)
    try:
        FollowerLearner(run, group).work()
    finally:
        group.leave()


def _learning(
    run: OnlineRun, place: RunEndpoints, group: ProcessGroup | None = None
) -> LearnerLoop:
    store = StoreClient(place.name("store"), NAMESPACE, run.config.fleet.deadline)
    return LearnerLoop(run, store, place.connect(), group=group)


def _reason(end: Any) -> str:
    try:
        ray.get(end, timeout=REASON_SECONDS)
    except RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "ended"
