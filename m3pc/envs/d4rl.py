"""The physics in which D4RL recorded its v2 locomotion data, on today's MuJoCo.

MuJoCo up to 2.1 weighed a capsule of radius r and half-length h as a cylinder of radius r and
half-length h + r/2; today it weighs the capsule itself. Everything else is gymnasium's v4
environment: v5 changed Walker2d's foot friction and the reward of a terminal step.
"""

from typing import Any

import mujoco
import numpy as np
from gymnasium.envs.mujoco import half_cheetah_v4, hopper_v4, walker2d_v4
from gymnasium.envs.mujoco.mujoco_env import MujocoEnv

CAPSULE, CYLINDER = mujoco.mjtGeom.mjGEOM_CAPSULE, mujoco.mjtGeom.mjGEOM_CYLINDER
# A contact's margin was the larger of its two geoms' margins; from 3.5 on it is their sum.
MARGINS_ADD = tuple(int(part) for part in mujoco.__version__.split(".")[:2]) >= (3, 5)


def recorded_model(path: str) -> Any:
    """The mujoco model of the XML at `path`: its own shapes, the inertia of MuJoCo 2.1.

    It is compiled anew, not changed in place, because a model also stores what follows from the
    inertial frames: which frames coincide, and the bounding boxes that decide what may collide.
    """
    inertials = _weighed_as_cylinders(path)
    spec = mujoco.MjSpec.from_file(path)
    for body in spec.bodies:
        inertial = inertials.body(body.name)
        body.explicitinertial = True
        body.mass = inertial.mass[0]
        body.ipos = inertial.ipos
        body.iquat = inertial.iquat
        body.inertia = inertial.inertia
    spec.compiler.inertiafromgeom = mujoco.mjtInertiaFromGeom.mjINERTIAFROMGEOM_FALSE
    model = spec.compile()
    if MARGINS_ADD:
        model.geom_margin[:] /= 2  # exact here: all geoms of one robot have the same margin
    return model


def _weighed_as_cylinders(path: str) -> Any:
    """The model with cylinders for capsules, and the density and total mass of the XML."""
    spec = mujoco.MjSpec.from_file(path)
    shapes = spec.compile()  # resolves capsules that the XML gives by their two ends
    for geom in spec.geoms:
        if geom.type == CAPSULE:
            shape = shapes.geom(geom.name)
            radius, half_length, _ = shape.size
            geom.type = CYLINDER
            geom.size = (radius, half_length + radius / 2, 0)
            geom.pos = shape.pos
            geom.quat = shape.quat
            geom.fromto = np.full(6, np.nan)  # unset: the four above decide
    return spec.compile()


class RecordedEnv(MujocoEnv):
    """Mixed into a gymnasium environment, as its first base, to give it the recorded model."""

    def _initialize_simulation(self) -> tuple[Any, Any]:
        model = recorded_model(self.fullpath)
        model.vis.global_.offwidth = self.width
        model.vis.global_.offheight = self.height
        return model, mujoco.MjData(model)


class HopperEnv(RecordedEnv, hopper_v4.HopperEnv):
    """States [11]: qpos without x, qvel clipped to 10. Actions [3]."""


class Walker2dEnv(RecordedEnv, walker2d_v4.Walker2dEnv):
    """States [17]: qpos without x, qvel clipped to 10. Actions [6]."""


class HalfCheetahEnv(RecordedEnv, half_cheetah_v4.HalfCheetahEnv):
    """States [17]: qpos without x, qvel. Actions [6]."""
