"""Small online runs in the point environment: a pretrained checkpoint, its data, settings."""

import json
from collections.abc import Callable
from contextlib import closing
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from actors.single_env import rollout
from m3pc.config.overrides import replace
from m3pc.config.schema import Config
from m3pc.coordinator import connect
from m3pc.core.seeding import data_episode
from m3pc.envs import make
from m3pc.model import checkpoint
from m3pc.model.checkpoint import LATEST, METADATA, TRAINING, WEIGHTS, Checkpoint
from m3pc.online.run_folder import OnlineRun, create_run, open_run
from m3pc.tracking import run_log
from m3pc.training.pretrain import create_run as start_pretraining
from m3pc.training.pretrain import resume as finish_pretraining
from m3pc.types import AppendKey, Coordinator, Floats
from replay.format.payload import encode
from replay.store.store import Store, write_store
from replay.writing.writer import Writer, WriterOptions
from tests.support.envs.point import HORIZON, POINT
from tests.support.episodes.episodes import header
from tests.support.runs.small_run import config as small_config
from tests.support.runs.small_run import ignore, sha256

ONLINE: dict[str, Any] = {
    "online.steps": 400,
    "online.batch": 8,
    "online.updates_per_step": 0.1,
    "online.critic_updates": 2,
    "online.lr": 1e-3,
    "replay.episodes": 10,
    "replay.online_after": 50,
    "fleet.envs_per_actor": 2,
    "fleet.durability": "os",
    "evaluation.every": 200,
    "evaluation.episodes": 2,
    "planner.candidates": 4,
    "planner.mode": "q",
}


class UniformPolicy:
    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        assert rng is not None
        return rng.uniform(-1, 1, 1).astype(np.float32)


@cache
def pretrained() -> tuple[Checkpoint, Store]:
    """A checkpoint that learned a little from random actions, and the store of those."""
    folder = Path(mkdtemp(prefix="m3pc-point-"))
    with (
        make(POINT) as env,
        write_store(
            folder / "data", header(states=2, actions=1, max_episode_steps=HORIZON, env=POINT)
        ) as store,
    ):
        for number in range(12):
            seed, rng = data_episode(0, number)
            store.append(rollout(env, UniformPolicy(), seed=seed, rng=rng))
    data = Store(folder / "data")
    config = small_config(
        pretrain__updates=20, critic__regression_updates=4, critic__updates=4, model__dropout=0.0
    )
    start_pretraining(data, config, folder / "run")
    finish_pretraining(folder / "run", ignore)
    return checkpoint.read(folder / "run"), data


def online_config(**changes: object) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return replace(pretrained()[0].weights.config, ONLINE | named)


def new_run(path: Path, *, env: str = POINT, **changes: object) -> OnlineRun:
    source, data = pretrained()
    create_run(source, data, env, online_config(**changes), path)
    return open_run(path)


def outcome(run: Path) -> dict[str, object]:
    """Everything that must not depend on when a lock-step run was stopped."""
    folder = run / "checkpoints"
    last = folder / (folder / LATEST).read_text().strip()
    store = Store(run / "replay")
    episodes = [segment.states.tobytes() for segment in store.segments]
    return {
        "progress": json.loads((last / METADATA).read_bytes())["progress"],
        WEIGHTS: sha256(last / WEIGHTS),
        TRAINING: sha256(last / TRAINING),
        "metrics": (run / run_log.NAME).read_text(),
        "names": sorted(path.name for path in folder.iterdir()),
        "states": b"".join(episodes),
        "returns": store.episode_returns.tolist(),
    }


def append_episodes(run: OnlineRun, count: int, incarnation: int = 0) -> None:
    """Write the first `count` logged episodes into the run's store, as if they were collected."""
    with closing(Writer(run.replay, run.header, WriterOptions(durability="os"))) as writer:
        for number, episode in enumerate(islice(cycle(pretrained()[1].episodes()), count)):
            writer.append(AppendKey(0, incarnation, number), encode(episode))


def coordinator(run: OnlineRun) -> Coordinator:
    return connect(
        run.path / "coordinator.sqlite", run=run.info.id, generations=run.path / "generations"
    )


class AllowedUpdates:
    """An UpdateBudget that allows `per_call` more updates at each call, after calling `meanwhile`
    with the number of calls."""

    def __init__(
        self, per_call: int, meanwhile: Callable[[int], None] = lambda calls: None
    ) -> None:
        self._per_call, self._meanwhile, self.calls = per_call, meanwhile, 0
        self.epochs: list[int] = []

    def may_update(self, epoch: int, done: int, total: int) -> int:
        self.calls += 1
        self.epochs.append(epoch)
        self._meanwhile(self.calls)
        return min(total, self.calls * self._per_call)
