"""What an environment is called: an id, and after a space what it is made with, as JSON.

Hopper-v4
d4rl/Hopper-v2 {"terminate_when_unhealthy": false}
"""

import json
from collections.abc import Mapping
from typing import Any

from m3pc.core.manipulation_tasks import TASKS, strange_arguments
from m3pc.types import InputError

LONGEST = 200  # characters of a name that are shown


def parted(name: str) -> tuple[str, dict[str, Any]]:
    """The id and the arguments of its constructor."""
    env_id, space, arguments = name.partition(" {")
    if not space:
        return name, {}
    try:
        return env_id.strip(), dict(json.loads(f"{{{arguments}"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"an environment is called {name[:LONGEST]!r}, in which JSON was expected after "
            f"the id: {error}; "
            """give it as in 'd4rl/Hopper-v2 {"terminate_when_unhealthy": false}'"""
        ) from None


def named(env_id: str, arguments: Mapping[str, Any]) -> str:
    """The name that `parted` takes apart; the same arguments give the same name."""
    return f"{env_id} {json.dumps(arguments, sort_keys=True)}" if arguments else env_id


def refuse_strangers(name: str, source: object) -> None:
    """What a file names is made only if that runs and opens nothing of the file's choice."""
    env_id, arguments = parted(name)
    if ":" in env_id:  # gymnasium imports what stands before the colon
        raise InputError(
            f"{source} names the environment {name!r}, whose module would be run; if you trust "
            "it, give it with --env"
        )
    strange = strange_arguments(arguments) if env_id in TASKS else list(arguments)
    if strange:
        raise InputError(
            f"{source} names the environment {name!r}, whose arguments {strange} may open any "
            "file; if you trust it, give it with --env"
        )
