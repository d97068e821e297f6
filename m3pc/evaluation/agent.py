"""The agent of a checkpoint: three lines from a file to an action."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m3pc.config.overrides import override
from m3pc.config.schema import BACKWARD
from m3pc.core.history import HistoryBuffer
from m3pc.model import checkpoint
from m3pc.model.checkpoint import Checkpoint
from m3pc.model.device import prepare_compute
from m3pc.types import Decision, Floats, InputError
from planner.policy import Policy

SETTABLE = ("planner", "conditioning", "goal", "compute")  # sections that may differ from training


class Agent:
    """A policy, and the history of the one environment that it acts in.

    agent = m3pc.load("runs/hopper")
    observation, _ = env.reset()
    agent.reset()
    action = agent.act(observation)  # in [-1, 1], as environments of `m3pc.envs.make` take them
    """

    def __init__(self, policy: Policy) -> None:
        if policy.config.planner.mode in BACKWARD:
            raise InputError(
                f"planner.mode is {policy.config.planner.mode}, which needs states to reach; "
                "an agent has none: give another mode, or play it with m3pc evaluate --waypoints"
            )
        self.policy = policy
        self.last: Decision | None = None  # the decision behind the last action
        self._histories = HistoryBuffer(
            1,
            window=policy.window,
            horizon=policy.horizon,
            state_size=policy.weights.state_size,
            action_size=policy.weights.action_size,
        )
        self._seed = 0

    def reset(self, seed: int = 0) -> None:
        """Begin a new episode at the next observation; `seed` is for the planner's candidates."""
        self.last, self._seed = None, seed

    def act(self, observation: Any, *, explore: bool = False) -> Floats:
        """The action [A] for an observation [S], given the steps of this episode so far."""
        state = np.asarray(observation, np.float32)
        if state.shape != (self.policy.weights.state_size,) or not np.isfinite(state).all():
            raise InputError(
                f"the observation has shape {list(state.shape)}; expected "
                f"{self.policy.weights.state_size} finite numbers"
            )
        if self.last is None:
            self._histories.begin(0, state, self._seed)
        else:
            self._histories.record(0, self.last.actions[0], state)
        self.last = self.policy.decide(self._histories.window([0]), explore=explore)
        action: Floats = self.last.actions[0].copy()  # the history keeps its own
        return action


def load(path: Path | str, *, sets: Sequence[str] = ()) -> Agent:
    """The agent of a run or checkpoint; `sets` such as "planner.mode=q" change how it plans."""
    return Agent(configured_policy(checkpoint.read(path), sets))


def configured_policy(source: Checkpoint, sets: Sequence[str]) -> Policy:
    """The planner of a checkpoint, with `sets` applied to its configuration."""
    trained = source.weights.config
    config = override(trained, sets)
    for name in type(config).model_fields:
        if name not in SETTABLE and getattr(config, name) != getattr(trained, name):
            raise InputError(
                f"{name} was settled by training; what may change afterwards is in "
                f"{', '.join(SETTABLE)}"
            )
    if config.planner.mode in ("q", "q0") and source.progress.get("critic_updates") == 0:
        raise InputError(
            f"planner.mode is {config.planner.mode}, but the critic of {source.path} has not "
            "learned yet; finish the run, or plan by m or rcbc"
        )
    prepare_compute(config.compute)
    return Policy(source.weights, config)
