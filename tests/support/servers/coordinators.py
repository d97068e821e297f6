"""Coordinators to test, in a file and in a Redis: make clients, and lose all records."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from m3pc.coordinator import connect
from m3pc.coordinator.coordinator import TableCoordinator
from m3pc.coordinator.sqlite import SqliteTable
from m3pc.types import Coordinator, Pointer, RecoveredState, Version
from tests.support.servers.redis_server import RedisServer


class Place(Protocol):
    """The coordinator of one run, for any number of clients."""

    address: str
    generations: Path

    def client(
        self, recover: Callable[[], RecoveredState] = RecoveredState, deadline: float = 5.0
    ) -> Coordinator: ...
    def lose(self) -> None: ...
    def close(self) -> None: ...


class InFile:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "coordinator.sqlite"
        self.address, self.generations = f"sqlite:{self.path}", folder / "generations"
        self.now = 1_000  # milliseconds
        self._clients: list[Coordinator] = []

    def client(
        self, recover: Callable[[], RecoveredState] = RecoveredState, deadline: float = 5.0
    ) -> Coordinator:
        table = SqliteTable(self.path, clock=lambda: self.now)
        self._clients.append(
            TableCoordinator(
                table, generations=self.generations, recover=recover, deadline=deadline
            )
        )
        return self._clients[-1]

    def lose(self) -> None:
        for path in self.path.parent.glob(f"{self.path.name}*"):
            path.unlink()

    def close(self) -> None:
        for client in self._clients:
            client.close()


class InRedis:
    def __init__(self, folder: Path, server: RedisServer, run: str) -> None:
        self.server, self.run = server, run
        self.address, self.generations = server.url, folder / "generations"
        self._clients: list[Coordinator] = []

    def client(
        self, recover: Callable[[], RecoveredState] = RecoveredState, deadline: float = 5.0
    ) -> Coordinator:
        self._clients.append(
            connect(
                self.address,
                run=self.run,
                generations=self.generations,
                recover=recover,
                deadline=deadline,
            )
        )
        return self._clients[-1]

    @property
    def prefix(self) -> str:
        return f"m3pc:{{{self.run}}}"

    def key(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    def lose(self) -> None:
        with self.server.admin() as admin:
            admin.flushall()

    def close(self) -> None:
        for client in self._clients:
            client.close()


def pointer(epoch: int, number: int, content: str = "a") -> Pointer:
    return Pointer(
        version=Version(epoch=epoch, number=number),
        sha256=content.encode().hex().zfill(64),
        size=10,
        path=f"weights/{epoch}-{number}.safetensors",
    )
