"""The process in which MLflow or W&B runs; trackers.py starts it.

Each line of input is a request. Each line of output is its answer: empty, or the reason of a
failure. The first request names the run and has no answer; {} ends the process. If the run's
process dies, input ends and so does this process; the tool then shows its run as interrupted.

    RUN/tracking.json   ids of the tools' runs, which a resumed run continues
"""

import json
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from m3pc.core.files import replace_file
from m3pc.tracking.trackers import CLOSE_SECONDS, Tracker

IDS = "tracking.json"
PROJECT = "m3pc"  # W&B project or MLflow experiment, unless the tool's environment names another
MAX_PARAMS, MAX_CHARACTERS = 100, 500  # MLflow's limits: parameters per call, length of each
INIT_SECONDS = 30  # W&B's server has to answer within this time


class Mlflow:
    def __init__(self, folder: Path, params: Mapping[str, object]) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}"
        self._client = MlflowClient(uri)
        run = self._previous_run(folder) or self._new_run(folder)
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        missing = [
            Param(name, str(value)[:MAX_CHARACTERS])
            for name, value in params.items()
            if name not in run.data.params  # a kill may have interrupted the first upload
        ]
        for first in range(0, len(missing), MAX_PARAMS):
            part = missing[first : first + MAX_PARAMS]
            self._client.log_batch(self._id, params=part, synchronous=True)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^/\w.\- :]", "_", name), value, now, step)
            for name, value in numbers.items()
        ]
        self._client.log_batch(self._id, metrics=metrics, synchronous=True)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _previous_run(self, folder: Path) -> Any:
        """The run to continue; None if MLflow's store does not have it."""
        from mlflow.exceptions import MlflowException

        run_id = _read_ids(folder).get("mlflow")
        try:
            return self._client.get_run(run_id) if run_id else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _new_run(self, folder: Path) -> Any:
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if not experiment_id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
        run = self._client.create_run(experiment_id, run_name=folder.name)
        _write_id(folder, "mlflow", run.info.run_id)
        return run


class Wandb:
    def __init__(self, folder: Path, params: Mapping[str, object]) -> None:
        import wandb

        run_id = _read_ids(folder).get("wandb")
        if run_id is None:
            run_id = secrets.token_hex(4)
            _write_id(folder, "wandb", run_id)
        arguments: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT") or PROJECT,
            "name": folder.name,
            "id": run_id,
            "resume": "allow",
            "config": dict(params),
            "dir": os.environ.get("WANDB_DIR") or folder.parent,
            "settings": wandb.Settings(
                console="off",
                silent=True,
                init_timeout=INIT_SECONDS,
                finish_timeout=0.75 * CLOSE_SECONDS,
            ),
        }
        try:
            self._run = wandb.init(**arguments)
        except wandb.errors.UsageError:  # no key, and no terminal to ask for one
            traceback.print_exc()
            self._run = wandb.init(**arguments, mode="offline")
        # W&B's own steps only grow, but evaluations are logged after later steps.
        self._run.define_metric("*", step_metric="step")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()


TOOLS: Mapping[str, Callable[[Path, Mapping[str, object]], Tracker]] = {
    "mlflow": Mlflow,
    "wandb": Wandb,
}


def main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # output of the tool must not look like an answer
        run = json.loads(sys.stdin.readline() or "{}")
        tool: Tracker | None = None
        for line in sys.stdin:
            request, reason = json.loads(line), ""
            try:
                if request:
                    if tool is None:  # if this fails, the next request tries again
                        tool = TOOLS[run["name"]](Path(run["folder"]), run["params"])
                    tool.log(request["numbers"], request["step"])
                elif tool is not None:
                    tool.close()
            except Exception as error:
                sys.stderr.write(_without_passwords(traceback.format_exc()))
                sys.stderr.flush()
                reason = _without_passwords(f"{type(error).__name__}: {error}")
            answers.write(" ".join(reason.split())[:300] + "\n")
            answers.flush()
            if not request:
                break
    os._exit(0)  # skips the tool's threads and exit handlers, which may wait for an absent server


def _without_passwords(text: str) -> str:
    """Remove user and password from addresses in the text."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def _read_ids(folder: Path) -> dict[str, str]:
    try:
        ids = json.loads((folder / IDS).read_bytes())
    except FileNotFoundError:
        return {}
    return {str(name): str(run_id) for name, run_id in ids.items()}


def _write_id(folder: Path, name: str, run_id: str) -> None:
    replace_file(folder / IDS, json.dumps(_read_ids(folder) | {name: run_id}).encode())


if __name__ == "__main__":
    main()
