"""An actor's own log of what the store acknowledged, to compare the two: one JSON line each."""

import json
from pathlib import Path

from actors.outbox import OnAck


class AckLog:
    """An `on_ack` that writes; a line is handed to the system before the next episode is sent."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)

    def __call__(self, receipt: OnAck) -> None:
        row = {**receipt.key._asdict(), "steps": receipt.steps, "sha256": receipt.sha256}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()
