"""What a server has to give, and the terms on which a robot comes. S state, H rows of waypoints."""

from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np

from m3pc.config.schema import BACKWARD, MODES
from m3pc.serving.messages import AlongWaypoints, ByReturn, ToGoal
from m3pc.serving.problems import ProblemError
from m3pc.serving.sessions import SessionConfig, Sizes
from m3pc.types import Floats, InputError
from planner.policy import Policy

AnyOpening = ByReturn | ToGoal | AlongWaypoints
CRITICAL: Final = ("q", "q0")  # modes that the critic guides


class About(TypedDict):
    """Fields of several messages."""

    state_size: int
    action_size: int
    candidates: int
    env: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """The same whatever weights answer, but for what their critic may be asked."""

    sizes: Sizes
    step_limit: int  # that the model was trained for
    mode: str  # of whoever asks for none
    candidates: int
    env: str | None
    critic: bool  # whether it has learned, so that it may guide
    deadline: float  # seconds
    most: int  # sessions
    idle: float  # seconds after which a session is ended
    least_steps: int  # of an episode that was cut short, to be worth storing

    @classmethod
    def of(
        cls, policy: Policy, *, critic: bool, deadline: float, most: int, idle: float
    ) -> "ServiceSpec":
        config, weights = policy.config, policy.weights
        if config.planner.mode in BACKWARD:
            raise InputError(
                f"planner.mode is {config.planner.mode}, which needs states to reach; serve with "
                "rcbc, m, q or q0: a session that gives a goal plans backwards all the same"
            )
        return cls(
            sizes=Sizes(
                window=config.model.window,
                horizon=config.planner.horizon,
                states=weights.state_size,
                actions=weights.action_size,
            ),
            step_limit=weights.max_episode_steps,
            mode=config.planner.mode,
            candidates=config.planner.candidates,
            env=weights.env,
            critic=critic,
            deadline=deadline,
            most=most,
            idle=idle,
            least_steps=config.dataset.min_length,
        )

    @property
    def modes(self) -> list[str]:
        """That a session may ask for."""
        return [mode for mode in MODES if self.critic or mode not in CRITICAL]

    @property
    def about(self) -> About:
        return About(
            state_size=self.sizes.states,
            action_size=self.sizes.actions,
            candidates=self.candidates,
            env=self.env,
        )

    def terms(self, asked: AnyOpening) -> SessionConfig:
        limit = asked.step_limit or self.step_limit
        if limit > self.step_limit:
            detail = f"step_limit is {limit}; the model was trained for {self.step_limit} at most"
            raise ProblemError(422, detail, where="step_limit")
        if asked.mode is not None and asked.mode not in self.modes:
            detail = f"mode is {asked.mode}, but the critic of this model has not learned; give "
            raise ProblemError(422, detail + ", ".join(self.modes), where="mode")
        return SessionConfig(
            step_limit=limit,
            deadline=self.deadline if asked.deadline_ms is None else asked.deadline_ms / 1000,
            name=asked.name,
            mode=asked.mode or self.mode,
            ratio=asked.ratio if isinstance(asked, ByReturn) else None,
            target=asked.target if isinstance(asked, ByReturn) else None,
            explore=isinstance(asked, ByReturn) and asked.explore,
            seed=asked.seed,
            waypoints=self._waypoints(asked, limit),
        )

    def state(self, numbers: list[float], where: str) -> Floats:
        """[S], or what is wrong with it."""
        if len(numbers) != self.sizes.states:
            detail = f"{where} has {len(numbers)} numbers; expected {self.sizes.states}"
            raise ProblemError(422, detail, where=where)
        return np.asarray(numbers, np.float32)

    def action(self, numbers: list[float] | None) -> Floats | None:
        """[A] that was really done, or what is wrong with it."""
        if numbers is None:
            return None
        if len(numbers) != self.sizes.actions:
            detail = f"action has {len(numbers)} numbers; expected {self.sizes.actions}"
            raise ProblemError(422, detail, where="action")
        return np.asarray(numbers, np.float32)

    def _waypoints(self, asked: AnyOpening, limit: int) -> Floats | None:
        """[H, S] with rows for all that a window may look at; a goal takes the room of one row."""
        if isinstance(asked, ByReturn):
            return None
        length = limit + self.sizes.window
        if isinstance(asked, ToGoal):
            return np.broadcast_to(self.state(asked.goal, "goal"), (length, self.sizes.states))
        most = self.step_limit + 1
        if len(asked.waypoints) > most:
            detail = f"waypoints has {len(asked.waypoints)} rows; give {most} at most"
            raise ProblemError(422, detail, where="waypoints")
        rows = [self.state(row, f"waypoints[{n}]") for n, row in enumerate(asked.waypoints)]
        return np.stack([*rows, *[rows[-1]] * (length - len(rows))][:length])
