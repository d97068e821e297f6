"""Runs in the sandbox in place of a reader, and misbehaves as a malicious file might make it."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    if "pid_file" in job:
        (Path(job["out"]) / "half").write_text("written")
        Path(job["pid_file"]).write_text(str(os.getpid()))
    FAULTS[job["fault"]]()


def _loop() -> None:
    while True:  # until the sandbox's limit of CPU time, at the latest
        pass


def _write(descriptor: int, content: bytes, times: int = 1) -> Callable[[], None]:
    def fault() -> None:
        for _ in range(times):
            os.write(descriptor, content)

    return fault


FAULTS: dict[str, Callable[[], object]] = {
    "loop": _loop,
    "sleep": lambda: time.sleep(120),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": os.abort,
    "leave": lambda: os._exit(3),
    "write nothing": lambda: None,
    "print": _write(1, b"hello\n"),
    "print bytes": _write(1, b"\xff\xfe\n"),
    "print a list": _write(1, b"[1, 2]\n"),
    "print text for numbers": _write(1, b'{"steps": "many"}\n'),
    "print deep": _write(1, b"[" * 60_000 + b"\n"),
    "print without end": _write(1, b"x" * 65_536, times=64),
    "complain without end": lambda: (_write(2, b"\xff" * 65_536, times=64)(), sys.exit(3)),
}
