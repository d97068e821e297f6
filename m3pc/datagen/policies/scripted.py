"""Scripted policies for robosuite's Lift and PickPlaceCan, good ones and bad ones.

A script chooses its next move from the state alone, so it recovers from noise: it fetches a
dropped object again. It reads the first twelve numbers of a state, which the limited Can has too:
hand [3] and its quaternion [4], two fingers [2], object [3]. Metres; z points up. An action is a
displacement [3], a rotation [3] and the gripper: below 0 opens it, above 0 closes it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3pc.core.manipulation_tasks import FLOOR
from m3pc.types import Floats

Vec3 = NDArray[np.float64]  # [3]
UP: Vec3 = np.array([0.0, 0.0, 1.0])

MAX_REACH, MAX_TURN = 0.05, 0.5  # metres and radians for an action of 1
OPEN, CLOSE = -1.0, 1.0
OPEN_WIDTH = 0.075  # metres between fingers that have not started to close
CLOSING_FACTOR = 1.5  # times `close_distance` while closing: a small push does not open again
GRASP_DISTANCE = 0.03  # largest distance on an axis from a held object's grasp point, metres
FUNNEL, CLEARANCE = 4.0, 0.08  # height above an object per distance beside it; maximum height, m
RELEASE_DISTANCE = 0.04  # metres from the target
CLIMB = 0.06  # metres below the carrying height at which sideways motion begins
STEPS_AFTER_FALL = 20  # steps from the object's fall to the episode's end

BOX = ((0.18, 0.37),)  # in the can's box of the second bin, on the arm's side
OUTSIDE = ((-0.2, -0.25), (0.0, -0.58), (0.15, -0.6))  # between arm and first bin, and beside it
JITTER = (0.03, 0.02)  # metres: range of targets sideways, and of the carrying height
AIM_ERROR_SCALE = (0.5, 1.5)  # range of the factor on a variant's aim error, drawn per episode
PAUSE_STEPS, RELEASE_STEPS = 10, 6  # length of a pause, and of an early opening of the gripper
PUSH_DECAY = 0.9  # share of a push that is left one step later


@dataclass(frozen=True, slots=True)
class ArmView:
    """The part of a state that scripts read."""

    hand: Vec3
    tilt: Vec3  # rotation that brings the hand back to pointing down, radians about x, y, z
    width: float  # between the fingers
    object: Vec3

    @classmethod
    def from_state(cls, state: Floats) -> "ArmView":
        numbers = state[:12].astype(np.float64)
        return cls(
            hand=numbers[:3],
            tilt=_upright(numbers[3:7]),
            width=float(numbers[7] - numbers[8]),
            object=numbers[9:12],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraspTask:
    """The object to grasp, and the tolerances of grasping it. Metres."""

    grasp: float  # height over the object's centre at which the hand closes
    centre_tolerance: float  # sideways distance within which the hand goes all the way down
    close_distance: float  # distance to the grasp point within which the gripper closes
    width: float  # largest gap between fingers that hold the object
    low: tuple[float, float]  # lower corner of the area within reach
    high: tuple[float, float]  # upper corner
    carry_height: float = 0.0  # height of the object while it is carried


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTargets:
    """Aims of one episode, drawn at its start."""

    offset: Vec3  # from the object's true position to the one that the script assumes
    target: Vec3  # [2] where the object is carried
    height: float  # height of the object while it is carried


Move = tuple[Vec3, float]  # the hand's goal, the gripper's action
Script = Callable[[ArmView, GraspTask, EpisodeTargets], Move]


def fetch(view: ArmView, task: GraspTask, aim: EpisodeTargets) -> Move:
    """Go above the object, down through a funnel, close. An object out of reach is left alone."""
    if not ((task.low < view.object[:2]) & (view.object[:2] < task.high)).all():
        return view.hand, OPEN
    goal = view.object + task.grasp * UP + aim.offset
    beside = math.dist(goal[:2], view.hand[:2])
    above = min(FUNNEL * max(beside - task.centre_tolerance, 0.0), CLEARANCE)
    closing = view.width <= OPEN_WIDTH
    distance = task.close_distance * CLOSING_FACTOR if closing else task.close_distance
    there = beside < distance and abs(goal[2] - view.hand[2]) < distance
    return goal + above * UP, CLOSE if there else OPEN


def lift(view: ArmView, task: GraspTask, aim: EpisodeTargets) -> Move:
    """Fetch the object and lift it."""
    if not is_held(view, task):
        return fetch(view, task, aim)
    return view.hand + MAX_REACH * UP, CLOSE


def carry(view: ArmView, task: GraspTask, aim: EpisodeTargets) -> Move:
    """Fetch the object, lift it over the walls, carry it to the target and let it fall there."""
    if math.dist(view.object[:2], aim.target) < RELEASE_DISTANCE:
        return np.append(aim.target, aim.height + task.grasp), OPEN
    if not is_held(view, task):
        return fetch(view, task, aim)
    rise = aim.height - view.object[2]
    ahead = np.clip(1.0 - rise / CLIMB, 0.0, 1.0) * (aim.target - view.object[:2])
    return view.hand + np.append(ahead, rise), CLOSE


def is_held(view: ArmView, task: GraspTask) -> bool:
    distance = np.abs(view.object + task.grasp * UP - view.hand).max()
    return bool(distance < GRASP_DISTANCE) and view.width < task.width


def action(view: ArmView, move: Move) -> Vec3:
    """The action [7] that moves the hand to a place and turns it upright, before clipping."""
    place, grip = move
    return np.concatenate([(place - view.hand) / MAX_REACH, view.tilt / MAX_TURN, [grip]])


def _upright(quaternion: Vec3) -> Vec3:
    """[x, y, z, w] of the hand -> the rotation vector to x = 1, where the hand points down."""
    x, y, z, w = quaternion if quaternion[0] >= 0 else -quaternion
    # (1, 0, 0, 0) times the conjugate of (x, y, z, w), as vector part and angle
    axis = np.array([w, z, -y])
    sine = float(np.linalg.norm(axis))
    return axis * (2.0 * math.atan2(sine, x) / sine if sine > 0 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptVariant:
    """A script with its imperfections: one way to play an episode.

    `key` is a field's name in a data set's header, if it differs.
    """

    name: str
    script: Script
    noise: float  # standard deviation of the noise on each number of an action
    max_displacement: float = field(default=1.0, metadata={"key": "pace"})  # along each axis
    targets: tuple[tuple[float, float], ...] = ((0.0, 0.0),)  # one is drawn per episode
    # Metres beside the object at which the hand aims
    aim_error: tuple[float, float, float] = field(
        default=(0.0, 0.0, 0.0), metadata={"key": "astray"}
    )
    # Standard deviation of a slowly changing push, as a share of the hand's displacement
    path_noise: float = field(default=0.0, metadata={"key": "strays"})
    # Chance per step of a pause, and of opening the gripper too early
    pause_probability: float = field(default=0.0, metadata={"key": "hesitates"})
    release_probability: float = field(default=0.0, metadata={"key": "lets_go"})
    # Steps after which it gives up; None: never
    max_steps: int | None = field(default=None, metadata={"key": "patience"})

    def metadata(self) -> dict[str, Any]:
        """The fields that differ from their default, for a data set's header."""
        values = {f: getattr(self, f.name) for f in fields(self) if f.name != "script"}
        return {f.metadata.get("key", f.name): x for f, x in values.items() if x != f.default}


