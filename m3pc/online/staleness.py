"""How old the policies were that collected what is learnt from."""

from collections.abc import Iterable

from m3pc.telemetry.catalogue import STALENESS
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Version
from replay.format.segment import Segment
from replay.sampling.sampler import SegmentCache, per_segment


class Staleness:
    """Counts each collected episode once, when the learner sees it for the first time."""

    def __init__(self, recorder: Recorder, before: Iterable[Segment]) -> None:
        """What came `before` this learner started is not counted again."""
        self._recorder, self._updates = recorder, 0
        self._seen: dict[tuple[int, int], int] = {}  # the last sequence, by slot and incarnation
        self._known: SegmentCache[int] = {}
        for segment in before:
            self._new(segment)

    def poll(self, segments: Iterable[Segment], updates: int) -> None:
        self._updates = updates
        self._known = per_segment(tuple(segments), self._known, self._count)

    def _count(self, segment: Segment) -> int:
        versions = [version for version in self._new(segment) if version >= 0]
        for version in versions:
            ahead = self._updates - Version.unpacked(version).number
            self._recorder.observe(STALENESS, max(ahead, 0))
        return len(versions)

    def _new(self, segment: Segment) -> list[int]:
        """Versions of the episodes that were in no segment before: logs become segments."""
        assert segment.keys is not None, "what is collected has producers"
        found = []
        for key, version in zip(segment.keys.tolist(), segment.versions.tolist(), strict=True):
            slot, incarnation, sequence = key
            if sequence > self._seen.get((slot, incarnation), -1):
                self._seen[slot, incarnation] = sequence
                found.append(version)
        return found
