"""D4RL's HDF5: n transitions laid end to end, in the layouts of v0 to v2."""

import re
from collections.abc import Iterator

import h5py
import numpy as np
from numpy.typing import NDArray

from m3pc.datasets.hdf5 import flags, matrix, members, to_float32, vector
from m3pc.datasets.source import EpisodeSource, ImportOptions
from m3pc.types import Episode, Floats, InputError

HORIZON = 1000  # step limit of the locomotion tasks
JUMP = 1e-5  # a successor further than this part from the next row's state: another episode
ROBOTS = {
    "hopper": "d4rl/Hopper-v2",
    "walker": "d4rl/Walker2d-v2",
    "halfcheetah": "d4rl/HalfCheetah-v2",
}
Flags = NDArray[np.bool_]


def is_d4rl(file: h5py.File) -> bool:
    return {"observations", "actions", "rewards", "terminals"} <= set(file)


def read_d4rl(file: h5py.File, name: str, options: ImportOptions) -> EpisodeSource:
    """Episodes end at terminals, at time-outs, where states jump, and at the end of the file."""
    present = members(file)
    states, actions = matrix(file, "observations"), matrix(file, "actions")
    rewards, terminals = to_float32(vector(file, "rewards")), flags(file, "terminals")
    successors = matrix(file, "next_observations") if "next_observations" in present else None
    timeouts = flags(file, "timeouts") if "timeouts" in present else np.zeros_like(terminals)
    _same_length(actions, rewards, terminals, timeouts, states=states, successors=successors)
    horizon = options.max_episode_steps or HORIZON
    jumps = _jumps(states, successors)
    ends = terminals | timeouts | jumps
    if "timeouts" not in present:
        timeouts = _clock_ends(ends, horizon) & ~terminals
    ends |= timeouts
    ends[-1] = True
    return EpisodeSource(
        kind="d4rl",
        states=states.shape[1],
        actions=actions.shape[1],
        max_episode_steps=horizon,
        env=options.env or robot(name),
        details={
            "transitions": len(states),
            "successors": successors is not None,
            "cuts_by_jump": int((jumps & ~terminals & ~timeouts).sum()),
            # Our environments repeat the physics of v2; older recordings were not shown to fit.
            "physics": "v2" if "-v2" in name else "unverified",
        },
        episodes=_episodes(states, successors, actions, rewards, terminals, timeouts, ends),
    )


def _episodes(
    states: Floats,
    successors: Floats | None,
    actions: Floats,
    rewards: Floats,
    terminals: Flags,
    timeouts: Flags,
    ends: Flags,
) -> Iterator[Episode]:
    first = 0
    for last in np.flatnonzero(ends).tolist():
        steps = slice(first, last + 1)
        first = last + 1
        if successors is not None:
            final = successors[last]
        elif terminals[last]:
            final = states[last]  # unknown, and never looked at: nothing follows a terminal
        else:
            steps = slice(steps.start, last)  # the last state is known, the step from it is not
            final = states[last]
        if steps.start == steps.stop:
            continue  # a lone transition whose successor nobody stored
        yield Episode(
            states=np.concatenate([states[steps], final[None]]),
            actions=actions[steps],
            rewards=rewards[steps],
            terminated=bool(terminals[last]),
            truncated=bool(timeouts[last] and not terminals[last]),
        )


def _jumps(states: Floats, successors: Floats | None) -> Flags:
    jumps = np.zeros(len(states), dtype=np.bool_)
    if successors is not None:
        distance = np.abs(states[1:] - successors[:-1])
        jumps[:-1] = (distance > JUMP * np.maximum(np.abs(states[1:]), 1)).any(axis=1)
        jumps |= ~np.isfinite(successors).all(axis=1)  # a final state then, and refused as such
    return jumps


def _clock_ends(ends: Flags, max_episode_steps: int) -> Flags:
    """The clock of a file that stores none: every `horizon` steps since the last end."""
    rows = np.arange(len(ends))
    begins = np.append(True, ends[:-1])
    since = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    late: Flags = since % max_episode_steps == max_episode_steps - 1
    return late


def _same_length(*columns: NDArray[np.generic], states: Floats, successors: Floats | None) -> None:
    lengths = [len(states), *(len(column) for column in columns)]
    if len(set(lengths)) > 1:
        raise InputError(
            f"columns have different lengths: {lengths} rows of observations, actions, rewards, "
            "terminals, timeouts"
        )
    if successors is not None and successors.shape != states.shape:
        raise InputError(
            f"next_observations have shape {list(successors.shape)}, "
            f"observations {list(states.shape)}"
        )


def robot(name: str) -> str | None:
    """The environment that a D4RL file name speaks of."""
    found = re.search(r"\b(hopper|walker|halfcheetah)(?=2d|[-_])", name.lower())
    return ROBOTS[found[1]] if found else None
