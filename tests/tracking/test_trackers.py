"""Metrics in MLflow and W&B: the real packages, offline; and trackers that fail or hang."""

import json
import logging
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from m3pc.config.overrides import flatten
from m3pc.distributed import launch
from m3pc.online import local
from m3pc.online.local import run_local
from m3pc.tracking import trackers
from m3pc.tracking.run_log import NAME, RunLog, read_metrics
from m3pc.tracking.trackers import BackgroundTracker, ExternalTracker, make_tracker, require_tracker
from m3pc.types import InputError
from replay.store.store import Store
from tests.support.episodes.shared_data import ROOT
from tests.support.faults.full_disk import fill_disk
from tests.support.runs.commands import assert_one_sentence, invoke
from tests.support.runs.small_online import new_run
from tests.support.runs.small_run import FEW_UPDATES, config, ignore, set_options
from tests.support.servers.waiting import eventually

NOWHERE = "http://127.0.0.1:9"
SECONDS = 90.0  # for a tool to load on a busy machine


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of this machine for the tools, and no server that can be reached."""
    for name in os.environ:
        if name.startswith(("MLFLOW_", "WANDB_", "M3PC_TRACK", "NETRC")):
            monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class FakeTracker:
    """Keeps the reports that it gets. It may fail, or hang until it is killed."""

    def __init__(self, *_: object) -> None:
        self.reports: list[tuple[dict[str, float], int]] = []
        self.failing = self.hanging = False
        self.began, self.killed = Event(), Event()
        self.closed = 0

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.began.set()
        if self.hanging:
            self.killed.wait(SECONDS)
            raise TimeoutError("killed")
        if self.failing:
            raise ConnectionError("no server")
        self.reports.append((dict(numbers), step))

    def close(self) -> None:
        self.closed += 1

    def kill(self) -> None:
        self.killed.set()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeTracker]:
    """Instead of the tools, as they are started."""
    started: list[FakeTracker] = []

    def start(*about: object) -> FakeTracker:
        started.append(FakeTracker(*about))
        return started[-1]

    monkeypatch.setattr(trackers, "ExternalTracker", start)
    return started


def children() -> list[str]:
    """Of this process and of its trackers'."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    )
    words = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    own = {str(os.getpid())} | {pid for pid, parent, _ in words if parent == str(os.getpid())}
    return [args for _, parent, args in words if parent in own and "ps -eo" not in args]


# What a RunLog's tracker may do


def test_numbers_and_steps_arrive_in_order_without_those_that_are_not_finite(
    tmp_path: Path,
) -> None:
    fake = FakeTracker()
    with RunLog(tmp_path, done=0, tracker=BackgroundTracker(lambda: fake)) as log:
        log.write("model", 4, {"states": 0.5, "actions": float("nan"), "rewards": float("inf")})
        log.write("model", 8, {"states": float("nan")})
        log.write("evaluation", 3, {"return": 7}, returns=[7.0])
    assert fake.reports == [({"model/states": 0.5}, 4), ({"evaluation/return": 7.0}, 3)]
    assert fake.closed == 1
    assert len((tmp_path / NAME).read_text().splitlines()) == 3


def test_a_failing_tracker_costs_a_log_line_and_may_recover(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "m3pc.tracking.trackers")
    fake = FakeTracker()
    fake.failing = True
    background = BackgroundTracker(lambda: fake)
    with RunLog(tmp_path, done=0, tracker=background) as log:
        for step in range(3):
            log.write("model", step, {"states": 1.0})
        assert eventually(lambda: background.failed == 3)
        fake.failing = False
        log.write("model", 3, {"states": 1.0})
    assert fake.reports == [({"model/states": 1.0}, 3)]
    assert [record.getMessage() for record in caplog.records] == [
        "event=tracking-lost reason=no server",
        "event=tracking-back lost=3",
        "event=tracking-lost reports=3",
    ]
    assert len(read_metrics(tmp_path, "model")) == 4


def test_a_tracker_that_hangs_does_not_keep_its_run_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeTracker()
    fake.hanging = True
    background = BackgroundTracker(lambda: fake, room=3, close_seconds=0.2)
    with RunLog(tmp_path, done=0, tracker=background) as log:
        log.write("model", 0, {"states": 1.0})
        assert fake.began.wait(10)
        before = time.monotonic()
        for step in range(1, 10):
            log.write("model", step, {"states": 1.0})
        wrote = time.monotonic() - before
        before = time.monotonic()
    assert wrote < 1
    assert time.monotonic() - before < 3
    assert fake.killed.is_set()
    assert [record.getMessage() for record in caplog.records] == [
        "event=tracking-lost reason=3 reports wait already",
        "event=tracking-lost reason=killed",
        "event=tracking-lost reports=10",
    ]
    assert len(read_metrics(tmp_path, "model")) == 10


