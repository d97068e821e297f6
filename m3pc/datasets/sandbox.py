"""Reads files from unknown sources in a child process, under limits of memory and time.

The child sets its limits before it imports any parser, runs `main(job)` of the given module,
reports progress as JSON lines, and ends with exit code 0, or with 2 and a one-line message.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import asdict, dataclass
from typing import IO, Any

from m3pc.core.progress import OnProgress
from m3pc.core.subprocesses import python_path
from m3pc.types import InputError

MAX_LINE = 1 << 16  # limit in characters for a line and for the error output of the child
DEBUG = "M3PC_DEBUG"  # environment variable; if set, the child prints its traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Resource limits of the child."""

    memory: int = 8 << 30  # bytes of address space
    seconds: float = 600.0  # limit of wall time and of CPU time


def run_limited(
    module: str,
    job: dict[str, Any],
    limits: SandboxLimits,
    on_progress: OnProgress,
) -> None:
    """Run `module.main(job)` in a child. InputError if it refuses, dies or exceeds its limits."""
    # -P: the current folder may have come with the file and contain Python modules.
    command = [sys.executable, "-P", "-m", "m3pc.datasets.sandbox"]
    request = json.dumps({"module": module, "job": job, "limits": asdict(limits)})
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(),
        start_new_session=True,
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        watchdog = threading.Timer(limits.seconds, stop)
        errors: list[str] = []
        drain = threading.Thread(target=_drain, args=(child.stderr, errors), daemon=True)
        watchdog.start()
        drain.start()
        try:
            child.stdin.write(request + "\n")
            child.stdin.flush()  # stdin stays open: the child ends when it closes
            while line := child.stdout.readline(MAX_LINE):
                on_progress(_progress(line))
            child.wait()
        finally:
            watchdog.cancel()
            child.kill()
            drain.join(timeout=10)
    if child.returncode != 0:
        raise InputError(_failure(child.returncode, "".join(errors), limits, late=late.is_set()))


def report(**progress: object) -> None:
    """Called in the child: sends one line of progress to the parent."""
    sys.stdout.write(json.dumps(progress) + "\n")
    sys.stdout.flush()


def _progress(line: str) -> dict[str, Any]:
    """Parse counts from a line of the child, which is trusted no more than the file."""
    try:
        counts = json.loads(line)
    except (ValueError, RecursionError):
        counts = None
    if isinstance(counts, dict) and counts and all(isinstance(n, int) for n in counts.values()):
        return counts
    raise InputError(f"the reader wrote {line[:80]!r} instead of counts; the file is not trusted")


def _drain(stream: IO[str], into: list[str]) -> None:
    """Read all of a stream and keep its end."""
    tail = ""
    while block := stream.read(MAX_LINE):
        tail = (tail + block)[-MAX_LINE:]
    into.append(tail)


def _failure(code: int, errors: str, limits: SandboxLimits, *, late: bool) -> str:
    if late or code == -signal.SIGXCPU:
        return (
            f"reading took longer than {limits.seconds:g} s; "
            "raise --time-limit if you trust the file"
        )
    if code == 2:
        messages = errors.strip().splitlines()
        return _printable(messages[-1]) if messages else "the reader gave no reason"
    if code < 0:
        name = signal.Signals(-code).name
        return f"the file crashed its reader ({name}): it is damaged or malicious"
    return f"the reader failed with exit code {code}: {_printable(errors.strip()[-300:])}"


def _printable(text: str) -> str:
    """Replace control characters: names in a file may contain terminal commands."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": python_path(),
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # obeys the address-space limit
        "HDF5_PLUGIN_PRELOAD": "::",  # never load plug-in filters
        "HDF5_USE_FILE_LOCKING": "FALSE",  # read-only folders cannot be locked
        "OPENBLAS_NUM_THREADS": "1",  # each thread's stack would count against the limit
    }


def _apply(limits: SandboxLimits) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    seconds = int(limits.seconds) + 1
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_parent() -> None:
    """End the child when its stdin closes, so that it does not outlive a killed parent."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _child() -> int:
    request = json.loads(sys.stdin.readline())
    limits = SandboxLimits(**request["limits"])
    _apply(limits)
    try:
        importlib.import_module(request["module"]).main(request["job"])
    except InputError as error:
        reason = str(error)
    except MemoryError:
        reason = (
            f"reading needs more than {limits.memory >> 20} MiB; "
            "raise --memory-limit if you trust the file"
        )
    except ImportError as error:
        reason = (
            f"the reader cannot start within {limits.memory >> 20} MiB ({error}); "
            "raise --memory-limit"
        )
    except Exception as error:  # a parser may raise anything over a malicious file
        reason = f"the file cannot be read: {type(error).__name__}: {error}"
        if os.environ.get(DEBUG):
            traceback.print_exc()
    else:
        return 0
    sys.stderr.write(" ".join(reason.split()) + "\n")
    return 2


if __name__ == "__main__":
    sys.exit(_child())
