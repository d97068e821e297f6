"""Writes a Minari dataset with Minari's own library."""

import json
import re
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box

from m3pc.core.env_ids import split_env_name
from m3pc.types import Episode

STEP_LIMIT = "step_limit"  # metadata key, needed if the environment has no specification


@dataclass(frozen=True, slots=True, kw_only=True)
class MinariContent:
    name: str  # the dataset's id is made from it
    state_size: int  # S
    action_size: int  # A
    max_episode_steps: int  # H
    env: str | None  # the environment's name
    source: dict[str, Any]  # provenance, for the description
    episodes: Iterator[Episode]


def write_minari(folder: Path, content: MinariContent) -> None:
    """Write `folder`/data with one episode in memory at a time. Actions stay in [-1, 1]."""
    import minari
    from minari.dataset.minari_storage import MinariStorage

    folder = folder.absolute()  # Minari would apply a relative path twice
    folder.mkdir(exist_ok=True)
    action_bound = np.ones(content.action_size, np.float32)
    state_bound = np.full(content.state_size, np.inf, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing authors and descriptions
        storage = MinariStorage.new(
            folder / "data",
            observation_space=Box(-state_bound, state_bound),
            action_space=Box(-action_bound, action_bound),
            env_spec=_env_spec(content.env, content.max_episode_steps),
            data_format="hdf5",
        )
        storage.update_metadata(
            {
                "dataset_id": dataset_id(content.name),
                "minari_version": minari.__version__,
                "description": "Exported by m3pc; actions are mapped to [-1, 1]. "
                f"Source: {json.dumps(content.source)}",
                STEP_LIMIT: content.max_episode_steps,
            }
        )
        storage.update_episodes(map(_buffer, content.episodes))


def dataset_id(name: str) -> str:
    """An id that Minari accepts; the name itself where it is one, such as hopper-v0."""
    plain = re.sub(r"[^-\w]", "-", name).strip("-") or "store"
    return plain if re.search(r".-v[0-9]+$", plain) else f"{plain}-v0"


def _buffer(episode: Episode) -> Any:
    from minari.data_collector import EpisodeBuffer

    ends = np.zeros((2, len(episode)), np.bool_)
    ends[:, -1] = episode.terminated, episode.truncated
    return EpisodeBuffer(
        seed=episode.seed if episode.seed >= 0 else None,
        observations=episode.states,
        actions=episode.actions,
        rewards=episode.rewards,
        terminations=ends[0],
        truncations=ends[1],
    )


def _env_spec(env: str | None, max_episode_steps: int) -> EnvSpec | None:
    """Return the registered specification, else one with the id only; None if neither works."""
    env_id, arguments = split_env_name(env) if env else ("", {})
    if not env_id or ":" in env_id:
        return None
    try:
        known = gymnasium.registry.get(env_id)
        spec = deepcopy(known) if known else EnvSpec(env_id)
        spec.kwargs |= arguments
        spec.max_episode_steps = max_episode_steps
        spec.to_json()
    except (gymnasium.error.Error, TypeError, ValueError):  # not an id, or contains code
        return None
    return spec
