"""An online run in one process, in lock-step: collect a round, do the updates that it owes, repeat.

A round is one episode in each environment, all by the same weights. Everything in it is a function
of the weights, the seed and the episodes' numbers. So a run that was killed repeats its last round,
the store recognises the episodes that it has already, and the run continues with the same bits.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.episodes import rollouts
from actors.rollout_loop import ExplorationConfig
from actors.vector_rollout import Rollout
from m3pc.core.progress import OnProgress
from m3pc.core.seeding import lock_step_episode
from m3pc.envs import make_vector
from m3pc.envs.registry import FloatVectorEnv
from m3pc.model.weights import Weights
from m3pc.online.evaluation import evaluate_run, evaluation_record, is_due
from m3pc.online.results import save_pictures
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.online.trainer import Trainer
from m3pc.tracking.run_lock import locked
from m3pc.tracking.run_log import RunLog
from m3pc.tracking.trackers import make_tracker
from m3pc.training.running_means import RunningMeans
from m3pc.types import AckStatus, AppendKey, Decision, InputError, Window
from planner.policy import Policy
from replay.format import manifest
from replay.format.payload import encode
from replay.server.schedule import schedule_of
from replay.store.store import Store
from replay.writing.writer import Writer, WriterOptions

SLOT, INCARNATION = 0, 0  # the only producer


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    path: Path
    steps: int
    weights: Weights


def run_local(path: Path, on_progress: OnProgress, *, track: str = "") -> LocalResult:
    """Continue from the newest complete checkpoint to the end."""
    with locked(path):
        run = open_run(path)
        _refuse_episodes_of_actors(run)
        tracked = make_tracker(track, path, run.config)
        options = WriterOptions(durability=run.config.fleet.durability)
        with closing(Writer(run.replay, run.header, options)) as writer:
            local = LocalTrainer(run, writer)
            with (
                RunLog(path, done=local.steps, unit="step", tracker=tracked) as log,
                closing(make_vector(run.info.env, run.config.fleet.envs_per_actor)) as envs,
            ):
                local.train(envs, log, on_progress)
        save_pictures(run)
        return LocalResult(path=path, steps=local.steps, weights=local.trainer.weights())


def _refuse_episodes_of_actors(run: OnlineRun) -> None:
    """Rollout actors do not collect in rounds, so lock-step has no round to continue from."""
    if not (run.replay / manifest.NAME).exists():
        return
    if {key[:2] for key in Store(run.replay).keys} - {(SLOT, INCARNATION)}:
        raise InputError(
            f"{run.path} has episodes of a fleet, which lock-step cannot go on from; "
            "resume it without --local"
        )


class LocalTrainer:
    """A lock-step run, at the end of a round."""

    def __init__(self, run: OnlineRun, writer: Writer) -> None:
        self.run, self.config, self._writer = run, run.config, writer
        self.episodes = 0
        self.trainer = Trainer(run, visible_episodes=lambda: self.episodes)
        progress = self.trainer.progress
        self.steps, self.episodes = int(progress["steps"]), int(progress["episodes"])
        self._evaluated = int(progress.get("evaluated", -1))  # steps at the previous evaluation
        self.trainer.refresh()
        self._means = RunningMeans()
        self._exploration = ExplorationConfig(noise_scale=run.config.online.noise)
        self._schedule = schedule_of(run.config.online, run.info.max_episode_steps)

    def train(self, envs: FloatVectorEnv, log: RunLog, on_progress: OnProgress) -> None:
        """Repeat rounds until all steps are collected and their updates are done."""
        while True:
            # Learn: as many updates as the collected steps owe.
            owed = self._schedule.owed(self.steps, self.episodes)
            while self.trainer.updates < owed:
                self._means.add(self.trainer.update())
                on_progress(self._progress())
            self._evaluate(log)  # if evaluation.every steps have passed
            self._save(log)  # a checkpoint of every round
            if self.steps >= self.config.online.steps:
                return
            self._collect(envs, log)  # one episode in each environment

    def _collect(self, envs: FloatVectorEnv, log: RunLog) -> None:
        explorer = Explorer(Policy(self.trainer.weights()), self._exploration)
        numbers = range(self.episodes, self.episodes + envs.num_envs)
        starts = [lock_step_episode(self.config.seed, number) for number in numbers]
        finished = rollouts(envs, explorer, starts, explore=True)
        in_order = sorted(finished, key=lambda rollout: rollout.number)
        for rollout in in_order:
            self._append(rollout)
        self.trainer.refresh()
        log.write("collected", self.steps, _summary(in_order))

    def _append(self, rollout: Rollout) -> None:
        key = AppendKey(SLOT, INCARNATION, self.episodes)
        ack = self._writer.append(key, encode(rollout.episode))
        if ack.status not in (AckStatus.DURABLE, AckStatus.DUPLICATE):
            raise OSError(f"{self.run.replay} did not take episode {key}: {ack.reason}")
        self.episodes += 1
        self.steps += len(rollout.episode)

    def _evaluate(self, log: RunLog) -> None:
        every, ended = self.config.evaluation.every, self.steps >= self.config.online.steps
        if not is_due(self._evaluated, self.steps, every=every, last=ended):
            return
        evaluation = evaluate_run(self.run, self.trainer.weights())
        self._evaluated = self.steps
        record = evaluation_record(evaluation, self.trainer.updates)
        log.write("evaluation", self.steps, record.numbers, returns=record.returns)

    def _save(self, log: RunLog) -> None:
        numbers = self._means.take()
        if numbers:
            log.write("learner", self.steps, numbers | {"updates": self.trainer.updates})
        log.sync()
        self.trainer.save(steps=self.steps, episodes=self.episodes, evaluated=self._evaluated)

    def _progress(self) -> dict[str, Any]:
        latest = self._means.latest
        return {
            "steps": self.steps,
            "of": self.config.online.steps,
            "episodes": self.episodes,
            "updates": self.trainer.updates,
            "entropy": f"{latest.get('entropy', math.nan):.2f} of {self.config.entropy.target:g}",
            "alpha": f"{latest.get('alpha', math.nan):.3g}",
        }


class Explorer:
    """A planner that explores as rollout actors do, with the same noise."""

    def __init__(self, policy: Policy, exploration: ExplorationConfig) -> None:
        self._policy, self._exploration = policy, exploration
        self.window, self.horizon = policy.window, policy.horizon

    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        assert explore
        (decision,) = self._policy.answer([self._exploration.request(window)])
        return self._exploration.add_noise(decision, window)


def _summary(rollouts: Sequence[Rollout]) -> dict[str, float]:
    returns = np.array([rollout.episode.rewards.sum(dtype=np.float64) for rollout in rollouts])
    lengths = np.array([len(rollout.episode) for rollout in rollouts])
    return {
        "episodes": len(rollouts),
        "return": float(returns.mean()),
        "best": float(returns.max()),
        "length": float(lengths.mean()),
        "version": rollouts[0].episode.version,
    }
