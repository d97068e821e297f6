"""Merges the metrics of all processes of a run. Counts never shrink when a process ends."""

from m3pc.telemetry.recorder import METRICS, Snapshot, merge


class RunTotals:
    """The newest snapshot of each process, and the counts of processes that have ended."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[int, Snapshot]] = {}  # name -> incarnation, snapshot
        self._ended: Snapshot = {}

    def update(self, name: str, incarnation: int, snapshot: Snapshot) -> None:
        """Store a process's newest snapshot; `incarnation` changes when the process restarts."""
        if name in self._running and self._running[name][0] != incarnation:
            self.remove(name)
        self._running[name] = (incarnation, snapshot)

    def remove(self, name: str) -> None:
        """Record that a process has ended: its counts stay, its gauges disappear."""
        if name in self._running:
            _, snapshot = self._running.pop(name)
            counts = {n: x for n, x in snapshot.items() if n in METRICS and not _is_gauge(n)}
            self._ended = merge([self._ended, counts])

    def snapshot(self) -> Snapshot:
        return merge([self._ended, *(snapshot for _, snapshot in self._running.values())])


def _is_gauge(name: str) -> bool:
    return METRICS[name].kind == "gauge"
