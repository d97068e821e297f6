"""How a running driver is watched and steered: two small files in the run's folder.

RUN/status.json    written by the driver every few seconds
RUN/wanted.json    written by `m3pc scale` and `m3pc stop` on any machine that sees the folder
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from m3pc.core.files import replace_file
from m3pc.types import InputError

STATUS, WANTED = "status.json", "wanted.json"
ACTOR_LIMIT = 100_000
STATUS_SECONDS = 60.0  # an older status is not from a live driver
IN_FILE = {"min_actors": "least", "max_actors": "most"}  # fields with other names in wanted.json
OF_FILE = {theirs: ours for ours, theirs in IN_FILE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """The users' wishes for the driver. None: the settings apply."""

    actors: int | None = None  # a fixed number, without autoscaling
    min_actors: int | None = None  # bounds of autoscaling
    max_actors: int | None = None
    stop: bool = False

    def __post_init__(self) -> None:
        if self.actors is not None and not 0 <= self.actors <= ACTOR_LIMIT:
            raise InputError(f"{self.actors} actors are wanted; give 0 to {ACTOR_LIMIT}")
        if (self.min_actors is None) != (self.max_actors is None):
            raise InputError(
                f"bounds are {self.min_actors} and {self.max_actors}; give both or none"
            )
        if self.min_actors is None or self.max_actors is None:
            return
        if not 1 <= self.min_actors <= self.max_actors <= ACTOR_LIMIT:
            raise InputError(
                f"between {self.min_actors} and {self.max_actors} actors are wanted; give two "
                f"numbers from 1 to {ACTOR_LIMIT}, the lower one first"
            )


def request(
    run: Path,
    *,
    actors: int | None = None,
    bounds: tuple[int, int] | None = None,
    stop: bool | None = None,
) -> DesiredState:
    """Change the given parts of the desired state. `actors` ends autoscaling, `bounds` begin it."""
    state = read_desired_state(run)
    if actors is not None:
        state = replace(state, actors=actors, min_actors=None, max_actors=None)
    if bounds is not None:
        state = replace(state, actors=None, min_actors=bounds[0], max_actors=bounds[1])
    if stop is not None:
        state = replace(state, stop=stop)
    fields = {IN_FILE.get(name, name): value for name, value in asdict(state).items()}
    replace_file(run / WANTED, json.dumps(fields).encode())
    return state


def read_desired_state(run: Path) -> DesiredState:
    """The state that `request` wrote; the defaults before the first request."""
    try:
        fields = json.loads((run / WANTED).read_text(encoding="utf-8"))
        return DesiredState(**{OF_FILE.get(name, name): x for name, x in fields.items()})
    except FileNotFoundError:
        return DesiredState()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{run / WANTED} cannot be read: {error}; remove it") from None


def write_status(run: Path, status: Mapping[str, Any]) -> None:
    """Replace the status, without waiting for the disk: after a power loss it may be old."""
    aside = run / f".{STATUS}.new"
    aside.write_text(json.dumps({"time": time.time(), **status}), encoding="utf-8")
    aside.replace(run / STATUS)


def read_status(run: Path) -> dict[str, Any]:
    """The driver's last status, and `driven`: whether a process works on the run."""
    try:
        status: Any = json.loads((run / STATUS).read_text(encoding="utf-8"))
        assert isinstance(status, dict)
    except FileNotFoundError:
        status = {}
    except (OSError, ValueError, AssertionError) as error:
        raise InputError(f"{run / STATUS} cannot be read: {error}; remove it") from None
    return {**status, "driven": is_driven(run)}


def has_driver(status: Mapping[str, Any]) -> bool:
    """Whether a live driver wrote the status; a lock-step run writes none."""
    age: float = abs(time.time() - status.get("time", 0.0))
    return bool(status["driven"]) and age < STATUS_SECONDS


def is_driven(run: Path) -> bool:
    """Whether a process on this machine, or on one that shares its file locks, works on the run."""
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"{run} is not a run: {error.strerror}; give the folder of one") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
