"""Reads Minari datasets with Minari's own library. L steps, S state size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from m3pc.datasets.hdf5 import NUMBER_KINDS, open_hdf5, refuse_links, to_float32
from m3pc.datasets.minari_writer import STEP_LIMIT
from m3pc.datasets.source import EpisodeSource, ImportOptions
from m3pc.types import Episode, Floats, InputError


def is_minari(folder: Path) -> bool:
    return (folder / "data" / "metadata.json").is_file()


def read_minari(folder: Path, options: ImportOptions) -> EpisodeSource:
    """Read a dataset, after checking that nothing in its files makes Minari run code."""
    import minari

    _refuse_missing_spaces(folder / "data" / "metadata.json")
    for path in sorted((folder / "data").rglob("*.hdf5")):
        with open_hdf5(path) as file:
            refuse_links(file)
    try:
        dataset = minari.MinariDataset(folder / "data")
        sample = dataset[0]
    except Exception as error:  # Minari raises whatever its storage back-ends raise
        raise InputError(f"{folder.name} is not readable as a Minari dataset: {error}") from error
    bounds = _bounds(dataset.spec.action_space)
    spec = dataset.env_spec
    limit = options.max_episode_steps or (spec.max_episode_steps if spec else None)
    limit = limit or dataset.storage.metadata.get(STEP_LIMIT)  # m3pc's own exports have it
    if limit is None:
        raise InputError(f"{folder.name} does not say its step limit; give --horizon")
    if spec and ":" in spec.id:
        raise InputError(
            f"its environment {spec.id!r} would load a module; only plain ids are accepted"
        )
    states = _join(sample.observations, options.keys)
    return EpisodeSource(
        kind="minari",
        state_size=states.shape[1],
        action_size=len(bounds[0]),
        max_episode_steps=limit,
        env=options.env or (spec.id if spec else None),
        details={"id": dataset.spec.dataset_id, "episodes": int(dataset.total_episodes)},
        episodes=_episodes(dataset, options.keys, bounds),
    )


def _refuse_missing_spaces(metadata: Path) -> None:
    """If a space is missing, Minari would run the code that `env_spec` names."""
    try:
        tree = json.loads(metadata.read_bytes())
        spaces = [tree["observation_space"], tree["action_space"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{metadata.name} is not JSON with observation_space and action_space "
            f"({type(error).__name__}: {error}); a dataset without them is not read"
        ) from None
    if not all(isinstance(space, str) for space in spaces):
        raise InputError(
            f"{metadata.name} has spaces that are not text; such a dataset is not read"
        )


def _episodes(
    dataset: Any, keys: tuple[str, ...], bounds: tuple[Floats, Floats]
) -> Iterator[Episode]:
    low, high = bounds
    centre, half_range = to_float32((low + high) / 2), to_float32((high - low) / 2)
    for episode in dataset.iterate_episodes():
        actions = np.asarray(episode.actions, dtype=np.float32).reshape(len(episode.rewards), -1)
        if actions.shape[1] != len(low):
            raise InputError(
                f"episode {episode.id} has actions of width {actions.shape[1]}, "
                f"its space {len(low)}"
            )
        yield Episode(
            states=_join(episode.observations, keys),
            actions=(actions - centre) / half_range,  # in this order, bounds of +-1 change no bit
            rewards=np.asarray(episode.rewards, dtype=np.float32),
            terminated=bool(episode.terminations[-1]),
            truncated=bool(episode.truncations[-1] and not episode.terminations[-1]),
        )


def _join(observations: Any, keys: tuple[str, ...]) -> Floats:
    """States [L + 1, S] from one array, or from the chosen entries of a dictionary."""
    if isinstance(observations, dict):
        if not keys:
            raise InputError(
                f"observations have several parts; choose with --keys from {sorted(observations)}"
            )
        missing = [key for key in keys if key not in observations]
        if missing:
            raise InputError(
                f"there are no observations {missing}; "
                f"choose with --keys from {sorted(observations)}"
            )
        return np.concatenate([_flat(observations[key]) for key in keys], axis=1)
    if keys:
        raise InputError(f"observations have one part, so --keys {','.join(keys)} cannot be chosen")
    return _flat(observations)


def _flat(values: Any) -> Floats:
    array = np.asarray(values)
    if array.dtype.kind not in NUMBER_KINDS:
        raise InputError(f"observations are {array.dtype}, expected numbers")
    return to_float32(array).reshape(len(array), -1)


def _bounds(space: gymnasium.Space[Any]) -> tuple[Floats, Floats]:
    if not isinstance(space, gymnasium.spaces.Box) or not space.is_bounded():
        raise InputError(f"actions are in {space}; expected a Box with finite bounds")
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    return low.astype(np.float32), high.astype(np.float32)
