"""A small pretraining run, watched, and everything that must not depend on when it was stopped."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.iql import CriticLearner
from learner.trajectory import TrajectoryLearner
from m3pc.config.schema import Config
from m3pc.model.checkpoint import LATEST, METADATA, TRAINING, WEIGHTS
from m3pc.tracking import run_log
from m3pc.training import pretrain
from m3pc.training.pretrain import create_run, resume
from m3pc.types import Episode
from replay.store.store import Store, write_store
from tests.support.episodes.episodes import header
from tests.support.models.small_weights import tiny_config

MODEL, REGRESSION, CRITIC = 40, 10, 20  # updates
TOTAL = MODEL + REGRESSION + CRITIC
# Updates that are followed by a report: every log_every, and each checkpoint.
REPORTS = sorted({*range(4, TOTAL + 1, 4), *range(10, TOTAL + 1, 10)})
SETTINGS: dict[str, Any] = {
    "model.width": 16,
    "model.heads": 2,
    "model.encoder_layers": 1,
    "model.dropout": 0.1,
    "planner.candidates": 12,
    "critic.width": 16,
    "critic.batch": 8,
    "critic.regression_updates": REGRESSION,
    "critic.updates": CRITIC,
    "pretrain.updates": MODEL,
    "pretrain.warmup": 5,
    "pretrain.batch": 8,
    "pretrain.checkpoint_every": 10,
    "pretrain.log_every": 4,
    "pretrain.measure_every": 20,
    "dataset.train_share": 0.75,
}
MEASURES = {
    *("state_1", "copy_1", "state_h", "copy_h", "reward", "return", "action"),
    *("action_between", "action_towards", "action_spread"),
    *("v_mean", "q_mean", "seen_mean", "v_correlation", "q_correlation"),
}


def config(**changes: object) -> Config:
    named = {name.replace(".", "__"): value for name, value in SETTINGS.items()}
    return tiny_config(**named | changes)


def ignore(numbers: Mapping[str, Any]) -> None:
    pass


def write_data(path: Path, seed: int = 0) -> Path:
    """Twelve episodes of 20 random steps, in three segments."""
    rng = np.random.default_rng(seed)
    about = header(states=3, actions=1, max_episode_steps=30)
    with write_store(path, about, segment_bytes=1500) as writer:
        for number in range(12):
            writer.append(
                Episode(
                    states=rng.standard_normal((21, 3)).astype(np.float32),
                    actions=rng.uniform(-1, 1, (20, 1)).astype(np.float32),
                    rewards=rng.standard_normal(20).astype(np.float32),
                    terminated=number % 2 == 0,
                    truncated=number % 2 == 1,
                )
            )
    return path


class WatchedRun:
    """What an uninterrupted run learned from and reported."""

    def __init__(self, data: Store, run: Path) -> None:
        self.updates: list[str] = []
        self.states: set[tuple[float, ...]] = set()
        self.reports: list[Mapping[str, Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            shrink_measurements(patch)
            watch_updates(patch, self._note)
            create_run(data, config(), run)
            self.done = resume(run, self.reports.append)
        self.outcome = outcome(run)

    def _note(self, word: str, batch: Any) -> None:
        self.updates.append(word)
        self.states.update(map(tuple, batch.states.reshape(-1, 3).tolist()))


UPDATE_METHODS: tuple[tuple[Any, str, str], ...] = (
    (TrajectoryLearner, "update", "model"),
    (CriticLearner, "regress", "regression"),
    (CriticLearner, "update", "critic"),
)


def watch_updates(patch: pytest.MonkeyPatch, before: Callable[[str, Any], None]) -> None:
    """Call `before` with the kind and the batch before every update."""

    def watch(owner: Any, name: str, word: str) -> None:
        real = getattr(owner, name)

        def update(*arguments: Any) -> Any:
            before(word, arguments[-1])
            return real(*arguments)

        patch.setattr(owner, name, update)

    for step in UPDATE_METHODS:
        watch(*step)


def shrink_measurements(patch: pytest.MonkeyPatch) -> None:
    """Measure on few held-out rows, for speed; what is measured has its own tests."""
    patch.setattr(pretrain, "MEASURED_BATCHES", 2)
    patch.setattr(pretrain, "MEASURED_ROWS", 16)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def outcome(run: Path) -> dict[str, object]:
    """Everything that must not depend on when a run was stopped; the path of its data may."""
    folder = run / "checkpoints"
    last = folder / (folder / LATEST).read_text().strip()
    metadata = json.loads((last / METADATA).read_bytes())
    metadata["progress"].pop("data")
    return {
        "metadata": metadata,
        WEIGHTS: sha256(last / WEIGHTS),
        TRAINING: sha256(last / TRAINING),
        "metrics": (run / run_log.NAME).read_text(),
        "names": sorted(path.name for path in folder.iterdir()),
        "config": (run / "config.yaml").read_text(),
    }


FEW_UPDATES: dict[str, Any] = {
    "pretrain__updates": 4,
    "pretrain__log_every": 1,
    "pretrain__warmup": 0,
    "critic__regression_updates": 0,
    "critic__updates": 2,
}


def set_options(**changes: object) -> list[str | Path]:
    named = SETTINGS | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--set={name}={value}" for name, value in named.items()]
