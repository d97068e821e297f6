"""docker/: linted by others' rules and ours; its steps run where there is no engine."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from m3pc.coordinator import connect
from tests.deployment.deploy_files import (
    DELETED,
    ROOT,
    changed,
    compose_findings,
    dockerfile_findings,
    load,
)
from tests.support.servers.redis_server import free_port

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = load("docker/compose.yaml")
FILES = ("compose.yaml", "compose.gpu.yaml")


def run(words: Sequence[object], **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, **more
    )


def tool(name: str) -> Path:
    return Path(sys.executable).parent / name


def test_hadolint_finds_nothing() -> None:
    done = run([tool("hadolint"), "--no-color", DOCKER / "Dockerfile"])
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something(tmp_path: Path) -> None:
    broken = tmp_path / "Dockerfile"
    broken.write_text("FROM python\nRUN cd /tmp && sudo pip install ray\n")
    done = run([tool("hadolint"), "--no-color", broken])
    assert done.returncode == 1
    assert {"DL3003", "DL3004", "DL3006"} <= set(done.stdout.split())


def test_the_dockerfile_has_no_findings() -> None:
    assert dockerfile_findings(DOCKERFILE) == []


# fmt: off
DOCKERFILE_MUTANTS = [
    ("not pinned", "=python:3.11.14-slim-bookworm", "=python"),
    ("not pinned", "=python:3.11.14-slim-bookworm", "=python:latest"),
    ("not the one that all images share", "FROM runtime AS gpu", "FROM nvidia/cuda:12.4 AS gpu"),
    ("image gpu runs as root", "compute,utility\nUSER 1000:1000", "compute,utility"),
    ("image actor runs as 0:0", "/opt/venv\nUSER 1000:1000\n\nFROM runtime AS cpu",
     "/opt/venv\nUSER 0:0\n\nFROM runtime AS cpu"),
    ("no health check", "\nHEALTHCHECK ", "\n# "),
    ("a secret is built in", "ARG TORCH_INDEX=", "ARG INDEX_TOKEN=abc\nARG TORCH_INDEX="),
    ("ADD fetches", "WORKDIR /build\n", "WORKDIR /build\nADD https://example.org/x /x\n"),
    ("whole folder", "COPY pyproject.toml constraints.txt docker/requirements.py ./", "COPY . ./"),
    ("not pinned", "PIP_CONSTRAINT=/build/constraints.txt", "PIP_NO_INPUT=1"),
]
# fmt: on


@pytest.mark.parametrize(("finding", "old", "new"), DOCKERFILE_MUTANTS)
def test_each_broken_dockerfile_is_found(finding: str, old: str, new: str) -> None:
    assert DOCKERFILE.count(old) == 1
    findings = dockerfile_findings(DOCKERFILE.replace(old, new))
    assert [line for line in findings if finding in line], findings


def test_a_build_sees_nothing_but_what_is_copied() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    ignored = [line for line in lines if not line.startswith("#")]
    copied = next(line for line in DOCKERFILE.splitlines() if line.startswith("COPY pyproject"))
    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored[1:]} == set(copied.split()[1:-1])


def test_images_get_what_the_project_asks_for() -> None:
    project = ROOT / "pyproject.toml"
    wanted = tomllib.loads(project.read_text())["project"]["dependencies"]
    script = [sys.executable, DOCKER / "requirements.py", project]
    assert run(script).stdout.splitlines() == wanted
    rest = run([*script, "--without", "torch"]).stdout.splitlines()
    assert set(wanted) - set(rest) == {"torch>=2.6"}
    assert run([*script, "--without", "torhc"]).returncode == 1


def test_the_compose_schema_accepts_the_files() -> None:
    schema = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = run([*schema, *(DOCKER / name for name in FILES)])
    assert done.returncode == 0, done.stdout


def test_the_compose_schema_refuses_a_misspelt_key(tmp_path: Path) -> None:
    broken = tmp_path / "compose.yaml"
    broken.write_text("services: {head: {image: a, read_onyl: true}}\n")
    schema = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    assert run([*schema, broken]).returncode == 1


def test_docker_compose_reads_the_files() -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose on this machine: apt-get install docker-compose")
    words = [program, *(word for name in FILES for word in ("-f", DOCKER / name)), "config"]
    user = {"M3PC_UID": "1000", "M3PC_GID": "1000"}
    done = run(words, env={"PATH": os.environ["PATH"]} | user)
    assert done.returncode == 0, done.stderr
    assert "m3pc:0.1.0-gpu" in done.stdout
    if not (DOCKER / ".env").exists():
        # Without prepare.sh nothing starts, least of all as root.
        assert run(words, env={"PATH": os.environ["PATH"]}).returncode != 0


def test_compose_has_no_findings() -> None:
    assert compose_findings(COMPOSE) == []


def _in(service: str, *path: str | int) -> tuple[str | int, ...]:
    return ("services", service, *path)


# fmt: off
COMPOSE_MUTANTS: list[tuple[str, Sequence[str | int], Any]] = [
    ("published beyond loopback", _in("grafana", "ports"), ["3000:3000"]),
    ("published beyond loopback", _in("grafana", "ports"), ["0.0.0.0:3000:3000"]),
    ("127.0.0.1:8265:8265 is published", _in("head", "ports"), ["127.0.0.1:8265:8265"]),
    ("6379:6379 is published", _in("head", "ports"), ["6379:6379"]),
    ("10001:10001 is published", _in("head", "ports"), ["10001:10001"]),
    ("6390:6390 is published", _in("redis", "ports"), ["127.0.0.1:6390:6390"]),
    ("read_only is None", _in("actor", "read_only"), DELETED),
    ("cap_drop is None", _in("prometheus", "cap_drop"), DELETED),
    ("may gain privileges", _in("redis", "security_opt"), []),
    ("image's user", _in("mind", "user"), DELETED),
    ("no mem_limit", _in("actor", "mem_limit"), DELETED),
    ("no cpus", _in("grafana", "cpus"), DELETED),
    ("no pids_limit", _in("actor", "pids_limit"), DELETED),
    ("kept apart", _in("head", "network_mode"), "host"),
    ("kept apart", _in("head", "privileged"), True),
    ("not pinned", _in("redis", "image"), "redis"),
    ("not pinned", _in("grafana", "image"), "grafana/grafana:latest"),
    ("actor: Ray asks for no token", _in("actor", "environment", "RAY_AUTH_MODE"), "disabled"),
    ("mind: Ray is given no token file", _in("mind", "command"), ["m3pc", "node", "worker"]),
    ("head: the token does not get there", _in("head", "secrets"), []),
    ("no room for Ray's objects", _in("head", "shm_size"), DELETED),
    ("which may be Ray's", _in("redis", "command", 2), "6379"),
    ("lets everybody in", _in("redis", "command", 3), "--other"),
    ("lets everybody in", _in("redis", "command", 6), "no"),
    ("command line", _in("redis", "command", 3), "--requirepass"),
    ("Redis forgets", _in("redis", "command", 14), "allkeys-lru"),
    ("open to the world", ("networks", "cluster", "internal"), False),
    ("is not a file", ("secrets", "ray_token"), {"environment": "TOKEN"}),
    ("is in the environment", _in("grafana", "environment", "GF_SECURITY_ADMIN_PASSWORD"), "x"),
    ("a secret is written", _in("head", "environment", "A"), "redis://m3pc:abc@redis:6390"),
]
# fmt: on


@pytest.mark.parametrize(("finding", "path", "value"), COMPOSE_MUTANTS)
def test_each_broken_compose_file_is_found(
    finding: str, path: Sequence[str | int], value: Any
) -> None:
    findings = compose_findings(changed(COMPOSE, path, value))
    assert [line for line in findings if finding in line], findings


def test_what_compose_mounts_is_there_or_made(tmp_path: Path) -> None:
    made = prepared(tmp_path)
    volumes = [mount for s in COMPOSE["services"].values() for mount in s.get("volumes", [])]
    sources = {mount.split(":")[0] for mount in volumes}
    sources |= {secret["file"] for secret in COMPOSE["secrets"].values()}
    ours = {source for source in sources if source.startswith("./")}
    assert [source for source in ours if not (made / source).exists()] == []
    assert sources - ours == {
        *(f"../{name}" for name in ("m3pc", "replay", "learner", "actors", "planner")),
        *(f"../monitoring/{name}" for name in ("prometheus.yml", "rules")),
        *(f"../monitoring/grafana/{name}" for name in ("provisioning", "dashboards")),
    }


def prepared(folder: Path) -> Path:
    shutil.copy(DOCKER / "prepare.sh", folder)
    done = run([folder / "prepare.sh"])
    assert done.returncode == 0, done.stderr
    return folder


def test_prepare_makes_secrets_for_their_owner_alone_and_only_once(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "prepare.sh"]
    assert {path.stat().st_mode & 0o077 for path in files} == {0}
    assert (folder / "secrets").stat().st_mode & 0o777 == 0o700
    before = {path: path.read_bytes() for path in files}
    assert len(before[folder / "secrets/ray_token"]) == 64
    prepared(folder)
    assert {path: path.read_bytes() for path in files} == before
    user = dict(line.split("=") for line in (folder / ".env").read_text().split())
    assert user["M3PC_UID"] != "0"


def test_neither_git_nor_a_job_takes_secrets_along() -> None:
    paths = [f"docker/{name}" for name in ("secrets/ray_token", "state/redis/x", ".env")]
    done = run(["git", "check-ignore", "--no-index", *paths], cwd=ROOT)
    assert done.stdout.split() == paths


def test_each_user_of_redis_reaches_its_own_keys_and_no_more(tmp_path: Path) -> None:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on this machine; `make test` installs it")
    secrets = prepared(tmp_path) / "secrets"
    port = free_port()
    words = list(COMPOSE["services"]["redis"]["command"])
    words[0], words[2], words[4] = program, str(port), str(secrets / "redis_users.acl")
    words[words.index("--dir") + 1] = str(tmp_path)
    server = subprocess.Popen([*words, "--bind", "127.0.0.1", "--logfile", str(tmp_path / "log")])
    try:
        with_password = (secrets / "coordinator_url").read_text()
        url = with_password.replace("@redis:6390", f"@127.0.0.1:{port}")
        _until_it_answers(port)
        connect(url, run="run", generations=tmp_path).close()
        ray = redis.Redis(
            port=port, username="ray", password=(secrets / "gcs_password").read_text()
        )
        ray.hset("RAYm3pc@node", "a", "b")
        assert ray.hget("RAYm3pc@node", "a") == b"b"
        ray.delete("DUMMY")
        for refused in (["GET", "m3pc:x"], ["FLUSHALL"], ["CONFIG", "GET", "dir"], ["KEYS", "*"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                cast(Any, ray).execute_command(*refused)
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(port=port).ping()
        ray.close()
    finally:
        server.kill()
        server.wait()


def _until_it_answers(port: int) -> None:
    for _ in range(200):
        try:
            redis.Redis(port=port).ping()
        except redis.exceptions.AuthenticationError:
            return
        except redis.exceptions.ConnectionError:
            time.sleep(0.05)
    raise AssertionError("Redis did not answer")


CHECKS = {
    "actor": """
