"""Publishing weights: one immutable file for each version, and a pointer to the newest."""

import hashlib
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from m3pc.core.files import replace_file
from m3pc.model.weights import Weights, to_bytes
from m3pc.telemetry.catalogue import COORDINATOR_FAILURES, LAST_PUBLISHED, PUBLISHED
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
    """Publishes the versions of one learner process, which all have its epoch."""

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
        """`name` names the pointer; `path` gives a version's file, relative to the run's folder;
        the newest `keep` files stay."""
        self._run, self._coordinator, self._name, self._path = run, coordinator, name, path
        self._keep, self._recorder = keep, recorder
        self.epoch = epoch
        self._newest: Pointer | None = None  # the newest file on disk
        self._pending: Pointer | None = None  # `_newest` until the coordinator accepts it
        (run / path(Version(epoch=epoch, number=0))).parent.mkdir(exist_ok=True)

    def publish(self, weights: Weights) -> Pointer:
        """Write a version's file, then point to it. If the coordinator does not answer, the next
        call tries again. A version that exists already is not written twice: its file is immutable.
        """
        version = Version.unpacked(weights.version)
        assert version.epoch == self.epoch
        if self._newest is not None and self._newest.version == version:
            self.publish_pointer()
            return self._newest
        content, path = to_bytes(weights), self._path(version)
        replace_file(self._run / path, content)
        self._newest = self._pending = Pointer(
            version=version,
            sha256=hashlib.sha256(content).hexdigest(),
            size=len(content),
            path=str(path),
        )
        self.publish_pointer()
        self._delete_old()
        return self._newest

    def publish_pointer(self) -> bool:
        """Point to the newest file if needed; False if the coordinator did not answer."""
        if self._pending is None:
            return True
        try:
            answer = self._coordinator.publish(self._name, self._pending)
        except CoordinatorUnavailableError as error:
            self._recorder.add(COORDINATOR_FAILURES)
            self._recorder.add(PUBLISHED, label="unavailable")
            log.warning("event=publish-later reason=%s", error)
            return False
        self._recorder.add(PUBLISHED, label=answer.value)
        if answer is Published.FENCED:
            raise FencedError(f"epoch {self.epoch} was fenced: another learner has begun since")
        self._pending = None
        self._recorder.set(LAST_PUBLISHED, time.time())
        return True

    def _delete_old(self) -> None:
        folder = (self._run / self._path(Version(epoch=0, number=0))).parent
        files = sorted(folder.glob("*.safetensors"), key=_epoch_and_number)
        for old in files[: -self._keep]:
            old.unlink(missing_ok=True)


def _epoch_and_number(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", path.stem)]
