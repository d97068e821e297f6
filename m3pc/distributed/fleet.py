"""The processes of a run on Ray, kept alive: store, learner, planners, evaluator, actors.

Processes look each other up by name and repeat requests that get no answer, so each may be killed
at any time. The driver only has to poll often.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from actors.remote import RolloutActor
from actors.reports import FinishedEpisode
from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig
from learner.remote import LearnerActor
from m3pc.distributed.data_parallel import build_learner
from m3pc.distributed.endpoints import NAMESPACE, NodeRole, RunEndpoints
from m3pc.distributed.evaluator import EvaluatorActor, EvaluatorStatus
from m3pc.distributed.supervised_process import SupervisedProcess
from m3pc.distributed.supervised_rollout import SupervisedRolloutWorker
from m3pc.model import checkpoint
from m3pc.online.learner_loop import LearnerStatus
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.telemetry.aggregate import RunTotals
from m3pc.telemetry.catalogue import RESTARTS, SCALED
from m3pc.telemetry.process_report import DetailT
from m3pc.telemetry.recorder import Recorder, Snapshot
from planner.server.client import PlannerClient
from planner.server.remote import PlannerActor
from planner.server.service import PlannerService, PlannerStatus
from replay.format.payload import encode
from replay.server.client import StoreClient
from replay.server.remote import StoreActor
from replay.server.service import StoreTotals

RECENT_EPISODES = 50  # finished episodes kept for the status


class ProcessFleet:
    """All supervised processes of a run, and their merged metrics."""

    def __init__(self, run: OnlineRun, endpoints: RunEndpoints) -> None:
        self.run, self.endpoints = run, endpoints
        self._config = run.config.fleet
        self._totals, self._recorder = RunTotals(), Recorder()
        self.store: SupervisedProcess[StoreTotals] = self._supervise("store", self._make_store)
        self.learner: SupervisedProcess[LearnerStatus] = self._supervise(
            "learner", self._make_learner
        )
        self.planners: list[SupervisedProcess[PlannerStatus]] = [
            self._supervise(f"planner-{n}", partial(self._make_planner, n))
            for n in range(self._config.planners)
        ]
        self.evaluator: SupervisedProcess[EvaluatorStatus] = self._supervise(
            "evaluator", self._make_evaluator
        )
        self.actors: dict[int, SupervisedRolloutWorker] = {}
        self._leaving: dict[SupervisedRolloutWorker, float] = {}  # worker -> deadline
        self.finished: deque[FinishedEpisode] = deque(maxlen=RECENT_EPISODES)
        self.stored: StoreTotals | None = None  # the last known, also while the store is away
        self._restarts: dict[str, int] = {}  # restarts counted so far, by process name

    def poll(self, now: float) -> None:
        """Start due processes and take the reports that have arrived. The store starts first:
        it creates the folder that the other processes read."""
        self.store.poll(now)
        if self.store.report is None:
            return
        self.stored = self.store.report.detail
        for process in self.core[1:]:
            process.poll(now)
        if any(planner.state == "up" for planner in self.planners):
            for actor in self.actors.values():
                actor.poll(now)
        self._retire_drained(now)
        self._take_reports()

    def scale(self, count: int, now: float) -> None:
        """Run `count` actors: fill the lowest free slots, drain the highest ones."""
        for slot in range(count):
            if slot not in self.actors:
                self.actors[slot] = self._actor(slot)
        for slot in sorted(self.actors)[count:]:
            actor = self.actors.pop(slot)
            actor.drain(self._config.deadline)
            self._leaving[actor] = now + self._config.deadline + self._config.silence

    def count_scaling(self, before: int, after: int) -> None:
        """Count, as a metric, that autoscaling changed the number of actors."""
        self._recorder.add(SCALED, label="up" if after > before else "down")

    def set_slack(self, steps: int) -> None:
        """Set how many steps collecting may run ahead of learning."""
        if self.store.handle is not None:
            self.store.handle.set_slack.remote(steps)

    def end(self) -> None:
        for process in self.processes():
            process.end()

    @property
    def core(self) -> list[SupervisedProcess[Any]]:
        """All processes but the actors: the store first, the evaluator last."""
        return [self.store, self.learner, *self.planners, self.evaluator]

    def processes(self) -> Iterator[SupervisedProcess[Any]]:
        yield from self.core
        yield from self.actors.values()
        yield from self._leaving

    @property
    def has_drained(self) -> bool:
        """Whether every actor that was asked to leave has left."""
        return not self._leaving

    @property
    def running_actors(self) -> int:
        return sum(actor.is_working for actor in self.actors.values())

    @property
    def is_parked(self) -> bool:
        """Whether there are actors, and all of them ended too often."""
        return bool(self.actors) and all(a.state == "parked" for a in self.actors.values())

    @property
    def learner_status(self) -> LearnerStatus | None:
        return self.learner.report.detail if self.learner.report else None

    def snapshot(self) -> Snapshot:
        self._totals.update("driver", 0, self._recorder.snapshot())
        return self._totals.snapshot()

    def _retire_drained(self, now: float) -> None:
        leaving = list(self._leaving.items())
        for actor in [a for a, deadline in leaving if a.has_drained or now > deadline]:
            del self._leaving[actor]
            actor.retire()
            self._totals.remove(actor.name)

    def _take_reports(self) -> None:
        for process in self.processes():
            if process.report is not None:
                self._totals.update(process.name, process.incarnation, process.report.snapshot)
            self._count_restarts(process)
        for actor in (*self.actors.values(), *self._leaving):
            for episode in actor.report.detail.finished if actor.report else ():
                if episode.number > actor.last_episode:
                    actor.last_episode = episode.number
                    self.finished.append(episode)

    def _count_restarts(self, process: SupervisedProcess[Any]) -> None:
        counted = self._restarts.get(process.name, 0)
        if process.restarts.count > counted:
            self._restarts[process.name] = process.restarts.count
            part = process.name.partition("-")[0]
            self._recorder.add(RESTARTS, process.restarts.count - counted, part)

    # How each process is made

    def _supervise(self, name: str, make: Callable[[], Any]) -> SupervisedProcess[DetailT]:
        return SupervisedProcess(name, make, patience=self._config.silence)

    def _options(self, part: str, number: int = 0, *, role: NodeRole = "learner") -> dict[str, Any]:
        """Options of a Ray actor. Store and evaluator run on nodes of the learner's role."""
        return {
            "name": self.endpoints.name(part, number),
            "namespace": NAMESPACE,
            "resources": self.endpoints.resources(role),
        }

    def _make_store(self) -> Any:
        run, actor_class = self.run, cast(Any, StoreActor)
        return actor_class.options(**self._options("store")).remote(
            str(run.replay), run.header, run.config.online, run.config.fleet
        )

    def _make_learner(self) -> Any:
        options = self._options("learner") | {"num_gpus": self._config.learner_gpus}
        build = partial(build_learner, self.endpoints)
        return cast(Any, LearnerActor).options(**options).remote(build)

    def _make_planner(self, number: int) -> Any:
        options = self._options("planner", number, role="planner")
        options |= {"num_gpus": self._config.planner_gpus}
        build = partial(build_planner, self.endpoints)
        return cast(Any, PlannerActor).options(**options).remote(build)

    def _make_evaluator(self) -> Any:
        options = self._options("evaluator")
        return cast(Any, EvaluatorActor).options(**options).remote(self.run.path)

    def _actor(self, slot: int) -> SupervisedRolloutWorker:
        options = self._options("actor", slot, role="actor") | {
            "num_cpus": self._config.actor_cpus,
            "scheduling_strategy": "SPREAD",
        }
        make = partial(cast(Any, RolloutActor).options(**options).remote, slot)
        return SupervisedRolloutWorker(
            slot, make, self.rollout_config(slot), patience=self._config.silence
        )

    def rollout_config(self, slot: int) -> RolloutConfig:
        config, fleet = self.run.config, self._config
        planners = [self.endpoints.name("planner", n) for n in range(fleet.planners)]
        return RolloutConfig(
            env_id=self.run.info.env,
            seed=config.seed,
            exploration=ExplorationConfig(
                discount=1.0 if config.planner.mode == "m" else config.critic.discount,
                noise_scale=config.online.noise,
                planner_timeout=fleet.deadline,
                max_policy_lag=config.online.pause_after,
            ),
            planner=PlannerClient(
                planners,
                NAMESPACE,
                window=config.model.window,
                horizon=config.planner.horizon,
                deadline=fleet.deadline,
                slot=slot,
            ),
            sink=StoreClient(self.endpoints.name("store"), NAMESPACE, fleet.deadline),
            encode=encode,
            connect=self.endpoints.connect,
            envs=fleet.envs_per_actor,
            step_timeout=fleet.step_timeout,
            max_unacked=fleet.unacked,
            ack_log=self.run.ack_log(slot) if fleet.receipts else None,
        )


def build_planner(endpoints: RunEndpoints) -> PlannerService:
    """Build a planner, in its process. It uses the newest checkpoint until it gets a version."""
    run = open_run(endpoints.run)
    service = PlannerService(checkpoint.read_newest(run.checkpoints).weights, run.config)
    service.follow(endpoints.connect(), run.path)
    return service
