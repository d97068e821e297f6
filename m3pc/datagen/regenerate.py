"""`m3pc data regenerate`: roll out the behaviour policy that recorded a data set, or several."""

import tempfile
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

import m3pc.envs
from actors.single_env import RoundRobin
from m3pc.core.env_ids import split_env_name
from m3pc.core.files import sha256
from m3pc.core.manipulation_tasks import TASKS
from m3pc.core.progress import OnProgress
from m3pc.datagen.collect import collect, header_of
from m3pc.datagen.policies.networks import AdaptedPolicy, Linear, RegressionPolicy, TanhGaussian
from m3pc.datasets import behaviour
from m3pc.datasets.d4rl import env_in_name
from m3pc.datasets.download import LocatedSource, locate
from m3pc.datasets.sandbox import SandboxLimits, run_limited
from m3pc.types import InputError
from replay.store.store import Store, write_store

SIZES = {"eef_pos": 3, "eef_quat": 4, "gripper_qpos": 2}  # per observation; the object has the rest


def regenerate(
    source: str,
    out: Path,
    *,
    steps: int,
    seed: int,
    env_id: str | None,
    limits: SandboxLimits,
    on_progress: OnProgress,
    also: Sequence[str] = (),
    still: bool = False,
    order: Sequence[str] = (),
    noise: float = 0.0,
    workers: int | None = None,
) -> Store:
    """Roll out the policy in a file or data set until `steps` is reached; complete the episode.

    also   more policies, which take turns with the first, an episode each
    still  a policy of zero actions takes turns, too
    order  the order of observations in the policies' training, where the environment's differs
    noise  standard deviation of the noise on each number of an action
    """
    files = [_policy_file(name, on_progress) for name in (source, *also)]
    env_id = env_id or env_in_name(files[0].name)
    if env_id is None:
        raise InputError(
            f"{files[0].name} does not say which robot it is for; give --env, such as "
            "d4rl/Hopper-v2"
        )
    state_columns = columns(env_id, order) if order else None
    networks = [load_policy(file.path, limits) for file in files]
    about = {
        "kind": "regenerated",
        "name": files[0].name,
        "sha256": sha256(files[0].path),
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
    policies = [AdaptedPolicy(policy=x, columns=state_columns, noise=noise) for x in networks]
    if still:
        zeros = zero_policy(header.states, header.actions)
        policies.append(AdaptedPolicy(policy=zeros, noise=noise))
    schedule = RoundRobin(tuple(policies))
    with write_store(out, header) as writer:
        for episode in collect(env_id, schedule, steps=steps, seed=seed, workers=workers):
            writer.append(episode)
            on_progress({"steps": writer.steps, "of": steps, "episodes": writer.episodes})
    return Store(out)


def _policy_file(source: str, on_progress: OnProgress) -> LocatedSource:
    file = locate(source, on_progress)
    if not file.path.is_file():
        raise InputError(f"{source} is not a file; give a D4RL .hdf5 or a DOPE .npz with a policy")
    return file


def columns(env_id: str, order: Sequence[str]) -> tuple[int, ...]:
    """The columns of an environment's states that hold the observations, in this order."""
    plain, _ = split_env_name(env_id)
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
        size, _ = m3pc.envs.env_sizes(env)
    ends = [*accumulate(SIZES[key] for key in keys[:-1]), size]
    bounds = dict(zip(keys, pairwise([0, *ends]), strict=True))
    return tuple(column for key in order for column in range(*bounds[key]))


def zero_policy(states: int, actions: int) -> RegressionPolicy:
    """The policy whose actions are all 0."""
    weight, bias = np.zeros((actions, states), np.float32), np.zeros(actions, np.float32)
    return RegressionPolicy(hidden=(), mean=Linear(weight=weight, bias=bias))


def load_policy(file: Path, limits: SandboxLimits) -> TanhGaussian | RegressionPolicy:
    """Read a policy's network from a foreign file, in the sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        arrays_file = Path(folder) / "policy.npz"
        job = {"path": str(file), "out": str(arrays_file)}
        run_limited("m3pc.datasets.behaviour", job, limits, lambda progress: None)
        arrays = behaviour.load_checked(arrays_file)
    hidden, (mean, *log_std) = (
        tuple(Linear(weight=arrays[weight], bias=arrays[bias]) for weight, bias in layers)
        for layers in behaviour.layer_names(arrays)
    )
    if log_std:
        return TanhGaussian(hidden=hidden, mean=mean, log_std=log_std[0])
    return RegressionPolicy(hidden=hidden, mean=mean)
