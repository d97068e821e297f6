"""Pretraining: the trajectory model, then the critic, from one store, on one machine.

    RUN/config.yaml     the settings
    RUN/metrics.jsonl   a line a report; TensorBoard's events beside it
    RUN/checkpoints/    the newest ones

Everything random is a function of the seed and the update's number, so a checkpoint holds weights
and optimisers, and a run that was killed goes on as if it had not been.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.diagnostics import measure_critic, measure_model
from learner.iql import CriticLearner
from learner.trajectory import TrajectoryLearner
from m3pc.config.presets import dump
from m3pc.config.schema import Config
from m3pc.core.files import staged_directory
from m3pc.model import checkpoint
from m3pc.model.btm import TrajectoryModel
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.critic import Critic
from m3pc.model.device import prepare_compute
from m3pc.model.normalisation import Normaliser
from m3pc.model.weights import Weights, gather, part
from m3pc.plots import loss_curves
from m3pc.tracking.run_lock import locked
from m3pc.tracking.run_log import RunLog, read
from m3pc.tracking.trackers import tracker
from m3pc.training.dataset import Dataset, prepare
from m3pc.training.running_means import RunningMeans
from m3pc.types import InputError
from replay.sampling.sampler import Sampler
from replay.sampling.transitions import TransitionSampler
from replay.store.store import Store

MEASURED_BATCHES, MEASURED_ROWS, MEASURED_STEPS = 4, 512, 2048  # of pieces, of single steps
# Tensors that no update changes.
FROM_DATA = ("normaliser.", "critic.state_", "envelope", "return_range")
Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """How it ended."""

    path: Path  # of the run
    weights: Weights
    measures: Mapping[str, float]  # on held-out episodes; empty where none was held out


def start(store: Store, config: Config, out: Path) -> None:
    """A new run at `out`, with a checkpoint of nothing learned: from here on it can be resumed."""
    if out.exists():
        raise InputError(f"{out} exists already; go on with it by --resume, or give another --out")
    prepare_compute(config.compute)
    work = PretrainTrainer(prepare(store, config), config)
    with staged_directory(out) as stage:
        (stage / "config.yaml").write_text(dump(config), encoding="utf-8")
        work.save(stage / "checkpoints", str(store.path.resolve()))


def resume(run: Path, report: Report, *, data: Store | None = None, track: str = "") -> Pretrained:
    """Go on from the newest whole checkpoint to the end."""
    with locked(run):
        last = checkpoint.newest(run / "checkpoints")
        config = last.weights.config
        prepare_compute(config.compute)
        source, checksum = (last.progress.get(name) for name in ("data", "checksum"))
        if not isinstance(source, str) or not isinstance(checksum, str):
            raise InputError(f"{last.path} does not say which data it learned from; use another")
        store = data or _own_data(source)
        if store.checksum != checksum:
            raise InputError(
                f"{store.path} has checksum {store.checksum[:16]}, {run} was started on "
                f"{checksum[:16]}; give the same data"
            )
        work = PretrainTrainer(prepare(store, config), config)
        work.restore(last)
        checkpoint.publish(last.path)  # a kill may have come between a checkpoint and its name
        if work.done < work.total:
            with RunLog(run, done=work.done, tracker=tracker(track, run, config)) as log:
                work.finish(run, log, report)
        return Pretrained(path=run, weights=work.weights(), measures=work.measures())


def _own_data(source: str) -> Store:
    try:
        return Store(source)
    except InputError as error:
        raise InputError(f"{error}; if the data moved, say where to with --data") from None


def draw_curve(run: Path) -> Path:
    """The errors by update, as RUN/curve.png: while learning, and of one step on held-out data."""
    model, held_out = read(run, "model"), read(run, "held_out")
    lines = {
        name: ([row["update"] for row in model], [row[name] for row in model])
        for name in ("states", "rewards", "returns", "actions")
    }
    measured = [row for row in held_out if row["update"] <= max(lines["states"][0], default=0)]
    for label, name in (("next state", "state_1"), ("copy the last state", "copy_1")):
        if measured and name in measured[0]:
            updates = [row["update"] for row in measured]
            lines[f"held-out: {label}"] = (updates, [row[name] for row in measured])
    path = run / "curve.png"
    loss_curves(path, lines, title=f"{run.name}: squared errors, normalised")
    return path


class PretrainTrainer:
    """Two learners and their samplers, at some number of updates."""

    def __init__(self, dataset: Dataset, config: Config) -> None:
        store, device = dataset.store, config.compute.device
        self.dataset, self.config = dataset, config
        self.sizes = (store.header.states, store.header.actions)
        self.normaliser = Normaliser.from_arrays(dataset.arrays, device)
        torch.manual_seed(config.seed)
        model = TrajectoryModel(config.model, *self.sizes).to(device)
        critic = Critic(config.critic, *self.sizes)
        critic.load_state_dict(
            {name: torch.from_numpy(x) for name, x in dataset.critic_arrays.items()}, strict=False
        )
        self.model = TrajectoryLearner(model, self.normaliser, config)
        self.critic = CriticLearner(critic.to(device), config.critic)
        self.pieces = self._pieces(dataset.train, config.pretrain.batch)
        self.transitions = self._transitions(dataset.train, config.critic.batch)
        self._measured: tuple[Sampler, TransitionSampler] | None = None
        self.model_updates = self.critic_updates = 0

    @property
    def done(self) -> int:
        return self.model_updates + self.critic_updates

    @property
    def total(self) -> int:
        critic = self.config.critic
        return self.config.pretrain.updates + critic.regression_updates + critic.updates

    def finish(self, run: Path, log: RunLog, report: Report) -> None:
        """All updates that are left, with reports, measurements and checkpoints on the way."""
        pretrain, means = self.config.pretrain, RunningMeans()
        while self.done < self.total:
            group, numbers = self._update()
            means.add(numbers)
            checkpoint_due = self._due(pretrain.checkpoint_every)
            if checkpoint_due or self._due(pretrain.log_every):  # a resumed run has no sums
                reported = means.take()
                log.write(group, self.done, reported)
                report({"updates": self.done, "of": self.total} | self._shown(group, reported))
            if self._due(pretrain.measure_every):
                log.write("held_out", self.done, self.measures())
            if checkpoint_due:
                log.sync()
                self.save(run / "checkpoints", str(self.dataset.store.path.resolve()))

    def _due(self, every: int) -> bool:
        """Every so many updates, and at the end of the model's and of the critic's."""
        return self.done % every == 0 or self.done in (self.config.pretrain.updates, self.total)

    def _update(self) -> tuple[str, dict[str, float]]:
        if self.model_updates < self.config.pretrain.updates:
            number = self.model_updates
            numbers = self.model.update(number, self.pieces.batch(number))
            self.model_updates += 1
            return "model", numbers
        number = self.critic_updates
        batch = self.transitions.batch(number)
        regression = number < self.config.critic.regression_updates
        numbers = self.critic.regress(batch) if regression else self.critic.update(batch)
        self.critic_updates += 1
        return "critic", numbers

    def _shown(self, group: str, means: Mapping[str, float]) -> dict[str, Any]:
        if group == "critic":
            return {name: f"{value:.3g}" for name, value in means.items()}
        entropy = means.get("entropy", float("nan"))
        return {
            "states": f"{means['states']:.3f}",
            "actions": f"{means.get('nll', float('nan')):.2f}",
            "rewards": f"{means['rewards']:.3f}",
            "returns": f"{means['returns']:.3f}",
            "entropy": f"{entropy:.2f} of {self.config.entropy.target:g}",
        }

    def measures(self) -> dict[str, float]:
        held_out = self.dataset.held_out
        if not held_out.any():
            return {}
        if self._measured is None:
            self._measured = (
                self._pieces(held_out, MEASURED_ROWS),
                self._transitions(held_out, MEASURED_STEPS),
            )
        (pieces, steps), numbers = self._measured, range(MEASURED_BATCHES)
        model = measure_model(
            self.model.model, self.normaliser, self.config, map(pieces.batch, numbers)
        )
        return model | measure_critic(self.critic.critic, map(steps.batch, numbers))

    def weights(self) -> Weights:
        dataset = self.dataset
        return Weights(
            version=self.done,
            config=self.config,
            state_size=self.sizes[0],
            action_size=self.sizes[1],
            max_episode_steps=dataset.store.header.max_episode_steps,
            env=dataset.store.header.env,
            tensors=gather(
                self.model.model,
                self.critic.critic,
                arrays=dataset.arrays,
                envelope=dataset.envelope,
                return_range=dataset.return_range,
            ),
        )

    def save(self, folder: Path, data: str) -> None:
        progress = {
            "model_updates": self.model_updates,
            "critic_updates": self.critic_updates,
            "data": data,
            "checksum": self.dataset.store.checksum,
        }
        folder.mkdir(exist_ok=True)
        keep = self.config.pretrain.keep
        checkpoint.write_next(
            folder, self.weights(), self._training(), progress, number=self.done, keep=keep
        )

    def restore(self, last: Checkpoint) -> None:
        self.model_updates, self.critic_updates = self._counters(last.progress)
        state, again = last.weights.tensors, self.weights().tensors
        for name in again:
            if name.startswith(FROM_DATA) and not torch.equal(state[name], again[name]):
                raise InputError(
                    f"{last.path}: {name} is not what this version takes from the data; "
                    "go on with the version that began the run, or start a new one"
                )
        self.model.model.load_state_dict(part(state, "model."))
        self.critic.critic.load_state_dict(part(state, "critic."))
        self.model.restore(part(last.training, "model."))
        self.critic.restore(part(last.training, "critic."))
        known = set(self._training())
        if set(last.training) != known:
            other = sorted(set(last.training) ^ known)[:3]
            raise InputError(f"{last.path}: the state of training differs in {other}; use another")

    def _counters(self, progress: Mapping[str, Any]) -> tuple[int, int]:
        """Updates done, of the model and of the critic, which comes after it."""
        critic = self.config.critic
        limits = {
            "model_updates": self.config.pretrain.updates,
            "critic_updates": critic.regression_updates + critic.updates,
        }
        done = []
        for name, limit in limits.items():
            count = progress.get(name)
            if type(count) is not int or not 0 <= count <= limit:
                raise InputError(f"the checkpoint's {name} is {count!r}, expected 0 to {limit}")
            done.append(count)
        if done[1] and done[0] < limits["model_updates"]:
            raise InputError(f"the checkpoint has {done[1]} updates of the critic before its time")
        return done[0], done[1]

    def _training(self) -> dict[str, Tensor]:
        return {f"model.{name}": x for name, x in self.model.state().items()} | {
            f"critic.{name}": x for name, x in self.critic.state().items()
        }

    def _pieces(self, chosen: Any, batch: int) -> Sampler:
        return Sampler(
            self.dataset.store,
            length=self.config.model.window,
            batch=batch,
            seed=self.config.seed,
            returns=self.dataset.rule,
            chosen=chosen,
        )

    def _transitions(self, chosen: Any, batch: int) -> TransitionSampler:
        return TransitionSampler(
            self.dataset.store,
            batch=batch,
            seed=self.config.seed,
            discount=self.config.critic.discount,
            terminals=self.config.critic.terminals,
            chosen=chosen,
        )
