"""The environment of Python processes that this one starts, and the identity of any process."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where the packages are, installed or not


def python_path(environment: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH with which a child finds our packages. Start the child with -P: its working folder
    may be another user's, and hold a file with a module's name."""
    return os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])


def start_time(pid: int) -> str:
    """Of a process, by Linux's clock: with it a pid is unique. "" if there is no such process, or
    only a zombie, and on other systems."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] == "Z" else words[19]
