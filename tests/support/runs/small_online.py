"""Small online runs on the point: a pretrained checkpoint, its data, their settings."""

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
from m3pc.online.run_folder import OnlineRun, open_run, start
from m3pc.tracking import run_log
from m3pc.training.pretrain import resume as finish_pretraining
from m3pc.training.pretrain import start as start_pretraining
from m3pc.types import AppendKey, Coordinator, Floats
from replay.format.payload import encode
from replay.store.store import Store, write_store
from replay.writing.writer import Writer, WriterOptions
from tests.support.envs.point import HORIZON, POINT
from tests.support.episodes.episodes import header
from tests.support.runs.small_run import config as small_config
from tests.support.runs.small_run import sha256, silent

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


class Uniform:
    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        assert rng is not None
        return rng.uniform(-1, 1, 1).astype(np.float32)


@cache
def pretrained() -> tuple[Checkpoint, Store]:
    """A checkpoint that learned a little from random pushes, and those."""
    folder = Path(mkdtemp(prefix="m3pc-point-"))
    with (
        make(POINT) as env,
        write_store(
            folder / "data", header(states=2, actions=1, horizon=HORIZON, env=POINT)
        ) as store,
    ):
        for number in range(12):
            seed, rng = data_episode(0, number)
            store.append(rollout(env, Uniform(), seed=seed, rng=rng))
    data = Store(folder / "data")
    config = small_config(
        pretrain__updates=20, critic__regression_updates=4, critic__updates=4, model__dropout=0.0
    )
    start_pretraining(data, config, folder / "run")
    finish_pretraining(folder / "run", silent)
    return checkpoint.read(folder / "run"), data


def online_config(**changes: object) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return replace(pretrained()[0].weights.config, ONLINE | named)


def new_run(path: Path, *, env: str = POINT, **changes: object) -> OnlineRun:
    found, data = pretrained()
    start(found, data, env, online_config(**changes), path)
    return open_run(path)


def outcome(run: Path) -> dict[str, object]:
    """All that must not depend on when a lock-step run was stopped."""
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


def appended(run: OnlineRun, count: int, incarnation: int = 0) -> None:
    """The store of a run with its first `count` episodes collected: those that were logged."""
    with closing(Writer(run.replay, run.header, WriterOptions(durability="os"))) as writer:
        for number, episode in enumerate(islice(cycle(pretrained()[1].episodes()), count)):
            writer.append(AppendKey(0, incarnation, number), encode(episode))


def coordinator(run: OnlineRun) -> Coordinator:
    return connect(
        run.path / "coordinator.sqlite", run=run.facts.id, generations=run.path / "generations"
    )


class Permits:
    """A store that allows up to so many updates more at each call; `meanwhile` hears of it."""

    def __init__(self, most: int, meanwhile: Callable[[int], None] = lambda calls: None) -> None:
        self._most, self._meanwhile, self.calls = most, meanwhile, 0
        self.epochs: list[int] = []

    def may_update(self, epoch: int, done: int, total: int) -> int:
        self.calls += 1
        self.epochs.append(epoch)
        self._meanwhile(self.calls)
        return min(total, self.calls * self._most)
