"""Versions that an online run publishes, found by looking into its folder."""

import threading
from pathlib import Path
from typing import Final

from m3pc.core.files import sha256
from m3pc.online.recovery import NAME, WEIGHTS, weights_path
from m3pc.types import InputError, Pointer, Version

LOOK: Final = 0.5  # seconds between two looks


class PublishedVersions:
    """Tells a Loader of newer ones. Needs nothing but the folder, whatever becomes of the run."""

    def __init__(self, run: Path) -> None:
        if not (run / WEIGHTS).is_dir():
            raise InputError(
                f"{run} publishes no versions: it has no folder {WEIGHTS}; give the folder of a "
                "run that m3pc finetune drives, or serve its checkpoint and reload that"
            )
        self._run, self._never = run, threading.Event()

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        """The newest, once it is beyond `since`; None after `timeout` seconds."""
        assert name == WEIGHTS, name
        while (found := self._newest(since)) is None and timeout > 0:
            self._never.wait(min(LOOK, timeout))
            timeout -= LOOK
        return found

    def newest(self) -> Version | None:
        names = (NAME.fullmatch(path.name) for path in (self._run / WEIGHTS).iterdir())
        found = (Version(epoch=int(name[1]), number=int(name[2])) for name in names if name)
        return max(found, default=None)

    def _newest(self, since: Version | None) -> Pointer | None:
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
        except FileNotFoundError:  # a newer one came, and this one went
            return None
