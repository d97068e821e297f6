"""Small foreign data sets with known contents: D4RL, robomimic, Minari, a policy; and a store.

S, A sizes of state and action, n rows.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from m3pc.types import Episode
from replay.format.manifest import Header
from replay.store.store import write_store

STATES, ACTIONS = 3, 2  # S, A of everything here
LENGTHS = (5, 7, 4)  # steps of the D4RL file's episodes: terminated, timed out, cut
HORIZON = 7  # so the second one ran into it
PARTS = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 10}
Columns = dict[str, NDArray[Any]]


def transitions(rng: np.random.Generator) -> Columns:
    """D4RL's v2 columns: three episodes that end in the three ways there are."""
    rows = sum(LENGTHS)
    ends = np.cumsum(LENGTHS) - 1
    walks = [rng.standard_normal((length + 1, STATES)).astype(np.float32) for length in LENGTHS]
    terminals, timeouts = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    terminals[ends[0]] = timeouts[ends[1]] = True
    return {
        "observations": np.concatenate([walk[:-1] for walk in walks]),
        "next_observations": np.concatenate([walk[1:] for walk in walks]),
        "actions": rng.uniform(-1, 1, (rows, ACTIONS)).astype(np.float32),
        "rewards": rng.standard_normal(rows).astype(np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def as_v1(columns: Columns) -> Columns:
    """v1 of the replay files: all float64, rewards [n, 1]."""
    wide = {name: column.astype(np.float64) for name, column in columns.items()}
    return wide | {"rewards": wide["rewards"][:, None]}


def as_v0(columns: Columns) -> Columns:
    """v0: neither time-outs nor successors."""
    return {k: v for k, v in columns.items() if k not in ("timeouts", "next_observations")}


def write_hdf5(path: Path, columns: Mapping[str, NDArray[Any]], **storage: Any) -> Path:
    """`storage` as h5py takes it: chunks, compression and the like."""
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column, **storage)
    return path


def demonstration(rng: np.random.Generator, length: int, *, done: bool) -> Columns:
    """robomimic's columns of one demonstration, with next_obs."""
    walks = {name: rng.standard_normal((length + 1, size)) for name, size in PARTS.items()}
    dones = np.zeros(length, np.int64)
    dones[-1] = done
    return {
        **{f"obs/{name}": walk[:-1] for name, walk in walks.items()},
        **{f"next_obs/{name}": walk[1:] for name, walk in walks.items()},
        "actions": rng.uniform(-1, 1, (length, ACTIONS)),
        "rewards": dones.astype(np.float64),
        "dones": dones,
    }


def without_successors(demo: Columns) -> Columns:
    return {name: column for name, column in demo.items() if not name.startswith("next_obs/")}


def write_robomimic(path: Path, demos: Sequence[Columns], env_name: str | None = "Lift") -> Path:
    """demo_1, demo_2, ... as robomimic numbers them."""
    named = {f"data/demo_{i}/{k}": v for i, demo in enumerate(demos, 1) for k, v in demo.items()}
    write_hdf5(path, named)
    if env_name is not None:
        with h5py.File(path, "a") as file:
            file["data"].attrs["env_args"] = json.dumps({"env_name": env_name, "type": 1})
    return path


def write_minari(
    folder: Path, episodes: Sequence[Mapping[str, Any]], bound: float = 2.0, **extra: Any
) -> Path:
    """Written by Minari itself under `folder`, whose `toy/pendulum-v0` this gives back.

    An episode is a mapping of observations, actions, rewards, terminations, truncations.
    """
    import minari
    from gymnasium.spaces import Box
    from minari.data_collector import EpisodeBuffer

    settings = {
        "observation_space": Box(-np.inf, np.inf, (STATES,), np.float32),
        "action_space": Box(-bound, bound, (1,), np.float32),
        **extra,
    }
    buffers = [EpisodeBuffer(id=i, **episode) for i, episode in enumerate(episodes)]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        warnings.simplefilter("ignore")  # it would like authors and descriptions
        minari.create_dataset_from_buffers("toy/pendulum-v0", buffers, **settings)
    return folder / "toy" / "pendulum-v0"


def swing(rng: np.random.Generator, length: int, *, ended: str) -> dict[str, Any]:
    """An episode for `write_minari`, actions in [-2, 2]; `ended`: terminated, truncated or cut."""
    flags = {name: np.zeros(length, np.bool_) for name in ("terminations", "truncations")}
    if ended != "cut":
        flags["terminations" if ended == "terminated" else "truncations"][-1] = True
    return {
        "observations": rng.standard_normal((length + 1, STATES)).astype(np.float32),
        "actions": rng.uniform(-2, 2, (length, 1)).astype(np.float32),
        "rewards": rng.standard_normal(length),
        **flags,
    }


def policy(rng: np.random.Generator, hidden: int = 8) -> dict[str, NDArray[Any]]:
    """A behaviour policy's arrays as DOPE stores them, of Hopper's sizes."""
    shapes = {"fc0": (hidden, 11), "fc1": (hidden, hidden)}
    shapes |= {name: (3, hidden) for name in ("last_fc", "last_fc_log_std")}
    weights = {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    biases = {f"{name}.bias": rng.standard_normal(shape[:1]) for name, shape in shapes.items()}
    return {name: values.astype(np.float32) for name, values in (weights | biases).items()}


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its stub takes `allow_pickle` for an array
    return path


def episode(rng: np.random.Generator, length: int, **flags: bool) -> Episode:
    return Episode(
        states=rng.standard_normal((length + 1, STATES)).astype(np.float32),
        actions=rng.uniform(-1, 1, (length, ACTIONS)).astype(np.float32),
        rewards=rng.standard_normal(length).astype(np.float32),
        **{"terminated": False, "truncated": False, **flags},
    )


def write_small_store(path: Path, rng: np.random.Generator, name: str = "toy") -> Path:
    """Two segments of two episodes each."""
    header = Header(
        states=STATES,
        actions=ACTIONS,
        max_episode_steps=10,
        env=None,
        source={"kind": "test", "name": name},
    )
    endings: tuple[dict[str, bool], ...] = (
        {"terminated": True},
        {"truncated": True},
        {},
        {"terminated": True},
    )
    with write_store(path, header, segment_bytes=300) as writer:
        for length, flags in zip((6, 8, 7, 6), endings, strict=True):
            writer.append(episode(rng, length, **flags))
    return path


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """`folder` holds the same names after the block as before it."""
    before = sorted(folder.iterdir())
    yield
    assert sorted(folder.iterdir()) == before
