"""The folder of an online run: all that any process of it, on any machine, needs to know.

RUN/run.json       what it started from: data, environment
RUN/config.yaml    the settings
RUN/checkpoints/   of the learner, by update
RUN/offline/       the weights that it started from: checkpoint 0 goes when newer ones come
RUN/replay/        the episodes that were collected
RUN/weights/       the versions that were published
RUN/metrics.jsonl  a line a report; TensorBoard's events beside it
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
FACTS, SETTINGS, CHECKPOINTS, OFFLINE = "run.json", "config.yaml", "checkpoints", "offline"
IN_FILE = {"max_episode_steps": "horizon"}  # fields that run.json calls otherwise
OF_FILE = {theirs: ours for ours, theirs in IN_FILE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run started from; never changes."""

    format: int
    id: str  # of the run, in the names of its processes
    data: str  # path of the logged episodes
    checksum: str  # of their manifest
    env: str
    states: int
    actions: int
    max_episode_steps: int
    split_seed: int  # by which pretraining told what it learned from and what was held out
    source: str  # digest of the weights at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRun:
    path: Path
    facts: RunInfo
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
        """Of the store that the run collects into."""
        facts = self.facts
        return Header(
            states=facts.states,
            actions=facts.actions,
            max_episode_steps=facts.max_episode_steps,
            env=facts.env,
            source={"kind": "run", "id": facts.id},
        )

    def receipts(self, slot: int) -> Path:
        """Where an actor lists what the store acknowledged."""
        return self.path / "receipts" / f"{slot}.jsonl"

    def logged(self) -> Store:
        """The episodes that pretraining learned from."""
        store = Store(self.facts.data)
        if store.checksum != self.facts.checksum:
            raise InputError(
                f"{store.path} has checksum {store.checksum[:16]}, {self.path} was started on "
                f"{self.facts.checksum[:16]}; give the same data"
            )
        return store


def start(source: Checkpoint, data: Store, env_id: str, config: Config, out: Path) -> None:
    """A new run at `out`, with checkpoint 0: from here on it can be resumed."""
    if out.exists():
        raise InputError(f"{out} exists already; go on with `m3pc resume`, or give another --out")
    weights = source.weights
    _check(weights, data, env_id, config)
    prepare_compute(config.compute)
    learner = OnlineLearner(weights, source.training, config)
    facts = RunInfo(
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
        with durable_file(stage / FACTS) as file:
            written = {IN_FILE.get(name, name): value for name, value in asdict(facts).items()}
            file.write(json.dumps(written, indent=1).encode())
        (stage / CHECKPOINTS).mkdir()
        first = learner.weights(0, envelope=weights.envelope)
        progress = {"updates": 0, "steps": 0, "episodes": 0}
        checkpoint.write(stage / OFFLINE, first, {}, progress)
        checkpoint.write_next(
            stage / CHECKPOINTS, first, learner.state(), progress, number=0, keep=1
        )


def open_run(path: Path) -> OnlineRun:
    try:
        found: Any = json.loads((path / FACTS).read_text(encoding="utf-8"))
        facts = RunInfo(**{OF_FILE.get(name, name): value for name, value in found.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not an online run: {FACTS} cannot be read ({error}); give the folder that "
            "m3pc finetune made"
        ) from None
    if facts.format != FORMAT:
        raise InputError(f"{path} has format {facts.format!r}; this version reads {FORMAT}")
    return OnlineRun(path=path, facts=facts, config=load(path / SETTINGS))


def _check(weights: Weights, data: Store, env_id: str, config: Config) -> None:
    """Whether all fit together, before anything is made."""
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
    found = {
        f"environment {env_id}": (*spaces, limit),
        f"data {data.path}": (
            (data.header.states,),
            (data.header.actions,),
            data.header.max_episode_steps,
        ),
    }
    expected = ((weights.state_size,), (weights.action_size,), weights.max_episode_steps)
    for what, sizes in found.items():
        if sizes != expected:
            raise InputError(
                f"{what} has states, actions and step limit {sizes}, the checkpoint {expected}; "
                "give those that it learned from"
            )
