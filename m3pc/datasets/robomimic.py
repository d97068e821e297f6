"""robomimic's HDF5: one group a demonstration, observations by name. L steps, S, A sizes."""

import json
import re
from collections.abc import Sequence

import h5py
import numpy as np

from m3pc.datasets.hdf5 import flags, matrix, members, subgroup, to_float32, vector
from m3pc.datasets.source import Options, Source
from m3pc.types import Episode, Floats, InputError

KEYS = ("eef_pos", "eef_quat", "gripper_qpos", "object")  # `robot0_` may be left out
HORIZON = 400  # robomimic's own for its lift and can data


def is_robomimic(file: h5py.File) -> bool:
    return (
        "data" in members(file)
        and isinstance(file["data"], h5py.Group)
        and any(name.startswith("demo_") for name in file["data"])
    )


def read_robomimic(file: h5py.File, options: Options) -> Source:
    data = subgroup(file, "data")
    demos = sorted(
        (name for name in members(data) if re.fullmatch(r"demo_\d+", name)),
        key=lambda name: int(name.removeprefix("demo_")),
    )
    if not demos:
        raise InputError(f"{data.name} has no demo_0, demo_1, ...; found {members(data)[:12]}")
    keys, horizon = options.keys or KEYS, options.horizon or HORIZON
    first = _episode(subgroup(data, demos[0]), keys, horizon)
    return Source(
        kind="robomimic",
        states=first.states.shape[1],
        actions=first.actions.shape[1],
        horizon=horizon,
        env=options.env or _environment(data),
        details={
            "keys": list(keys),
            "demonstrations": len(demos),
            "horizon": "given" if options.horizon else "assumed",
        },
        episodes=(_episode(subgroup(data, name), keys, horizon) for name in demos),
    )


def _episode(demo: h5py.Group, keys: Sequence[str], horizon: int) -> Episode:
    """All stored steps. Without `next_obs` the last is left out, unless the task ended there."""
    states = _observations(subgroup(demo, "obs"), keys)
    actions, rewards = matrix(demo, "actions"), to_float32(vector(demo, "rewards"))
    done = flags(demo, "dones")
    lengths = [len(states), len(actions), len(rewards), len(done)]
    if len(set(lengths)) > 1:
        raise InputError(
            f"{demo.name} has {lengths} rows of obs, actions, rewards, dones; expected one length"
        )
    if "next_obs" in members(demo):
        successors = _observations(subgroup(demo, "next_obs"), keys)
        if successors.shape != states.shape:
            raise InputError(
                f"{demo.name} has obs of shape {list(states.shape)}, "
                f"next_obs of {list(successors.shape)}; expected one shape"
            )
        final = successors[-1:]
    elif done[-1]:
        final = states[-1:]  # unknown, and never looked at: nothing follows a terminal
    else:
        final = states[:0]  # the last state is known, the step from it is not
        actions, rewards = actions[:-1], rewards[:-1]
    return Episode(
        states=np.concatenate([states, final]),
        actions=actions,
        rewards=rewards,
        terminated=bool(done[-1]),
        truncated=bool(not done[-1] and len(done) == horizon),  # else somebody stopped recording
    )


def _observations(group: h5py.Group, keys: Sequence[str]) -> Floats:
    present = members(group)
    names = [key if key in present else f"robot0_{key}" for key in keys]
    missing = [key for key, name in zip(keys, names, strict=True) if name not in present]
    if missing:
        raise InputError(
            f"{group.name} lacks the observations {missing}; choose with --keys from {present}"
        )
    parts = [matrix(group, name) for name in names]
    if len({len(part) for part in parts}) > 1:
        lengths = [len(part) for part in parts]
        raise InputError(f"{group.name} has observations of different lengths: {lengths}")
    return np.concatenate(parts, axis=1)


def _environment(data: h5py.Group) -> str | None:
    """`env_args` is JSON text that names the robosuite task."""
    text = data.attrs.get("env_args")
    if not isinstance(text, str):
        return None
    try:
        name = json.loads(text)["env_name"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{data.name} has env_args that are not JSON with an env_name") from None
    return f"robosuite/{name}"
