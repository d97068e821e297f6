"""Scripted policies for robosuite's Lift and PickPlaceCan, good ones and bad ones.

What a script does next follows from the state alone, so it recovers from what noise does to it: a
dropped object is fetched again. Of a state it reads the first twelve numbers, which the limited Can
has too: hand [3] and its quaternion [4], two fingers [2], object [3]. Metres; z points up. An
action is a displacement [3], a rotation [3] and the gripper: below 0 opens it, above 0 closes it.
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

REACH, TURN = 0.05, 0.5  # metres and radians that an action of 1 asks for
OPEN, CLOSE = -1.0, 1.0
OPENED = 0.075  # metres between fingers that have not begun to close
ONCE_CLOSING = 1.5  # times `near`: fingers that have go on, though the hand was pushed a little
HELD_NEAR = 0.03  # metres from the point to grasp at, on each axis, while the object is held
FUNNEL, CLEARANCE = 4.0, 0.08  # height over an object by distance beside it, and at most
LET_GO = 0.04  # metres from the target
CLIMB = 0.06  # metres below the height of carrying, from which on it moves sideways too
AFTER_FALL = 20  # steps that an episode goes on after that

BOX = ((0.18, 0.37),)  # in the can's box of the second bin, on the arm's side
OUTSIDE = ((-0.2, -0.25), (0.0, -0.58), (0.15, -0.6))  # between arm and first bin, and beside it
JITTER = (0.03, 0.02)  # metres by which targets and heights of carrying differ at most
ASTRAY = (0.5, 1.5)  # times a role's error of aim, drawn for an episode
STILL, LOOSE = 10, 6  # steps of a hesitation, and of an opening that came too early
STEADY = 0.9  # of a push sideways, what is left of it a step later


@dataclass(frozen=True, slots=True)
class ArmView:
    """What a script reads of a state."""

    hand: Vec3
    tilt: Vec3  # rotation that brings the hand back to pointing down, radians about x, y, z
    width: float  # between the fingers
    thing: Vec3

    @classmethod
    def of(cls, state: Floats) -> "ArmView":
        numbers = state[:12].astype(np.float64)
        return cls(
            hand=numbers[:3],
            tilt=_upright(numbers[3:7]),
            width=float(numbers[7] - numbers[8]),
            thing=numbers[9:12],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraspTask:
    """What there is to grasp."""

    grasp: float  # height over the object's centre at which the hand closes
    centred: float  # metres beside it within which the hand goes all the way down
    near: float  # metres from the point to grasp at within which the gripper closes
    width: float  # between fingers that hold it, at most
    low: tuple[float, float]  # from where it can be fetched
    high: tuple[float, float]
    carry: float = 0.0  # height at which it passes over walls


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTargets:
    """How an episode is meant to go; drawn once an episode."""

    offset: Vec3  # from where the object is to where it is believed to be
    target: Vec3  # [2] where the object is carried
    height: float  # in which it is carried


Move = tuple[Vec3, float]  # where the hand goes, what the gripper does
Script = Callable[[ArmView, GraspTask, EpisodeTargets], Move]


def fetch(view: ArmView, task: GraspTask, aim: EpisodeTargets) -> Move:
    """Above the object, down through a funnel, close. What lies out of reach is left alone."""
    if not ((task.low < view.thing[:2]) & (view.thing[:2] < task.high)).all():
        return view.hand, OPEN
    goal = view.thing + task.grasp * UP + aim.offset
    beside = math.dist(goal[:2], view.hand[:2])
    above = min(FUNNEL * max(beside - task.centred, 0.0), CLEARANCE)
    near = task.near if view.width > OPENED else task.near * ONCE_CLOSING
    there = beside < near and abs(goal[2] - view.hand[2]) < near
    return goal + above * UP, CLOSE if there else OPEN


def lift(view: ArmView, task: GraspTask, aim: EpisodeTargets) -> Move:
    if not held(view, task):
        return fetch(view, task, aim)
    return view.hand + REACH * UP, CLOSE


def carry(view: ArmView, task: GraspTask, aim: EpisodeTargets) -> Move:
    """Fetch the object, lift it over the walls, carry it to the target and let it fall there."""
    if math.dist(view.thing[:2], aim.target) < LET_GO:
        return np.append(aim.target, aim.height + task.grasp), OPEN
    if not held(view, task):
        return fetch(view, task, aim)
    rise = aim.height - view.thing[2]
    ahead = np.clip(1.0 - rise / CLIMB, 0.0, 1.0) * (aim.target - view.thing[:2])
    return view.hand + np.append(ahead, rise), CLOSE


def held(view: ArmView, task: GraspTask) -> bool:
    near = np.abs(view.thing + task.grasp * UP - view.hand).max() < HELD_NEAR
    return bool(near) and view.width < task.width


def action(view: ArmView, move: Move) -> Vec3:
    """[7] The hand towards a place and upright, not yet within [-1, 1]."""
    place, grip = move
    return np.concatenate([(place - view.hand) / REACH, view.tilt / TURN, [grip]])


def _upright(quaternion: Vec3) -> Vec3:
    """[x, y, z, w] of the hand -> the rotation vector to x = 1, in which it points down."""
    x, y, z, w = quaternion if quaternion[0] >= 0 else -quaternion
    # (1, 0, 0, 0) times the conjugate of (x, y, z, w), as vector part and angle
    axis = np.array([w, z, -y])
    sine = float(np.linalg.norm(axis))
    return axis * (2.0 * math.atan2(sine, x) / sine if sine > 0 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptVariant:
    """One way to play an episode."""

    name: str
    script: Script
    noise: float  # standard deviation of what is added to each number of an action
    pace: float = 1.0  # largest displacement that it asks for, along each axis
    targets: tuple[tuple[float, float], ...] = ((0.0, 0.0),)  # one is drawn for an episode
    astray: tuple[float, float, float] = (0.0, 0.0, 0.0)  # metres beside the object that it aims at
    strays: float = 0.0  # standard deviation of a slow push, as a share of the hand's displacement
    hesitates: float = 0.0  # chance a step to hold still for STILL steps
    lets_go: float = 0.0  # chance a step to open the gripper for LOOSE steps
    patience: int | None = None  # steps after which it gives up

    def numbers(self) -> dict[str, Any]:
        """For a data set's header: what makes it what it is."""
        usual = {one.name: one.default for one in fields(self)}
        numbers = {name: getattr(self, name) for name in usual if name != "script"}
        return {name: value for name, value in numbers.items() if value != usual[name]}


