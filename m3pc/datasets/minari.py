"""Minari data sets, read by Minari itself. L steps, S, A sizes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from m3pc.datasets.hdf5 import NUMBERS, open_hdf5, refuse_links, to_float32
from m3pc.datasets.minari_writer import STEP_LIMIT
from m3pc.datasets.source import EpisodeSource, ImportOptions
from m3pc.types import Episode, Floats, InputError


def is_minari(folder: Path) -> bool:
    return (folder / "data" / "metadata.json").is_file()


def read_minari(folder: Path, options: ImportOptions) -> EpisodeSource:
    import minari

    _refuse_missing_spaces(folder / "data" / "metadata.json")
    for path in sorted((folder / "data").rglob("*.hdf5")):
        with open_hdf5(path) as file:
            refuse_links(file)
    try:
        found = minari.MinariDataset(folder / "data")
        sample = found[0]
    except Exception as error:  # Minari raises whatever its storage back-ends raise
        raise InputError(f"{folder.name} is not readable as a Minari data set: {error}") from error
    bounds = _bounds(found.spec.action_space)
    spec = found.env_spec
    limit = options.max_episode_steps or (spec.max_episode_steps if spec else None)
    limit = limit or found.storage.metadata.get(STEP_LIMIT)  # of a set that m3pc wrote
    if limit is None:
        raise InputError(f"{folder.name} does not say its step limit; give --horizon")
    if spec and ":" in spec.id:
        raise InputError(
            f"its environment {spec.id!r} would load a module; only plain ids are kept"
        )
    states = _join(sample.observations, options.keys)
    return EpisodeSource(
        kind="minari",
        states=states.shape[1],
        actions=len(bounds[0]),
        max_episode_steps=limit,
        env=options.env or (spec.id if spec else None),
        details={"id": found.spec.dataset_id, "episodes": int(found.total_episodes)},
        episodes=_episodes(found, options.keys, bounds),
    )


def _refuse_missing_spaces(metadata: Path) -> None:
    """For a space that it does not find, Minari would run whatever code `env_spec` names."""
    try:
        found = json.loads(metadata.read_bytes())
        spaces = [found["observation_space"], found["action_space"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{metadata.name} is not JSON with observation_space and action_space "
            f"({type(error).__name__}: {error}); without both the data is not read"
        ) from None
    if not all(isinstance(space, str) for space in spaces):
        raise InputError(f"{metadata.name} gives spaces that are not text; the data is not read")


def _episodes(
    found: Any, keys: tuple[str, ...], bounds: tuple[Floats, Floats]
) -> Iterator[Episode]:
    low, high = bounds
    centre, reach = to_float32((low + high) / 2), to_float32((high - low) / 2)
    for episode in found.iterate_episodes():
        actions = np.asarray(episode.actions, dtype=np.float32).reshape(len(episode.rewards), -1)
        if actions.shape[1] != len(low):
            raise InputError(
                f"episode {episode.id} has actions of width {actions.shape[1]}, "
                f"its space {len(low)}"
            )
        yield Episode(
            states=_join(episode.observations, keys),
            actions=(actions - centre) / reach,  # in this order, bounds of +-1 change no bit
            rewards=np.asarray(episode.rewards, dtype=np.float32),
            terminated=bool(episode.terminations[-1]),
            truncated=bool(episode.truncations[-1] and not episode.terminations[-1]),
        )


def _join(observations: Any, keys: tuple[str, ...]) -> Floats:
    """[L + 1, S], one array or the chosen entries of a dictionary side by side."""
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
    if array.dtype.kind not in NUMBERS:
        raise InputError(f"observations are {array.dtype}, expected numbers")
    return to_float32(array).reshape(len(array), -1)


def _bounds(space: gymnasium.Space[Any]) -> tuple[Floats, Floats]:
    if not isinstance(space, gymnasium.spaces.Box) or not space.is_bounded():
        raise InputError(f"actions are in {space}; expected a Box with finite bounds")
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    return low.astype(np.float32), high.astype(np.float32)
