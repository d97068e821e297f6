"""An online run in one process, in lock-step: collect a round, learn what it owes, go on.

A round is one episode in each environment, all by the same weights. Everything in it is a function
of the weights, the seed and the episodes' numbers; so a run that was killed plays its last round
again, the store knows those episodes already, and the run goes on as if it had not been killed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.episodes import rollouts
from actors.rollout_loop import ExplorationConfig
from actors.vector_rollout import Rollout
from m3pc.core.seeding import lock_step_episode
from m3pc.envs import make_vector
from m3pc.envs.registry import FloatVectorEnv
from m3pc.model.weights import Weights
from m3pc.online.evaluation import evaluated, evaluation, is_due
from m3pc.online.results import save_pictures
from m3pc.online.run_folder import OnlineRun, open_run
from m3pc.online.trainer import Trainer
from m3pc.tracking.run_lock import locked
from m3pc.tracking.run_log import RunLog
from m3pc.tracking.trackers import tracker
from m3pc.training.running_means import RunningMeans
from m3pc.types import AckStatus, AppendKey, Decision, InputError, Window
from planner.policy import Policy
from replay.format import manifest
from replay.format.payload import encode
from replay.server.schedule import schedule_of
from replay.store.store import Store
from replay.writing.writer import Writer, WriterOptions

Report = Callable[[Mapping[str, Any]], None]
SLOT, INCARNATION = 0, 0  # of the only producer


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalResult:
    path: Path
    steps: int
    weights: Weights


def run_local(path: Path, report: Report, *, track: str = "") -> LocalResult:
    """Go on from the newest whole checkpoint to the end."""
    with locked(path):
        run = open_run(path)
        _require_own(run)
        tracked = tracker(track, path, run.config)
        options = WriterOptions(durability=run.config.fleet.durability)
        with closing(Writer(run.replay, run.header, options)) as writer:
            work = LocalTrainer(run, writer)
            with (
                RunLog(path, done=work.steps, unit="step", tracker=tracked) as log,
                closing(make_vector(run.facts.env, run.config.fleet.envs_per_actor)) as envs,
            ):
                work.finish(envs, log, report)
        save_pictures(run)
        return LocalResult(
            path=path, steps=work.steps, weights=work.trainer.weights(work.trainer.updates)
        )


def _require_own(run: OnlineRun) -> None:
    """What a fleet collected was not collected in lock-step: there is no point to go on from."""
    if not (run.replay / manifest.NAME).exists():
        return
    others = {key[:2] for key in Store(run.replay).keys} - {(SLOT, INCARNATION)}
    if others:
        raise InputError(
            f"{run.path} has episodes of a fleet, which lock-step cannot go on from; "
            "resume it without --local"
        )


class LocalTrainer:
    def __init__(self, run: OnlineRun, writer: Writer) -> None:
        self.run, self.config, self._writer = run, run.config, writer
        self.episodes = 0
        self.trainer = Trainer(run, visible=lambda: self.episodes)
        progress = self.trainer.progress
        self.steps, self.episodes = int(progress["steps"]), int(progress["episodes"])
        self._evaluated = int(progress.get("evaluated", -1))  # steps at the last evaluation
        self.trainer.refresh()
        self._means = RunningMeans()
        self._acting = ExplorationConfig(
            window=run.config.model.window,
            horizon=run.config.planner.horizon,
            noise=run.config.online.noise,
        )
        self._schedule = schedule_of(run.config.online, run.facts.max_episode_steps)

    def finish(self, envs: FloatVectorEnv, log: RunLog, report: Report) -> None:
        online = self.config.online
        while True:
            self._learn(report)
            self._evaluate(log)
            self._save(log)
            if self.steps >= online.steps:
                return
            self._collect(envs, log)

    def _learn(self, report: Report) -> None:
        owed = self._schedule.owed(self.steps, self.episodes)
        while self.trainer.updates < owed:
            self._means.add(self.trainer.update())
            report(self._shown())

    def _collect(self, envs: FloatVectorEnv, log: RunLog) -> None:
        weights = self.trainer.weights(self.trainer.updates)
        numbers = range(self.episodes, self.episodes + envs.num_envs)
        starts = [lock_step_episode(self.config.seed, number) for number in numbers]
        found = sorted(
            rollouts(
                envs,
                Explorer(Policy(weights), self._acting),
                starts,
                window=self._acting.window,
                horizon=self._acting.horizon,
                explore=True,
            ),
            key=lambda rollout: rollout.number,
        )
        for rollout in found:
            self._append(rollout)
        self.trainer.refresh()
        log.write("collected", self.steps, _collected(found))

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
        found = evaluation(self.run, self.trainer.weights(self.trainer.updates))
        self._evaluated = self.steps
        kept = evaluated(found, self.trainer.updates)
        log.write("evaluation", self.steps, kept.numbers, returns=kept.returns)

    def _save(self, log: RunLog) -> None:
        numbers = self._means.take()
        if numbers:
            log.write("learner", self.steps, numbers | {"updates": self.trainer.updates})
        log.sync()
        self.trainer.save(steps=self.steps, episodes=self.episodes, evaluated=self._evaluated)

    def _shown(self) -> dict[str, Any]:
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
    """A planner that acts as a rollout process does."""

    def __init__(self, policy: Policy, acting: ExplorationConfig) -> None:
        self._policy, self._acting = policy, acting

    def decide(self, window: Window, *, explore: bool = False) -> Decision:
        assert explore
        (decision,) = self._policy.answer([self._acting.ask(window)])
        return self._acting.noisy(decision, window)


def _collected(found: Sequence[Rollout]) -> dict[str, float]:
    returns = np.array([rollout.episode.rewards.sum(dtype=np.float64) for rollout in found])
    lengths = np.array([len(rollout.episode) for rollout in found])
    return {
        "episodes": len(found),
        "return": float(returns.mean()),
        "best": float(returns.max()),
        "length": float(lengths.mean()),
        "version": found[0].episode.version,
    }
