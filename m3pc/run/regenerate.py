"""A data set made anew from the policy that once recorded it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import m3pc.envs
from actors.policy import Linear, TanhGaussian
from m3pc.datasets import behaviour
from m3pc.datasets.d4rl import robot
from m3pc.datasets.download import locate
from m3pc.datasets.sandbox import Limits, run_limited
from m3pc.files import sha256
from m3pc.run.collect import collect
from m3pc.types import InputError
from replay.manifest import Header
from replay.store import Store, write_store


def regenerate(
    source: str,
    out: Path,
    *,
    steps: int,
    seed: int,
    env_id: str | None,
    limits: Limits,
    on_progress: Callable[[dict[str, Any]], None],
    workers: int | None = None,
) -> Store:
    """Roll out the behaviour policy in a file or dataset for `steps` steps, in whole episodes."""
    found = locate(source, on_progress)
    if not found.path.is_file():
        raise InputError(f"{source} is not a file; give a D4RL .hdf5 or a DOPE .npz with a policy")
    env_id = env_id or robot(found.name)
    if env_id is None:
        raise InputError(
            f"{found.name} does not say which robot it is for; give --env, such as d4rl/Hopper-v2"
        )
    policy = load_policy(found.path, limits)
    expected = ((policy.hidden[0].weight.shape[1],), policy.mean.bias.shape)
    with m3pc.envs.make(env_id) as env:
        sizes = (env.observation_space.shape, env.action_space.shape)
        if sizes != expected:
            raise InputError(
                f"{env_id} has states and actions of {sizes}, the policy in {found.name} {expected}"
            )
        header = Header(
            states=expected[0][0],
            actions=expected[1][0],
            horizon=m3pc.envs.step_limit(env),
            env=env_id,
            source={
                "kind": "regenerated",
                "name": found.name,
                "sha256": sha256(found.path),
                "steps": steps,
                "seed": seed,
                "engine": m3pc.envs.engine(env),
            },
        )
    with write_store(out, header) as writer:
        for episode in collect(env_id, policy, steps=steps, seed=seed, workers=workers):
            writer.append(episode)
            on_progress({"steps": writer.steps, "of": steps, "episodes": writer.episodes})
    return Store(out)


def load_policy(file: Path, limits: Limits) -> TanhGaussian:
    with tempfile.TemporaryDirectory() as folder:
        arrays_file = Path(folder) / "policy.npz"
        job = {"path": str(file), "out": str(arrays_file)}
        run_limited("m3pc.datasets.behaviour", job, limits, lambda progress: None)
        arrays = behaviour.load(arrays_file)
    hidden = sum(key.startswith("fc") for key in arrays) // 2

    def layer(name: str) -> Linear:
        return Linear(weight=arrays[f"{name}.weight"], bias=arrays[f"{name}.bias"])

    return TanhGaussian(
        hidden=tuple(layer(f"fc{i}") for i in range(hidden)),
        mean=layer("last_fc"),
        log_std=layer("last_fc_log_std"),
    )
