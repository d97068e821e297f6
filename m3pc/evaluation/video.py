"""One episode as an MP4 file. L steps of an episode, H rows of a waypoint table, S state."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv
from numpy.typing import NDArray

from actors.episodes import rollouts
from actors.vector_rollout import Rollout
from m3pc.core.history import Waypoints
from m3pc.core.seeding import evaluation_episode
from m3pc.envs import make_vector
from m3pc.envs.registry import FloatVectorEnv
from m3pc.types import Decision, Floats, InputError, Planner

RgbFrame = NDArray[np.uint8]  # [height, width, 3]
OnFrame = Callable[[int, RgbFrame], None]  # called with the steps so far and the frame
FRAMES_PER_SECOND = 30  # if an environment does not say
ENCODER_SECONDS = 60  # to finish the file after the last frame


def record_video(
    env_id: str,
    planner: Planner,
    path: Path,
    *,
    seed: int,
    waypoints: Waypoints | None = None,
    every: int = 4,
    size: tuple[int, int] = (320, 320),
    on_frame: OnFrame = lambda steps, frame: None,
    **kwargs: Any,
) -> Rollout:
    """Play episode 0 of `seed`, as `evaluate` does, and film every `every`-th step.

    `size` (width, height) is for environments that take one; `kwargs` go to gymnasium.make.
    """
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(_filmed(env_id, size, kwargs)) as envs:
        film = _Film(partial, every, on_frame)
        starts = [evaluation_episode(seed, 0)]
        try:
            with closing(film):
                (rollout,) = rollouts(
                    envs, planner, starts, waypoints=waypoints, on_step=film.shoot
                )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    return rollout


def poses(env_id: str, states: Floats, size: tuple[int, int] = (320, 320)) -> list[RgbFrame]:
    """Frames of a MuJoCo robot in states [N, S]: positions without the first (the distance
    travelled), then velocities. Empty if the environment has no such states or model."""
    with closing(_filmed(env_id, size, {})) as envs:
        assert isinstance(envs, SyncVectorEnv)
        robot: Any = envs.envs[0].unwrapped
        model: Any = getattr(robot, "model", None)
        if not hasattr(robot, "set_state") or states.shape[1] != model.nq - 1 + model.nv:
            return []
        envs.reset(seed=0)
        frames = []
        for state in states.astype(np.float64):
            robot.set_state(np.insert(state[: model.nq - 1], 0, 0.0), state[model.nq - 1 :])
            frames.append(_frame(envs))
    return frames


class _Film:
    """Renders after steps 1, 1 + `every`, ...; each frame goes to ffmpeg at once."""

    def __init__(self, path: Path, every: int, on_frame: OnFrame) -> None:
        self._path, self._every, self._on_frame, self._steps = path, every, on_frame, 0
        self._writer: Generator[None, RgbFrame | None, None] | None = None

    def shoot(self, envs: FloatVectorEnv, decision: Decision) -> None:
        if self._steps % self._every == 0:
            frame = _frame(envs)
            if self._writer is None:
                rate = envs.metadata.get("render_fps", FRAMES_PER_SECOND) / self._every
                self._writer = _writer(self._path, frame, rate)
            self._writer.send(frame)
            self._on_frame(self._steps + 1, frame)
        self._steps += 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _filmed(env_id: str, size: tuple[int, int], kwargs: dict[str, Any]) -> FloatVectorEnv:
    """One environment that renders, at this size if it takes one."""
    kwargs = {"render_mode": "rgb_array", **kwargs}
    try:
        return make_vector(env_id, 1, width=size[0], height=size[1], **kwargs)
    except InputError:
        return make_vector(env_id, 1, **kwargs)


def _frame(envs: FloatVectorEnv) -> RgbFrame:
    """Render a frame, cropped to even sides, which yuv420p needs."""
    # MuJoCo reads this when it first renders. Other systems have a single back-end.
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        (frame,) = envs.render() or (None,)
    except Exception as error:  # an environment is foreign code: it may raise anything
        raise InputError(_cannot_render(envs, str(error))) from error
    if not isinstance(frame, np.ndarray):
        raise InputError(_cannot_render(envs, f"it gives {frame!r}, no picture"))
    height, width = (side // 2 * 2 for side in frame.shape[:2])
    return np.ascontiguousarray(frame[:height, :width], np.uint8)


def _cannot_render(envs: FloatVectorEnv, reason: str) -> str:
    name = envs.spec.id if envs.spec else str(envs)
    return (
        f"environment {name!r} cannot be rendered: {reason.rstrip('.')}. Install what it names, or "
        "set MUJOCO_GL to a back-end that `m3pc doctor` finds working, or go without a video."
    )


def _writer(path: Path, frame: RgbFrame, rate: float) -> Generator[None, RgbFrame | None, None]:
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError("a video needs ffmpeg; pip install imageio-ffmpeg") from error
    height, width, _ = frame.shape
    writer: Generator[None, RgbFrame | None, None] = imageio_ffmpeg.write_frames(
        str(path),
        (width, height),
        fps=rate,
        codec="libx264",
        macro_block_size=2,
        ffmpeg_timeout=ENCODER_SECONDS,
        # The name of the partial file does not show the container. The index goes first, so that
        # browsers play the file while it loads.
        output_params=["-f", "mp4", "-movflags", "+faststart"],
    )
    writer.send(None)  # runs it to its first wait for a frame
    return writer
