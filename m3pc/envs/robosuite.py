"""robosuite's manipulation tasks, as robomimic recorded them. S state, A action.

States are `robot0_eef_pos`, `robot0_eef_quat`, `robot0_gripper_qpos` and `object`, joined. The
reward is 1 at success, which ends the episode, and 0 before.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

import gymnasium
import mujoco
import numpy as np
from gymnasium.envs.mujoco.mujoco_rendering import OffScreenViewer
from gymnasium.spaces import Box
from numpy.typing import ArrayLike, NDArray

from m3pc.core.manipulation_tasks import (
    CONTROL_FREQ,
    CONTROLLER,
    OTHER_OBJECTS,
    ROBOT,
    TASKS,
    key_part,
)
from m3pc.types import Doubles, Floats, InputError

SUPPORTED_VERSION = "1.4."
WRONG_VERSION_REASON = f"{OTHER_OBJECTS}, so that a policy would see other states than in the data"
INSTALL_HINT = "pip install 'm3pc[robosuite]'"
SEED_LIMIT = 2**32  # exclusive, for numpy's legacy generator


class ManipulationEnv(gymnasium.Env[Floats, Floats]):
    """States [S], actions [A]: six numbers that move and turn the hand, one that closes it.

    `controller` overrides entries of robosuite's OSC_POSE.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012  # as gymnasium's

    def __init__(
        self,
        task: str,
        *,
        robots: str = ROBOT,
        control_freq: int = CONTROL_FREQ,
        controller: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
        width: int = 480,
        height: int = 480,
        camera_name: str = "agentview",
    ) -> None:
        self.task = TASKS[task]
        self.render_mode, self._camera, self._size = render_mode, camera_name, (height, width)
        self.metadata = {**self.metadata, "render_fps": control_freq}
        self._viewer: Any = None  # made when something is rendered
        self._closed = False
        with _numpy_seeded(np.random.default_rng(0)):  # robosuite draws a scene at once
            self._robosuite = robosuite().make(
                self.task.name,
                robots=robots,
                control_freq=control_freq,
                controller_configs={**CONTROLLER, **(controller or {})},
                reward_shaping=False,
                ignore_done=True,  # gymnasium counts the steps
                hard_reset=self.task.hard_reset,
                has_renderer=False,
                has_offscreen_renderer=False,  # `render` makes its own
                use_camera_obs=False,
            )
        low, high = (bound.astype(np.float32) for bound in self._robosuite.action_spec)
        self.action_space = Box(low, high, dtype=np.float32)
        self.observation_space = Box(-np.inf, np.inf, self.observe()[0].shape, np.float32)

    @property
    def engine(self) -> str:
        return f"mujoco {mujoco.__version__}, robosuite {metadata.version('robosuite')}"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        with _numpy_seeded(self.np_random):
            self._robosuite.reset()
        if self.task.hard_reset:
            self._drop_viewer()  # a hard reset builds a new model; the viewer holds the old one
        return self.observe()

    def step(self, action: Floats) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        self._robosuite.step(np.asarray(action, np.float64))
        # After a step MuJoCo's body poses lag one substep of 2 ms behind its joints. Recomputed,
        # the observation depends on the simulator's state only, as in the recorded data.
        mujoco.mj_kinematics(self.model, self._data)
        state, info = self.observe()
        return state, float(info["success"]), info["success"], False, info

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """A frame [height, width, 3]; None without a render mode."""
        if self.render_mode is None:
            return None
        if self._viewer is None:
            height, width = self._size
            self.model.vis.global_.offheight = height
            self.model.vis.global_.offwidth = width
            self._viewer = OffScreenViewer(self.model, self._data, width, height)
            self._viewer.vopt.geomgroup[0] = 0  # hides collision shapes, as robosuite does
        self._viewer.make_context_current()
        frame: NDArray[np.uint8] = self._viewer.render("rgb_array", self._camera_id())
        return frame

    def _camera_id(self) -> int:
        model = self.model
        names = [model.camera(number).name for number in range(model.ncam)]
        if self._camera not in names:
            raise InputError(f"there is no camera {self._camera!r}; give one of {names}")
        return names.index(self._camera)

    def close(self) -> None:
        if not self._closed:
            self._drop_viewer()
            self._robosuite.close()
        self._closed = True

    def sim_state(self) -> Doubles:
        """Time, positions and velocities: what robomimic stores as `states`."""
        flat: Doubles = self._robosuite.sim.get_state().flatten()
        return flat

    def set_sim_state(self, state: ArrayLike) -> Floats:
        """Put the simulator into this state and return the state [S]; resets the controller."""
        values, size = np.asarray(state, np.float64), len(self.sim_state())
        if values.shape != (size,):
            raise InputError(
                f"{self.task.name} has simulator states of {size} numbers; found shape "
                f"{list(values.shape)}: give one of the same task"
            )
        self._robosuite.sim.set_state_from_flattened(values)
        for robot in self._robosuite.robots:
            robot.controller.update(force=True)  # also computes the poses
            robot.controller.reset_goal()
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        return self.observe()[0]

    def observe(self) -> tuple[Floats, dict[str, Any]]:
        """The state [S], and gymnasium's info."""
        observations = self._robosuite._get_observations(force_update=True)
        observations["object"] = observations["object-state"]
        parts = []
        for key in self.task.keys:
            name, numbers = key_part(key)
            full_name = name if name in observations else f"robot0_{name}"
            parts.append(observations[full_name][numbers])
        position = observations[f"{self.task.body}_pos"]
        info = {"success": bool(self._robosuite._check_success()), "object_pos": position}
        if self.task.bins:
            info["box"] = self._box(position)
        return np.concatenate(parts).astype(np.float32), info

    def _box(self, position: Doubles) -> int:
        """The number of the box that the object lies in, -1 for none."""
        inside = (box for box in range(4) if not self._robosuite.not_in_bin(position, box))
        return next(inside, -1)

    @property
    def model(self) -> Any:
        return self._robosuite.sim.model._model

    @property
    def _data(self) -> Any:
        return self._robosuite.sim.data._data

    def _drop_viewer(self) -> None:
        if self._viewer is not None:
            self._viewer.close()
        self._viewer = None


@cache
def robosuite() -> Any:
    """Import robosuite, quietly and without a GL context; InputError if it does not fit."""
    try:
        version = metadata.version("robosuite")
    except metadata.PackageNotFoundError:
        raise InputError(f"robosuite is not installed; {INSTALL_HINT}") from None
    if not version.startswith(SUPPORTED_VERSION):
        raise InputError(
            f"robosuite {version} is installed, expected {SUPPORTED_VERSION}x: "
            f"{WRONG_VERSION_REASON}; {INSTALL_HINT}"
        )
    # robosuite/macros.py reads this in place of a user's file, whose settings could change the
    # physics. It also keeps robosuite from setting MUJOCO_GL for the whole process.
    private = ModuleType("robosuite.macros_private")
    vars(private).update(MUJOCO_GPU_RENDERING=False)
    sys.modules.setdefault(private.__name__, private)
    with _without_gl():
        import robosuite as package
    return package


@contextmanager
def _without_gl() -> Iterator[None]:
    """Keep robosuite from loading the GL back-end of MUJOCO_GL when it is imported."""
    previous = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disable"  # mujoco, imported above, has read it already
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]
        if previous is not None:
            os.environ["MUJOCO_GL"] = previous


@contextmanager
def _numpy_seeded(stream: np.random.Generator) -> Iterator[None]:
    """Seed numpy's global stream, from which robosuite draws, and restore it afterwards."""
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(int(stream.integers(SEED_LIMIT)))  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
