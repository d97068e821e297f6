"""Several Ray nodes on this machine, as `ray start` makes them; no process of this one joins."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from m3pc.run.ray_node import LOOPBACK, SETTINGS
from tests.online_job import alive
from tests.redis_server import free_port
from tests.waiting import eventually

START_SECONDS = 120


@dataclass(slots=True, kw_only=True)
class Nodes:
    folder: Path  # with a short name
    environment: dict[str, str]
    address: str = ""
    pids: list[list[int]] = field(default_factory=list)  # of each node's processes

    def start(self, *, cpus: int, gpus: int = 0) -> None:
        """The first is the head."""
        number, port = len(self.pids), free_port()
        where = ["--head", f"--port={port}"] if not number else [f"--address={self.address}"]
        before = self._processes()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *where),
                *(f"--node-ip-address={LOOPBACK}", f"--temp-dir={self.folder / 'r'}"),
                *(f"--num-cpus={cpus}", f"--num-gpus={gpus}", "--include-dashboard=false"),
                *("--object-store-memory=100000000", "--disable-usage-stats"),
            ],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.address = self.address or f"{LOOPBACK}:{port}"
        self.pids.append(sorted(self._processes() - before))

    def kill(self, number: int) -> None:
        """All at once, workers included: a machine that loses its power."""
        node = set(self.pids[number])
        for pid in sorted(node | {pid for pid in self._processes() if _parent(pid) in node}):
            _kill(pid)
        assert eventually(lambda: not any(map(alive, node)))

    def end(self) -> None:
        for pid in self._processes():
            _kill(pid)
        assert eventually(lambda: not any(map(alive, self._processes())))

    def _processes(self) -> set[int]:
        """Those that were started in this environment: its folder is in all of them."""
        mark = f"M3PC_NODES={self.folder}".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
            except OSError:  # it ended meanwhile, or is not ours
                continue
        return {pid for pid in found if alive(pid)}


@contextmanager
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="m3-", dir="/tmp"))
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "M3PC_NODES": str(folder)}
    found = Nodes(folder=folder, environment={**os.environ, **SETTINGS, **own})
    try:
        yield found
    finally:
        found.end()
        shutil.rmtree(folder, ignore_errors=True)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
