"""Start or resume an online run on Ray: check inputs, connect, log, and drive."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, cast

import ray

from m3pc.core.exit_codes import OK
from m3pc.distributed.driver import Driver, RunOutcome, ShowStatus
from m3pc.distributed.endpoints import NAMESPACE, RunEndpoints
from m3pc.distributed.metrics_endpoint import MetricsEndpoint, published_metrics
from m3pc.online.recovery import WEIGHTS
from m3pc.online.results import save_pictures
from m3pc.online.run_control import read_status
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.ray_nodes.connection import connected
from m3pc.tracking.run_lock import locked
from m3pc.tracking.trackers import make_tracker
from m3pc.types import CoordinatorUnavailableError, InputError

LOGICAL_CPUS = 256  # a private cluster offers more than any number of actors needs
LOG, LOGS = "driver.log", "logs"  # this process; all other processes of a private cluster
LOG_BYTES = 10 << 20


def run_cluster(
    path: Path,
    show: ShowStatus,
    *,
    address: str | None,
    coordinator: str = "",
    metrics: MetricsEndpoint | None = None,
    track: str = "",
) -> RunOutcome:
    """Drive a run until it has all its steps, is asked to stop, or cannot continue."""
    path = path.resolve()  # other processes have other working folders
    with locked(path):
        run = open_run(path)
        if _is_finished(run):
            return RunOutcome(code=OK, reason="finished", steps=read_status(path)["steps"])
        endpoints = RunEndpoints(
            run=path,
            id=run.info.id,
            coordinator=coordinator,
            roles=run.config.fleet.roles and address is not None,
        )
        _check_inputs(run, endpoints)
        tracker = make_tracker(track, path, run.config)
        private = {"cpus": LOGICAL_CPUS, "gpus": _logical_gpus(run)} if address is None else {}
        with _log_file(path / LOG):
            with connected(address, namespace=NAMESPACE, logs=path / LOGS, **private):
                check_machines(endpoints)
                with published_metrics(path, metrics) as publish:
                    driver = Driver(run, endpoints, show, metrics=publish, tracker=tracker)
                    outcome = driver.drive()
            save_pictures(run)
        return outcome


def _check_inputs(run: OnlineRun, endpoints: RunEndpoints) -> None:
    """Fail before anything starts if logged data or coordinator would fail every process."""
    run.logged_store()
    try:
        with closing(endpoints.connect()) as coordinator:
            coordinator.read(WEIGHTS)
    except CoordinatorUnavailableError as error:
        raise InputError(
            f"no coordinator answers: {error}; start it, or give its address"
        ) from None


def check_machines(endpoints: RunEndpoints) -> None:
    """Refuse several machines if the coordinator is a file: its locks and clock are local."""
    nodes: list[dict[str, Any]] = cast(Any, ray).nodes()
    hosts = sorted({node["NodeManagerHostname"] for node in nodes if node["Alive"]})
    if len(hosts) > 1 and not endpoints.coordinator:
        raise InputError(
            f"the cluster has {len(hosts)} machines ({', '.join(hosts[:3])}), which cannot meet in "
            "a file; start a Redis and give its address by --coordinator or M3PC_COORDINATOR"
        )


def _is_finished(run: OnlineRun) -> bool:
    """Whether an earlier driver finished the run."""
    last = read_status(run.path)
    expected = {"state": "ended", "reason": "finished", "code": OK, "of": run.config.online.steps}
    return all(last.get(name) == value for name, value in expected.items())


def _logical_gpus(run: OnlineRun) -> int | None:
    """GPUs that a private cluster offers: as the settings request; None: those that Ray detects."""
    fleet = run.config.fleet
    gpus = fleet.planners * fleet.planner_gpus + fleet.learners * fleet.learner_gpus
    return max(1, round(gpus + 0.5)) if gpus and run.config.compute.device == "cpu" else None


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Log into a file instead of the terminal, which shows the status."""
    handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger("m3pc")
    level, propagate = root.level, root.propagate
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        root.propagate = propagate
        handler.close()
