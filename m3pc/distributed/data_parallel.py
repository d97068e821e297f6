"""The learners of a run: the lead, which the driver supervises, and its followers."""

import logging
import threading
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayError, RayTaskError

from learner.process_group import PeersLostError, ProcessGroup
from learner.remote import FollowerActor, LearnerProcess
from learner.rendezvous import Rendezvous, create_rendezvous, join
from m3pc.distributed.endpoints import NAMESPACE, RunEndpoints
from m3pc.online.lead_learner import FollowerLearner
from m3pc.online.learner_loop import LearnerLoop, LearnerStatus
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.telemetry.process_report import ProcessReport
from replay.server.client import StoreClient

# Seconds that a learner waits for its peers. The lead needs less between two commands even if store
# and coordinator do not answer.
PATIENCE = 120.0
REASON_SECONDS = 2.0  # wait for the error of a follower that ended

log = logging.getLogger(__name__)


def build_learner(endpoints: RunEndpoints) -> LearnerProcess:
    """Build the lead learner, in its process."""
    run = open_run(endpoints.run)
    if run.config.fleet.learners == 1:
        return _learner_loop(run, endpoints)
    return DataParallelLearner(run, endpoints)


class DataParallelLearner:
    """The lead of several learners. It owns its followers' processes and ends if one ends."""

    def __init__(self, run: OnlineRun, endpoints: RunEndpoints) -> None:
        fleet = run.config.fleet
        rendezvous, table = create_rendezvous(
            cast(Any, ray.util).get_node_ip_address(),
            size=fleet.learners,
            device=run.config.compute.device,
            seconds=PATIENCE + 2 * fleet.deadline,
        )
        actor_class = cast(Any, FollowerActor).options(
            num_gpus=fleet.learner_gpus, resources=endpoints.resources("learner")
        )
        self.followers = [actor_class.remote() for _ in range(1, fleet.learners)]
        self._ends = [
            follower.work.remote(partial(follow, endpoints, rendezvous, rank))
            for rank, follower in enumerate(self.followers, start=1)
        ]
        try:
            self._group = join(rendezvous, 0, table)
            self._loop = _learner_loop(run, endpoints, self._group)
        except PeersLostError as error:
            raise self._explained(error) from error
        log.info("event=learners-met count=%d", fleet.learners)

    def work(self, stop: threading.Event) -> None:
        try:
            self._loop.work(stop)
        except PeersLostError as error:
            raise self._explained(error) from error
        finally:
            self._group.leave()

    def report(self, error: str = "") -> ProcessReport[LearnerStatus]:
        return self._loop.report(error)

    def _explained(self, error: PeersLostError) -> PeersLostError:
        """Add the errors of the followers that ended."""
        ended, _ = ray.wait(self._ends, num_returns=len(self._ends), timeout=REASON_SECONDS)
        reasons = [f"learner {self._ends.index(end) + 1}: {_reason(end)}" for end in ended]
        return PeersLostError("; ".join([str(error), *reasons]))


def follow(endpoints: RunEndpoints, rendezvous: Rendezvous, rank: int) -> None:
    """Run a follower, in its process."""
    run = open_run(endpoints.run)
    group = join(rendezvous, rank)
    try:
        FollowerLearner(run, group).work()
    finally:
        group.leave()


def _learner_loop(
    run: OnlineRun, endpoints: RunEndpoints, group: ProcessGroup | None = None
) -> LearnerLoop:
    store = StoreClient(endpoints.name("store"), NAMESPACE, run.config.fleet.deadline)
    return LearnerLoop(run, store, endpoints.connect(), group=group)


def _reason(end: Any) -> str:
    try:
        ray.get(end, timeout=REASON_SECONDS)
    except RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "ended"
