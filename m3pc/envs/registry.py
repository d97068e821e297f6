"""Makes environments with states [S] and actions [A] in [-1, 1], or raises an InputError."""

import difflib
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import DependencyNotInstalled, DeprecatedEnv, UnregisteredEnv
from gymnasium.spaces import Box, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation, RescaleAction, TransformAction

from m3pc.core.env_ids import split_env_name
from m3pc.types import InputError

Env = gymnasium.Env[Any, Any]
FloatVectorEnv = VectorEnv[Any, Any, Any]

# What to do about an error: the first row that fits it.
ADVICE: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((UnregisteredEnv, DeprecatedEnv), "Give an id that gymnasium knows"),
    ((DependencyNotInstalled, ImportError), "Install the package it needs, or give another id"),
    ((TypeError,), "Check the arguments given to the environment"),
    ((Exception,), "Check the id and the arguments given to the environment"),
)


def make(env_id: str, **kwargs: Any) -> Env:
    """Make a gymnasium environment with Box spaces, by id or by name (`m3pc.core.env_ids`).

    `kwargs` go to gymnasium.make and override arguments in the name.
    """
    plain, arguments = split_env_name(env_id)
    try:
        env = gymnasium.make(plain, **arguments | kwargs)
    except InputError:  # our own environments say what to do
        raise
    except Exception as error:  # an environment is foreign code: it may raise anything
        raise InputError(_cannot_make(env_id, error)) from error
    try:
        return _unit_actions(_flat_states(env, env_id), env_id)
    except InputError:
        env.close()  # type: ignore[no-untyped-call]  # gymnasium leaves it without types
        raise


def make_vector(
    env_id: str, count: int, *, processes: bool = False, **kwargs: Any
) -> FloatVectorEnv:
    """`count` environments that step together, in this process or in one process each.

    No environment resets itself. reset(seed=[an int or None for each],
    options={"reset_mask": bool [count]}) resets the environments in the mask only.
    """
    if count < 1:
        raise InputError(f"{count} environments were asked for; give a count of 1 or more")
    makers = [partial(make, env_id, **kwargs)] * count
    envs: AsyncVectorEnv | SyncVectorEnv
    try:
        if processes:  # spawned: threads (torch, Ray) and GL contexts do not survive a fork
            envs = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED, context="spawn")
        else:
            envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    except (EOFError, ConnectionError) as error:  # this process could make it, a child could not
        raise InputError(
            f"environment {env_id!r} can be made in this process but not in another; "
            "give the module that registers it as well, as in 'module:Name-v0'"
        ) from error
    envs.spec = envs.get_attr("spec")[0]
    return envs


def step_limit(env: Env | FloatVectorEnv) -> int:
    """The number of steps after which the environment truncates an episode."""
    limit = env.spec.max_episode_steps if env.spec else None
    if limit is None:
        raise InputError(
            f"{env} has no limit of steps per episode, which returns and windows need; "
            "give one with max_episode_steps=H"
        )
    return limit


def env_sizes(env: Env | FloatVectorEnv) -> tuple[int, int]:
    """S and A: the sizes of one environment's state and action."""
    spaces = (
        (env.single_observation_space, env.single_action_space)
        if isinstance(env, VectorEnv)
        else (env.observation_space, env.action_space)
    )
    shapes = [space.shape or () for space in spaces]
    assert all(len(shape) == 1 for shape in shapes), f"{env} has shapes {shapes}"
    return shapes[0][0], shapes[1][0]


def engine(env: Env) -> str:
    """Name and version of the simulator; belongs beside every score."""
    import mujoco

    own = getattr(env.unwrapped, "engine", None)
    if isinstance(own, str):
        return own
    if isinstance(getattr(env.unwrapped, "model", None), mujoco.MjModel):
        return f"mujoco {mujoco.__version__}"
    return f"gymnasium {gymnasium.__version__}"


def _cannot_make(env_id: str, error: Exception) -> str:
    advice = next(advice for types, advice in ADVICE if isinstance(error, types))
    plain, _ = split_env_name(env_id)
    known = [name for name in gymnasium.registry if name != plain]
    close = difflib.get_close_matches(plain, known, n=4)
    hint = f" (close to it: {', '.join(close)})" if close else ""
    return f"environment {env_id!r} cannot be made: {str(error).rstrip('.')}. {advice}{hint}."


def _flat_states(env: Env, env_id: str) -> Env:
    space = env.observation_space
    if not isinstance(space, Box):
        raise InputError(_misfit(env_id, "observations", space, "a Box"))
    return env if len(space.shape) == 1 else FlattenObservation(env)


def _unit_actions(env: Env, env_id: str) -> Env:
    space = env.action_space
    if not (
        isinstance(space, Box)
        and len(space.shape) == 1
        and np.issubdtype(space.dtype, np.floating)
        and np.isfinite([space.low, space.high]).all()
        and (space.low < space.high).all()
    ):
        expected = "a one-dimensional Box of floats with finite bounds, low < high"
        raise InputError(_misfit(env_id, "actions", space, expected))
    if (space.low == -1).all() and (space.high == 1).all():
        return env
    # Rescaling rounds: without the clip, -1 and 1 would land just outside many bounds.
    clipped = TransformAction(env, partial(np.clip, a_min=space.low, a_max=space.high), space)
    bound = np.ones_like(space.high)
    return RescaleAction(clipped, -bound, bound)


def _misfit(env_id: str, what: str, space: Space[Any], expected: str) -> str:
    return (
        f"environment {env_id!r} has {what} in {space}; expected {expected}. "
        "Choose another environment, or register a wrapped one that fits."
    )
