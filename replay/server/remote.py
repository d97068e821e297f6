"""Runs the store in its own process. Logic belongs in service.py."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import ray

from m3pc.config.schema import FleetConfig, OnlineConfig
from m3pc.core.exit_codes import IO_FAILED
from m3pc.telemetry.process_report import ProcessReport
from m3pc.types import Ack, AppendKey
from replay.format.manifest import Header
from replay.server.service import StoreService, StoreTotals
from replay.writing.manifest_writer import BrokenStoreError

# Threads per group of calls: appends that wait for the learner never block its calls.
GROUPS = {"appends": 64, "learner": 8, "reports": 4}

log = logging.getLogger(__name__)


# Ray's annotations lack concurrency groups.
@cast(Any, ray.remote)(num_cpus=0, max_restarts=0, concurrency_groups=GROUPS)
class StoreActor:
    """Never restarts by itself: the supervisor starts a new actor."""

    def __init__(self, path: str, header: Header, online: OnlineConfig, fleet: FleetConfig) -> None:
        self._service = StoreService(path, header, online, fleet)

    @ray.method(concurrency_group="appends")
    def append(self, key: AppendKey, payload: bytes) -> Ack:
        with _exit_when_broken():
            return self._service.append(key, payload)

    @ray.method(concurrency_group="learner")
    def may_update(self, epoch: int, done: int, total: int, timeout: float) -> int:
        with _exit_when_broken():
            return self._service.may_update(epoch, done, total, timeout)

    @ray.method(concurrency_group="reports")
    def report(self) -> ProcessReport[StoreTotals]:
        with _exit_when_broken():
            return ProcessReport(
                pid=os.getpid(), snapshot=self._service.report(), detail=self._service.totals()
            )

    @ray.method(concurrency_group="reports")
    def set_slack(self, steps: int) -> None:
        self._service.set_slack(steps)

    @ray.method(concurrency_group="reports")
    def close(self) -> None:
        self._service.close()


@contextmanager
def _exit_when_broken() -> Iterator[None]:
    try:
        yield
    except BrokenStoreError as error:
        log.critical("event=store-ends code=%d error=%s", IO_FAILED, error)
        logging.shutdown()
        os._exit(IO_FAILED)