import importlib.util, os, ray
assert importlib.util.find_spec("torch") is None and os.getuid() == 1000
""",
    "head": """
import boto3, os, ray, torch
assert torch.version.cuda is None and os.getuid() == 1000
""",
}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", CHECKS)
def test_the_steps_of_an_image_run_in_a_debian_root(target: str, tmp_path: Path) -> None:
    """`head` has the steps of `cpu` in it. Those of `gpu` would need more than 6 GB of disk."""
    if os.getuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap: apt-get install debootstrap")
    words = [sys.executable, DOCKER / "rehearse.py", tmp_path / "root", "--target", target]
    index = ["--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
    check = f"pip check && bash --login -c 'ray --version' && python -c '{CHECKS[target]}'"
    try:
        done = run([*words, *index, "--", "sh", "-c", check])
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert done.stdout.endswith(f"ray, version {version('ray')}\n")
        assert (tmp_path / "root/home/m3pc/.m3pc").stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(tmp_path / "root", ignore_errors=True)


# --- compose.yaml's own commands, in namespaces of their own, with a Redis of this machine ---


@pytest.mark.long
@pytest.mark.ray
def test_the_commands_of_compose_start_a_cluster_that_takes_jobs() -> None:
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "redis-server"))):
        pytest.skip("needs root, unshare, ip and redis-server")
    spaces = ["unshare", "--pid", "--fork", "--net", "--mount", "--mount-proc", "--kill-child"]
    done = run(
        [*spaces, sys.executable, "-m", "tests.deployment.test_docker"], cwd=ROOT, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["healthy"] == {"redis": True, "head": True, "actor": True}
    assert seen["job"] == [0, "format: 1"]
    assert seen["nodes"] == {"10.9.0.1": [], "10.9.0.2": ["m3pc_actor"]}
    assert seen["secrets that ps shows"] == []


def launch() -> None:
    """Two machines on a wire. What an engine would mount is put where the commands look for it."""
    for words in (
        "mount -t tmpfs none /tmp",
        "mount --mkdir -t tmpfs none /run/netns",
        "mount --mkdir -t tmpfs none /run/secrets",
        "ip link set lo up",
        "ip netns add actor",
        "ip link add to-actor type veth peer name to-head netns actor",
        "ip addr add 10.9.0.1/24 dev to-actor",
        "ip link set to-actor up",
        "ip -n actor addr add 10.9.0.2/24 dev to-head",
        "ip -n actor link set to-head up",
        "ip -n actor link set lo up",
    ):
        subprocess.run(words.split(), check=True)
    Path("/tmp/hosts").write_text("127.0.0.1 localhost\n10.9.0.1 ray-head redis\n")
    subprocess.run(["mount", "--bind", "/tmp/hosts", "/etc/hosts"], check=True)
    secrets = prepared(Path("/tmp")) / "secrets"
    for name, secret in COMPOSE["secrets"].items():
        shutil.copy2(secrets / Path(secret["file"]).name, f"/run/secrets/{name}")
    services = COMPOSE["services"]
    server = ["/tmp" if word == "/data" else word for word in services["redis"]["command"]]
    subprocess.Popen(server, stdout=subprocess.DEVNULL)
    healthy = {"redis": _healthy([], services["redis"]["healthcheck"]["test"][1])}
    healthy["head"] = _node_up("head", [])
    healthy["actor"] = _node_up("actor", ["ip", "netns", "exec", "actor"])
    job_words = ["submit", "--working-dir", "none", "--in", "/tmp", "--", "config", "show"]
    job = run([sys.executable, "-m", "m3pc", *job_words], env=_variables("head"), timeout=120)
    shown = [line for line in job.stdout.splitlines() if line.startswith("format:")]
    processes = run(["ps", "axww", "-o", "args"]).stdout
    values = {path.name: path.read_text() for path in secrets.iterdir()}
    seen = {
        "healthy": healthy,
        "job": [job.returncode, *shown],
        "nodes": _nodes(),
        "secrets that ps shows": [name for name, text in values.items() if text in processes],
    }
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


def _variables(service: str) -> dict[str, str]:
    given = {
        name: str(value) for name, value in COMPOSE["services"][service]["environment"].items()
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return given | {"PATH": path, "PYTHONPATH": str(ROOT)}


def _node_up(service: str, where: Sequence[str]) -> bool:
    command = [word.replace("$$", "$") for word in COMPOSE["services"][service]["command"]]
    subprocess.Popen([*where, *command], env=_variables(service), stdout=subprocess.DEVNULL)
    check = next(
        line for line in DOCKERFILE.splitlines() if line.strip().startswith('CMD ["python')
    )
    return _healthy(where, shlex.join(json.loads(check.strip().removeprefix("CMD "))))


def _healthy(where: Sequence[str], check: str) -> bool:
    for _ in range(60):
        if run([*where, "sh", "-c", check], env=_variables("head")).returncode == 0:
            return True
        time.sleep(1)
    return False


def _nodes() -> dict[str, list[str]]:
    """Roles by address."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/run/secrets/ray_token"}
    import ray

    ray.init(address="10.9.0.1:6379", log_to_driver=False)
    nodes: list[dict[str, Any]] = cast(Any, ray).nodes()
    ray.shutdown()
    return {
        node["NodeManagerAddress"]: [name for name in node["Resources"] if "m3pc" in name]
        for node in nodes
    }


if __name__ == "__main__":
    launch()
