"""Which planners and weights an evaluation plays, and in which environment (`m3pc evaluate`).

`m3pc.evaluation.episodes` plays the episodes of a job and computes their statistics.
"""

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3pc.config.schema import BACKWARD, MODES
from m3pc.core.env_ids import refuse_foreign_code, split_env_name
from m3pc.core.history import block_subgoals
from m3pc.core.manipulation_tasks import TASKS
from m3pc.core.progress import OnProgress
from m3pc.envs import engine, make
from m3pc.evaluation.agent import configured_policy
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.evaluation.video import record_video
from m3pc.goals.files import read_table
from m3pc.goals.registry import rows_per_subgoal
from m3pc.model import checkpoint
from m3pc.model.weights import Weights
from m3pc.types import Floats, InputError
from planner.policy import Policy

SLOTS = 32  # environments that are planned for together
HEAVY_SLOTS = 16  # manipulation tasks take 80 MB each, and all cores to step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to play."""

    path: Path  # a run or checkpoint
    env_id: str | None  # default: the data's
    episodes: int
    seed: int
    ratio: float | None = None  # target return / the data's best; default: the configuration's
    sets: tuple[str, ...] = ()
    waypoints: Path | None = None  # .npy or .csv [H, S], for backward plans
    spacing: int | None = None  # rows that share a subgoal; default: the configuration's


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The evaluation of one planner, with its weights and settings."""

    mode: str
    ratio: float
    version: int
    digest: str
    settings: tuple[str, ...]  # overrides of the checkpoint's
    evaluation: Evaluation
    label: str = ""  # displayed name; default: the mode

    @property
    def name(self) -> str:
        return self.label or self.mode

    def as_json(self) -> dict[str, Any]:
        about = {"planner": self.mode, "ratio": self.ratio, "version": self.version}
        about |= {"weights": self.digest, "settings": list(self.settings)}
        return about | self.evaluation.as_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """A request for one planner, read and checked, so that it can be played."""

    request: EvaluationRequest
    env_id: str
    policy: Policy
    waypoints: Floats | None  # [H, S]
    label: str = ""  # displayed name; default: the mode

    @property
    def mode(self) -> str:
        return self.policy.config.planner.mode

    @property
    def name(self) -> str:
        return self.label or self.mode

    def play(self, on_progress: OnProgress, processes: int = 0) -> EvaluationResult:
        """`processes` step the environments; 0: one, or one per core if these are heavy."""
        slots, processes = slots_and_processes(self.env_id, processes)
        evaluation = evaluate(
            self.env_id,
            self.policy,
            episodes=self.request.episodes,
            seed=self.request.seed,
            slots=slots,
            processes=processes,
            waypoints=self.waypoints,
            on_progress=on_progress,
        )
        return self._result(evaluation)

    def earlier_result(self, folder: Path) -> EvaluationResult | None:
        """The result of an earlier evaluation of the same episodes, if the folder's JSON has it."""
        if self.waypoints is not None:  # JSON does not record the waypoints
            return None
        with closing(make(self.env_id)) as env:
            engine_name = engine(env)
        expected = {
            "planner": self.mode,
            "ratio": self.policy.config.conditioning.evaluation_ratio,
            "weights": self.policy.weights.digest,
            "settings": list(self.request.sets),
            "env": self.env_id,
            "engine": engine_name,
            "seed": self.request.seed,
            "episodes": self.request.episodes,
        }
        for path in sorted(folder.glob("*.json")):
            for row in _read_rows(path):
                if all(row.get(name) == value for name, value in expected.items()):
                    return self._result(Evaluation.from_json(row))
        return None

    def _result(self, evaluation: Evaluation) -> EvaluationResult:
        return EvaluationResult(
            mode=self.mode,
            ratio=self.policy.config.conditioning.evaluation_ratio,
            version=self.policy.weights.version,
            digest=self.policy.weights.digest,
            settings=self.request.sets,
            evaluation=evaluation,
            label=self.label,
        )

    def film(self, path: Path) -> None:
        """Record the first episode as an MP4."""
        record_video(
            self.env_id, self.policy, path, seed=self.request.seed, waypoints=self.waypoints
        )


def make_jobs(request: EvaluationRequest, names: Sequence[str] = ()) -> list[EvaluationJob]:
    """One job per planner named, or one for the configured planner, all with the same weights.

    `q@0.9` is planner q, conditioned on 0.9 times the best return. Everything is read and checked
    before anything is played.
    """
    source = checkpoint.read(request.path)
    env_id = env_of(request.path, request.env_id, source.weights)
    ratio = [] if request.ratio is None else [f"conditioning.evaluation_ratio={request.ratio}"]
    jobs = []
    for sets in _planner_sets(names):
        policy = configured_policy(source, [*request.sets, *ratio, *sets])
        waypoints = _waypoints(request, policy, env_id)
        jobs.append(
            EvaluationJob(request=request, env_id=env_id, policy=policy, waypoints=waypoints)
        )
    return jobs


def slots_and_processes(env_id: str, processes: int = 0) -> tuple[int, int]:
    """How many environments are planned for together, and how many processes step them."""
    if split_env_name(env_id)[0] in TASKS:
        return HEAVY_SLOTS, processes or len(os.sched_getaffinity(0))
    return SLOTS, processes or 1


def env_of(path: Path, requested: str | None, weights: Weights) -> str:
    """The requested environment, or that of the weights at `path`. InputError if its states or
    actions do not have the weights' sizes."""
    env_id = requested or weights.env
    if env_id is None:
        raise InputError(f"{path} does not say which environment it is for; give --env")
    if requested is None:
        refuse_foreign_code(env_id, path)
    with closing(make(env_id)) as env:
        sizes = [space.shape for space in (env.observation_space, env.action_space)]
    expected = [(weights.state_size,), (weights.action_size,)]
    if sizes != expected:
        raise InputError(
            f"states and actions of {env_id} have shapes {sizes[0]} and {sizes[1]}, those of "
            f"{path} {expected[0]} and {expected[1]}; give the --env that it learned from"
        )
    return env_id


def _waypoints(request: EvaluationRequest, policy: Policy, env_id: str) -> Floats | None:
    """The table [H, S] that a backward planner follows; None for the other planners."""
    mode, weights = policy.config.planner.mode, policy.weights
    if mode not in BACKWARD:
        return None
    if request.waypoints is None:
        raise InputError(
            f"planner {mode} needs states to reach; give --waypoints FILE, .npy or .csv"
        )
    states = read_table(request.waypoints, weights.state_size)
    if len(states) < weights.max_episode_steps:
        raise InputError(
            f"{request.waypoints} has {len(states)} rows; expected one for each of "
            f"{weights.max_episode_steps} steps: repeat the last row to stay there"
        )
    spacing = rows_per_subgoal(policy.config.goal, env_id)
    return block_subgoals(states, request.spacing or spacing)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of evaluations; empty for any other file."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []


def _planner_sets(names: Sequence[str]) -> list[list[str]]:
    """The settings of each planner: its mode and, after an @, its ratio. Without names one empty
    list, for the configured planner."""
    sets: dict[str, list[str]] = {}
    for name in names:
        mode, at, ratio = name.partition("@")
        if mode not in MODES:
            raise InputError(f"planner is {mode!r}; give one of {', '.join(MODES)}")
        sets[name] = [f"planner.mode={mode}"]
        if at:
            sets[name].append(f"conditioning.evaluation_ratio={ratio}")
    return list(sets.values()) or [[]]
