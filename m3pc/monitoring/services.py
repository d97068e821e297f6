"""Starts and stops Prometheus, and Grafana where it is installed, for the runs of this machine.

The services outlive the shell that started them; FOLDER/processes.json lists them.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from m3pc.core.files import replace_file
from m3pc.core.subprocesses import start_time
from m3pc.types import InputError

PROCESSES, CONFIG = "processes.json", "prometheus.yml"
READY_SECONDS, END_SECONDS, PAUSE = 60.0, 20.0, 0.1
NODE_EXPORTER = 9100  # port of the node exporter
RETENTION = "30d"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoringService:
    """A service process that this module started."""

    name: str
    pid: int
    began: str  # start time by the kernel's clock, since pids are reused
    url: str  # address of the service's web page


def shipped_folder() -> Path:
    """The folder with rules and dashboards: monitoring/ in the source tree, m3pc/monitoring/shipped
    in an installed package."""
    here = Path(__file__).resolve()
    for folder in (here.parents[2] / "monitoring", here.parent / "shipped"):
        if (folder / CONFIG).is_file():
            return folder
    raise InputError("the folder monitoring/ is missing; install m3pc again, or use its source")


def start_services(
    folder: Path, targets: Sequence[Path], *, port: int = 9090, grafana_port: int = 3000
) -> list[MonitoringService]:
    """Start the services that do not run yet and return all running services."""
    services = {service.name: service for service in running_services(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        target.mkdir(parents=True, exist_ok=True)
    starters: dict[str, Callable[[], MonitoringService | None]] = {
        "prometheus": lambda: _prometheus(folder, targets, port),
        "node exporter": lambda: _node_exporter(folder),
        "grafana": lambda: _grafana(folder, services["prometheus"], grafana_port),
    }
    for name, start in starters.items():
        if name not in services and (service := start()) is not None:
            services[name] = service
            entries = [asdict(service) for service in services.values()]
            replace_file(folder / PROCESSES, json.dumps(entries).encode())
    return list(services.values())


def stop_services(folder: Path) -> list[MonitoringService]:
    """Stop the running services and return them."""
    services = running_services(folder)
    for service in services:
        os.kill(service.pid, signal.SIGTERM)
    end = time.monotonic() + END_SECONDS
    while running_services(folder) and time.monotonic() < end:
        time.sleep(PAUSE)
    for service in running_services(folder):
        os.kill(service.pid, signal.SIGKILL)
    (folder / PROCESSES).unlink(missing_ok=True)
    return services


def running_services(folder: Path) -> list[MonitoringService]:
    """The services listed in the folder that still run."""
    try:
        entries: Any = json.loads((folder / PROCESSES).read_text(encoding="utf-8"))
        services = [MonitoringService(**entry) for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / PROCESSES} cannot be read: {error}; remove it") from None
    return [service for service in services if start_time(service.pid) == service.began]


def configuration(
    folder: Path, targets: Sequence[Path], *, port: int, scrape: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The shipped Prometheus configuration with this machine's paths; `scrape` replaces its
    intervals."""
    config: dict[str, Any] = yaml.safe_load((shipped_folder() / CONFIG).read_text(encoding="utf-8"))
    config["rule_files"] = [str(shipped_folder() / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        for discovery in job.get("file_sd_configs", ()):
            discovery["files"] = [str(target.resolve() / "*.json") for target in targets]
        if job["job_name"] == "prometheus":
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        if scrape is not None:
            job.pop("scrape_interval", None)
            job.pop("scrape_timeout", None)
    config["global"] |= scrape or {}
    return config


def _prometheus(folder: Path, targets: Sequence[Path], port: int) -> MonitoringService:
    program = shutil.which("prometheus")
    if program is None:
        raise InputError(
            "prometheus is not installed; apt install prometheus, or take it from prometheus.io"
        )
    config = configuration(folder, targets, port=port)
    replace_file(folder / CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
    return _started(
        folder,
        "prometheus",
        [
            program,
            f"--config.file={folder / CONFIG}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--storage.tsdb.retention.time={RETENTION}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        port=port,
        ready="/-/ready",
        page="/alerts",
    )


def _node_exporter(folder: Path) -> MonitoringService | None:
    """Start the node exporter if it is installed and its port is free; one may run already."""
    program = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
    if program is None or not _is_free(NODE_EXPORTER):
        return None
    address = f"--web.listen-address=127.0.0.1:{NODE_EXPORTER}"
    return _started(folder, "node exporter", [program, address], port=NODE_EXPORTER, ready="/")


def _grafana(folder: Path, prometheus: MonitoringService, port: int) -> MonitoringService | None:
    program = shutil.which("grafana") or shutil.which("grafana-server")
    if program is None:
        return None
    words = ["server"] if Path(program).name == "grafana" else []
    home = Path(os.environ.get("GF_PATHS_HOME", "/usr/share/grafana"))
    boards = shipped_folder() / "grafana"
    settings = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_DATA": str(folder / "grafana"),
        "GF_PATHS_PROVISIONING": str(boards / "provisioning"),
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_AUTH_ANONYMOUS_ENABLED": "true",  # read-only, and only from this machine
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "M3PC_PROMETHEUS": prometheus.url.removesuffix("/alerts"),
        "M3PC_DASHBOARDS": str(boards / "dashboards"),
    }
    return _started(
        folder,
        "grafana",
        [program, *words, f"--homepath={home}"],
        port=port,
        ready="/api/health",
        page="/dashboards",
        environment=settings,
    )


def _started(
    folder: Path,
    name: str,
    command: Sequence[str],
    *,
    port: int,
    ready: str,
    page: str = "",
    environment: Mapping[str, str] | None = None,
) -> MonitoringService:
    """Start a service and wait until it answers. Its output goes to a file in the folder."""
    if not _is_free(port):
        raise InputError(f"port {port} is taken, so {name} cannot have it; give another port")
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + READY_SECONDS
    while not _answers(url + ready):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            process.wait()
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise InputError(f"{name} does not start: {' '.join(last)}; see {log}")
        time.sleep(PAUSE)
    process.returncode = 0  # the process stays: avoid a ResourceWarning when this object is deleted
    return MonitoringService(
        name=name, pid=process.pid, began=start_time(process.pid), url=url + page
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
