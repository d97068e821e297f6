"""A real Redis server on a free loopback port, whose user has the rights that we need, no more."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from m3pc.coordinator.redis import RedisAddress

USER, PASSWORD = "m3pc", "a-pass-word-for-tests"
ADMIN, ADMIN_PASSWORD = "admin", "another-pass-word"
COMMANDS = "evalsha script|load time set getrange pttl del hget hset hlen hexists hgetall auth"
MISSING = (
    "no redis-server on this machine; `make test` installs it, or: apt-get install redis-server"
)


class RedisServer:
    """Empty at each start: nothing is kept on disk."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip(MISSING)
        self._program, self._folder = program, folder
        self.port = free_port()
        allowed = " ".join(f"+{command}" for command in COMMANDS.split())
        (folder / "users.acl").write_text(
            "user default off\n"
            f"user {USER} on >{PASSWORD} resetkeys ~m3pc:* -@all {allowed}\n"
            f"user {ADMIN} on >{ADMIN_PASSWORD} ~* &* +@all\n"
        )
        self.start()

    @property
    def address(self) -> RedisAddress:
        return RedisAddress(host="127.0.0.1", port=self.port, user=USER, password=PASSWORD)

    @property
    def url(self) -> str:
        return f"redis://{USER}:{PASSWORD}@127.0.0.1:{self.port}/0"

    def admin(self) -> "redis.Redis":
        return redis.Redis(
            port=self.port, username=ADMIN, password=ADMIN_PASSWORD, protocol=2, socket_timeout=5
        )

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(self._program, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--aclfile", "users.acl", "--save", "", "--appendonly", "no"),
                *("--logfile", "redis.log", "--daemonize", "no"),
            ],
            cwd=self._folder,
        )
        end = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError((self._folder / "redis.log").read_text())
            time.sleep(0.02)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It keeps its connections and does not answer."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with self.admin() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
