"""Several Ray nodes on this machine, as `ray start` or `m3pc node` make them, on loopback alone; no
process of this one joins."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from m3pc.ray_nodes.connection import LOOPBACK, LOOPBACK_ONLY, SETTINGS
from m3pc.ray_nodes.ports import CLIENTS, NodePorts, node_ports
from m3pc.ray_nodes.processes import descendants, marked, name, send
from m3pc.types import InputError
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.online_job import alive
from tests.support.servers.redis_server import free_port
from tests.support.servers.waiting import eventually

START_SECONDS = 120
# Under 32768, from which Linux takes numbers for outgoing connections.
PORT_BLOCKS = range(24000, 32000, 1000)


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
                *(sys.executable, "-m", "m3pc.ray_nodes.ray_start", *where),
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
        return marked("M3PC_NODES", str(self.folder))


@contextmanager
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="m3-", dir="/tmp"))
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "M3PC_NODES": str(folder)}
    own |= {"PYTHONPATH": str(ROOT), **LOOPBACK_ONLY}
    found = Nodes(folder=folder, environment={**os.environ, **SETTINGS, **own})
    try:
        yield found
    finally:
        found.end()
        shutil.rmtree(folder, ignore_errors=True)


class NodeCommand:
    """`m3pc node ...`, with the words and variables that are given."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.folder, self._log = folder, folder.with_name(f"{folder.name}.log")
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "m3pc", "node", *words, f"--folder={folder}"],
                cwd=ROOT,
                env={**bare_environment(), **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until_up(self, times: int = 1) -> None:
        """Until it told so often that it is up."""
        self.until(lambda: self.output.count("event=node-up") >= times)

    def until(self, condition: Callable[[], object]) -> None:
        ended = eventually(
            lambda: condition() or self.process.poll() is not None, 3 * START_SECONDS
        )
        assert condition(), f"in time: {ended}, code: {self.process.poll()}\n{self.output}"

    @property
    def pids(self) -> set[int]:
        return descendants([self.process.pid])

    def pid(self, program: str) -> int:
        """Of the one process of the node with that name; 0 while there is none."""
        found = [pid for pid in self.pids if name(pid) == program]
        assert len(found) <= 1
        return found[0] if found else 0

    def stop(self) -> int:
        """Its exit code, when all of it has ended."""
        pids = self.pids
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        assert not any(map(alive, pids)), self.output
        return code

    def end(self) -> None:
        pids = self.pids
        self.process.kill()
        self.process.wait()
        _kill(pids)
        self._log.unlink()


@contextmanager
def node_command(*words: str, **environment: str) -> Iterator[NodeCommand]:
    """In a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="m3-", dir="/tmp"))
    found = NodeCommand(folder, *words, **environment)
    try:
        yield found
    finally:
        found.end()
        shutil.rmtree(folder, ignore_errors=True)


def refused_node(words: str, *arguments: str, **environment: str) -> str:
    """What `m3pc node` says on its way out, with these words in it. One that starts is stopped."""
    process = subprocess.Popen(
        [sys.executable, "-m", "m3pc", "node", *arguments],
        cwd=ROOT,
        env={**bare_environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, ""), errors
    assert words in errors
    assert "Traceback" not in errors
    return errors


def bare_environment() -> dict[str, str]:
    """Ours, without what tests before this one, or the user, told Ray."""
    told = ("RAY_", "M3PC_RAY")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(told)}
    return {**kept, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


def free_ports(*taken: NodePorts) -> tuple[str, NodePorts]:
    """The word for `m3pc node` by which its ports are others than those of any node here."""
    for first in PORT_BLOCKS:
        ports = node_ports(first)
        if first not in CLIENTS and ports not in taken:
            try:
                ports.require_free(LOOPBACK, head=True)
            except InputError:
                continue
            return f"--ports-from={first}", ports
    raise AssertionError("all blocks of ports are taken")


def listeners(pids: set[int]) -> dict[int, set[str]]:
    """Ports on which these processes listen, with the addresses."""
    shown = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    found: dict[int, set[str]] = {}
    for line in shown.splitlines():
        host, _, port = line.split()[3].rpartition(":")
        if {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & pids:
            found.setdefault(int(port), set()).add(host.strip("[]").removeprefix("::ffff:"))
    return found


def _kill(pids: set[int]) -> None:
    """With all that they started."""
    pids = pids | descendants(pids)
    send(pids, signal.SIGKILL)
    assert eventually(lambda: not any(map(alive, pids)))
