"""Real recordings, which are not part of the project: tests that need them skip without them."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(os.environ.get("M3PC_SHARED_DATA", ROOT.parent / "shared" / "data"))


def shared_file(name: str) -> Path:
    """The file of that name under the folder of real data; skips the test where it is absent."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no real data at {path}; set M3PC_SHARED_DATA to the folder that has {name}")
    return path


def golden_file(name: str) -> Path:
    """A recording of the authors' network; skips the test where it is absent."""
    path = FOLDER.parent / "golden" / name
    if not path.is_file():
        pytest.skip(f"no recorded outputs at {path}; set M3PC_SHARED_DATA to the folder beside it")
    return path
