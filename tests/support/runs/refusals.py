"""Imports that must be refused, and small ways to damage a good file."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from m3pc.datagen.importing import ingest
from m3pc.datasets.sandbox import SandboxLimits
from m3pc.datasets.source import ImportOptions
from m3pc.types import InputError
from tests.support.episodes.foreign_files import Columns, nothing_left, write_hdf5
from tests.support.episodes.shared_data import ROOT

LIMITS = SandboxLimits(memory=1 << 30, seconds=60)


def refusal(source: Path | str, out: Path, limits: SandboxLimits = LIMITS, **options: Any) -> str:
    """The error message of an import that must be refused and leave nothing behind."""
    with nothing_left(out.parent), pytest.raises(InputError) as refused:
        ingest(str(source), out, ImportOptions(**options), limits, lambda progress: None)
    return sentence(refused)


def sentence(refused: pytest.ExceptionInfo[InputError]) -> str:
    """The error message, which must be one line."""
    message = str(refused.value)
    assert message
    assert "\n" not in message
    return message


def command(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """Run `m3pc data` in a new process."""
    line = [sys.executable, "-m", "m3pc", "data", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False)


def assert_refused(done: subprocess.CompletedProcess[str], word: str) -> None:
    """The process refused bad input: exit code 2 and one line with this word."""
    assert (done.returncode, done.stdout) == (2, "")
    assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def put(name: str, row: int, value: float) -> Callable[[Columns], Columns]:
    def change(columns: Columns) -> Columns:
        column = columns[name].astype(np.float64)
        column[row] = value
        return columns | {name: column}

    return change


def shape(name: str, change: Callable[[Any], Any]) -> Callable[[Columns], Columns]:
    return lambda columns: columns | {name: change(columns[name])}


def without(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {k: v for k, v in columns.items() if k != name}


# Ways in which an HDF5 file refers to data elsewhere.


def external_link(file: h5py.File, column: Any) -> None:
    write_hdf5(Path(file.filename).with_name("other.hdf5"), {"rewards": column})
    file["rewards"] = h5py.ExternalLink("other.hdf5", "/rewards")


def soft_link(file: h5py.File, column: Any) -> None:
    file["elsewhere"] = column
    file["rewards"] = h5py.SoftLink("/elsewhere")


def external_storage(file: h5py.File, column: Any) -> None:
    raw = Path(file.filename).with_name("raw")
    raw.write_bytes(column.tobytes())
    file.create_dataset(
        "rewards", column.shape, column.dtype, external=[(str(raw), 0, column.nbytes)]
    )


def virtual(file: h5py.File, column: Any) -> None:
    other = write_hdf5(Path(file.filename).with_name("other.hdf5"), {"rewards": column})
    layout = h5py.VirtualLayout(column.shape, column.dtype)
    layout[:] = h5py.VirtualSource(str(other), "rewards", column.shape)
    file.create_virtual_dataset("rewards", layout)