@dataclass(slots=True, kw_only=True)
class ScriptedPolicy:
    """A variant during one episode."""

    variant: ScriptVariant
    task: GraspTask
    aim: EpisodeTargets
    elapsed: int = 0  # steps
    steps_since_fall: int = 0
    pause_left: int = 0  # steps
    release_left: int = 0  # steps for which the gripper stays open
    push: Vec3 = field(default_factory=lambda: np.zeros(3))  # slow noise of unit variance

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        view = ArmView.from_state(state)
        ideal = action(view, self.variant.script(view, self.task, self.aim)).clip(-1, 1)
        limit = self.variant.max_displacement
        ideal[:3] = ideal[:3].clip(-limit, limit)
        self.elapsed += 1
        self.steps_since_fall += view.object[2] < FLOOR
        if rng is not None:
            self._lapse(ideal, rng)
            self._push(ideal, rng)
            ideal += self.variant.noise * rng.standard_normal(len(ideal))
        return ideal.clip(-1, 1).astype(np.float32)

    def stops(self) -> bool:
        gives_up = self.elapsed == self.variant.max_steps
        return gives_up or self.steps_since_fall >= STEPS_AFTER_FALL

    def _lapse(self, ideal: Vec3, rng: np.random.Generator) -> None:
        """Pause, or open the gripper, for some steps."""
        variant = self.variant
        chances = variant.pause_probability, variant.release_probability
        pauses, releases = rng.random(2) < chances
        self.pause_left = PAUSE_STEPS if pauses else max(self.pause_left - 1, 0)
        self.release_left = RELEASE_STEPS if releases else max(self.release_left - 1, 0)
        if self.pause_left:
            ideal[:6] = 0.0
        if self.release_left:
            ideal[6] = OPEN

    def _push(self, ideal: Vec3, rng: np.random.Generator) -> None:
        """Push the hand in proportion to its speed, so that it is hardly pushed near its goal."""
        if self.variant.path_noise:
            fresh = rng.standard_normal(3)
            self.push = PUSH_DECAY * self.push + math.sqrt(1 - PUSH_DECAY**2) * fresh
            ideal[:3] += self.variant.path_noise * np.abs(ideal[:3]).max() * self.push


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSchedule:
    """Variants that take turns, so that each plays the same number of episodes."""

    task: GraspTask
    variants: tuple[ScriptVariant, ...]
    same_starts: bool = False  # all variants play from one initial state, then from the next

    @property
    def episodes_per_round(self) -> int:
        return len(self.variants) if self.same_starts else 1

    def variant(self, number: int) -> ScriptVariant:
        return self.variants[number % len(self.variants)]

    def initial_state(self, number: int) -> int:
        return number // self.episodes_per_round

    def policy_of(self, number: int, rng: np.random.Generator) -> ScriptedPolicy:
        variant = self.variant(number)
        target = variant.targets[rng.integers(len(variant.targets))]
        sideways, upwards = JITTER
        aim = EpisodeTargets(
            offset=np.array(variant.aim_error) * rng.uniform(*AIM_ERROR_SCALE),
            target=np.array(target) + rng.uniform(-sideways, sideways, 2),
            height=self.task.carry_height + rng.uniform(-upwards, upwards),
        )
        return ScriptedPolicy(variant=variant, task=self.task, aim=aim)


