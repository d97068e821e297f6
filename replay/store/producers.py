"""Exactly once: which append is the next of its producer, and what to answer to any other.

A slot's incarnations count upwards; each numbers its episodes 0, 1, 2, ... The table holds, for
every slot, its newest incarnation and the number that this one must send next.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from m3pc.types import AckStatus, AppendKey
from replay.format.index import ProducerState
from replay.format.log import LogEntry
from replay.format.validation import possible

NOBODY = ProducerState(-1, 0)


class Verdict(NamedTuple):
    """DURABLE here means: the next, and nothing speaks against it."""

    status: AckStatus
    expected: int
    reason: str = ""


class RefusedEpisodes(NamedTuple):
    """By the newest incarnation of a slot that sent rubbish; older ones are shut out anyway."""

    incarnation: int
    episodes: int


class Producers:
    def __init__(self, known: Mapping[int, ProducerState], most_refused: int) -> None:
        self._table, self._most_refused = dict(known), most_refused
        self._refused: dict[int, RefusedEpisodes] = {}  # by slot

    def __getitem__(self, slot: int) -> ProducerState:
        return self._table.get(slot, NOBODY)

    def expected(self, key: AppendKey) -> int:
        where = self[key.slot]
        return where.expected if where.incarnation == key.incarnation else 0

    def judge(self, key: AppendKey, ahead: Mapping[int, ProducerState]) -> Verdict:
        """`ahead`: where slots will stand when what was judged before is saved."""
        if not possible(key):
            return Verdict(AckStatus.REJECTED, 0, f"{key} is no key")
        where = ahead.get(key.slot, self[key.slot])
        if key.incarnation < where.incarnation:
            return Verdict(AckStatus.FENCED, 0, f"incarnation {where.incarnation} has the slot")
        if self._count_refused(key) >= self._most_refused:
            return Verdict(
                AckStatus.FENCED, 0, f"{self._most_refused} of its episodes were rejected"
            )
        expected = where.expected if key.incarnation == where.incarnation else 0
        if key.sequence == expected:
            return Verdict(AckStatus.DURABLE, expected + 1)
        status = AckStatus.DUPLICATE if key.sequence < expected else AckStatus.GAP
        return Verdict(status, expected, f"the next is {expected}")

    def advance(self, entries: Sequence[LogEntry]) -> None:
        """Note what was saved."""
        for entry in entries:
            self._table[entry.key.slot] = following(entry.key)
            if entry.episode is None:
                episodes = self._count_refused(entry.key) + 1
                self._refused[entry.key.slot] = RefusedEpisodes(entry.key.incarnation, episodes)

    def _count_refused(self, key: AppendKey) -> int:
        refused = self._refused.get(key.slot)
        return refused.episodes if refused and refused.incarnation == key.incarnation else 0


def following(key: AppendKey) -> ProducerState:
    return ProducerState(key.incarnation, key.sequence + 1)
