"""A supervised rollout worker. The driver sends its configuration whenever it is idle."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from actors.reports import RolloutStatus
from actors.rollout_worker import RolloutConfig
from m3pc.distributed.run_view import ProcessView
from m3pc.distributed.supervised_process import RayRestartedProcess, kill_process, reason_of
from m3pc.telemetry.catalogue import ENV_STEPS
from m3pc.telemetry.recorder import value


class SupervisedRolloutWorker(RayRestartedProcess[RolloutStatus]):
    """The rollout worker of one slot."""

    def __init__(
        self, slot: int, make: Callable[[], Any], config: RolloutConfig, *, patience: float
    ) -> None:
        """`make` returns the handle of a new RolloutActor; `config` is then sent to start it."""
        super().__init__(f"actor-{slot}", make, patience=patience)
        self.slot, self._config = slot, config
        self.last_episode = -1  # number of the last finished episode that was processed
        self._start_at: float | None = 0.0  # when to send `config`; None: it was sent
        self._starting: Any = None
        self._draining: Any = None
        self._identity: tuple[int, int] | None = None

    def poll(self, now: float) -> None:
        if self._starting is not None and not self._has_started(now):
            return
        super().poll(now)
        if self.state != "up" or self.report is None or self._draining is not None:
            return
        if self.report.detail.state not in ("running", "draining"):
            self._start_work(now, self.report.detail)

    @property
    def is_working(self) -> bool:
        """Whether it collects; a worker that answers may still wait for its configuration."""
        return (
            self.state == "up" and self.report is not None and self.report.detail.state == "running"
        )

    def view(self) -> ProcessView:
        view = super().view()
        if self.report is None or self.state != "up":
            return view
        env_steps = value(self.report.snapshot, ENV_STEPS)
        return replace(view, state=self.report.detail.state, env_steps=env_steps)

    def lost(self, now: float, reason: str) -> None:
        """Ray gave up the worker: its successor needs the configuration again."""
        super().lost(now, reason)
        self._start_at, self._starting = 0.0, None

    def drain(self, seconds: float) -> None:
        """Ask the worker to store its episodes and end; `has_drained` becomes true then."""
        if self._draining is None and self.handle is not None:
            self._draining = self.handle.drain.remote(seconds)

    @property
    def has_drained(self) -> bool:
        """Whether there is nothing to wait for: the worker drained, died, or never started."""
        if self._draining is None:
            return self.handle is None
        return bool(ray.wait([self._draining], timeout=0)[0])

    def retire(self) -> None:
        """Stop permanently. A worker that has not drained may hang, so its node sends SIGKILL."""
        if self.location is not None and not self.has_drained:
            kill_process(self.location)
        self.end()

    def _report_request(self) -> Any:
        return self.handle.report.remote(self.last_episode)

    def _accept(self, now: float) -> None:
        super()._accept(now)
        if self.report is not None:
            identity = self.report.pid, self.report.detail.incarnation
            if self._identity != identity:
                self._identity, self.incarnation = identity, self.incarnation + 1

    def _start_work(self, now: float, status: RolloutStatus) -> None:
        if self._start_at is None:  # Ray restarted the process, or its work ended
            self._locate()
            self._restart_later(now, status.reason or "its process ended")
        elif now >= self._start_at:
            self._start_at, self.last_episode = None, -1
            self.report = self._pending = None  # both are from before this start
            self._starting = self.handle.start.remote(self._config)

    def _restart_later(self, now: float, reason: str) -> None:
        self.reason, self._start_at = reason, self.restarts.record_end(now)
        if self._start_at is None:
            self.end()

    def _has_started(self, now: float) -> bool:
        """Whether polling may go on: the worker started, or its start failed and is due again."""
        if not ray.wait([self._starting], timeout=0)[0]:
            if now - self._answered > self._patience:
                self._starting = None
            return False
        starting, self._starting = self._starting, None
        try:
            ray.get(starting, timeout=1.0)
        except RayError as error:
            self._restart_later(now, reason_of(error))
            return self.state != "parked"
        return True
