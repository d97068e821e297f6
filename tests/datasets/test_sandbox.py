"""A reader that hangs, crashes, lies or is orphaned does no harm."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from m3pc.datagen.importing import ingest
from m3pc.datasets.sandbox import SandboxLimits, run_limited
from m3pc.datasets.source import ImportOptions
from m3pc.types import InputError
from replay.store.store import Store
from tests.support.episodes.foreign_files import nothing_left, transitions, write_hdf5
from tests.support.episodes.shared_data import ROOT
from tests.support.runs.refusals import LIMITS, refusal

WAITS = 600  # of 0.1 s, for another process


def test_a_file_that_needs_more_than_the_memory_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.hdf5"
    with h5py.File(path, "w") as file:  # 800 MB of zeros, none of which is on disk
        file.create_dataset("observations", (10**8, 2), "f4", chunks=(1024, 2))
        for name in ("actions", "rewards", "terminals"):
            file.create_dataset(name, (10**8,), "f4", chunks=(1024,))
    assert path.stat().st_size < 1 << 16
    limits = SandboxLimits(memory=512 << 20, seconds=60)
    assert "needs more than 512 MiB; raise --memory-limit" in refusal(
        path, tmp_path / "out", limits
    )


FAULTS = {
    "loop": "longer than 1 s; raise --time-limit",
    "sleep": "longer than 1 s; raise --time-limit",
    "crash": "crashed its reader (SIGSEGV)",
    "abort": "crashed its reader (SIGABRT)",
    "leave": "failed with exit code 3",
    "print": "the reader wrote 'hello",
    "print bytes": "the reader wrote",
    "print a list": "the reader wrote '[1, 2]",
    "print text for numbers": "the reader wrote",
    "print deep": "the reader wrote",
    "print without end": "the reader wrote 'xxx",
    "complain without end": "failed with exit code 3",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_child_that_misbehaves_is_ended_and_refused(fault: str, tmp_path: Path) -> None:
    seconds = 1.0 if fault in ("loop", "sleep") else 60.0
    pid_file = tmp_path / "pid"
    job = {"fault": fault, "pid_file": str(pid_file), "out": str(tmp_path)}
    with pytest.raises(InputError) as refused:
        run_limited(
            "tests.support.children.unruly_child",
            job,
            SandboxLimits(seconds=seconds),
            lambda progress: None,
        )
    assert FAULTS[fault] in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert not pid_file.exists() or not alive(int(pid_file.read_text()))


SLOW_IMPORT = """
import sys
from pathlib import Path
import m3pc.datagen.importing as run
from m3pc.datasets.source import ImportOptions

source, out, pid_file, fault = sys.argv[1:]
real = run.run_limited
run.run_limited = lambda module, job, *rest: real(
    "tests.support.children.unruly_child", job | {"fault": fault, "pid_file": pid_file}, *rest
)
limits = run.SandboxLimits(seconds=100)
run.ingest(source, Path(out), ImportOptions(), limits, lambda progress: None)
"""


def test_a_child_that_writes_no_store_is_refused(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(11)))
    (tmp_path / "pid").write_text("")
    arguments = [str(path), str(tmp_path / "out"), str(tmp_path / "pid"), "write nothing"]
    with nothing_left(tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", SLOW_IMPORT, *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
            check=False,
        )
    assert "InputError" in done.stderr
    assert "is not a store: it has no MANIFEST" in done.stderr


def test_a_killed_import_ends_with_its_child_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "good.hdf5", transitions(np.random.default_rng(12)))
    out, pid_file, stage = tmp_path / "out", tmp_path / "pid", tmp_path / ".out.partial"
    arguments = [str(path), str(out), str(pid_file), "sleep"]
    with subprocess.Popen([sys.executable, "-c", SLOW_IMPORT, *arguments], cwd=ROOT) as first:
        try:
            wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
            reader = int(pid_file.read_text())
            # A second import to the same folder is refused while the first one runs.
            assert "is being written by another process" in refusal(path, out)
            assert (stage / "half").read_text() == "written"
            assert alive(reader)
        finally:
            first.kill()
    wait_until(lambda: not alive(reader))  # it must not write into the folder of the next import
    assert (stage / "half").read_text() == "written"
    assert not out.exists()
    store = ingest(str(path), out, ImportOptions(), LIMITS, lambda progress: None)
    assert store.totals == Store(out).totals
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good.hdf5", "out", "pid"]
    assert sorted(p.name for p in out.iterdir()) == ["MANIFEST", "segments"]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(reached: Callable[[], bool]) -> None:
    for _ in range(WAITS):
        if reached():
            return
        time.sleep(0.1)
    raise AssertionError("the other process did not get there in time")
