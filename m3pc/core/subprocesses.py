"""PYTHONPATH for child processes, and the start time that identifies a process."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the folder of the packages, installed or not


def python_path(environment: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH with which a child finds our packages. Start the child with -P: a file in its
    working folder, perhaps another user's, could have a module's name."""
    return os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])


def start_time(pid: int) -> str:
    """When the process started, in Linux's clock ticks: with it a pid is unique. "" if the
    process is missing or a zombie, and on other systems."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]
