"""robomimic's `env_args`: JSON about the simulator in which a file was recorded.

    {"env_name": "Lift", "env_version": "1.4.1", "type": 1, "env_kwargs": {"control_freq": 20, ...}}

A file may lack `env_args`, or its `env_version`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from m3pc.core.env_ids import join_env_name
from m3pc.core.manipulation_tasks import CONTROL_FREQ, CONTROLLER, ROBOT, TASKS, unknown_arguments
from m3pc.types import InputError

# Prefixes of arguments that do not change the dynamics. Rewards are read from the data.
DROPPED = ("camera", "render", "has_", "use_", "reward_", "ignore_done", "hard_reset", "horizon")
RENAMED = {"damping": "damping_ratio", "damping_limits": "damping_ratio_limits"}  # since 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvArgs:
    """What a file says about the environment it was recorded in."""

    task: str | None = None  # robosuite's name
    version: str | None = None  # robosuite's version
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: object, source: str) -> "EnvArgs":
        """Parse the attribute's value; empty if it is not a text."""
        if isinstance(text, bytes):  # HDF5's texts of fixed size
            text = text.decode(errors="replace")
        if not isinstance(text, str):
            return cls()
        try:
            args = json.loads(text)
            task, version = args["env_name"], args.get("env_version")
            kwargs = args.get("env_kwargs") or {}
            if not (isinstance(task, str) and isinstance(version, str | None)):
                raise TypeError
            return cls(task=task, version=version, kwargs=dict(kwargs))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            message = f"{source} has env_args that are not JSON with an env_name"
            raise InputError(message) from None

    @property
    def recorded_by(self) -> str:
        """The simulator, for people."""
        if self.version:
            return f"robosuite {self.version}"
        return "not said: robosuite 1.4 or before is assumed"  # in manifests: keep it

    @property
    def is_later_robosuite(self) -> bool:
        """Whether robosuite 1.5 or later recorded the data; its observation `object` differs."""
        controller = self.kwargs.get("controller_configs")
        if isinstance(controller, Mapping) and "body_parts" in controller:
            return True
        try:
            return tuple(map(int, (self.version or "0").split(".")[:2])) >= (1, 5)
        except ValueError:
            raise InputError(
                f"env_args has env_version {self.version!r}; expected a number such as 1.4.1"
            ) from None

    def env_name(self, env_id: str) -> str:
        """The environment's name, with the arguments that differ from our defaults."""
        name, left_out = self.split_arguments(env_id)
        if left_out:
            raise InputError(
                f"env_args has {left_out}, which these environments do not support; give "
                f"--env {env_id} to use the data without them"
            )
        return name

    def split_arguments(self, env_id: str) -> tuple[str, dict[str, Any]]:
        """Return the name with the arguments that we support, and the unsupported arguments."""
        arguments = _arguments(self.kwargs)
        left_out = {name: arguments.pop(name) for name in unknown_arguments(arguments)}
        return join_env_name(env_id, arguments), left_out

    @property
    def env_id(self) -> str | None:
        """Our environment's id, else robosuite/TASK; None if the task is unknown."""
        if self.task is None:
            return None
        ours = (env_id for env_id, task in TASKS.items() if task.name == self.task)
        return next(ours, f"robosuite/{self.task}")


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that matter and differ from our defaults, in our spelling."""
    arguments = {
        name: value
        for name, value in kwargs.items()
        if not name.startswith(DROPPED) and value not in (None, "default")
    }
    robots = arguments.get("robots")
    if isinstance(robots, list) and len(robots) == 1:
        arguments["robots"] = robots[0]
    controller = arguments.pop("controller_configs", {})
    if isinstance(controller, dict):
        values = {str(RENAMED.get(name, name)): value for name, value in controller.items()}
        controller = _differing(values, CONTROLLER)
    arguments["controller"] = controller
    defaults: dict[str, Any] = {
        "robots": ROBOT,
        "control_freq": CONTROL_FREQ,
        "controller": {},
    }
    return _differing(arguments, defaults)


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if defaults.get(name, ...) != value}
