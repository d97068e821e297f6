"""cluster.yaml, by Ray's own rules and by ours; and what its commands start on this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import yaml
from ray.autoscaler._private import command_runner
from ray.autoscaler._private.util import prepare_config, validate_config

from m3pc.ray_nodes.connection import SETTINGS
from m3pc.ray_nodes.ports import PORTS, node_ports
from tests.deployment.deploy_files import DELETED, ROOT, changed, cluster_findings, load, options

TEXT = (ROOT / "cluster.yaml").read_text()
SHIPPED = load("cluster.yaml")
TOKEN = "ab" * 32
HEAD_IP, WORKER_IP = "10.9.0.1", "10.9.0.2"


def on_premises() -> Any:
    """What is left when one does what the file says: the part for AWS goes, the signs #~ too."""
    kept = re.sub(r"# --- AWS: begin ---.*?# --- AWS: end ---", "", TEXT, flags=re.DOTALL)
    return yaml.safe_load(re.sub(r"^#~ ", "", kept, flags=re.MULTILINE))


def prepared(config: Any) -> Any:
    result = prepare_config(config)
    validate_config(result)
    return result


def test_rays_own_schema_accepts_it() -> None:
    config = prepared(SHIPPED)
    assert config["provider"]["type"] == "aws"
    # Ray fills in what a file leaves out: it would install a boto3, and open the dashboard.
    assert config["head_setup_commands"] == config["setup_commands"]
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert len(starts) == 4


def test_rays_own_schema_refuses_a_misspelt_key() -> None:
    with pytest.raises(Exception, match="max_wrokers"):
        prepared(SHIPPED | {"max_wrokers": 3})


def test_the_commented_provider_is_valid_when_it_is_uncommented() -> None:
    config = prepared(on_premises())
    assert config["provider"]["type"] == "local"
    assert config["available_node_types"]["local.cluster.node"]["min_workers"] == 2
    assert cluster_findings(on_premises()) == []


def test_the_shipped_file_has_no_findings() -> None:
    assert cluster_findings(SHIPPED) == []


START = SHIPPED["head_start_ray_commands"][1]
WORKER = SHIPPED["worker_start_ray_commands"][1]
SETUP, ENV = SHIPPED["setup_commands"]
HEAD, WORKERS = ("head_start_ray_commands", 1), ("worker_start_ray_commands", 1)
IMAGE = ("available_node_types", "gpu", "docker", "worker_image")
# fmt: off
MUTANTS: list[tuple[str, Sequence[str | int], Any]] = [
    ("dashboard listens on '0.0.0.0'", HEAD, START.replace("127.0.0.1", "0.0.0.0")),
    ("dashboard listens on '[::]'", HEAD, START.replace("127.0.0.1", "[::]")),
    ("dashboard listens on None", HEAD, START.replace("--dashboard-host=127.0.0.1", "")),
    ("no autoscaler", HEAD, START.replace("--autoscaling-config", "--other")),
    ("where others may enter", HEAD, START.replace("$HOME/.m3pc/r", "/tmp/ray")),
    ("where others may enter", WORKERS, WORKER.replace("$HOME/.m3pc/r", "/tmp/ray")),
    ("without its settings", WORKERS, WORKER.removeprefix(". ~/.m3pc/ray.env; ")),
    ("starts Ray 0 times", WORKERS, "true"),
    ("asks for no token", ("setup_commands", 1), ENV.replace("MODE=token", "MODE=disabled")),
    ("no token file", ("setup_commands", 1), ENV.replace("RAY_AUTH_TOKEN_PATH", "OTHER")),
    ("open umask", ("setup_commands", 1), ENV.replace("\numask 077\n", "\n")),
    ("a secret is written", ("setup_commands", 1), ENV + "export RAY_AUTH_TOKEN=abc\n"),
    ("a secret is written", ("setup_commands", 1), ENV + "export A=redis://u:pass@h:6390\n"),
    ("may read the token", ("setup_commands", 0), SETUP.replace("chmod 600", "chmod 644")),
    ("may enter the folder", ("setup_commands", 0), SETUP.replace("chmod 700", "chmod 755")),
    ("does not get to the nodes", ("file_mounts", "~/.m3pc/token"), DELETED),
    ("keep capabilities", ("docker", "run_options", 0), "--cap-add=ALL"),
    ("may gain privileges", ("docker", "run_options", 1), DELETED),
    ("not pinned", ("docker", "head_image"), "REPLACE/m3pc"),
    ("not pinned", IMAGE, "REPLACE/m3pc:latest"),
]
# fmt: on


