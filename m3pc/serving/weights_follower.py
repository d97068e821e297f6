"""Finds the weights that an online run publishes, by polling its folder."""

import time
from pathlib import Path
from typing import Final

from m3pc.core.files import sha256
from m3pc.online.recovery import NAME, WEIGHTS, weights_path
from m3pc.types import InputError, Pointer, Version

POLL_SECONDS: Final = 0.5


class PublishedVersions:
    """A pointer source for a WeightsLoader. It reads the run's folder and needs no coordinator."""

    def __init__(self, run: Path) -> None:
        if not (run / WEIGHTS).is_dir():
            raise InputError(
                f"{run} publishes no versions: it has no folder {WEIGHTS}; give the folder of a "
                "run that m3pc finetune drives, or serve its checkpoint and reload that"
            )
        self._run = run

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        """The newest version, once it is above `since`; None after `timeout` seconds."""
        assert name == WEIGHTS, name
        while (pointer := self._newer(since)) is None and timeout > 0:
            time.sleep(min(POLL_SECONDS, timeout))
            timeout -= POLL_SECONDS
        return pointer

    def newest(self) -> Version | None:
        names = (NAME.fullmatch(path.name) for path in (self._run / WEIGHTS).iterdir())
        versions = (Version(epoch=int(name[1]), number=int(name[2])) for name in names if name)
        return max(versions, default=None)

    def _newer(self, since: Version | None) -> Pointer | None:
        newest = self.newest()
        if newest is None or (since is not None and newest <= since):
            return None
        path = weights_path(newest)
        try:
            return Pointer(
                version=newest,
                sha256=sha256(self._run / path),
                size=(self._run / path).stat().st_size,
                path=str(path),
            )
        except FileNotFoundError:  # a newer version came, and the run deleted this one
            return None
