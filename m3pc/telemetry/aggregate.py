"""Metrics of all processes of a run as one: counts never shrink, whoever dies."""

from m3pc.telemetry.recorder import METRICS, Snapshot, merged


class RunTotals:
    def __init__(self) -> None:
        self._lives: dict[str, tuple[int, Snapshot]] = {}  # by name: which life, what it said last
        self._past: Snapshot = {}

    def take(self, name: str, life: int, snapshot: Snapshot) -> None:
        """What a process says of itself; `life` tells it from those that had its name before."""
        known = self._lives.get(name)
        if known is not None and known[0] != life:
            self._past = merged([self._past, _counted(known[1])])
        self._lives[name] = (life, snapshot)

    def ended(self, name: str) -> None:
        """Nobody has the name any more: its gauges go, what it counted stays."""
        known = self._lives.pop(name, None)
        if known is not None:
            self._past = merged([self._past, _counted(known[1])])

    def now(self) -> Snapshot:
        return merged([self._past, *(snapshot for _, snapshot in self._lives.values())])


def _counted(snapshot: Snapshot) -> Snapshot:
    return {n: x for n, x in snapshot.items() if n in METRICS and METRICS[n].kind != "gauge"}