@pytest.mark.parametrize(("finding", "path", "value"), MUTANTS)
def test_each_broken_copy_is_found(finding: str, path: Sequence[str | int], value: Any) -> None:
    findings = cluster_findings(changed(SHIPPED, path, value))
    assert [line for line in findings if finding in line], findings


def test_ports_are_pinned_to_those_of_our_table() -> None:
    table = node_ports()
    for command, head in ((START, True), (WORKER, False)):
        given = options(command)
        wanted = dict(word.split("=") for word in table.arguments(head=head))
        assert {name: given.get(name) for name in wanted} == wanted
    for name, number in table.environment().items():
        assert f"export {name}={number}\n" in ENV


def test_the_documents_name_every_port() -> None:
    rows = (ROOT / "docs/DEPLOY.md").read_text().splitlines()
    documented = {row.split("|")[1].strip() for row in rows if row.startswith("| ")}
    low, high = node_ports().workers[0], node_ports().workers[-1]
    assert documented >= {str(port.number) for port in PORTS} | {f"{low}-{high}"}


def test_nodes_offer_each_role_once_and_the_head_none() -> None:
    offered = {name: set(t["resources"]) for name, t in SHIPPED["available_node_types"].items()}
    assert offered == {
        "head": {"CPU"},
        "actors": {"m3pc_actor"},
        "gpu": {"m3pc_planner", "m3pc_learner"},
    }
    actors = SHIPPED["available_node_types"]["actors"]
    assert 0 < actors["min_workers"] < actors["max_workers"]


def home_after_setup(folder: Path, commands: Sequence[str]) -> dict[str, str]:
    """Run the commands as `ray up` does, and return what a shell knows after Ray's settings."""
    (folder / ".m3pc").mkdir(mode=0o755)
    (folder / ".bashrc").write_text("")
    (folder / ".m3pc/token").write_text(TOKEN)
    (folder / ".m3pc/coordinator").write_text("redis://m3pc@redis:6390/0")
    for command in commands:
        _as_ray_up(command, {"HOME": str(folder)})
    shown = subprocess.run(
        ["bash", "-c", ". ~/.m3pc/ray.env; umask; env"],
        env={"HOME": str(folder), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return {"umask": shown[0]} | dict(line.split("=", 1) for line in shown[1:] if "=" in line)


def in_login_shell(command: str) -> str:
    """As `ray up` does it."""
    return " ".join(cast(Any, command_runner)._with_interactive(command))


def _as_ray_up(command: str, environment: Mapping[str, str]) -> None:
    known = {"PATH": os.environ["PATH"], "TERM": "dumb", **environment}
    words = ["bash", "-c", in_login_shell(command)]
    done = subprocess.run(words, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_setup_gives_ray_its_settings_and_nobody_else_the_token(tmp_path: Path) -> None:
    known = home_after_setup(tmp_path, SHIPPED["setup_commands"])
    assert {name: known.get(name) for name in SETTINGS} == SETTINGS
    assert known["RAY_AUTH_MODE"] == "token"
    assert known["RAY_AUTH_TOKEN_PATH"] == f"{tmp_path}/.m3pc/token"
    assert known["M3PC_COORDINATOR"] == "redis://m3pc@redis:6390/0"
    assert known["umask"] == "0077"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / ".m3pc").iterdir()}
    assert modes == {"token": 0o600, "coordinator": 0o600, "ray.env": 0o600}
    assert (tmp_path / ".m3pc").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("gpu", "roles"), [(False, "actor"), (True, "planner learner")])
