"""What this server offers (sizes, modes, limits), and how requests are checked against it.

S state, A action, H rows of waypoints.
"""

from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np

from m3pc.config.schema import BACKWARD, MODES
from m3pc.serving.messages import ByReturn, Opening, ToGoal
from m3pc.serving.problems import ProblemError
from m3pc.serving.sessions import SessionConfig, Sizes
from m3pc.types import Floats, InputError
from planner.policy import Policy

CRITIC_MODES: Final = ("q", "q0")  # modes that the critic guides


class ModelFields(TypedDict):
    """Model fields that several messages share."""

    state_size: int
    action_size: int
    candidates: int
    env: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """Holds for all versions of the weights, except for `critic_trained`."""

    sizes: Sizes
    max_episode_steps: int  # step limit in the model's environment
    mode: str  # default for sessions
    candidates: int
    env: str | None
    critic_trained: bool  # modes q and q0 require it
    deadline: float  # seconds; default for sessions
    max_sessions: int
    idle_seconds: float  # a session without requests for so long is ended
    min_stored_steps: int  # shorter episodes are not stored if they were cut short

    @classmethod
    def from_policy(
        cls,
        policy: Policy,
        *,
        critic_trained: bool,
        deadline: float,
        max_sessions: int,
        idle_seconds: float,
    ) -> "ServiceSpec":
        config, weights = policy.config, policy.weights
        if config.planner.mode in BACKWARD:
            raise InputError(
                f"planner.mode is {config.planner.mode}, which needs states to reach; serve with "
                "rcbc, m, q or q0: a session that gives a goal plans backwards all the same"
            )
        return cls(
            sizes=Sizes(
                window=policy.window,
                horizon=policy.horizon,
                states=weights.state_size,
                actions=weights.action_size,
            ),
            max_episode_steps=weights.max_episode_steps,
            mode=config.planner.mode,
            candidates=config.planner.candidates,
            env=weights.env,
            critic_trained=critic_trained,
            deadline=deadline,
            max_sessions=max_sessions,
            idle_seconds=idle_seconds,
            min_stored_steps=config.dataset.min_length,
        )

    @property
    def modes(self) -> list[str]:
        """Modes that a session may request."""
        return [mode for mode in MODES if self.critic_trained or mode not in CRITIC_MODES]

    @property
    def model_fields(self) -> ModelFields:
        return ModelFields(
            state_size=self.sizes.states,
            action_size=self.sizes.actions,
            candidates=self.candidates,
            env=self.env,
        )

    def session_config(self, opening: Opening) -> SessionConfig:
        """The opening with defaults filled in; ProblemError if this server cannot serve it."""
        limit = opening.step_limit or self.max_episode_steps
        if limit > self.max_episode_steps:
            detail = (
                f"step_limit is {limit}; the model was trained for {self.max_episode_steps} at most"
            )
            raise ProblemError(422, detail, where="step_limit")
        if opening.mode is not None and opening.mode not in self.modes:
            detail = f"mode is {opening.mode}, but the critic of this model has not learned; give "
            raise ProblemError(422, detail + ", ".join(self.modes), where="mode")
        return SessionConfig(
            step_limit=limit,
            deadline=self.deadline if opening.deadline_ms is None else opening.deadline_ms / 1000,
            name=opening.name,
            mode=opening.mode or self.mode,
            ratio=opening.ratio if isinstance(opening, ByReturn) else None,
            target=opening.target if isinstance(opening, ByReturn) else None,
            explore=isinstance(opening, ByReturn) and opening.explore,
            seed=opening.seed,
            waypoints=self._waypoints(opening, limit),
        )

    def parse_state(self, numbers: list[float], where: str) -> Floats:
        """Convert to [S]; ProblemError if the size is wrong."""
        return _sized_array(numbers, self.sizes.states, where)

    def parse_action(self, numbers: list[float] | None) -> Floats | None:
        """Convert to [A]; ProblemError if the size is wrong."""
        return None if numbers is None else _sized_array(numbers, self.sizes.actions, "action")

    def _waypoints(self, opening: Opening, limit: int) -> Floats | None:
        """Return [H, S], a row for every step that a window may reach. A goal is not copied."""
        if isinstance(opening, ByReturn):
            return None
        length = limit + self.sizes.window
        if isinstance(opening, ToGoal):
            goal = self.parse_state(opening.goal, "goal")
            return np.broadcast_to(goal, (length, self.sizes.states))
        max_rows = self.max_episode_steps + 1
        if len(opening.waypoints) > max_rows:
            detail = f"waypoints has {len(opening.waypoints)} rows; give {max_rows} at most"
            raise ProblemError(422, detail, where="waypoints")
        rows = [self.parse_state(row, f"waypoints[{n}]") for n, row in enumerate(opening.waypoints)]
        return np.stack([*rows, *[rows[-1]] * (length - len(rows))][:length])


def _sized_array(numbers: list[float], size: int, where: str) -> Floats:
    if len(numbers) != size:
        detail = f"{where} has {len(numbers)} numbers; expected {size}"
        raise ProblemError(422, detail, where=where)
    return np.asarray(numbers, np.float32)
