"""Two hosts on this machine and the link between them: a Ray cluster that can be partitioned.

    head ── switch ── worker

Three network namespaces; the switch is a bridge. While its port to the worker is down, the head
sees nothing but silence. Both hosts see the same files.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from m3pc.ray_nodes.connection import LOOPBACK_ONLY
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.online_job import ONE_THREAD, Job
from tests.support.servers.autoscaling_cluster import Watch
from tests.support.servers.processes import program_name
from tests.support.servers.ray_nodes import START_SECONDS, Nodes, nodes
from tests.support.servers.redis_server import COMMANDS, MISSING, PASSWORD, USER
from tests.support.servers.waiting import eventually

ADDRESSES = {"head": "10.77.0.1", "worker": "10.77.0.2"}
RAY_PORT, REDIS_PORT = 6379, 6390  # always free in a namespace of their own
SWITCH, BRIDGE, CARD = "switch", "bridge", "eth0"


def missing() -> str:
    """Why two hosts are impossible here; "" if they are not."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and its `ip` command (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = f"m3-{secrets.token_hex(3)}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"no network namespace: {made.stderr.decode().strip()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    prefix: str  # of the names of its namespaces

    def space(self, host: str) -> str:
        return f"{self.prefix}-{host}"

    def inside(self, host: str) -> list[str]:
        """The command that runs another one on a host."""
        return ["ip", "netns", "exec", self.space(host)]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """No packet passes while the block runs."""
        port = f"-n {self.space(SWITCH)} link set worker"
        _ip(f"{port} down")
        try:
            yield
        finally:
            _ip(f"{port} up")


@contextmanager
def network() -> Iterator[Network]:
    net = Network(prefix=f"m3-{secrets.token_hex(3)}")
    switch = net.space(SWITCH)
    try:
        for host in (SWITCH, *ADDRESSES):
            _ip(f"netns add {net.space(host)}")
        _ip(f"-n {switch} link add {BRIDGE} type bridge")
        _ip(f"-n {switch} link set {BRIDGE} up")
        for host, address in ADDRESSES.items():
            own = net.space(host)
            _ip(f"-n {switch} link add {host} type veth peer name {CARD} netns {own}")
            _ip(f"-n {switch} link set {host} master {BRIDGE} up")
            _ip(f"-n {own} address add {address}/24 dev {CARD}")
            for device in ("lo", CARD):
                _ip(f"-n {own} link set {device} up")
        yield net
    finally:
        for host in (*ADDRESSES, SWITCH):  # with them go their cards and cables
            with suppress(subprocess.CalledProcessError):
                _ip(f"netns del {net.space(host)}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, timeout=20)


class TwoHosts:
    """A Ray cluster of both hosts, with a Redis on the head; its processes are those of `nodes`."""

    address = f"{ADDRESSES['head']}:{RAY_PORT}"
    redis = f"redis://{USER}:{PASSWORD}@{ADDRESSES['head']}:{REDIS_PORT}/0"

    def __init__(self, network: Network, nodes: Nodes, settings: dict[str, str]) -> None:
        self.network, self._nodes = network, nodes
        # The hosts have addresses of their own, which Ray has to use.
        of_hosts = {k: v for k, v in nodes.environment.items() if k not in LOOPBACK_ONLY}
        self.environment = of_hosts | settings
        self.cut = network.cut
        self._started: list[subprocess.Popen[bytes]] = []
        self._start_redis()

    def start(self, host: str, *, cpus: int, roles: Sequence[str]) -> None:
        """Start a node by the command, which restarts the node whenever it is lost."""
        folder = self._nodes.folder / host[0]
        if host == "head":
            where = ["head", "--ip", ADDRESSES[host]]
        else:
            where = ["worker", "--address", self.address, "--ip", ADDRESSES[host]]
        self._run(
            host,
            *(sys.executable, "-m", "m3pc", "node", *where, "--folder", str(folder)),
            *("--token-file", self.environment["RAY_AUTH_TOKEN_PATH"]),
            *("--cpus", str(cpus), "--gpus", "0", "--object-store-memory", "100000000"),
            *(word for role in roles for word in ("--role", role)),
        )
        up = "address:" if host == "head" else "joined:"
        assert eventually(lambda: up in self.printed(host), START_SECONDS), self.printed(host)

    def printed(self, host: str) -> str:
        """The output of the processes of a host."""
        return (self._nodes.folder / f"{host}.log").read_text(errors="replace")

    def _start_redis(self) -> None:
        program, folder = shutil.which("redis-server"), self._nodes.folder
        if program is None:
            pytest.skip(MISSING)
        allowed = " ".join(f"+{command}" for command in COMMANDS.split())
        (folder / "users.acl").write_text(
            f"user default off\nuser {USER} on >{PASSWORD} resetkeys ~m3pc:* -@all {allowed}\n"
        )
        self._run(
            "head",
            *(program, "--bind", ADDRESSES["head"], "--port", str(REDIS_PORT)),
            *("--aclfile", str(folder / "users.acl"), "--save", "", "--appendonly", "no"),
            *("--dir", str(folder), "--logfile", "redis.log", "--daemonize", "no"),
        )
        written = folder / "redis.log"
        assert eventually(lambda: written.exists() and "Ready to accept" in written.read_text())

    def _run(self, host: str, *command: str) -> None:
        with (self._nodes.folder / f"{host}.log").open("a") as log:
            self._started.append(
                subprocess.Popen(
                    [*self.network.inside(host), *command],
                    cwd=ROOT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def end(self) -> None:
        """End the processes that might start others; the rest ends with `nodes`."""
        for process in self._started:
            process.kill()
            process.wait()

    def logged(self, event: str) -> int:
        """How often rollout processes of both hosts logged an event."""
        logs = self._nodes.folder.glob("*/r/session_2*/logs/worker-*.err")
        return sum(path.read_text(errors="replace").count(f"event={event} ") for path in logs)

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Counts the nodes."""
        watch = Watch(self.address, self.environment, self.network.inside("head"))
        try:
            yield watch
        finally:
            watch.end()

    @contextmanager
    def stopped(self, host: str, program: str) -> Iterator[None]:
        """A program on a host is stopped (SIGSTOP) while the block runs."""
        named = subprocess.run(
            ["ip", "netns", "pids", self.network.space(host)],
            capture_output=True,
            text=True,
            check=True,
        )
        pids = [int(pid) for pid in named.stdout.split() if program_name(int(pid)) == program]
        assert pids, named.stdout
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextmanager
def two_hosts(**settings: str) -> Iterator[TwoHosts]:
    """`settings` are environment variables of Ray that replace those of m3pc."""
    with network() as net, nodes() as processes:
        hosts = TwoHosts(net, processes, settings)
        try:
            yield hosts
        finally:
            hosts.end()


class HeadJob(Job):
    """`m3pc resume RUN` on the head."""

    def __init__(self, run: Path, hosts: TwoHosts) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [
                *(*hosts.network.inside("head"), sys.executable, "-m", "m3pc", "resume", str(run)),
                *("--address", hosts.address, "--coordinator", hosts.redis),
            ],
            cwd=ROOT,
            env={**hosts.environment, "PYTHONPATH": str(ROOT), **ONE_THREAD},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@contextmanager
def head_job(run: Path, hosts: TwoHosts) -> Iterator[HeadJob]:
    work = HeadJob(run, hosts)
    try:
        yield work
    finally:
        work.end()
