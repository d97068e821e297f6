"""Stores each append exactly once: decides whether a key is the next of its producer.

A slot's incarnations count upwards; each numbers its episodes 0, 1, 2, ... For every slot the table
holds the newest incarnation and the next sequence number of this incarnation.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from m3pc.types import AckStatus, AppendKey
from replay.format.index import ProducerState
from replay.format.log import LogEntry
from replay.format.validation import is_valid_key

UNKNOWN = ProducerState(-1, 0)


class Verdict(NamedTuple):
    """The decision about a key; nothing is stored yet."""

    refusal: AckStatus | None  # None: the key is its producer's next and may be stored
    expected: int
    reason: str = ""


class RefusedEpisodes(NamedTuple):
    """Counted for one incarnation of a slot, since older incarnations are fenced anyway."""

    incarnation: int
    episodes: int


class Producers:
    def __init__(self, known: Mapping[int, ProducerState], max_refused: int) -> None:
        """An incarnation is fenced after `max_refused` invalid episodes."""
        self._states, self._max_refused = dict(known), max_refused
        self._refused: dict[int, RefusedEpisodes] = {}  # keyed by slot

    def __getitem__(self, slot: int) -> ProducerState:
        return self._states.get(slot, UNKNOWN)

    @property
    def known_slots(self) -> int:
        return len(self._states)

    @property
    def suspected_slots(self) -> int:
        """How many slots have sent invalid episodes."""
        return len(self._refused)

    def expected(self, key: AppendKey) -> int:
        state = self[key.slot]
        return state.expected if state.incarnation == key.incarnation else 0

    def judge(self, key: AppendKey, ahead: Mapping[int, ProducerState]) -> Verdict:
        """`ahead` holds the states of slots after requests that are judged but not saved yet."""
        if not is_valid_key(key):
            return Verdict(AckStatus.REJECTED, 0, f"{key} is no key")
        state = ahead.get(key.slot, self[key.slot])
        if key.incarnation < state.incarnation:
            return Verdict(AckStatus.FENCED, 0, f"incarnation {state.incarnation} has the slot")
        if self._count_refused(key) >= self._max_refused:
            return Verdict(
                AckStatus.FENCED, 0, f"{self._max_refused} of its episodes were rejected"
            )
        expected = state.expected if key.incarnation == state.incarnation else 0
        if key.sequence == expected:
            return Verdict(None, expected + 1)
        status = AckStatus.DUPLICATE if key.sequence < expected else AckStatus.GAP
        return Verdict(status, expected, f"the next is {expected}")

    def advance(self, entries: Sequence[LogEntry]) -> None:
        """Record saved entries."""
        for entry in entries:
            self._states[entry.key.slot] = state_after(entry.key)
            if entry.episode is None:
                episodes = self._count_refused(entry.key) + 1
                self._refused[entry.key.slot] = RefusedEpisodes(entry.key.incarnation, episodes)

    def _count_refused(self, key: AppendKey) -> int:
        refused = self._refused.get(key.slot)
        return refused.episodes if refused and refused.incarnation == key.incarnation else 0


def state_after(key: AppendKey) -> ProducerState:
    return ProducerState(key.incarnation, key.sequence + 1)
