"""A checkpoint's planners, played in an environment."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3pc.config.schema import BACKWARD, MODES
from m3pc.core.env_ids import parted, refuse_strangers
from m3pc.core.history import subgoals
from m3pc.core.manipulation_tasks import TASKS
from m3pc.envs import engine, make
from m3pc.evaluation.agent import policy
from m3pc.evaluation.episodes import Evaluation, evaluate
from m3pc.evaluation.video import record_video
from m3pc.goals.files import read_table
from m3pc.goals.registry import rows_per_subgoal
from m3pc.model import checkpoint
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.weights import Weights
from m3pc.types import Floats, InputError
from planner.policy import Policy

Report = Callable[[Mapping[str, Any]], None]
SLOTS = 32  # environments that ask together
HEAVY_SLOTS = 16  # of those that take 80 MB each, and all cores to step


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to play."""

    path: Path  # a run or checkpoint
    env_id: str | None  # default: the one that the data came from
    episodes: int
    seed: int
    ratio: float | None = None  # times the best return of the data; default: the configuration's
    sets: tuple[str, ...] = ()
    waypoints: Path | None = None  # .npy or .csv [H, S], for backward plans
    spacing: int | None = None  # rows that share a subgoal; default: the configuration's


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    mode: str
    ratio: float
    version: int
    digest: str
    settings: tuple[str, ...]  # that differ from the checkpoint's
    evaluation: Evaluation
    label: str = ""  # what to call it; default: its mode

    @property
    def name(self) -> str:
        return self.label or self.mode

    def as_json(self) -> dict[str, Any]:
        about = {"planner": self.mode, "ratio": self.ratio, "version": self.version}
        about |= {"weights": self.digest, "settings": list(self.settings)}
        return about | self.evaluation.as_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """An order that can be played with one planner: everything is there and fits."""

    order: EvaluationRequest
    env_id: str
    policy: Policy
    waypoints: Floats | None  # [H, S]
    label: str = ""  # what to call it; default: its mode

    @property
    def mode(self) -> str:
        return self.policy.config.planner.mode

    @property
    def name(self) -> str:
        return self.label or self.mode

    def play(self, report: Report, processes: int = 0) -> EvaluationResult:
        """`processes` step the environments; 0: as many as there are cores if these are heavy."""
        slots, processes = together(self.env_id, processes)
        found = evaluate(
            self.env_id,
            self.policy,
            episodes=self.order.episodes,
            seed=self.order.seed,
            slots=slots,
            processes=processes,
            window=self.policy.config.model.window,
            horizon=self.policy.config.planner.horizon,
            waypoints=self.waypoints,
            on_progress=report,
        )
        return self._played(found)

    def kept(self, folder: Path) -> EvaluationResult | None:
        """What an earlier evaluation kept in JSON of the very same episodes; None: nothing."""
        if self.waypoints is not None:  # JSON does not tell which
            return None
        with closing(make(self.env_id)) as env:
            engine_name = engine(env)
        expected = {
            "planner": self.mode,
            "ratio": self.policy.config.conditioning.evaluation_ratio,
            "weights": self.policy.weights.digest,
            "settings": list(self.order.sets),
            "env": self.env_id,
            "engine": engine_name,
            "seed": self.order.seed,
            "episodes": self.order.episodes,
        }
        for path in sorted(folder.glob("*.json")):
            for row in _rows(path):
                if all(row.get(name) == value for name, value in expected.items()):
                    return self._played(Evaluation.from_json(row))
        return None

    def _played(self, found: Evaluation) -> EvaluationResult:
        return EvaluationResult(
            mode=self.mode,
            ratio=self.policy.config.conditioning.evaluation_ratio,
            version=self.policy.weights.version,
            digest=self.policy.weights.digest,
            settings=self.order.sets,
            evaluation=found,
            label=self.label,
        )

    def film(self, path: Path) -> None:
        """The first episode, as an MP4."""
        record_video(
            self.env_id,
            self.policy,
            path,
            seed=self.order.seed,
            window=self.policy.config.model.window,
            horizon=self.policy.config.planner.horizon,
            waypoints=self.waypoints,
        )


def together(env_id: str, processes: int = 0) -> tuple[int, int]:
    """How many environments ask together, and how many processes step them; 0: by their weight."""
    if parted(env_id)[0] in TASKS:
        return HEAVY_SLOTS, processes or len(os.sched_getaffinity(0))
    return SLOTS, processes or 1


def matches(order: EvaluationRequest, names: Sequence[str] = ()) -> list[EvaluationJob]:
    """A match for each planner named, or for that of the configuration, all of the same weights.

    `q@0.9` is planner q, asked for 0.9 times the best return. Everything is read and checked before
    anything is played.
    """
    found = checkpoint.read(order.path)
    env_id = environment(order.path, order.env_id, found.weights)
    return [_match(order, found, env_id, more) for more in _settings(names) or [[]]]


def _match(
    order: EvaluationRequest, found: Checkpoint, env_id: str, more: list[str]
) -> EvaluationJob:
    ratio = [] if order.ratio is None else [f"conditioning.evaluation_ratio={order.ratio}"]
    ready = policy(found, [*order.sets, *ratio, *more])
    return EvaluationJob(
        order=order, env_id=env_id, policy=ready, waypoints=_waypoints(order, ready, env_id)
    )


def environment(path: Path, asked: str | None, weights: Weights) -> str:
    """The id of an environment whose states and actions are those of the weights at `path`."""
    env_id = asked or weights.env
    if env_id is None:
        raise InputError(f"{path} does not say which environment it is for; give --env")
    if asked is None:
        refuse_strangers(env_id, path)
    with closing(make(env_id)) as env:
        sizes = [space.shape for space in (env.observation_space, env.action_space)]
    expected = [(weights.state_size,), (weights.action_size,)]
    if sizes != expected:
        raise InputError(
            f"states and actions of {env_id} have shapes {sizes[0]} and {sizes[1]}, those of "
            f"{path} {expected[0]} and {expected[1]}; give the --env that it learned from"
        )
    return env_id


def _waypoints(order: EvaluationRequest, ready: Policy, env_id: str) -> Floats | None:
    mode, weights = ready.config.planner.mode, ready.weights
    if mode not in BACKWARD:
        return None
    if order.waypoints is None:
        raise InputError(
            f"planner {mode} needs states to reach; give --waypoints FILE, .npy or .csv"
        )
    states = read_table(order.waypoints, weights.state_size)
    if len(states) < weights.max_episode_steps:
        raise InputError(
            f"{order.waypoints} has {len(states)} rows; expected one for each of "
            f"{weights.max_episode_steps} steps: repeat the last row to stay there"
        )
    spacing = rows_per_subgoal(ready.config.goal, env_id)
    return subgoals(states, order.spacing or spacing)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Of a file of evaluations; none where it is not one."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _settings(names: Sequence[str]) -> list[list[str]]:
    """What each planner sets: its mode, and its ratio where one is named with it."""
    found: dict[str, list[str]] = {}
    for name in names:
        mode, at, ratio = name.partition("@")
        if mode not in MODES:
            raise InputError(f"planner is {mode!r}; give one of {', '.join(MODES)}")
        found[name] = [f"planner.mode={mode}"]
        if at:
            found[name].append(f"conditioning.evaluation_ratio={ratio}")
    return list(found.values())