@dataclass(slots=True, kw_only=True)
class ScriptedPolicy:
    """A role during one episode."""

    role: ScriptVariant
    task: GraspTask
    aim: EpisodeTargets
    elapsed: int = 0  # steps
    fallen: int = 0  # steps since the object fell
    still: int = 0  # steps for which it goes on to hold still
    loose: int = 0  # steps for which it goes on to open the gripper
    push: Vec3 = field(default_factory=lambda: np.zeros(3))  # slow noise of standard size

    def act(self, state: Floats, rng: np.random.Generator | None) -> Floats:
        view = ArmView.of(state)
        wanted = action(view, self.role.script(view, self.task, self.aim)).clip(-1, 1)
        wanted[:3] = wanted[:3].clip(-self.role.pace, self.role.pace)
        self.elapsed += 1
        self.fallen += view.thing[2] < FLOOR
        if rng is not None:
            self._lapse(wanted, rng)
            self._stray(wanted, rng)
            wanted += self.role.noise * rng.standard_normal(len(wanted))
        return wanted.clip(-1, 1).astype(np.float32)

    def stops(self) -> bool:
        return self.fallen >= AFTER_FALL or self.elapsed == self.role.patience

    def _lapse(self, wanted: Vec3, rng: np.random.Generator) -> None:
        hesitates, lets_go = rng.random(2) < (self.role.hesitates, self.role.lets_go)
        self.still = STILL if hesitates else max(self.still - 1, 0)
        self.loose = LOOSE if lets_go else max(self.loose - 1, 0)
        if self.still:
            wanted[:6] = 0.0
        if self.loose:
            wanted[6] = OPEN

    def _stray(self, wanted: Vec3, rng: np.random.Generator) -> None:
        """Who moves fast is pushed far; who is nearly there is hardly pushed at all."""
        if self.role.strays:
            fresh = rng.standard_normal(3)
            self.push = STEADY * self.push + math.sqrt(1 - STEADY**2) * fresh
            wanted[:3] += self.role.strays * np.abs(wanted[:3]).max() * self.push


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSchedule:
    """Roles that take turns, so that each plays the same number of episodes."""

    task: GraspTask
    roles: tuple[ScriptVariant, ...]
    together: bool = False  # all of them play from one initial state, then from the next

    @property
    def round(self) -> int:
        return len(self.roles) if self.together else 1

    def role(self, number: int) -> ScriptVariant:
        return self.roles[number % len(self.roles)]

    def start(self, number: int) -> int:
        return number // self.round

    def player(self, number: int, rng: np.random.Generator) -> ScriptedPolicy:
        role = self.role(number)
        target = role.targets[rng.integers(len(role.targets))]
        sideways, upwards = JITTER
        aim = EpisodeTargets(
            offset=np.array(role.astray) * rng.uniform(*ASTRAY),
            target=np.array(target) + rng.uniform(-sideways, sideways, 2),
            height=self.task.carry + rng.uniform(-upwards, upwards),
        )
        return ScriptedPolicy(role=role, task=self.task, aim=aim)


