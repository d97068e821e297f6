"""The store in its own process. Logic belongs in service.py."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import ray

from m3pc.config.schema import FleetConfig, OnlineConfig
from m3pc.core.exit_codes import IO_FAILED
from m3pc.telemetry.recorder import Snapshot
from m3pc.types import Ack, AppendKey
from replay.format.manifest import Header
from replay.server.service import StoreService, StoreTotals
from replay.writing.manifest_writer import BrokenStoreError
from replay.writing.writer import WriterOptions

NAME_PAUSE = 0.1  # seconds between two trials to take the name of a process that has just died
# Threads by what they do: appends that wait for the learner never keep the learner waiting.
GROUPS = {"appends": 64, "learner": 8, "reports": 4}

log = logging.getLogger(__name__)


# Ray's own annotations know no groups.
@cast(Any, ray.remote)(num_cpus=0, max_restarts=0, concurrency_groups=GROUPS)
class StoreActor:
    """Start it by `start_store`. It never restarts by itself: a supervisor starts the next."""

    def __init__(
        self,
        path: str,
        header: Header,
        online: OnlineConfig,
        fleet: FleetConfig,
        options: WriterOptions | None = None,
    ) -> None:
        self._service = StoreService(path, header, online, fleet, options=options)

    @ray.method(concurrency_group="appends")
    def append(self, key: AppendKey, payload: bytes) -> Ack:
        with _ending_when_broken():
            return self._service.append(key, payload)

    @ray.method(concurrency_group="learner")
    def may_update(self, epoch: int, done: int, total: int, timeout: float) -> int:
        with _ending_when_broken():
            return self._service.may_update(epoch, done, total, timeout)

    @ray.method(concurrency_group="reports")
    def totals(self) -> StoreTotals:
        with _ending_when_broken():
            return self._service.totals()

    @ray.method(concurrency_group="reports")
    def report(self) -> Snapshot:
        with _ending_when_broken():
            return self._service.report()

    @ray.method(concurrency_group="reports")
    def status(self) -> tuple[StoreTotals, Snapshot]:
        with _ending_when_broken():
            return self._service.totals(), self._service.report()

    @ray.method(concurrency_group="reports")
    def set_slack(self, steps: int) -> None:
        self._service.set_slack(steps)

    @ray.method(concurrency_group="reports")
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="reports")
    def close(self) -> None:
        self._service.close()


def start_store(
    name: str,
    *,
    namespace: str,
    path: str,
    header: Header,
    online: OnlineConfig,
    fleet: FleetConfig,
    options: WriterOptions | None = None,
    deadline: float = 60.0,
) -> Any:
    """The actor's handle, once it has recovered the store and can be asked. It lives as long as the
    handle's owner; the name of one that has just died is waited for."""
    end, kind = time.monotonic() + deadline, cast(Any, StoreActor)
    while True:
        try:
            actor = kind.options(name=name, namespace=namespace).remote(
                path, header, online, fleet, options
            )
            break
        except ValueError:
            if time.monotonic() + NAME_PAUSE > end:
                raise
            time.sleep(NAME_PAUSE)
    pid = ray.get(actor.pid.remote(), timeout=max(end - time.monotonic(), 0))
    log.info("event=store-started name=%s pid=%d path=%s", name, pid, path)
    return actor


@contextmanager
def _ending_when_broken() -> Iterator[None]:
    try:
        yield
    except BrokenStoreError as error:
        log.critical("event=store-ends code=%d error=%s", IO_FAILED, error)
        logging.shutdown()
        os._exit(IO_FAILED)
