"""A child process for what must not take its parent down: foreign files, under limits.

The child sets its limits before it imports any parser, runs `main(job)` of the module it was given,
reports progress as JSON lines and ends with exit code 0, or with 2 and one sentence.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO, Any

from m3pc.core.subprocesses import python_path
from m3pc.types import InputError

LONGEST = 1 << 16  # characters of a line from the child, and of its errors
DEBUG = "M3PC_DEBUG"  # set it to see the child's own traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    memory: int = 8 << 30  # bytes of address space
    seconds: float = 600.0  # of wall time, and of CPU time


def run_limited(
    module: str,
    job: dict[str, Any],
    limits: SandboxLimits,
    on_progress: Callable[[dict[str, Any]], None],
) -> None:
    """Run `module.main(job)` in a child. InputError if it refuses, dies or exceeds its limits."""
    # -P: the folder we are in may have come with the file, and hold modules of its own.
    command = [sys.executable, "-P", "-m", "m3pc.datasets.sandbox"]
    order = json.dumps({"module": module, "job": job, "limits": asdict(limits)})
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
            child.stdin.write(order + "\n")
            child.stdin.flush()  # and left open: its end tells the child that we are gone
            while line := child.stdout.readline(LONGEST):
                on_progress(_progress(line))
            child.wait()
        finally:
            watchdog.cancel()
            child.kill()
            drain.join(timeout=10)
    if child.returncode != 0:
        raise InputError(_verdict(child.returncode, "".join(errors), limits, late=late.is_set()))


def report(**progress: object) -> None:
    """Called in the child: one line of progress for the parent."""
    sys.stdout.write(json.dumps(progress) + "\n")
    sys.stdout.flush()


def _progress(line: str) -> dict[str, Any]:
    """What the child says is no more to be trusted than the file that it reads."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if (
        isinstance(found, dict)
        and found
        and all(isinstance(value, int) for value in found.values())
    ):
        return found
    raise InputError(f"the reader said {line[:80]!r} in place of numbers; the file is not trusted")


def _drain(stream: IO[str], into: list[str]) -> None:
    """Keep the end of what is written, however much that is."""
    tail = ""
    while block := stream.read(LONGEST):
        tail = (tail + block)[-LONGEST:]
    into.append(tail)


def _verdict(code: int, errors: str, limits: SandboxLimits, *, late: bool) -> str:
    if late or code == -signal.SIGXCPU:
        return (
            f"reading took longer than {limits.seconds:g} s; "
            "raise --time-limit if the file is to be trusted"
        )
    if code == 2:
        said = errors.strip().splitlines()
        return _printable(said[-1]) if said else "the reader gave no reason"
    if code < 0:
        name = signal.Signals(-code).name
        return f"the file brought its reader down ({name}): it is damaged, or made to do harm"
    return f"the reader failed with exit code {code}: {_printable(errors.strip()[-300:])}"


def _printable(text: str) -> str:
    """Names in a file are its author's; a terminal would obey what some of them hold."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": python_path(),
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # obeys the address-space limit
        "HDF5_PLUGIN_PRELOAD": "::",  # never load a filter from elsewhere
        "HDF5_USE_FILE_LOCKING": "FALSE",  # read-only folders cannot be locked
        "OPENBLAS_NUM_THREADS": "1",  # each thread's stack would count against the limit
    }


def _enter(limits: SandboxLimits) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    seconds = int(limits.seconds) + 1
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_parent() -> None:
    """A parent that was killed must not leave a writer behind in its folder."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _child() -> int:
    order = json.loads(sys.stdin.readline())
    limits = SandboxLimits(**order["limits"])
    _enter(limits)
    try:
        importlib.import_module(order["module"]).main(order["job"])
    except InputError as error:
        reason = str(error)
    except MemoryError:
        reason = (
            f"reading needs more than {limits.memory >> 20} MiB; "
            "raise --memory-limit if the file is to be trusted"
        )
    except ImportError as error:
        reason = (
            f"the reader cannot start within {limits.memory >> 20} MiB ({error}); "
            "raise --memory-limit"
        )
    except Exception as error:  # a parser may raise anything over a hostile file
        reason = f"the file cannot be read: {type(error).__name__}: {error}"
        if os.environ.get(DEBUG):
            traceback.print_exc()
    else:
        return 0
    sys.stderr.write(" ".join(reason.split()) + "\n")
    return 2


if __name__ == "__main__":
    sys.exit(_child())
