"""The columns of a store. Rows have a fixed width, so a column is one block of memory.

A segment is two Arrow IPC files with one record batch each: its steps, one row per step, and its
episodes, one row per episode. Episodes never span segments. The final state of an episode, from
which no step was taken, is a column of `episodes`.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from m3pc.core.returns import steps_within
from m3pc.types import AppendKey, Episode

FORMAT = 2  # this version writes it
READABLE = (1, 2)  # format 1 lacks last version, target return (`condition`) and utility


def steps_schema(states: int, actions: int) -> pa.Schema:
    return _required(
        states=pa.list_(pa.float32(), states),
        actions=pa.list_(pa.float32(), actions),
        rewards=pa.float32(),
        episode=pa.int64(),  # joins with the episodes file
        step=pa.int32(),  # steps since the episode's reset
    )


def episodes_schema(states: int, store_format: int = FORMAT) -> pa.Schema:
    tags = {"last_version": pa.int64(), "condition": pa.float64(), "utility": pa.float64()}
    return _required(
        episode=pa.int64(),  # number in the store
        first=pa.int64(),  # the episode's first row in the steps file
        length=pa.int32(),
        terminated=pa.bool_(),
        truncated=pa.bool_(),
        final_state=pa.list_(pa.float32(), states),
        episode_return=pa.float64(),
        seed=pa.int64(),
        version=pa.int64(),
        **(tags if store_format > 1 else {}),
    )


def live_episodes_schema(states: int, store_format: int = FORMAT) -> pa.Schema:
    """The columns of `episodes_schema`, then the key under which the episode was appended."""
    keys = [pa.field(name, pa.int64(), nullable=False) for name in AppendKey._fields]
    return pa.schema([*episodes_schema(states, store_format), *keys])


def wire_schema(states: int, actions: int) -> pa.Schema:
    """The columns of an episode on its way to the store: see `replay/format/payload.py`."""
    return _required(
        states=pa.list_(pa.float32(), states),
        actions=pa.list_(pa.float32(), actions),
        rewards=pa.float32(),
    )


def steps_batch(
    episodes: Sequence[Episode], first_number: int, schema: pa.Schema
) -> pa.RecordBatch:
    lengths = _lengths(episodes)
    numbers = np.arange(first_number, first_number + len(episodes), dtype=np.int64)
    columns = {
        "states": vectors(np.concatenate([e.states[:-1] for e in episodes])),
        "actions": vectors(np.concatenate([e.actions for e in episodes])),
        "rewards": pa.array(np.concatenate([e.rewards for e in episodes])),
        "episode": pa.array(np.repeat(numbers, lengths)),
        "step": pa.array(steps_within(lengths).astype(np.int32)),
    }
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def episodes_batch(
    episodes: Sequence[Episode],
    first_number: int,
    schema: pa.Schema,
    keys: Sequence[AppendKey] | None = None,
) -> pa.RecordBatch:
    lengths = _lengths(episodes)
    columns = {
        "episode": pa.array(np.arange(first_number, first_number + len(episodes))),
        "first": pa.array(np.cumsum(lengths) - lengths),
        "length": pa.array(lengths.astype(np.int32)),
        "terminated": pa.array([e.terminated for e in episodes]),
        "truncated": pa.array([e.truncated for e in episodes]),
        "final_state": vectors(np.stack([e.states[-1] for e in episodes])),
        "episode_return": pa.array([e.rewards.sum(dtype=np.float64) for e in episodes]),
        "seed": pa.array([e.seed for e in episodes], pa.int64()),
        "version": pa.array([e.version for e in episodes], pa.int64()),
        "last_version": pa.array([e.last_version for e in episodes], pa.int64()),
        "condition": pa.array([e.target_return for e in episodes], pa.float64()),
        "utility": pa.array([e.utility for e in episodes], pa.float64()),
    }
    if keys is not None:
        by_name = zip(AppendKey._fields, zip(*keys, strict=True), strict=True)
        columns |= {name: pa.array(values, pa.int64()) for name, values in by_name}
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _required(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def vectors(values: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _lengths(episodes: Sequence[Episode]) -> np.ndarray:
    return np.array([len(e) for e in episodes], dtype=np.int64)
