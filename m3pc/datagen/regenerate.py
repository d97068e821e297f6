"""A data set made anew from the policy that once recorded it, or from several."""

import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

import m3pc.envs
from actors.single_env import RoundRobin
from m3pc.core.env_ids import parted
from m3pc.core.files import sha256
from m3pc.core.manipulation_tasks import TASKS
from m3pc.datagen.collect import header_of, played
from m3pc.datagen.policies.networks import AdaptedPolicy, Linear, RegressionPolicy, TanhGaussian
from m3pc.datasets import behaviour
from m3pc.datasets.d4rl import robot
from m3pc.datasets.download import LocatedSource, locate
from m3pc.datasets.sandbox import SandboxLimits, run_limited
from m3pc.types import InputError
from replay.store.store import Store, write_store

WIDTHS = {"eef_pos": 3, "eef_quat": 4, "gripper_qpos": 2}  # numbers of each; an object has the rest


def regenerate(
    source: str,
    out: Path,
    *,
    steps: int,
    seed: int,
    env_id: str | None,
    limits: SandboxLimits,
    on_progress: Callable[[dict[str, Any]], None],
    also: Sequence[str] = (),
    still: bool = False,
    order: Sequence[str] = (),
    noise: float = 0.0,
    workers: int | None = None,
) -> Store:
    """Roll out the behaviour policy in a file or dataset for `steps` steps, in whole episodes.

    Those in `also` take turns with it, and so does one that does nothing, if `still`. `order` is
    that of the observations which the policies were trained on, where it is another than the
    environment's; `noise` is added to their actions.
    """
    files = [_policy_file(name, on_progress) for name in (source, *also)]
    first = files[0]
    env_id = env_id or robot(first.name)
    if env_id is None:
        raise InputError(
            f"{first.name} does not say which robot it is for; give --env, such as d4rl/Hopper-v2"
        )
    places = columns(env_id, order) if order else None
    networks = [load_policy(file.path, limits) for file in files]
    about = {
        "kind": "regenerated",
        "name": first.name,
        "sha256": sha256(first.path),
        **({"also": {file.name: sha256(file.path) for file in files[1:]}} if also else {}),
        **({"still": True} if still else {}),
        "steps": steps,
        "seed": seed,
        **({"order": list(order)} if order else {}),
        **({"noise": noise} if noise else {}),
    }
    header = header_of(env_id, about)
    sizes = (header.states,), (header.actions,)
    for file, network in zip(files, networks, strict=True):
        expected = ((network.hidden[0].weight.shape[1],), network.mean.bias.shape)
        if sizes != expected:
            raise InputError(
                f"{env_id} has states and actions of {sizes}, the policy in {file.name} {expected}"
            )
    policies = [AdaptedPolicy(policy=network, columns=places, noise=noise) for network in networks]
    if still:
        policies.append(AdaptedPolicy(policy=nothing(header.states, header.actions), noise=noise))
    cast = RoundRobin(tuple(policies))
    with write_store(out, header) as writer:
        for episode in played(env_id, cast, steps=steps, seed=seed, workers=workers):
            writer.append(episode)
            on_progress({"steps": writer.steps, "of": steps, "episodes": writer.episodes})
    return Store(out)


def _policy_file(source: str, on_progress: Callable[[dict[str, Any]], None]) -> LocatedSource:
    found = locate(source, on_progress)
    if not found.path.is_file():
        raise InputError(f"{source} is not a file; give a D4RL .hdf5 or a DOPE .npz with a policy")
    return found


def columns(env_id: str, order: Sequence[str]) -> tuple[int, ...]:
    """Where in an environment's states those observations stand, in that order."""
    plain, _ = parted(env_id)
    if plain not in TASKS:
        raise InputError(
            f"--order was given, but the states of {plain} are not joined from observations; "
            f"leave it out, or give one of {', '.join(TASKS)}"
        )
    keys = TASKS[plain].keys
    if sorted(order) != sorted(keys):
        raise InputError(
            f"--order is {','.join(order)}; expected {','.join(keys)}, in the policy's order"
        )
    with m3pc.envs.make(env_id) as env:
        assert env.observation_space.shape
        size = env.observation_space.shape[0]
    ends = [*accumulate(WIDTHS[key] for key in keys[:-1]), size]
    parts = dict(zip(keys, pairwise([0, *ends]), strict=True))
    return tuple(column for key in order for column in range(*parts[key]))


def nothing(states: int, actions: int) -> RegressionPolicy:
    """The policy whose actions are all 0."""
    weight, bias = np.zeros((actions, states), np.float32), np.zeros(actions, np.float32)
    return RegressionPolicy(hidden=(), mean=Linear(weight=weight, bias=bias))


def load_policy(file: Path, limits: SandboxLimits) -> TanhGaussian | RegressionPolicy:
    with tempfile.TemporaryDirectory() as folder:
        arrays_file = Path(folder) / "policy.npz"
        job = {"path": str(file), "out": str(arrays_file)}
        run_limited("m3pc.datasets.behaviour", job, limits, lambda progress: None)
        arrays = behaviour.load(arrays_file)
    hidden, (mean, *log_std) = (
        tuple(Linear(weight=arrays[weight], bias=arrays[bias]) for weight, bias in part)
        for part in behaviour.layers(arrays)
    )
    if log_std:
        return TanhGaussian(hidden=hidden, mean=mean, log_std=log_std[0])
    return RegressionPolicy(hidden=hidden, mean=mean)
