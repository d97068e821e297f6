"""Staleness of collected episodes: updates done since the weights that collected them."""

from collections.abc import Iterable
from weakref import WeakSet

from m3pc.telemetry.catalogue import STALENESS
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Version
from replay.format.segment import Segment


class Staleness:
    """Records each collected episode once, when the learner sees it for the first time."""

    def __init__(self, recorder: Recorder, before: Iterable[Segment]) -> None:
        """Episodes in `before` arrived before this learner started and are not recorded again."""
        self._recorder = recorder
        self._last: dict[tuple[int, int], int] = {}  # last sequence, by slot and incarnation
        self._known: WeakSet[Segment] = WeakSet()
        for segment in before:
            self._new_versions(segment)

    def poll(self, segments: Iterable[Segment], updates: int) -> None:
        """Record the episodes that are new in these segments, after `updates` updates."""
        for segment in segments:
            if segment in self._known:
                continue
            self._known.add(segment)
            for version in self._new_versions(segment):
                if version >= 0:
                    ahead = updates - Version.unpacked(version).number
                    self._recorder.observe(STALENESS, max(ahead, 0))

    def _new_versions(self, segment: Segment) -> list[int]:
        """The versions of new episodes. Episodes of a log come again in a segment: not new then."""
        assert segment.keys is not None, "collected episodes have producers"
        versions = []
        for key, version in zip(segment.keys.tolist(), segment.versions.tolist(), strict=True):
            slot, incarnation, sequence = key
            if sequence > self._last.get((slot, incarnation), -1):
                self._last[slot, incarnation] = sequence
                versions.append(version)
        return versions
