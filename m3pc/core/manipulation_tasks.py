"""The manipulation tasks: names, sizes, and arguments that may be changed.

Data sets, names and environments share these tables, which load no simulator.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from m3pc.types import InputError

ARM = {"eef_pos": 3, "eef_quat": 4, "gripper_qpos": 2}  # sizes for a Panda; keys without `robot0_`


@dataclass(frozen=True, slots=True, kw_only=True)
class ManipulationTask:
    """An environment id. A state joins the observations `keys`; an episode ends at success."""

    name: str  # what robosuite calls it
    keys: tuple[str, ...]
    max_episode_steps: int
    object_size: int  # numbers of `object` in a file
    sim_size: int  # numbers of a flattened simulator state: time, positions, velocities
    object_at: int  # index of the object's position in a simulator state
    body: str  # the object's prefix in robosuite's observations
    bins: bool = False  # whether there are four boxes for the object
    hard_reset: bool = False  # whether each episode builds a new model

    @property
    def state_size(self) -> int:
        """The size of a state with a Panda; other hands have other fingers."""
        sizes = ARM | {"object": self.object_size}
        return sum(len(range(sizes[name])[part]) for name, part in map(key_part, self.keys))


LIFT = ManipulationTask(
    name="Lift",
    keys=(*ARM, "object"),
    max_episode_steps=400,
    object_size=10,
    sim_size=32,
    object_at=10,
    body="cube",
    hard_reset=True,  # the cube's size is drawn when the model is built
)
CAN = ManipulationTask(
    name="PickPlaceCan",
    keys=(*ARM, "object"),
    max_episode_steps=400,
    object_size=14,
    sim_size=71,
    object_at=31,
    body="Can",
    bins=True,
)
SQUARE = ManipulationTask(
    name="NutAssemblySquare",
    keys=(*ARM, "object"),
    max_episode_steps=500,
    object_size=14,
    sim_size=45,
    object_at=10,
    body="SquareNut",
)
CAN_LIMITED = ManipulationTask(
    name="PickPlaceCan",
    keys=(*ARM, "object[:3]"),  # the can's position, not its rotation
    max_episode_steps=400,
    object_size=14,
    sim_size=71,
    object_at=31,
    body="Can",
    bins=True,
)
TASKS: Mapping[str, ManipulationTask] = {
    "robosuite/Lift": LIFT,
    "robosuite/PickPlaceCan": CAN,
    "robosuite/NutAssemblySquare": SQUARE,
    "robosuite/CanLim": CAN_LIMITED,
}

FLOOR = 0.75  # metres: an object below this height has fallen from table or bins for good
OTHER_OBJECTS = (  # why a version of robosuite matters
    "from 1.5 on Lift's gripper_to_cube_pos has the opposite sign and the two halves of the Can's "
    "object are swapped"
)

# Defaults of an environment, as in robomimic's recordings. The controller is robosuite 1.4's own
# OSC_POSE, in which an action of 1 asks the hand to move by 5 cm or to turn by half a radian.
ROBOT, CONTROL_FREQ = "Panda", 20
ROBOTS = ("Panda", "Sawyer", "IIWA", "Jaco", "Kinova3", "UR5e")
CONTROLLER: Mapping[str, Any] = {
    "type": "OSC_POSE",
    "input_max": 1,
    "input_min": -1,
    "output_max": [0.05, 0.05, 0.05, 0.5, 0.5, 0.5],
    "output_min": [-0.05, -0.05, -0.05, -0.5, -0.5, -0.5],
    "kp": 150,
    "damping_ratio": 1,
    "impedance_mode": "fixed",
    "kp_limits": [0, 300],
    "damping_ratio_limits": [0, 10],
    "position_limits": None,
    "orientation_limits": None,
    "uncouple_pos_ori": True,
    "control_delta": True,
    "interpolation": None,
    "ramp_ratio": 0.2,
}


def key_part(key: str) -> tuple[str, slice]:
    """The name of an observation and which of its numbers: object[:3] is the first three."""
    match = re.fullmatch(r"(\w+)(?:\[(\d*):(\d*)\])?", key)
    if match is None:
        raise InputError(f"{key!r} is no observation; give a name, or a part of it as object[:3]")
    name, first, last = match.groups()
    return name, slice(int(first) if first else None, int(last) if last else None)


def _is_numeric(value: object, depth: int = 2) -> bool:
    """Whether the value is None, a finite number, or a short list of such."""
    if isinstance(value, list) and depth:
        return len(value) <= 12 and all(_is_numeric(entry, depth - 1) for entry in value)
    # Compared, not converted: an int may be larger than any float.
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)


FIXED = ("type", "impedance_mode", "control_delta")  # entries that define what an action means


def _is_controller(values: object) -> bool:
    return isinstance(values, dict) and all(
        name in CONTROLLER
        and (value == CONTROLLER[name] or (name not in FIXED and _is_numeric(value)))
        for name, value in values.items()
    )


# Arguments allowed in an environment's name, with checks: numbers and known names, never a file.
ARGUMENTS: Mapping[str, Callable[[object], bool]] = {
    "robots": lambda value: value in ROBOTS,
    "control_freq": lambda value: type(value) is int and 1 <= value <= 500,
    "controller": _is_controller,
}


def unknown_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments that are unknown or have a value that is not allowed."""
    return [
        name
        for name, value in arguments.items()
        if name not in ARGUMENTS or not ARGUMENTS[name](value)
    ]
