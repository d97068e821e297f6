"""Versions of the weights: immutable files, and a pointer to the newest."""

import hashlib
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from m3pc.core.files import replace_file
from m3pc.model.weights import Weights, to_bytes
from m3pc.telemetry.catalogue import COORDINATOR_DOWN, LAST_PUBLISHED, PUBLISHED
from m3pc.telemetry.recorder import Recorder
from m3pc.types import (
    Coordinator,
    CoordinatorUnavailableError,
    FencedError,
    Pointer,
    Published,
    Version,
)

log = logging.getLogger(__name__)


class Publisher:
    """Of one learner, from its start to its end: versions of one epoch."""

    def __init__(
        self,
        run: Path,
        coordinator: Coordinator,
        *,
        name: str,
        path: Callable[[Version], Path],
        epoch: int,
        keep: int,
        recorder: Recorder,
    ) -> None:
        """`name` is the pointer's, `path` where a version lies in the run's folder."""
        self._run, self._coordinator, self._name, self._path = run, coordinator, name, path
        self._keep, self._recorder = keep, recorder
        self.epoch = epoch
        self._newest: Pointer | None = None  # on disk
        self._waiting: Pointer | None = None  # the same, while the coordinator does not know it
        (run / path(Version(epoch=epoch, number=0))).parent.mkdir(exist_ok=True)

    def publish(self, weights: Weights, number: int) -> Pointer:
        """Write a version, then point to it. Where the coordinator is away the file waits for the
        next try. A version that is there stays as it is. Weights that are not finite cannot be:
        `Weights` refuses them."""
        version = Version(epoch=self.epoch, number=number)
        assert weights.version == version.packed
        if self._newest is not None and self._newest.version == version:
            self.offer()
            return self._newest
        content, path = to_bytes(weights), self._path(version)
        replace_file(self._run / path, content)
        self._newest = self._waiting = Pointer(
            version=version,
            sha256=hashlib.sha256(content).hexdigest(),
            size=len(content),
            path=str(path),
        )
        self.offer()
        self._forget_old()
        return self._newest

    def offer(self) -> bool:
        """Point to what was written last, if nobody does yet; whether it is known now."""
        if self._waiting is None:
            return True
        try:
            answer = self._coordinator.publish(self._name, self._waiting)
        except CoordinatorUnavailableError as error:
            self._recorder.add(COORDINATOR_DOWN)
            self._recorder.add(PUBLISHED, label="unavailable")
            log.warning("event=publish-later reason=%s", error)
            return False
        self._recorder.add(PUBLISHED, label=answer.value)
        if answer is Published.FENCED:
            raise FencedError(f"epoch {self.epoch} was fenced: another learner has begun since")
        self._waiting = None
        self._recorder.set(LAST_PUBLISHED, time.time())
        return True

    def _forget_old(self) -> None:
        folder = (self._run / self._path(Version(epoch=0, number=0))).parent
        found = sorted(folder.glob("*.safetensors"), key=_numbers)
        for old in found[: -self._keep]:
            old.unlink(missing_ok=True)


def _numbers(path: Path) -> list[int]:
    return [int(part) for part in re.findall("[0-9]+", path.stem)]
