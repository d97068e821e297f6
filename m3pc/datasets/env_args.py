"""robomimic's `env_args`: JSON about the simulator in which a file was recorded.

    {"env_name": "Lift", "env_version": "1.4.1", "type": 1, "env_kwargs": {"control_freq": 20, ...}}

Files may lack it, or its version.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from m3pc.core.env_ids import named
from m3pc.core.manipulation_tasks import CONTROL_FREQ, CONTROLLER, ROBOT, TASKS, strange_arguments
from m3pc.types import InputError

# What is seen and what is kept of it, not what happens: rewards are looked at themselves.
DROPPED = ("camera", "render", "has_", "use_", "reward_", "ignore_done", "hard_reset", "horizon")
RENAMED = {"damping": "damping_ratio", "damping_limits": "damping_ratio_limits"}  # since 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvArgs:
    task: str | None = None  # as robosuite calls it
    version: str | None = None  # of robosuite
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: object, source: str) -> "EnvArgs":
        """`text` is the attribute; what is not text is as good as absent."""
        if isinstance(text, bytes):  # HDF5 has texts of one size too
            text = text.decode(errors="replace")
        if not isinstance(text, str):
            return cls()
        try:
            found = json.loads(text)
            task, version = found["env_name"], found.get("env_version")
            kwargs = found.get("env_kwargs") or {}
            if not (isinstance(task, str) and isinstance(version, str | None)):
                raise TypeError
            return cls(task=task, version=version, kwargs=dict(kwargs))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            message = f"{source} has env_args that are not JSON with an env_name"
            raise InputError(message) from None

    @property
    def recorded_by(self) -> str:
        if self.version:
            return f"robosuite {self.version}"
        return "not said: robosuite 1.4 or before is assumed"

    @property
    def is_later(self) -> bool:
        """Whether it is of robosuite 1.5 or later, in which `object` is another vector."""
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
        """The environment's name: with what of `kwargs` differs from ours and matters."""
        name, left_out = self.merged(env_id)
        if left_out:
            raise InputError(
                f"env_args asks for {left_out}, with which these environments are not made; give "
                f"--env {env_id} to use the data without"
            )
        return name

    def merged(self, env_id: str) -> tuple[str, dict[str, Any]]:
        """The same with those arguments that these environments take, and the others."""
        arguments = _arguments(self.kwargs)
        left_out = {name: arguments.pop(name) for name in strange_arguments(arguments)}
        return named(env_id, arguments), left_out

    @property
    def env_id(self) -> str | None:
        """An environment of that task; robosuite's other tasks keep their name."""
        if self.task is None:
            return None
        ours = (env_id for env_id, task in TASKS.items() if task.name == self.task)
        return next(ours, f"robosuite/{self.task}")


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    left = {
        name: value
        for name, value in kwargs.items()
        if not name.startswith(DROPPED) and value not in (None, "default")
    }
    robots = left.get("robots")
    if isinstance(robots, list) and len(robots) == 1:
        left["robots"] = robots[0]
    controller = left.pop("controller_configs", {})
    left["controller"] = _changes(controller) if isinstance(controller, dict) else controller
    ours = {"robots": ROBOT, "control_freq": CONTROL_FREQ, "controller": {}}
    return {name: value for name, value in left.items() if ours.get(name, ...) != value}


def _changes(controller: Mapping[str, Any]) -> dict[str, Any]:
    """What a controller has other than ours."""
    values = {RENAMED.get(name, name): value for name, value in controller.items()}
    return {name: value for name, value in values.items() if CONTROLLER.get(name, ...) != value}
