"""Reads D4RL's HDF5: n transitions, episodes end to end, in the layouts of v0 to v2."""

import re
from collections.abc import Iterator

import h5py
import numpy as np
from numpy.typing import NDArray

from m3pc.datasets.hdf5 import member_names, read_flags, read_matrix, read_vector, to_float32
from m3pc.datasets.source import EpisodeSource, ImportOptions
from m3pc.types import Booleans, Episode, Floats, InputError

STEP_LIMIT = 1000  # default: the locomotion tasks' limit
JUMP = 1e-5  # an episode ends where successor and next state differ by more, relatively
ROBOTS = {
    "hopper": "d4rl/Hopper-v2",
    "walker": "d4rl/Walker2d-v2",
    "halfcheetah": "d4rl/HalfCheetah-v2",
}


def is_d4rl(file: h5py.File) -> bool:
    return {"observations", "actions", "rewards", "terminals"} <= set(file)


def read_d4rl(file: h5py.File, name: str, options: ImportOptions) -> EpisodeSource:
    """Episodes end at terminals, at time-outs, where states jump, and at the end of the file."""
    present = member_names(file)
    states, actions = read_matrix(file, "observations"), read_matrix(file, "actions")
    rewards, terminals = to_float32(read_vector(file, "rewards")), read_flags(file, "terminals")
    successors = read_matrix(file, "next_observations") if "next_observations" in present else None
    timeouts = read_flags(file, "timeouts") if "timeouts" in present else np.zeros_like(terminals)
    _same_length(actions, rewards, terminals, timeouts, states=states, successors=successors)
    max_episode_steps = options.max_episode_steps or STEP_LIMIT
    jumps = _jumps(states, successors)
    ends = terminals | timeouts | jumps
    if "timeouts" not in present:
        timeouts = _step_limit_ends(ends, max_episode_steps) & ~terminals
    ends |= timeouts
    ends[-1] = True
    return EpisodeSource(
        kind="d4rl",
        state_size=states.shape[1],
        action_size=actions.shape[1],
        max_episode_steps=max_episode_steps,
        env=options.env or env_in_name(name),
        details={
            "transitions": len(states),
            "successors": successors is not None,
            "cuts_by_jump": int((jumps & ~terminals & ~timeouts).sum()),
            # Our environments have the physics of v2; older recordings are not verified.
            "physics": "v2" if "-v2" in name else "unverified",
        },
        episodes=_episodes(states, successors, actions, rewards, terminals, timeouts, ends),
    )


def _episodes(
    states: Floats,
    successors: Floats | None,
    actions: Floats,
    rewards: Floats,
    terminals: Booleans,
    timeouts: Booleans,
    ends: Booleans,
) -> Iterator[Episode]:
    first = 0
    for last in np.flatnonzero(ends).tolist():
        steps = slice(first, last + 1)
        first = last + 1
        if successors is not None:
            final = successors[last]
        elif terminals[last]:
            final = states[last]  # unknown, but never used: nothing follows a terminal
        else:
            steps = slice(steps.start, last)  # the last step's successor is unknown: drop the step
            final = states[last]
        if steps.start == steps.stop:
            continue  # a single transition without a successor
        yield Episode(
            states=np.concatenate([states[steps], final[None]]),
            actions=actions[steps],
            rewards=rewards[steps],
            terminated=bool(terminals[last]),
            truncated=bool(timeouts[last] and not terminals[last]),
        )


def _jumps(states: Floats, successors: Floats | None) -> Booleans:
    jumps = np.zeros(len(states), dtype=np.bool_)
    if successors is not None:
        distance = np.abs(states[1:] - successors[:-1])
        jumps[:-1] = (distance > JUMP * np.maximum(np.abs(states[1:]), 1)).any(axis=1)
        jumps |= ~np.isfinite(successors).all(axis=1)  # NaN or Inf: end here; the store refuses it
    return jumps


def _step_limit_ends(ends: Booleans, max_episode_steps: int) -> Booleans:
    """Derive time-outs for a file without them: every `max_episode_steps` after an end."""
    rows = np.arange(len(ends))
    begins = np.append(True, ends[:-1])
    step = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    ends_here: Booleans = step % max_episode_steps == max_episode_steps - 1
    return ends_here


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


def env_in_name(name: str) -> str | None:
    """The environment that the name of a D4RL file contains."""
    robot = re.search(r"\b(hopper|walker|halfcheetah)(?=2d|[-_])", name.lower())
    return ROBOTS[robot[1]] if robot else None