def test_on_premises_a_gpu_decides_the_role(
    gpu: bool, roles: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexit {0 if gpu else 9}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    home = tmp_path / "home"
    home.mkdir()
    own = on_premises()
    # A login shell forgets the PATH that it was given, so the file that it reads last says it.
    commands = [
        *own["setup_commands"],
        f"PATH={program.parent}:$PATH; " + own["worker_setup_commands"][0],
    ]
    known = home_after_setup(home, commands)
    assert json.loads(known["M3PC_RESOURCES"]) == {f"m3pc_{role}": 1 for role in roles.split()}


# --- the commands, run in namespaces of their own: `ray stop` must not see other clusters ---


@pytest.mark.long
@pytest.mark.ray
def test_its_commands_start_a_cluster_that_asks_for_the_token() -> None:
    if os.getuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root, unshare and ip: it makes namespaces")
    spaces = ["unshare", "--pid", "--fork", "--net", "--mount", "--mount-proc", "--kill-child"]
    with TemporaryDirectory(dir="/tmp") as folder:  # short: Ray's sockets are below it
        done = subprocess.run(
            [*spaces, sys.executable, "-m", "tests.deployment.test_cluster_yaml", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["statuses"] == [401, 403, 200]
    assert seen["dashboard elsewhere"] == "refused"
    assert seen["resources"].keys() >= {"m3pc_actor"}
    assert "CPU" not in seen["head"]
    assert set(seen["ports"]) == {port.number for port in PORTS} - {
        6385
    }  # no autoscaler without boto3


def launch(folder: Path) -> None:
    """Two machines on a wire: the commands of the file on each, then a look from outside."""
    for words in (
        "mount --mkdir -t tmpfs none /run/netns",
        "ip link set lo up",
        "ip netns add worker",
        "ip link add to-worker type veth peer name to-head netns worker",
        f"ip addr add {HEAD_IP}/24 dev to-worker",
        "ip link set to-worker up",
        f"ip -n worker addr add {WORKER_IP}/24 dev to-head",
        "ip -n worker link set to-head up",
        "ip -n worker link set lo up",
    ):
        subprocess.run(words.split(), check=True)
    homes = {name: folder / name[0] for name in ("head", "worker")}
    for home in homes.values():
        home.mkdir()
        home_after_setup(home, SHIPPED["setup_commands"])
        (home / ".bashrc").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    (homes["head"] / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(prepared(SHIPPED)))
    _started(
        homes["head"],
        START.replace("--head", f"--head --node-ip-address={HEAD_IP}"),
        [],
        '{"CPU": 0}',
    )
    ports = _listening()
    joined = WORKER.replace("ray start", f"ray start --node-ip-address={WORKER_IP}")
    offered = SHIPPED["available_node_types"]["actors"]["resources"]
    _started(homes["worker"], joined, ["ip", "netns", "exec", "worker"], json.dumps(offered))
    statuses = [_status("127.0.0.1", token) for token in (None, "cd" * 32, TOKEN)]
    seen = {"statuses": statuses, "ports": ports, "dashboard elsewhere": _status(HEAD_IP, TOKEN)}
    sys.stdout.write("\n" + json.dumps(seen | _resources(homes["head"])) + "\n")


def _started(home: Path, command: str, where: Sequence[str], offered: str) -> None:
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "TERM": "dumb",
        "RAY_HEAD_IP": HEAD_IP,
        "RAY_OVERRIDE_RESOURCES": offered,
    }
    # The two share processes: the worker's `ray stop` would end the head.
    for each in [command] if where else ["ray stop", command]:
        words = [*where, "bash", "-c", in_login_shell(each)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _listening() -> list[int]:
    """Ports of this network that somebody listens on, but for those of worker processes."""
    lines = [line for name in ("tcp", "tcp6") for line in _lines(Path("/proc/net") / name)]
    fields = [line.split() for line in lines if ":" in line]
    ports = {int(field[1].rsplit(":", 1)[1], 16) for field in fields if field[3] == "0A"}
    return sorted(port for port in ports if not 10002 <= port < 11000)


def _status(host: str, token: str | None) -> int | str:
    request = urllib.request.Request(f"http://{host}:8265/api/jobs/")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return "refused"


def _resources(home: Path) -> dict[str, Any]:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home / ".m3pc/token")}
    import ray

    ray.init(address=f"{HEAD_IP}:6379", log_to_driver=False)
    nodes = {node["NodeManagerAddress"]: node["Resources"] for node in cast(Any, ray).nodes()}
    ray.shutdown()
    return {"resources": nodes.get(WORKER_IP, {}), "head": nodes[HEAD_IP]}


if __name__ == "__main__":
    launch(Path(sys.argv[1]))
