"""What the driver of a run tells everybody, and what everybody may ask of it: two small files.

RUN/status.json    by the driver, every few seconds
RUN/wanted.json    by `m3pc scale` and `m3pc stop`, from any machine that sees the folder
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
MOST = 100_000  # actors
FRESH = 60.0  # seconds in which a driver says something


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """How the fleet should be."""

    actors: int | None = None  # None: as the settings say, or as autoscaling does
    least: int | None = None  # bounds of autoscaling; None: as the settings say
    most: int | None = None
    stop: bool = False

    def __post_init__(self) -> None:
        if self.actors is not None and not 0 <= self.actors <= MOST:
            raise InputError(f"{self.actors} actors are wanted; give 0 to {MOST}")
        if (self.least is None) != (self.most is None):
            raise InputError(f"bounds are {self.least} and {self.most}; give both or none")
        least, most = (1 if bound is None else bound for bound in (self.least, self.most))
        if not 1 <= least <= most <= MOST:
            raise InputError(
                f"between {self.least} and {self.most} actors are wanted; give two numbers from 1 "
                f"to {MOST}, the lower one first"
            )


def request(
    run: Path,
    *,
    actors: int | None = None,
    between: tuple[int, int] | None = None,
    stop: bool | None = None,
) -> DesiredState:
    """Change what is wanted; what is not named stays. A number of actors ends autoscaling, bounds
    begin it."""
    now = read_desired_state(run)
    if actors is not None:
        now = replace(now, actors=actors, least=None, most=None)
    if between is not None:
        now = replace(now, actors=None, least=between[0], most=between[1])
    if stop is not None:
        now = replace(now, stop=stop)
    replace_file(run / WANTED, json.dumps(asdict(now)).encode())
    return now


def read_desired_state(run: Path) -> DesiredState:
    try:
        return DesiredState(**json.loads((run / WANTED).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return DesiredState()
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{run / WANTED} cannot be read: {error}; remove it") from None


def write_status(run: Path, status: Mapping[str, Any]) -> None:
    """For people, and not worth waiting for the disk: whole or absent, perhaps old."""
    aside = run / f".{STATUS}.new"
    aside.write_text(json.dumps({"time": time.time(), **status}), encoding="utf-8")
    aside.replace(run / STATUS)


def read_status(run: Path) -> dict[str, Any]:
    """What the driver said last, and whether a process works on the run (`driven`)."""
    try:
        found: Any = json.loads((run / STATUS).read_text(encoding="utf-8"))
        assert isinstance(found, dict)
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError, AssertionError) as error:
        raise InputError(f"{run / STATUS} cannot be read: {error}; remove it") from None
    return {**found, "driven": is_driven(run)}


def has_driver(found: Mapping[str, Any]) -> bool:
    """Whether what was told is of a driver that lives: one process in lock-step tells nothing."""
    silent: float = abs(time.time() - found.get("time", 0.0))
    return bool(found["driven"]) and silent < FRESH


def is_driven(run: Path) -> bool:
    """Whether a process on this machine, or on one that shares its locks, works on the run."""
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
