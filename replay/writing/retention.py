"""Decides which segments a live store drops, and when the disk is too full to append."""

from collections.abc import Sequence
from dataclasses import dataclass

from replay.format.index import SegmentEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    keep_bytes: int | None = None  # the segments' maximum size
    keep_episodes: int | None = None  # minimum in the segments that stay, unless over keep_bytes
    low_space: int = 2 << 30  # free bytes below which the oldest segment is dropped, if any may be
    no_space: int = 512 << 20  # free bytes below which appends are refused

    def beyond_limits(self, segments: Sequence[SegmentEntry]) -> list[int]:
        """Return the numbers of the oldest segments, which the limits do not keep."""
        kept, numbers = list(segments), []
        while kept and (
            (self.keep_bytes is not None and sum(s.bytes for s in kept) > self.keep_bytes)
            or (
                self.keep_episodes is not None
                and sum(s.episodes.rows for s in kept[1:]) >= self.keep_episodes
            )
        ):
            numbers.append(kept.pop(0).number)
        return numbers

    def to_make_room(self, segments: Sequence[SegmentEntry], free: int) -> list[int]:
        """Return the oldest segment's number if fewer than `low_space` bytes are free. The newest
        segment always stays, and a store without limits keeps all."""
        may_drop = self.keep_bytes is not None or self.keep_episodes is not None
        if free < self.low_space and may_drop and len(segments) > 1:
            return [segments[0].number]
        return []
