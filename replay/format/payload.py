"""Encodes an episode for a store, which checks the bytes. S state, A action, L steps.

    magic  crc32 of the rest  rows  ended  seed
    version  last version  target return  utility
    Arrow stream: schema, one batch

The batch has rows = L + 1 of states, actions and rewards. The last row holds the final state, from
which no step was taken: its action and reward are 0.

The senders run third-party environments, and crafted metadata can crash Arrow's parser. So the
stream is never parsed: apart from the numbers, it must be byte for byte what `encode` writes for an
episode of this length, which puts the numbers at known offsets.
"""

import io
import struct
import zlib
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from m3pc.types import Episode, Floats, InputError
from replay.format.manifest import Header
from replay.format.schema import vectors, wire_schema
from replay.format.validation import check_episode

MAGIC = b"m3e2"
HEAD = struct.Struct("<4sIIIqqqdd")
CHECKED = 8  # offset of the first byte that the checksum covers
TERMINATED, TRUNCATED = 1, 2  # bits of `ended`
MAX_BYTES = 16 << 20
MAX_REWARD = 1e6
END = b"\xff\xff\xff\xff\0\0\0\0"  # last bytes of an Arrow stream

PayloadFault = Literal["size", "head", "checksum", "rows", "arrow", "values"]


class PayloadError(InputError):
    """A store never accepts these bytes, however often they are sent."""

    def __init__(self, code: PayloadFault, message: str) -> None:
        super().__init__(f"the payload was rejected ({code}): {message}")
        self.code = code


def encode(episode: Episode) -> bytes:
    rows = len(episode) + 1
    actions = np.zeros((rows, episode.actions.shape[1]), np.float32)
    rewards = np.zeros(rows, np.float32)
    actions[:-1], rewards[:-1] = episode.actions, episode.rewards
    ended = TERMINATED * episode.terminated | TRUNCATED * episode.truncated
    tags = (episode.version, episode.last_version, episode.target_return, episode.utility)
    head = HEAD.pack(MAGIC, 0, rows, ended, episode.seed, *tags)
    content = head[CHECKED:] + _stream(episode.states, actions, rewards)
    return MAGIC + zlib.crc32(content).to_bytes(4, "little") + content


def decode(payload: bytes, header: Header) -> Episode:
    """Return the episode, whose arrays are views of the payload, or raise PayloadError."""
    if not HEAD.size <= len(payload) <= MAX_BYTES:
        raise PayloadError(
            "size", f"{len(payload)} bytes, expected {HEAD.size} to {MAX_BYTES}; cut the episode"
        )
    magic, crc, rows, ended, seed, *tags = HEAD.unpack_from(payload)
    if magic != MAGIC or ended & ~(TERMINATED | TRUNCATED):
        raise PayloadError("head", f"it begins with {payload[: HEAD.size].hex()}; not an episode")
    if zlib.crc32(memoryview(payload)[CHECKED:]) != crc:
        raise PayloadError("checksum", "its bytes changed on the way; send it again")
    if not 2 <= rows <= header.max_episode_steps + 1:
        raise PayloadError("rows", f"{rows} rows, expected 2 to {header.max_episode_steps + 1}")
    states, actions, rewards = _columns(payload, header, rows)
    if actions[-1].any() or rewards[-1]:
        raise PayloadError("values", "the last row has an action or reward; it must have none")
    version, last_version, target_return, utility = tags
    episode = Episode(
        states=states,
        actions=actions[:-1],
        rewards=rewards[:-1],
        terminated=bool(ended & TERMINATED),
        truncated=bool(ended & TRUNCATED),
        seed=seed,
        version=version,
        last_version=last_version,
        target_return=target_return,
        utility=utility,
    )
    try:
        check_episode(episode, header, number=0)
    except InputError as error:
        raise PayloadError("values", str(error)) from None
    if np.abs(rewards).max() > MAX_REWARD:
        raise PayloadError("values", f"a reward is beyond {MAX_REWARD:g}; scale the rewards")
    return episode


class StreamFrame(NamedTuple):
    """The constant bytes around the numbers of a stream."""

    before: bytes
    size: int  # bytes of the numbers, each column padded to a multiple of 8


@lru_cache(maxsize=4096)
def stream_frame(states: int, actions: int, rows: int) -> StreamFrame:
    zeros = np.zeros((rows, states + actions + 1), np.float32)
    stream = _stream(zeros[:, :states], zeros[:, states:-1], zeros[:, -1])
    size = sum(padded_bytes(rows * width) for width in (states, actions, 1))
    assert stream.endswith(bytes(size) + END)
    return StreamFrame(stream[: -size - len(END)], size)


def _columns(payload: bytes, header: Header, rows: int) -> tuple[Floats, Floats, Floats]:
    # Checked first because `stream_frame` allocates memory for all rows.
    if 4 * rows * (header.states + header.actions + 1) > len(payload):
        raise PayloadError("arrow", f"{len(payload)} bytes, too few for {rows} rows")
    frame = stream_frame(header.states, header.actions, rows)
    place = HEAD.size + len(frame.before)
    if len(payload) != place + frame.size + len(END):
        raise PayloadError(
            "arrow",
            f"{len(payload)} bytes, expected {place + frame.size + len(END)} for {rows} rows of "
            f"{header.states} states and {header.actions} actions",
        )
    if payload[HEAD.size : place] != frame.before or not payload.endswith(END):
        raise PayloadError(
            "arrow",
            "its columns are others, or it was written by another version of Arrow than the "
            "store's; use the same pyarrow for both",
        )
    columns = []
    for width in (header.states, header.actions, 1):
        values = np.frombuffer(payload, np.float32, rows * width, place)
        columns.append(values.reshape(rows, width))
        place += padded_bytes(rows * width)
    return columns[0], columns[1], columns[2][:, 0]


def _stream(states: Floats, actions: Floats, rewards: Floats) -> bytes:
    schema = wire_schema(states.shape[1], actions.shape[1])
    batch = pa.record_batch([vectors(states), vectors(actions), pa.array(rewards)], schema=schema)
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, schema) as writer:
        writer.write_batch(batch)
    return stream.getvalue()


def padded_bytes(values: int) -> int:
    return -(-4 * values // 8) * 8
