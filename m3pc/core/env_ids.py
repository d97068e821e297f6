"""Names of environments: an id and, after a space, constructor arguments as JSON.

Hopper-v4
d4rl/Hopper-v2 {"terminate_when_unhealthy": false}
"""

import json
from collections.abc import Mapping
from typing import Any

from m3pc.core.manipulation_tasks import TASKS, unknown_arguments
from m3pc.types import InputError

MAX_SHOWN = 200  # characters of a name in a message


def split_env_name(name: str) -> tuple[str, dict[str, Any]]:
    """The id and the arguments of its constructor."""
    env_id, space, arguments = name.partition(" {")
    if not space:
        return name, {}
    try:
        return env_id.strip(), dict(json.loads(f"{{{arguments}"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"an environment is called {name[:MAX_SHOWN]!r}, in which JSON was expected after "
            f"the id: {error}; "
            """give it as in 'd4rl/Hopper-v2 {"terminate_when_unhealthy": false}'"""
        ) from None


def join_env_name(env_id: str, arguments: Mapping[str, Any]) -> str:
    """The inverse of `split_env_name`; equal arguments give equal names."""
    return f"{env_id} {json.dumps(arguments, sort_keys=True)}" if arguments else env_id


def refuse_foreign_code(name: str, source: object) -> None:
    """Refuse an environment name from a file if making it could run code or open any file."""
    env_id, arguments = split_env_name(name)
    if ":" in env_id:  # gymnasium imports the module before the colon
        raise InputError(
            f"{source} names the environment {name!r}, whose module would be run; if you trust "
            "it, give it with --env"
        )
    unknown = unknown_arguments(arguments) if env_id in TASKS else list(arguments)
    if unknown:
        raise InputError(
            f"{source} names the environment {name!r}, whose arguments {unknown} may open any "
            "file; if you trust it, give it with --env"
        )