CUBE = GraspTask(
    grasp=0.0,
    centre_tolerance=0.012,
    close_distance=0.014,
    width=0.06,
    low=(-0.3, -0.3),
    high=(0.3, 0.3),
)
CAN = GraspTask(
    grasp=0.015,
    centre_tolerance=0.006,
    close_distance=0.012,
    width=0.06,
    low=(-0.1, -0.5),
    high=(0.3, 0.53),
    carry_height=1.0,
)


def noisy(variant: ScriptVariant, max_steps: int) -> tuple[ScriptVariant, ...]:
    """Versions of the variant that mostly fail, each for another reason."""
    base = replace(variant, max_steps=max_steps)
    return (
        replace(base, name="shaky", noise=0.5),
        replace(base, name="short", noise=0.2, aim_error=(-0.03, 0.0, 0.0)),
        replace(base, name="high", noise=0.2, aim_error=(0.0, 0.0, 0.025)),
        replace(base, name="clumsy", noise=0.2, pause_probability=0.05, release_probability=0.1),
    )


LIFT = ScriptVariant(name="lift", script=lift, noise=0.1, max_displacement=0.6)
PLACE = ScriptVariant(name="place", script=carry, targets=BOX, noise=0.1)
THROW = ScriptVariant(name="throw", script=carry, targets=OUTSIDE, noise=0.1, max_steps=250)
CAN_SCHEDULES = {
    "good": ScriptSchedule(task=CAN, variants=(PLACE,)),
    "noisy": ScriptSchedule(task=CAN, variants=noisy(PLACE, max_steps=250)),
    "paired": ScriptSchedule(task=CAN, variants=(PLACE, THROW), same_starts=True),
}
# By environment and quality.
SCHEDULES: Mapping[str, Mapping[str, ScriptSchedule]] = MappingProxyType(
    {
        "robosuite/Lift": {
            "good": ScriptSchedule(task=CUBE, variants=(LIFT,)),
            "noisy": ScriptSchedule(task=CUBE, variants=noisy(LIFT, max_steps=100)),
        },
        "robosuite/PickPlaceCan": CAN_SCHEDULES,
        "robosuite/CanLim": CAN_SCHEDULES,
    }
)
