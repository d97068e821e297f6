"""The processes of a run on Ray, kept alive: store, learner, planners, evaluator, actors.

Each finds the others by name and asks again while one is away, so any of them may be killed at any
time; whoever drives the run only has to look often.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from actors.remote import RolloutActor
from actors.reports import FinishedEpisode, RolloutReport
from actors.rollout_loop import ExplorationConfig
from actors.rollout_worker import RolloutConfig
from learner.remote import LearnerActor
from m3pc.distributed.data_parallel import build_learner
from m3pc.distributed.endpoints import NAMESPACE, NodeRole, RunEndpoints
from m3pc.distributed.evaluator import EvaluatorActor
from m3pc.distributed.rollout_supervisor import SupervisedRolloutWorker
from m3pc.distributed.supervisor import SupervisedProcess
from m3pc.model import checkpoint
from m3pc.online.learner_loop import LearnerReport
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.telemetry.aggregate import RunTotals
from m3pc.telemetry.catalogue import RESTARTS, SCALED
from m3pc.telemetry.recorder import Recorder, Snapshot
from planner.server.client import PlannerClient
from planner.server.remote import PlannerActor
from planner.server.service import PlannerService
from replay.format.payload import encode
from replay.server.client import StoreClient
from replay.server.remote import StoreActor
from replay.server.service import StoreTotals

RECENT = 50  # finished episodes that are remembered


class ProcessFleet:
    """Seats of all processes, by name."""

    def __init__(self, run: OnlineRun, place: RunEndpoints) -> None:
        self.run, self.place = run, place
        self._fleet = run.config.fleet
        self.totals, self._recorder = RunTotals(), Recorder()
        self.store = self._seat("store", self._make_store, lambda h: h.status.remote())
        self.learner = self._seat("learner", self._make_learner)
        self.planners = [
            self._seat(f"planner-{n}", partial(self._make_planner, n))
            for n in range(self._fleet.planners)
        ]
        self.evaluator = self._seat("evaluator", self._make_evaluator)
        self.actors: dict[int, SupervisedRolloutWorker] = {}
        self._leaving: dict[
            SupervisedRolloutWorker, float
        ] = {}  # and until when they are waited for
        self.finished: deque[FinishedEpisode] = deque(maxlen=RECENT)
        self._restarts: dict[str, int] = {}  # by name: how often each process ended
        self._stored: StoreTotals | None = None

    def poll(self, now: float) -> None:
        """Start what is to be started, hear what there is to hear. Others wait for the store: it
        makes the folder that they read."""
        self.store.poll(now)
        if self.store.report is None:
            return
        for seat in (self.learner, *self.planners, self.evaluator):
            seat.poll(now)
        if any(seat.state == "up" for seat in self.planners):
            for actor in self.actors.values():
                actor.poll(now)
        self._leave(now)
        self._hear()

    def scale(self, count: int, now: float) -> None:
        """As many actors as that: the highest slots leave, the lowest free ones are filled."""
        for slot in range(count):
            if slot not in self.actors:
                self.actors[slot] = self._actor(slot)
        for slot in sorted(self.actors)[count:]:
            actor = self.actors.pop(slot)
            actor.drain(self._fleet.deadline)
            self._leaving[actor] = now + self._fleet.deadline + self._fleet.silence

    def scaled(self, before: int, after: int) -> None:
        """Autoscaling changed how many actors are wanted."""
        self._recorder.add(SCALED, label="up" if after > before else "down")

    def set_slack(self, steps: int) -> None:
        """How far collecting may run ahead of learning, from now on."""
        if self.store.handle is not None:
            self.store.handle.set_slack.remote(steps)

    def _leave(self, now: float) -> None:
        for actor in [one for one, until in self._leaving.items() if one.drained or now > until]:
            del self._leaving[actor]
            actor.leave()
            self.totals.ended(actor.name)

    def end(self) -> None:
        for seat in self.seats():
            seat.end()

    @property
    def parts(self) -> list[SupervisedProcess]:
        """All but the actors."""
        return [self.store, self.learner, *self.planners, self.evaluator]

    def seats(self) -> Iterator[SupervisedProcess]:
        yield from self.parts
        yield from self.actors.values()
        yield from self._leaving

    @property
    def left(self) -> bool:
        """Whether all who were told to leave have left."""
        return not self._leaving

    @property
    def running(self) -> int:
        """Actors that collect."""
        return sum(actor.works for actor in self.actors.values())

    @property
    def parked(self) -> bool:
        """Whether there are actors, and all of them ended too often."""
        return bool(self.actors) and all(a.state == "parked" for a in self.actors.values())

    @property
    def stored(self) -> StoreTotals | None:
        """As it said last, also while it is away."""
        if self.store.report is not None:
            self._stored = self.store.report[0]
        return self._stored

    @property
    def learnt(self) -> LearnerReport | None:
        return cast("LearnerReport | None", self.learner.report)

    def snapshot(self) -> Snapshot:
        self.totals.take("driver", 0, self._recorder.snapshot())
        return self.totals.now()

    def _hear(self) -> None:
        """Take the totals of everybody who said something."""
        if self.store.report is not None:
            self._take(self.store, self.store.report[1])
        if self.learnt is not None:
            self._take(self.learner, self.learnt.snapshot)
        for planner in self.planners:
            if planner.report is not None:
                self._take(planner, planner.report[0])
        for actor in (*self.actors.values(), *self._leaving):
            report: RolloutReport | None = actor.report
            if report is not None:
                life = (report.pid, report.incarnation)
                self.totals.take(actor.name, hash(life), report.snapshot)
                self._remember(actor, report)
        self._count_restarts()

    def _take(self, seat: SupervisedProcess, snapshot: Snapshot) -> None:
        self.totals.take(seat.name, seat.restarts.count, snapshot)

    def _remember(self, actor: SupervisedRolloutWorker, report: RolloutReport) -> None:
        for episode in report.finished:
            if episode.number > actor.heard:
                actor.heard = episode.number
                self.finished.append(episode)

    def _count_restarts(self) -> None:
        for seat in self.seats():
            known = self._restarts.get(seat.name, 0)
            if seat.restarts.count > known:
                self._restarts[seat.name] = seat.restarts.count
                part = seat.name.partition("-")[0]
                self._recorder.add(RESTARTS, seat.restarts.count - known, part)

    # Making

    def _seat(
        self,
        name: str,
        make: Callable[[], Any],
        ask: Callable[[Any], Any] = lambda handle: handle.report.remote(),
    ) -> SupervisedProcess:
        return SupervisedProcess(name, make, patience=self._fleet.silence, ask=ask)

    def _options(self, part: str, number: int = 0, *, role: NodeRole = "learner") -> dict[str, Any]:
        """Store and evaluator live where the learner does."""
        return {
            "name": self.place.name(part, number),
            "namespace": NAMESPACE,
            "resources": self.place.resources(role),
        }

    def _make_store(self) -> Any:
        run, kind = self.run, cast(Any, StoreActor)
        return kind.options(**self._options("store")).remote(
            str(run.replay), run.header, run.config.online, run.config.fleet
        )

    def _make_learner(self) -> Any:
        options = self._options("learner") | {"num_gpus": self._fleet.learner_gpus}
        return cast(Any, LearnerActor).options(**options).remote(partial(build_learner, self.place))

    def _make_planner(self, number: int) -> Any:
        options = self._options("planner", number, role="planner")
        options |= {"num_gpus": self._fleet.planner_gpus}
        build = partial(build_planner, self.place)
        return cast(Any, PlannerActor).options(**options).remote(build)

    def _make_evaluator(self) -> Any:
        options = self._options("evaluator")
        return cast(Any, EvaluatorActor).options(**options).remote(self.run.path)

    def _actor(self, slot: int) -> SupervisedRolloutWorker:
        options = self._options("actor", slot, role="actor") | {
            "num_cpus": self._fleet.actor_cpus,
            "scheduling_strategy": "SPREAD",
        }
        make = cast(Any, RolloutActor).options(**options).remote
        silence = self._fleet.silence
        return SupervisedRolloutWorker(
            slot, partial(make, slot), self._order(slot), patience=silence
        )

    def _order(self, slot: int) -> RolloutConfig:
        config, fleet = self.run.config, self._fleet
        names = [self.place.name("planner", n) for n in range(fleet.planners)]
        return RolloutConfig(
            env_id=self.run.facts.env,
            seed=config.seed,
            acting=ExplorationConfig(
                window=config.model.window,
                horizon=config.planner.horizon,
                discount=1.0 if config.planner.mode == "m" else config.critic.discount,
                noise=config.online.noise,
                patience=fleet.deadline,
                pause_after=config.online.pause_after,
            ),
            planner=PlannerClient(names, NAMESPACE, deadline=fleet.deadline, slot=slot),
            sink=StoreClient(self.place.name("store"), NAMESPACE, fleet.deadline),
            encode=encode,
            connect=self.place.connect,
            envs=fleet.envs_per_actor,
            step_timeout=fleet.step_timeout,
            unacked=fleet.unacked,
            receipts=self.run.receipts(slot) if fleet.receipts else None,
        )


def build_planner(place: RunEndpoints) -> PlannerService:
    """With the newest checkpoint, until the first published version is found."""
    run = open_run(place.run)
    service = PlannerService(checkpoint.newest(run.checkpoints).weights, run.config)
    service.follow(place.connect(), run.path)
    return service
