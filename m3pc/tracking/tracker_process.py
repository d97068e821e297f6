"""The process in which MLflow or W&B runs, for trackers.py.

A line in is an order, a line out its answer: empty, or why it failed. The first line says for which
run; {} asks for the end. If the run's process dies, input ends and so does this process, leaving
the tool's run as one that was cut off.

    RUN/tracking.json   ids of the tools' runs, with which a resumed run goes on
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
PROJECT = "m3pc"  # or experiment, unless the tool's environment names another
MOST_PARAMS, MOST_METRICS, MOST_CHARACTERS = 100, 1000, 500  # of MLflow in one call; of a param
INIT_SECONDS = 30  # of W&B, for its server to answer


class Mlflow:
    def __init__(self, folder: Path, params: Mapping[str, object]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.parent / 'mlflow.db'}"
        self._client = MlflowClient(uri)
        run = self._known(folder) or self._new(folder)
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        missing = [
            Param(name, str(value)[:MOST_CHARACTERS])
            for name, value in params.items()
            if name not in run.data.params  # a kill may have come before all were there
        ]
        for part in _parts(missing, MOST_PARAMS):
            self._client.log_batch(self._id, params=part, synchronous=True)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        now = round(1000 * time.time())
        metrics = [
            self._metric(re.sub(r"[^/\w.\- :]", "_", name), value, now, step)
            for name, value in numbers.items()
        ]
        for part in _parts(metrics, MOST_METRICS):
            self._client.log_batch(self._id, metrics=part, synchronous=True)

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _known(self, folder: Path) -> Any:
        """The run of this one, unless it is in another store than today's."""
        from mlflow.exceptions import MlflowException

        known = _ids(folder).get("mlflow")
        try:
            return self._client.get_run(known) if known else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _new(self, folder: Path) -> Any:
        run = self._client.create_run(self._experiment(), run_name=folder.name)
        _remember(folder, "mlflow", run.info.run_id)
        return run

    def _experiment(self) -> str:
        if known := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


class Wandb:
    def __init__(self, folder: Path, params: Mapping[str, object]) -> None:
        import wandb

        run_id = _ids(folder).get("wandb")
        if run_id is None:
            run_id = secrets.token_hex(4)
            _remember(folder, "wandb", run_id)
        begin: dict[str, Any] = {
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
            self._run = wandb.init(**begin)
        except wandb.errors.UsageError:  # no key, and no terminal to ask for one
            traceback.print_exc()
            self._run = wandb.init(**begin, mode="offline")
        # Evaluations come later than what they are about; W&B's own steps only grow.
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
        os.dup2(2, 1)  # whatever a tool prints is not an answer
        about = json.loads(sys.stdin.readline() or "{}")
        made: Tracker | None = None
        for line in sys.stdin:
            order, reason = json.loads(line), ""
            try:
                if order:  # made now: if that fails, the next order tries again
                    made = made or TOOLS[about["name"]](Path(about["folder"]), about["params"])
                    made.log(order["numbers"], order["step"])
                elif made is not None:
                    made.close()
            except Exception as error:
                sys.stderr.write(_safe(traceback.format_exc()))
                sys.stderr.flush()
                reason = " ".join(_safe(f"{type(error).__name__}: {error}").split())[:300]
            answers.write(reason + "\n")
            answers.flush()
            if not order:
                break
    os._exit(0)  # a tool's thread or exit handler would keep it for as long as its server is away


def _safe(text: str) -> str:
    """Without passwords in addresses."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def _parts(items: list[Any], most: int) -> list[list[Any]]:
    return [items[start : start + most] for start in range(0, len(items), most)]


def _ids(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / IDS).read_bytes())
    except FileNotFoundError:
        return {}
    return {str(name): str(known) for name, known in found.items()}


def _remember(folder: Path, name: str, known: str) -> None:
    replace_file(folder / IDS, json.dumps(_ids(folder) | {name: known}).encode())


if __name__ == "__main__":
    main()