def test_a_tracker_is_closed_though_the_disk_is_full(tmp_path: Path) -> None:
    fake = FakeTracker()
    log = RunLog(tmp_path, done=0, tracker=BackgroundTracker(lambda: fake))
    log.write("model", 1, {"states": 1.0})
    fill_disk(log.file)
    log.file.write("x")
    with pytest.raises(OSError, match="No space left"):
        log.__exit__(None, None, None)
    assert fake.closed == 1


def test_a_tracker_does_not_start_before_the_first_report(tmp_path: Path) -> None:
    made = make_tracker("mlflow", tmp_path, config())
    assert made is not None
    made.close()
    assert not list(tmp_path.glob("*track*"))
    assert make_tracker("", tmp_path, config()) is make_tracker("none", tmp_path, config()) is None


def test_a_package_that_is_not_installed_is_named_before_a_run_is_made(
    tmp_path: Path,
    data: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'm3pc\[wandb\]'"):
        require_tracker("wandb")
    out = tmp_path / "run"
    for name, words in (("mlflow", "pip install 'm3pc[mlflow]'"), ("tea", "mlflow, wandb, none")):
        monkeypatch.setenv("M3PC_TRACK", name)
        asked = ["pretrain", "--data", data.path, "--out", out, *set_options(**FEW_UPDATES)]
        done = invoke(capsys, monkeypatch, *asked)
        assert_one_sentence(done, words)
    assert not out.exists()


# Runs with a tracker


def groups_and_counts(fake: FakeTracker) -> list[tuple[str, int]]:
    """Group and count of each report."""
    return [(min(numbers).partition("/")[0], step) for numbers, step in fake.reports]


@pytest.mark.usefixtures("quick")
def test_pretraining_reports_to_its_tracker_what_it_writes(
    tmp_path: Path,
    data: Store,
    fakes: list[FakeTracker],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    done = invoke(
        capsys, monkeypatch, *("pretrain", "--data", data.path, "--out", run, "--track", "wandb"),
        *set_options(**FEW_UPDATES),
    )  # fmt: skip
    assert done.code == 0
    (fake,) = fakes
    lines = [json.loads(line) for line in (run / NAME).read_text().splitlines()]
    assert lines
    assert groups_and_counts(fake) == [(line["group"], line["update"]) for line in lines]


def test_lock_step_reports_to_its_tracker_what_it_writes(
    tmp_path: Path, fakes: list[FakeTracker]
) -> None:
    run = new_run(tmp_path / "run", online__steps=20, evaluation__every=20)
    run_local(run.path, ignore, track="mlflow")
    (fake,) = fakes
    lines = [json.loads(line) for line in (run.path / NAME).read_text().splitlines()]
    assert lines
    assert groups_and_counts(fake) == [(line["group"], line["step"]) for line in lines]
    assert fake.closed == 1


@pytest.mark.parametrize(
    ("module", "name", "where"), [(local, "run_local", ["--local"]), (launch, "run_cluster", [])]
)
def test_a_resumed_run_is_tracked_by_the_tool_of_option_or_environment(
    module: Any,
    name: str,
    where: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise InputError(f"track={options['track']}")

    monkeypatch.setattr(module, name, refuse)
    asked = ["resume", str(tmp_path), *where]
    assert_one_sentence(invoke(capsys, monkeypatch, *asked, "--track", "wandb"), "track=wandb")
    monkeypatch.setenv("M3PC_TRACK", "mlflow")
    assert_one_sentence(invoke(capsys, monkeypatch, *asked), "track=mlflow")


# The real tools


def settings() -> dict[str, Any]:
    """As JSON represents them."""
    values: dict[str, Any] = json.loads(json.dumps(flatten(config())))
    return values


@contextmanager
def tracked(name: str, run: Path, done: int) -> Iterator[RunLog]:
    run.mkdir(parents=True, exist_ok=True)
    start = partial(ExternalTracker, name, run, flatten(config()))
    background = BackgroundTracker(start, close_seconds=SECONDS)
    with RunLog(run, done=done, unit="step", tracker=background) as log:
        yield log
    assert background.failed == 0, (run / trackers.LOG).read_text()


def test_a_run_and_its_resumption_are_one_run_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")  # of the client below
    run = tmp_path / "runs" / "a hopper"
    with tracked("mlflow", run, 0) as log:
        log.write("model", 4, {"states": 0.5, "actions": float("nan")})
        log.write("model", 8, {"states": 0.25, "odd=name": 1.0})
    with tracked("mlflow", run, 8) as log:
        log.write("model", 12, {"states": 0.125})
        log.write("evaluation", 10, {"return": 3.0})

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'm3pc'")
    (tracked_run,) = client.search_runs([experiment.experiment_id])
    assert json.loads((run / "tracking.json").read_text()) == {"mlflow": tracked_run.info.run_id}
    assert (tracked_run.info.run_name, tracked_run.info.status) == ("a hopper", "FINISHED")
    assert tracked_run.data.params == {name: str(x) for name, x in settings().items()}

    def history(name: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in client.get_metric_history(tracked_run.info.run_id, name)]

    assert history("model/states") == [(4, 0.5), (8, 0.25), (12, 0.125)]
    assert history("evaluation/return") == [(10, 3.0)]
    assert set(tracked_run.data.metrics) == {"model/states", "model/odd_name", "evaluation/return"}
    assert not any("tracker_process" in args for args in children())


AT_A_TERMINAL = """
import sys
from pathlib import Path
from functools import partial
from m3pc.tracking.trackers import BackgroundTracker, ExternalTracker
run = Path(sys.argv[1])
run.mkdir(parents=True)
tracker = BackgroundTracker(
    partial(ExternalTracker, "wandb", run, {"seed": 7}), close_seconds=80
)
tracker.log({"model/states": 0.5, "model/actions": float("nan")}, 4)
tracker.log({"model/states": 0.25}, 8)
tracker.close()
"""


def at_a_terminal(code: str, *arguments: Path) -> str:
    """Run a program at a terminal with no input; what it showed."""
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=ROOT,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            check=True,
            timeout=SECONDS,
            start_new_session=True,
        )
        os.set_blocking(ours, False)
        try:
            return os.read(ours, 1 << 16).decode()
        except BlockingIOError:
            return ""
    finally:
        os.close(ours)
        os.close(theirs)


def offline_runs(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.children.wandb_files", str(folder)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    runs: list[dict[str, Any]] = json.loads(done.stdout)
    return runs


def test_without_a_key_a_run_and_its_resumption_are_one_offline_run_of_wandb_and_nothing_is_asked(
    tmp_path: Path,
) -> None:
    run = tmp_path / "runs" / "hopper"
    assert at_a_terminal(AT_A_TERMINAL, run) == ""
    with tracked("wandb", run, 8) as log:
        log.write("model", 12, {"states": 0.125})
        log.write("evaluation", 10, {"return": 3.0})
    assert not any("wandb" in args or "tracker_process" in args for args in children())

    first, second = offline_runs(run.parent)
    known = json.loads((run / "tracking.json").read_text())["wandb"]
    assert first["id"] == second["id"] == known
    assert (first["name"], first["project"]) == ("hopper", "m3pc")
    assert first["config"]["seed"] == 7
    assert settings().items() <= second["config"].items()
    assert first["rows"] == [
        {"model/states": 0.5, "step": 4},
        {"model/states": 0.25, "step": 8},
    ]
    assert second["rows"] == [
        {"model/states": 0.125, "step": 12},
        {"evaluation/return": 3.0, "step": 10},
    ]


def test_a_server_that_never_answers_does_not_keep_a_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        port = silent_server.getsockname()[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{port}")
        start = partial(ExternalTracker, "mlflow", tmp_path, {})
        background = BackgroundTracker(start, close_seconds=0.2)
        with RunLog(tmp_path, done=0, tracker=background) as log:
            log.write("model", 1, {"states": 1.0})
            silent_server.settimeout(SECONDS)
            connection, _ = silent_server.accept()
            before = time.monotonic()
        took = time.monotonic() - before
        connection.close()
    assert took < 15
    assert not any("tracker_process" in args for args in children())
    assert "event=tracking-lost reports=1" in caplog.messages


def test_an_absent_server_costs_a_log_line_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    start = partial(ExternalTracker, "mlflow", tmp_path, {})
    background = BackgroundTracker(start, close_seconds=SECONDS)
    with RunLog(tmp_path, done=0, tracker=background) as log:
        log.write("model", 1, {"states": 1.0})
    lost, count = caplog.messages
    assert lost.startswith("event=tracking-lost reason=MlflowException: API request to http://127")
    assert count == "event=tracking-lost reports=1"
    assert "secret" not in (tmp_path / trackers.LOG).read_text()
