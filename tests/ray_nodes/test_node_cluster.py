"""A real cluster by `m3pc node`: only its token lets in, and it outlives its processes.

One head serves all tests of this file; its control process keeps its tables in Redis.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from m3pc.online.delivery_audit import audit_deliveries
from m3pc.online.run_control import read_status
from m3pc.ray_nodes.ports import CLIENTS, PORTS, NodePorts
from m3pc.ray_nodes.processes import command_of
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.fleet_runs import FLEET, PARTS
from tests.support.runs.online_job import job
from tests.support.runs.small_online import new_run
from tests.support.servers.ray_nodes import (
    NodeCommand,
    bare_environment,
    free_ports,
    listeners,
    node_command,
)
from tests.support.servers.redis_server import ADMIN, ADMIN_PASSWORD, RedisServer
from tests.support.servers.waiting import eventually

WRONG = "00" * 32
ACTOR = """
@ray.remote(num_cpus=0)
class Counter:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return [self.count, os.getpid()]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    command: NodeCommand
    ports: NodePorts
    redis: RedisServer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports.by_name['gcs']}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.ports.by_name['dashboard']}"

    @property
    def token(self) -> Path:
        return self.command.folder / "token"

    @property
    def credentials(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}

    def submit(self, entrypoint: str, token: str | None) -> int:
        """Submit a job by HTTP; the status of the response."""
        request = urllib.request.Request(
            f"{self.dashboard}/api/jobs/",
            data=json.dumps({"entrypoint": entrypoint}).encode(),
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {token}"} if token else {}),
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def drive(self, script: str, address: str = "", **credentials: str) -> str:
        """The last line that a driver prints; empty if it failed."""
        connect = (
            "import os, sys, json\n"
            "from m3pc.ray_nodes.connection import connected\n"
            "with connected(sys.argv[1], namespace='n'):\n"
            "    import ray\n"
            "    exec(sys.argv[2])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", connect, address or self.address, script],
            cwd=ROOT,
            env={**bare_environment(), **(credentials or self.credentials)},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        lines = done.stdout.strip().splitlines()
        assert done.returncode == 0 or credentials, done.stderr
        return lines[-1] if done.returncode == 0 and lines else ""

    def nodes(self) -> list[int]:
        """Ports of the raylets that are alive."""
        script = "print(json.dumps([n['NodeManagerPort'] for n in ray.nodes() if n['Alive']]))"
        return sorted(json.loads(self.drive(script)))


@pytest.fixture(scope="module")
def head(redis_server: RedisServer) -> Iterator[Head]:
    option, ports = free_ports()
    url = f"redis://{ADMIN}:{ADMIN_PASSWORD}@127.0.0.1:{redis_server.port}"
    words = ("head", option, "--cpus=8", "--gpus=0", "--role=actor", "--role=learner")
    with node_command(*words, M3PC_RAY_REDIS=url) as command:
        command.until_up()
        yield Head(command=command, ports=ports, redis=redis_server)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_job_needs_the_token(head: Head, tmp_path: Path) -> None:
    marks = [tmp_path / name for name in ("anonymous", "wrong", "ours")]
    assert head.submit(f"touch {marks[0]}", None) == 401
    assert head.submit(f"touch {marks[1]}", WRONG) == 403
    assert head.submit(f"touch {marks[2]}", head.token.read_text()) == 200
    assert eventually(marks[2].exists, 120)
    assert not marks[0].exists() and not marks[1].exists()


def refused(head: Head, script: str, address: str, folder: Path) -> bool:
    """Whether a driver without a token and one with a wrong token fail. Ray tries for a while."""
    (folder / "wrong").write_text(WRONG)
    wrong = (
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "wrong")},
    )
    with ThreadPoolExecutor() as pool:
        done = pool.map(lambda credentials: head.drive(script, address, **credentials), wrong)
        return list(done) == ["", ""]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_driver_needs_the_token(head: Head, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert refused(head, f"open({str(mark)!r}, 'w'); print('in')", "", tmp_path)
    assert not mark.exists()
    assert "m3pc_learner" in head.drive("print(ray.cluster_resources())")


@pytest.mark.ray
@pytest.mark.skipif(not shutil.which("ss"), reason="`ss` is not installed")
def test_a_head_listens_where_the_table_says_and_on_loopback_only(head: Head) -> None:
    expected = set(head.ports.by_name.values())
    assert eventually(lambda: expected <= listeners(head.command.pids).keys())
    addresses_by_port = listeners(head.command.pids)
    assert addresses_by_port.keys() - expected <= {*head.ports.workers, *CLIENTS}
    assert {address for addresses in addresses_by_port.values() for address in addresses} == {
        "127.0.0.1"
    }


@pytest.mark.ray
def test_only_its_owner_reads_the_files_of_a_node(head: Head) -> None:
    folder = head.command.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert head.token.stat().st_mode & 0o777 == 0o600
    if os.geteuid() == 0 and shutil.which("setpriv"):
        nobody = ["setpriv", "--reuid=65534", "--clear-groups"]
        for words in (["ls", str(folder)], ["ls", str(folder / "r")], ["cat", str(head.token)]):
            done = subprocess.run([*nobody, *words], capture_output=True, text=True, check=False)
            assert done.returncode != 0 and not done.stdout
            assert "Permission denied" in done.stderr


@pytest.mark.ray
def test_no_secret_is_in_a_command_line_or_in_a_log(head: Head) -> None:
    secrets = (head.token.read_text(), ADMIN_PASSWORD)
    for pid in (head.command.process.pid, *head.command.pids):
        if (Path("/proc") / str(pid)).exists():
            assert not any(secret in " ".join(command_of(pid)) for secret in secrets)
    files = [path for path in head.command.folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    for secret in secrets:
        assert secret not in head.command.output
        holders = [path for path in files if secret.encode() in path.read_bytes()]
        assert holders == ([head.token] if secret == secrets[0] else [])


def m3pc(head: Head, *words: object) -> "subprocess.CompletedProcess[str]":
    """A command in a shell that has the token."""
    return subprocess.run(
        [sys.executable, "-m", "m3pc", *map(str, words)],
        cwd=ROOT,
        env={**bare_environment(), **head.credentials, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_job_finetunes_and_finishes(head: Head, tmp_path: Path) -> None:
    run, cluster = tmp_path / "run", ("--address", head.dashboard)
    new_run(run, **FLEET | {"online__steps": 200, "fleet__actors": 1})
    words = ("--in", tmp_path, "--env", f"PYTHONPATH={ROOT}", "--id", "one")  # for the point
    done = m3pc(head, "submit", *cluster, *words, "--", "resume", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished" in done.stdout
    assert "job: one  succeeded" in done.stderr
    assert audit_deliveries(run).acknowledged > 0 and audit_deliveries(run).sound
    assert read_status(run)["reason"] == "finished"
    listed = m3pc(head, "jobs", "list", *cluster).stdout
    assert "SUCCEEDED" in listed and "resume run" in listed
    assert "finished" in m3pc(head, "jobs", "logs", "one", *cluster).stdout
    failed = m3pc(head, "submit", *cluster, "--in", tmp_path, "--", "resume", "absent")
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert "error:" in failed.stdout


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_is_stopped_in_order_and_its_run_goes_on(head: Head, tmp_path: Path) -> None:
    run, cluster = tmp_path / "run", ("--address", head.dashboard)
    new_run(run, **FLEET | {"fleet__actors": 1})
    words = ("--in", tmp_path, "--env", f"PYTHONPATH={ROOT}", "--id", "two", "--no-follow")
    assert m3pc(head, "submit", *cluster, *words, "--", "resume", "run").returncode == 0
    assert eventually(lambda: read_status(run).get("steps", 0) > 100, 180)
    stopped = m3pc(head, "jobs", "stop", "two", *cluster)
    assert (stopped.returncode, stopped.stdout) == (0, "job: two  stopped\n"), stopped.stderr
    assert read_status(run)["reason"] == "stopped" and not read_status(run)["driven"]
    assert audit_deliveries(run).sound
    before = read_status(run)["steps"]
    with job(run, "--address", head.address, **bare_environment() | head.credentials) as work:
        work.until(lambda: work.steps > before)
        work.stop()


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_cluster_outlives_its_control_process(head: Head) -> None:
    """Named actors stay as they are, new ones can be made, and the token is still required."""
    make = "Counter.options(name='one', lifetime='detached').remote()"
    first = head.drive(f"{ACTOR}\nprint(ray.get({make}.add.remote()))")
    others = head.command.pids - {gcs := head.command.pid("gcs_server")}
    os.kill(gcs, signal.SIGKILL)
    head.command.until(lambda: head.command.pid("gcs_server") not in (0, gcs))
    assert others <= head.command.pids, "nothing else is restarted"
    again = head.drive("print(ray.get(ray.get_actor('one').add.remote(), timeout=60))")
    assert [json.loads(first)[0], json.loads(again)[0]] == [1, 2]
    assert json.loads(first)[1] == json.loads(again)[1], "the same process"
    new = head.drive(f"{ACTOR}\nprint(ray.get(Counter.remote().add.remote(), timeout=60))")
    assert json.loads(new)[0] == 1
    head.drive("ray.kill(ray.get_actor('one'))")
    assert [head.submit("true", token) for token in (None, WRONG)] == [401, 403]
    assert head.submit("true", head.token.read_text()) == 200


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_node_whose_raylet_was_killed_comes_back(head: Head) -> None:
    option, ports = free_ports(head.ports)
    joining = ("worker", f"--address={head.address}", f"--token-file={head.token}", option)
    with node_command(*joining, "--cpus=1", "--gpus=0", "--role=planner") as worker:
        worker.until_up()
        both = sorted([head.ports.by_name["node-manager"], ports.by_name["node-manager"]])
        assert head.nodes() == both
        names = {port.name for port in PORTS if not port.head}
        assert listeners(worker.pids).keys() - {ports.by_name[name] for name in names} <= set(
            ports.workers
        )
        os.kill(worker.pid("raylet"), signal.SIGKILL)
        worker.until_up(2)
        assert eventually(lambda: head.nodes() == both, 90), head.nodes()
        where = "ray.remote(resources={'m3pc_planner': 0.001})(lambda: os.getpid()).remote()"
        assert int(head.drive(f"print(ray.get({where}, timeout=60))"))
        assert worker.stop() == 0
        assert eventually(lambda: head.nodes() == [head.ports.by_name["node-manager"]], 60)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_goes_on_when_the_control_process_is_killed(head: Head, tmp_path: Path) -> None:
    run = tmp_path / "run"
    new_run(run, **FLEET)
    with job(run, "--address", head.address, **bare_environment() | head.credentials) as work:
        work.until_up(2)
        names = (*PARTS, "actor-1")
        before = [work.pid(name) for name in names]
        gcs = head.command.pid("gcs_server")
        os.kill(gcs, signal.SIGKILL)
        head.command.until(lambda: head.command.pid("gcs_server") not in (0, gcs))
        work.advance(200)
        assert [work.pid(name) for name in names] == before
        assert [work.restarts(name) for name in names] == [0] * len(names)
        pid = work.kill("actor-0")  # Ray's control process has to start another
        work.until_replaced("actor-0", pid)
        pid = work.kill("planner-0")  # and so has ours
        work.until_replaced("planner-0", pid)
        work.advance(60)
        assert work.stop().acknowledged > 20


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_remote_driver_needs_the_token(head: Head, tmp_path: Path) -> None:
    address = f"ray://127.0.0.1:{head.ports.by_name['client']}"
    assert refused(head, "print('in')", address, tmp_path)
    assert head.drive("print(ray.get(ray.put(3)))", address) == "3"


@pytest.mark.ray
def test_a_head_that_is_stopped_leaves_nothing_behind(head: Head) -> None:
    """The last test of this file."""
    assert head.command.stop() == 0, head.command.output
    with head.redis.admin() as client:
        assert client.keys("RAY*") == []


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")),
    reason="only root can make a network of its own",
)
def test_alone_in_a_network_nothing_listens_that_is_not_in_the_table() -> None:
    """With the default ports, and without Redis."""
    script = (
        "ip link set lo up; "
        f"{sys.executable} -m m3pc node head --cpus 2 --gpus 0 --folder $0 2>$0/log & "
        "for n in $(seq 600); do grep -q event=node-up $0/log && break; sleep 0.2; done; "
        "sleep 5; ss -ltnH; kill -9 $(pgrep -x gcs_server); wait $!; echo code $?"
    )
    with TemporaryDirectory(prefix="m3-", dir="/tmp") as name:
        folder = Path(name)
        done = subprocess.run(
            ["unshare", "-pfn", "--mount-proc", "sh", "-c", script, str(folder)],
            cwd=ROOT,
            env=bare_environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("LISTEN")]
        listening = [words[3].rpartition(":") for words in lines]
        assert sorted(int(port) for _, _, port in listening) == sorted(p.number for p in PORTS)
        assert {host.strip("[]").removeprefix("::ffff:") for host, _, _ in listening} == {
            "127.0.0.1"
        }
        assert "code 69" in done.stdout, "without Redis a cluster ends with its control process"
        assert "event=cluster-lost" in (folder / "log").read_text()
