"""A real Prometheus on a free loopback port, with the shipped rules, scraping every second."""

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.servers.redis_server import free_port
from tests.support.servers.shipped_monitoring import MONITORING

READY_SECONDS = 60.0
MISSING = "no {} on this machine; Debian has it: apt-get install prometheus"


def promtool(*arguments: str | Path, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Skip the test where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip(MISSING.format("promtool"))
    return subprocess.run(
        [program, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Its URL. `targets` are the addresses to scrape with their labels, `job` among them."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip(MISSING.format("prometheus"))
    url = f"http://127.0.0.1:{free_port()}"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_quick(url, targets)))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={url.removeprefix('http://')}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(process, url, folder / "prometheus.log")
            yield url
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def _quick(url: str, targets: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The shipped configuration with other intervals and targets."""
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] |= {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    config["rule_files"] = [str(MONITORING / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        for key in ("scrape_interval", "scrape_timeout", "file_sd_configs"):
            job.pop(key, None)
        name = job["job_name"]
        addresses = {address: own for address, own in targets.items() if own["job"] == name}
        if name == "prometheus":
            addresses = {url.removeprefix("http://"): {"job": "prometheus"}}
        job["static_configs"] = [
            {"targets": [address], "labels": dict(labels)} for address, labels in addresses.items()
        ]
    return config


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while not _ready(url):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(log.read_text(errors="replace"))
        time.sleep(0.05)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
