"""Python processes that this one starts."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # where the packages are, installed or not


def python_path(environment: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH with which a child finds our packages. Start it with -P: the folder that it is
    started in may be somebody else's, and hold a file with a module's name."""
    return os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
