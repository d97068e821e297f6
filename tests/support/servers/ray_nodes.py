"""Several Ray nodes on this machine, on loopback alone, by `ray start` or `m3pc node`. The process
of the tests is no node."""

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
from m3pc.ray_nodes.processes import descendants, find_by_variable, send_signal
from m3pc.types import InputError
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.online_job import alive
from tests.support.servers.processes import program_name
from tests.support.servers.redis_server import free_port
from tests.support.servers.waiting import eventually

START_SECONDS = 120
# Under 32768, from which Linux takes numbers for outgoing connections.
PORT_BLOCKS = range(24000, 32000, 1000)


@dataclass(slots=True, kw_only=True)
class Nodes:
    folder: Path  # with a short name, because of Ray's sockets
    environment: dict[str, str]
    address: str = ""
    pids: list[list[int]] = field(default_factory=list)  # of each node's processes

    def start(self, *, cpus: int, gpus: int = 0, more: Sequence[str] = ()) -> None:
        """Start a node; the first is the head."""
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
        """Kill all processes of a node at once, like a power failure."""
        _kill(set(self.pids[number]))

    def end(self) -> None:
        _kill(self._processes())

    def _processes(self) -> set[int]:
        """All processes of the nodes. The folder is in the environment of each, except where a
        process title overwrote it; those are children of one that has it."""
        return find_by_variable("M3PC_NODES", str(self.folder))


@contextmanager
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="m3-", dir="/tmp"))
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "M3PC_NODES": str(folder)}
    own |= {"PYTHONPATH": str(ROOT), **LOOPBACK_ONLY}
    cluster = Nodes(folder=folder, environment={**os.environ, **SETTINGS, **own})
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


class NodeCommand:
    """A process of `m3pc node`, with options and environment variables."""

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
        """Wait until the node has started so often."""
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
        """Of the only process of the node with that name; 0 while there is none."""
        pids = [pid for pid in self.pids if program_name(pid) == program]
        assert len(pids) <= 1
        return pids[0] if pids else 0

    def stop(self) -> int:
        """Stop the node; its exit code when all of its processes have ended."""
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
    """Run it in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="m3-", dir="/tmp"))
    command = NodeCommand(folder, *words, **environment)
    try:
        yield command
    finally:
        command.end()
        shutil.rmtree(folder, ignore_errors=True)


def refused_node(words: str, *arguments: str, **environment: str) -> str:
    """The error of an `m3pc node` that refuses to start; `words` have to be in it."""
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
    """This process's environment without settings of Ray, by the user or by earlier tests."""
    prefixes = ("RAY_", "M3PC_RAY")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    return {**kept, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


def free_ports(*taken: NodePorts) -> tuple[str, NodePorts]:
    """An option of `m3pc node` by which no port is taken, and those ports."""
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
    """The addresses on which these processes listen, by port."""
    output = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    addresses: dict[int, set[str]] = {}
    for line in output.splitlines():
        host, _, port = line.split()[3].rpartition(":")
        if {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & pids:
            address = host.strip("[]").removeprefix("::ffff:")
            addresses.setdefault(int(port), set()).add(address)
    return addresses


def _kill(pids: set[int]) -> None:
    """With their descendants."""
    pids = pids | descendants(pids)
    send_signal(pids, signal.SIGKILL)
    assert eventually(lambda: not any(map(alive, pids)))
