"""A checkpoint's planners, played in an environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.evaluate import Evaluation, evaluate
from actors.video import record_video
from m3pc import checkpoint
from m3pc.config import BACKWARD, MODES
from m3pc.run.agent import policy
from m3pc.types import Floats, InputError
from m3pc.weights import Weights
from m3pc.windows import subgoals
from planner.policy import Policy

Report = Callable[[Mapping[str, Any]], None]
SLOTS = 32  # environments that ask together


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to play."""

    path: Path  # a run or checkpoint
    env_id: str | None  # default: the one that the data came from
    episodes: int
    seed: int
    ratio: float | None = None  # times the best return of the data; default: the configuration's
    sets: tuple[str, ...] = ()
    waypoints: Path | None = None  # .npy [H, S], for backward plans
    spacing: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    mode: str
    ratio: float
    version: int
    digest: str
    evaluation: Evaluation

    def as_json(self) -> dict[str, Any]:
        about = {"planner": self.mode, "ratio": self.ratio, "version": self.version}
        return about | {"weights": self.digest} | self.evaluation.as_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An order that can be played with one planner: everything is there and fits."""

    order: Order
    mode: str
    env_id: str
    policy: Policy
    waypoints: Floats | None  # [H, S]

    def play(self, report: Report) -> Played:
        found = evaluate(
            self.env_id,
            self.policy,
            episodes=self.order.episodes,
            seed=self.order.seed,
            slots=SLOTS,
            window=self.policy.config.model.window,
            horizon=self.policy.config.planner.horizon,
            waypoints=self.waypoints,
            on_progress=report,
        )
        return Played(
            mode=self.mode,
            ratio=self.policy.config.conditioning.evaluation_ratio,
            version=self.policy.weights.version,
            digest=self.policy.weights.digest,
            evaluation=found,
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


def match(order: Order, mode: str) -> Match:
    """Read the checkpoint and check the settings, before anything is played."""
    weights, env_id = _weights(order)
    settings = [*order.sets, f"planner.mode={mode}"]
    if order.ratio is not None:
        settings.append(f"conditioning.evaluation_ratio={order.ratio}")
    return Match(
        order=order,
        mode=mode,
        env_id=env_id,
        policy=policy(weights, settings),
        waypoints=_waypoints(order, mode, weights),
    )


def _weights(order: Order) -> tuple[Weights, str]:
    weights = checkpoint.read(order.path).weights
    env_id = order.env_id or weights.env
    if env_id is None:
        raise InputError(f"{order.path} does not say which environment it is for; give --env")
    return weights, env_id


def _waypoints(order: Order, mode: str, weights: Weights) -> Floats | None:
    if mode not in BACKWARD:
        return None
    if order.waypoints is None:
        raise InputError(f"planner {mode} needs states to reach; give --waypoints FILE.npy")
    try:
        table = np.lib.format.open_memmap(order.waypoints, mode="r").astype(np.float32)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{order.waypoints} is not a .npy of numbers: {error}") from None
    if table.ndim != 2 or table.shape[1] != weights.state_size or not np.isfinite(table).all():
        raise InputError(
            f"{order.waypoints} has shape {list(table.shape)}; expected rows of "
            f"{weights.state_size} finite numbers, one row a step"
        )
    return subgoals(table, order.spacing)


def modes(names: Sequence[str]) -> list[str]:
    """Checked names of planners, in the order given, each once."""
    for name in names:
        if name not in MODES:
            raise InputError(f"planner is {name!r}; give one of {', '.join(MODES)}")
    return list(dict.fromkeys(names))
