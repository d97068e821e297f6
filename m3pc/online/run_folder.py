"""The folder of an online run, in which its processes on any machine find what they need.

RUN/run.json       what the run started from: data, environment, digest of the weights
RUN/config.yaml    the settings
RUN/checkpoints/   the learner's checkpoints, by update
RUN/offline/       the initial weights, which stay when checkpoint 0 is deleted
RUN/replay/        the collected episodes
RUN/weights/       the published versions
RUN/metrics.jsonl  one line per report; TensorBoard's event files are beside it
"""

import json
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from learner.online import OnlineLearner
from m3pc.config.presets import dump, load
from m3pc.config.schema import BACKWARD, Config
from m3pc.core.files import durable_file, staged_directory
from m3pc.envs import make
from m3pc.envs.registry import step_limit
from m3pc.model import checkpoint
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.device import prepare_compute
from m3pc.model.weights import Weights
from m3pc.online.recovery import REPLAY
from m3pc.types import InputError
from replay.format.manifest import Header
from replay.store.store import Store

FORMAT = 1
INFO, SETTINGS, CHECKPOINTS, OFFLINE = "run.json", "config.yaml", "checkpoints", "offline"
IN_FILE = {"max_episode_steps": "horizon"}  # fields with other names in run.json
OF_FILE = {theirs: ours for ours, theirs in IN_FILE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The origin of a run; never changes."""

    format: int
    id: str  # part of the names of the run's processes
    data: str  # path of the logged episodes
    checksum: str  # checksum of the data's manifest
    env: str
    states: int
    actions: int
    max_episode_steps: int
    split_seed: int  # pretraining chose the held-out episodes with this seed
    source: str  # digest of the initial weights


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRun:
    path: Path
    info: RunInfo
    config: Config

    @property
    def replay(self) -> Path:
        return self.path / REPLAY

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def offline(self) -> Path:
        return self.path / OFFLINE

    @property
    def header(self) -> Header:
        """The header of the store that the run collects into."""
        info = self.info
        return Header(
            states=info.states,
            actions=info.actions,
            max_episode_steps=info.max_episode_steps,
            env=info.env,
            source={"kind": "run", "id": info.id},
        )

    def ack_log(self, slot: int) -> Path:
        """Where the actor in a slot lists the episodes that the store acknowledged."""
        return self.path / "receipts" / f"{slot}.jsonl"

    def logged_store(self) -> Store:
        """The episodes that pretraining learned from."""
        store = Store(self.info.data)
        if store.checksum != self.info.checksum:
            raise InputError(
                f"{store.path} has checksum {store.checksum[:16]}, {self.path} was started on "
                f"{self.info.checksum[:16]}; give the same data"
            )
        return store


def create_run(source: Checkpoint, data: Store, env_id: str, config: Config, out: Path) -> None:
    """Make a run at `out` with a checkpoint of the initial weights, ready to be resumed."""
    if out.exists():
        raise InputError(f"{out} exists already; go on with `m3pc resume`, or give another --out")
    weights = source.weights
    _check(weights, data, env_id, config)
    prepare_compute(config.compute)
    learner = OnlineLearner(weights, source.training, config)
    info = RunInfo(
        format=FORMAT,
        id=uuid4().hex[:12],
        data=str(data.path.resolve()),
        checksum=data.checksum,
        env=env_id,
        states=weights.state_size,
        actions=weights.action_size,
        max_episode_steps=weights.max_episode_steps,
        split_seed=weights.config.seed,
        source=weights.digest,
    )
    with staged_directory(out) as stage:
        (stage / SETTINGS).write_text(dump(config), encoding="utf-8")
        with durable_file(stage / INFO) as file:
            fields = {IN_FILE.get(name, name): value for name, value in asdict(info).items()}
            file.write(json.dumps(fields, indent=1).encode())
        (stage / CHECKPOINTS).mkdir()
        initial = learner.weights(0, envelope=weights.envelope)
        progress = {"updates": 0, "steps": 0, "episodes": 0}
        checkpoint.write(stage / OFFLINE, initial, {}, progress)
        checkpoint.write_next(
            stage / CHECKPOINTS, initial, learner.state(), progress, number=0, keep=1
        )


def open_run(path: Path) -> OnlineRun:
    """The run in a folder that `create_run` made."""
    try:
        fields: Any = json.loads((path / INFO).read_text(encoding="utf-8"))
        info = RunInfo(**{OF_FILE.get(name, name): value for name, value in fields.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not an online run: {INFO} cannot be read ({error}); give the folder that "
            "m3pc finetune made"
        ) from None
    if info.format != FORMAT:
        raise InputError(f"{path} has format {info.format!r}; this version reads {FORMAT}")
    return OnlineRun(path=path, info=info, config=load(path / SETTINGS))


def _check(weights: Weights, data: Store, env_id: str, config: Config) -> None:
    """Refuse weights, data, environment and settings that do not fit together."""
    trained = weights.config
    for name in ("model", "returns", "normaliser", "dataset"):
        if getattr(config, name) != getattr(trained, name):
            raise InputError(f"settings under {name} belong to the checkpoint; drop them")
    if config.planner.mode in BACKWARD:
        raise InputError(
            f"planner.mode is {config.planner.mode}, which needs states to reach; explore with "
            "rcbc, m, q or q0"
        )
    with closing(make(env_id)) as env:
        spaces = [space.shape for space in (env.observation_space, env.action_space)]
        limit = step_limit(env)
    sizes_of = {
        f"environment {env_id}": (*spaces, limit),
        f"data {data.path}": (
            (data.header.states,),
            (data.header.actions,),
            data.header.max_episode_steps,
        ),
    }
    expected = ((weights.state_size,), (weights.action_size,), weights.max_episode_steps)
    for what, sizes in sizes_of.items():
        if sizes != expected:
            raise InputError(
                f"{what} has states, actions and step limit {sizes}, the checkpoint {expected}; "
                "give those that it learned from"
            )
