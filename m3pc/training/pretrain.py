"""Pretraining: the trajectory model, then the critic, from one store, on one machine.

    RUN/config.yaml     the settings
    RUN/metrics.jsonl   one line per report; TensorBoard's event files are beside it
    RUN/checkpoints/    the newest checkpoints

Everything random is a function of the seed and the update's number. So a checkpoint needs only
weights and optimisers, and a run that was killed continues with the same bits.
"""

from collections.abc import Mapping
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
from m3pc.core.progress import OnProgress
from m3pc.model import checkpoint
from m3pc.model.btm import TrajectoryModel
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.critic import Critic
from m3pc.model.device import prepare_compute
from m3pc.model.normalisation import Normaliser
from m3pc.model.weights import Weights, gather_tensors, with_prefix
from m3pc.plots import loss_curves
from m3pc.tracking.run_lock import locked
from m3pc.tracking.run_log import RunLog, read_metrics
from m3pc.tracking.trackers import make_tracker
from m3pc.training.dataset import Dataset, prepare_dataset
from m3pc.training.running_means import RunningMeans
from m3pc.types import InputError
from replay.sampling.sampler import Sampler
from replay.sampling.transitions import TransitionSampler
from replay.store.store import Store

# A measurement on held-out data: batches, windows per batch, transitions per batch.
MEASURED_BATCHES, MEASURED_ROWS, MEASURED_STEPS = 4, 512, 2048
# Prefixes of the tensors that come from the data: no update changes them.
FROM_DATA = ("normaliser.", "critic.state_", "envelope", "return_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainResult:
    path: Path  # the run's folder
    weights: Weights
    measures: Mapping[str, float]  # errors on held-out episodes; empty if there are none


def create_run(store: Store, config: Config, out: Path) -> None:
    """Make a run at `out` with a checkpoint of untrained weights, ready to be resumed."""
    if out.exists():
        raise InputError(f"{out} exists already; go on with it by --resume, or give another --out")
    prepare_compute(config.compute)
    trainer = PretrainTrainer(prepare_dataset(store, config), config)
    with staged_directory(out) as stage:
        (stage / "config.yaml").write_text(dump(config), encoding="utf-8")
        (stage / "checkpoints").mkdir()
        trainer.save(stage / "checkpoints")


def resume(
    run: Path, on_progress: OnProgress, *, data: Store | None = None, track: str = ""
) -> PretrainResult:
    """Continue from the newest complete checkpoint to the end; `data` if its store has moved."""
    with locked(run):
        last = checkpoint.read_newest(run / "checkpoints")
        config = last.weights.config
        prepare_compute(config.compute)
        source, checksum = (last.progress.get(name) for name in ("data", "checksum"))
        if not isinstance(source, str) or not isinstance(checksum, str):
            raise InputError(f"{last.path} does not say which data it learned from; use another")
        store = data or _open_source(source)
        if store.checksum != checksum:
            raise InputError(
                f"{store.path} has checksum {store.checksum[:16]}, {run} was started on "
                f"{checksum[:16]}; give the same data"
            )
        trainer = PretrainTrainer(prepare_dataset(store, config), config)
        trainer.restore(last)
        checkpoint.publish(last.path)  # in case a kill came before LATEST named it
        if trainer.done < trainer.total:
            with RunLog(run, done=trainer.done, tracker=make_tracker(track, run, config)) as log:
                trainer.train(run, log, on_progress)
        return PretrainResult(
            path=run, weights=trainer.weights(), measures=trainer.measure_held_out()
        )


def _open_source(source: str) -> Store:
    try:
        return Store(source)
    except InputError as error:
        raise InputError(f"{error}; if the data moved, say where to with --data") from None


def draw_curve(run: Path) -> Path:
    """Draw RUN/curve.png: training errors and one-step errors on held-out data, by update."""
    model, held_out = read_metrics(run, "model"), read_metrics(run, "held_out")
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
    """Model and critic with their optimisers and samplers, after some number of updates."""

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
        self.windows = self._window_sampler(dataset.train, config.pretrain.batch)
        self.transitions = self._transition_sampler(dataset.train, config.critic.batch)
        self._held_out: tuple[Sampler, TransitionSampler] | None = None
        self.model_updates = self.critic_updates = 0

    @property
    def done(self) -> int:
        """Updates of the model and of the critic so far."""
        return self.model_updates + self.critic_updates

    @property
    def total(self) -> int:
        critic = self.config.critic
        return self.config.pretrain.updates + critic.regression_updates + critic.updates

    def train(self, run: Path, log: RunLog, on_progress: OnProgress) -> None:
        """Do the remaining updates: first the model's, then the critic's."""
        pretrain, critic, means = self.config.pretrain, self.config.critic, RunningMeans()
        while self.done < self.total:
            # Sample a batch and learn from it.
            if self.model_updates < pretrain.updates:
                group, number = "model", self.model_updates
                numbers = self.model.update(number, self.windows.batch(number))
                self.model_updates += 1
            else:
                group, number = "critic", self.critic_updates
                regression = number < critic.regression_updates
                learn = self.critic.regress if regression else self.critic.update
                numbers = learn(self.transitions.batch(number))
                self.critic_updates += 1
            means.add(numbers)
            # Report means, also before a checkpoint: a resumed run starts without sums.
            checkpoint_due = self._due(pretrain.checkpoint_every)
            if checkpoint_due or self._due(pretrain.log_every):
                reported = means.take()
                log.write(group, self.done, reported)
                on_progress(
                    {"updates": self.done, "of": self.total} | self._progress(group, reported)
                )
            # Measure on held-out data.
            if self._due(pretrain.measure_every):
                log.write("held_out", self.done, self.measure_held_out())
            if checkpoint_due:
                log.sync()
                self.save(run / "checkpoints")

    def _due(self, every: int) -> bool:
        """True at multiples of `every` and after the last update of the model or of the critic."""
        return self.done % every == 0 or self.done in (self.config.pretrain.updates, self.total)

    def _progress(self, group: str, means: Mapping[str, float]) -> dict[str, Any]:
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

    def measure_held_out(self) -> dict[str, float]:
        """Errors of model and critic on held-out episodes; empty if there are none."""
        held_out = self.dataset.held_out
        if not held_out.any():
            return {}
        if self._held_out is None:
            self._held_out = (
                self._window_sampler(held_out, MEASURED_ROWS),
                self._transition_sampler(held_out, MEASURED_STEPS),
            )
        (windows, transitions), numbers = self._held_out, range(MEASURED_BATCHES)
        model = measure_model(
            self.model.model, self.normaliser, self.config, map(windows.batch, numbers)
        )
        return model | measure_critic(self.critic.critic, map(transitions.batch, numbers))

    def weights(self) -> Weights:
        """A copy of the current weights."""
        dataset = self.dataset
        return Weights(
            version=self.done,
            config=self.config,
            state_size=self.sizes[0],
            action_size=self.sizes[1],
            max_episode_steps=dataset.store.header.max_episode_steps,
            env=dataset.store.header.env,
            tensors=gather_tensors(
                self.model.model,
                self.critic.critic,
                arrays=dataset.arrays,
                envelope=dataset.envelope,
                return_range=dataset.return_range,
            ),
        )

    def save(self, folder: Path) -> None:
        """Write a checkpoint into `folder`."""
        progress = {
            "model_updates": self.model_updates,
            "critic_updates": self.critic_updates,
            "data": str(self.dataset.store.path.resolve()),
            "checksum": self.dataset.store.checksum,
        }
        keep = self.config.pretrain.keep
        checkpoint.write_next(
            folder, self.weights(), self._training(), progress, number=self.done, keep=keep
        )

    def restore(self, last: Checkpoint) -> None:
        """Continue from a checkpoint, which must be of the same data and settings."""
        self.model_updates, self.critic_updates = self._counters(last.progress)
        state, fresh = last.weights.tensors, self.weights().tensors
        for name in fresh:
            if name.startswith(FROM_DATA) and not torch.equal(state[name], fresh[name]):
                raise InputError(
                    f"{last.path}: {name} is not what this version takes from the data; "
                    "go on with the version that began the run, or start a new one"
                )
        self.model.model.load_state_dict(with_prefix(state, "model."))
        self.critic.critic.load_state_dict(with_prefix(state, "critic."))
        self.model.restore(with_prefix(last.training, "model."))
        self.critic.restore(with_prefix(last.training, "critic."))
        names = set(self._training())
        if set(last.training) != names:
            differing = sorted(set(last.training) ^ names)[:3]
            raise InputError(
                f"{last.path}: the state of training differs in {differing}; use another"
            )

    def _counters(self, progress: Mapping[str, Any]) -> tuple[int, int]:
        """Updates of the model and of the critic, which starts after the model's last one."""
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
        """The training state of model and critic, without their weights."""
        return {f"model.{name}": x for name, x in self.model.state().items()} | {
            f"critic.{name}": x for name, x in self.critic.state().items()
        }

    def _window_sampler(self, chosen: Any, batch: int) -> Sampler:
        return Sampler(
            self.dataset.store,
            length=self.config.model.window,
            batch=batch,
            seed=self.config.seed,
            returns=self.dataset.rule,
            chosen=chosen,
        )

    def _transition_sampler(self, chosen: Any, batch: int) -> TransitionSampler:
        return TransitionSampler(
            self.dataset.store,
            batch=batch,
            seed=self.config.seed,
            discount=self.config.critic.discount,
            terminals=self.config.critic.terminals,
            chosen=chosen,
        )
