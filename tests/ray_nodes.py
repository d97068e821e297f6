"""Several Ray nodes on this machine, as `ray start` makes them; no process of this one joins."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from m3pc.run.cluster.ray_node import LOOPBACK, SETTINGS
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

    def start(self, *, cpus: int, gpus: int = 0, more: Sequence[str] = ()) -> None:
        """The first is the head."""
        number, port = len(self.pids), free_port()
        head = ["--head", f"--port={port}", "--include-dashboard=false"]
        where = [f"--address={self.address}"] if number else [*head, f"--temp-dir={self._ray}"]
        before = self._processes()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *where),
                *(f"--node-ip-address={LOOPBACK}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
                *("--object-store-memory=100000000", "--disable-usage-stats", *more),
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

    @property
    def _ray(self) -> Path:
        return self.folder / "r"

    def kill(self, number: int) -> None:
        """All at once, workers included: a machine that loses its power."""
        _kill(set(self.pids[number]))

    def end(self) -> None:
        _kill(self._processes())

    def _processes(self) -> set[int]:
        """Those that were started in this environment: its folder is in all of them, but for
        those that wrote their titles over it; they are children of one."""
        mark = f"M3PC_NODES={self.folder}".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
            except OSError:  # it ended meanwhile, or is not ours
                continue
        return _with_descendants({pid for pid in found if alive(pid)})


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


def _with_descendants(pids: set[int]) -> set[int]:
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it ended meanwhile
        return 0


def _kill(pids: set[int]) -> None:
    """With all that they started."""
    pids = _with_descendants(pids)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not any(map(alive, pids)))
