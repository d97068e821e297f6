"""M³PC: one masked trajectory model that is pretrained offline, plans online and keeps learning."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m3pc.evaluation.agent import Agent

__version__ = "0.1.0"


def load(path: Path | str, *, sets: Sequence[str] = ()) -> "Agent":
    """Load the agent of a run or checkpoint: `m3pc.load("runs/hopper").act(observation)`.

    sets  settings to change, such as `planner.candidates=64`
    """
    # By name: every module of m3pc imports this package, which must not import its upper layers.
    agent: Agent = import_module("m3pc.evaluation.agent").load(path, sets=sets)
    return agent
