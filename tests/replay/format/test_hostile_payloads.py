"""Bytes from an untrusted actor, through the append that a run uses."""

import random
import time
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from m3pc.types import AckStatus, AppendKey, Episode
from replay.format.manifest import Header
from replay.format.payload import CHECKED, HEAD, MAGIC, MAX_BYTES, PayloadError, decode, encode
from replay.store.store import Store
from replay.writing.writer import WriterOptions
from tests.support.faults.live_writer import HEADER, ROOMY, episode, open_writer

COUNTS = [1_500, pytest.param(10_000, marks=pytest.mark.long)]
PATIENT = replace(ROOMY, max_refused=1 << 30, durability="os")
BYTES = (0, 1, 0x7F, 0x80, 0xFF)


def mutant(rng: random.Random, content: bytes) -> bytes:
    """Changed in a few places, cut, longer or mixed; often with a checksum that fits again."""
    changed = bytearray(content)
    for _ in range(rng.choice([0, 1, 1, 2, 8])):
        place = rng.randrange(rng.choice([HEAD.size, len(changed)]))
        changed[place] = rng.choice([*BYTES, rng.randrange(256)])
    match rng.randrange(8):
        case 0:
            del changed[rng.randrange(len(changed)) :]
        case 1:
            changed += rng.randbytes(rng.randrange(1, 100))
        case 2:
            changed[HEAD.size :] = encode(episode(rng.randrange(20)))[HEAD.size :]
    if rng.random() < 0.7:
        changed[CHECKED - 4 : CHECKED] = zlib.crc32(changed[CHECKED:]).to_bytes(4, "little")
    return bytes(changed)


def numbers_of(episode: Episode) -> tuple[object, ...]:
    arrays = (episode.states, episode.actions, episode.rewards)
    return *(x.tobytes() for x in arrays), episode.terminated, episode.truncated, episode.seed


@pytest.mark.parametrize("count", COUNTS)
def test_a_store_keeps_what_it_acknowledged_and_nothing_else(count: int, tmp_path: Path) -> None:
    rng = random.Random(count)
    kept, statuses = [], set()
    with open_writer(tmp_path / "store", PATIENT) as writer:
        for sequence in range(count):
            payload = mutant(rng, encode(episode(rng.randrange(20))))
            ack = writer.append(AppendKey(0, 0, sequence), payload)
            statuses.add(ack.status)
            if ack.status is AckStatus.DURABLE:
                kept.append(numbers_of(decode(payload, HEADER)))
    assert statuses == {AckStatus.DURABLE, AckStatus.REJECTED}
    assert [numbers_of(stored) for stored in Store(tmp_path / "store").episodes()] == kept
    assert count // 20 < len(kept) < count


def claims(rows: int) -> bytes:
    """A head without anything behind it."""
    head = HEAD.pack(MAGIC, 0, rows, 0, 0, 0, 0, 0.0, 0.0)[CHECKED:]
    return MAGIC + zlib.crc32(head).to_bytes(4, "little") + head


def test_few_bytes_that_claim_a_long_episode_allocate_nothing() -> None:
    header = Header(states=376, actions=17, max_episode_steps=100_000, env=None, source={})
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match="too few for 100001 rows"):
            decode(claims(100_001), header)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content", [b"", b"x", bytes(MAX_BYTES + 1), claims(2), claims((1 << 32) - 1)]
)
def test_a_producer_of_invalid_payloads_is_fenced_and_blocks_no_other(
    content: bytes, tmp_path: Path
) -> None:
    options: WriterOptions = replace(ROOMY, max_refused=20, durability="os")
    begin = time.monotonic()
    with open_writer(tmp_path / "store", options) as writer:
        for sequence in range(30):
            bad = writer.append(AppendKey(0, 0, sequence), content).status
            assert bad is (AckStatus.REJECTED if sequence < 20 else AckStatus.FENCED)
            good = writer.append(AppendKey(1, 0, sequence), encode(episode(sequence))).status
            assert good is AckStatus.DURABLE
    assert time.monotonic() - begin < 20
    assert Store(tmp_path / "store").totals.episodes == 30