CUBE = GraspTask(
    grasp=0.0,
    centred=0.012,
    near=0.014,
    width=0.06,
    low=(-0.3, -0.3),
    high=(0.3, 0.3),
)
CAN = GraspTask(
    grasp=0.015,
    centred=0.006,
    near=0.012,
    width=0.06,
    low=(-0.1, -0.5),
    high=(0.3, 0.53),
    carry=1.0,
)


def noisy(role: ScriptVariant, patience: int) -> tuple[ScriptVariant, ...]:
    """The role played in ways that mostly fail, each for a reason of its own."""
    role = replace(role, patience=patience)
    return (
        replace(role, name="shaky", noise=0.5),
        replace(role, name="short", noise=0.2, astray=(-0.03, 0.0, 0.0)),
        replace(role, name="high", noise=0.2, astray=(0.0, 0.0, 0.025)),
        replace(role, name="clumsy", noise=0.2, hesitates=0.05, lets_go=0.1),
    )


LIFT = ScriptVariant(name="lift", script=lift, noise=0.1, pace=0.6)
PLACE = ScriptVariant(name="place", script=carry, targets=BOX, noise=0.1)
THROW = ScriptVariant(name="throw", script=carry, targets=OUTSIDE, noise=0.1, patience=250)
OF_CAN = {
    "good": ScriptSchedule(task=CAN, roles=(PLACE,)),
    "noisy": ScriptSchedule(task=CAN, roles=noisy(PLACE, patience=250)),
    "paired": ScriptSchedule(task=CAN, roles=(PLACE, THROW), together=True),
}
# By environment and quality.
CASTS: Mapping[str, Mapping[str, ScriptSchedule]] = MappingProxyType(
    {
        "robosuite/Lift": {
            "good": ScriptSchedule(task=CUBE, roles=(LIFT,)),
            "noisy": ScriptSchedule(task=CUBE, roles=noisy(LIFT, patience=100)),
        },
        "robosuite/PickPlaceCan": OF_CAN,
        "robosuite/CanLim": OF_CAN,
    }
)
