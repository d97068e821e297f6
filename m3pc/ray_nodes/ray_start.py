"""`ray start`, but for two habits of Ray 2.60; a program of its own, run by `node`.

A node whose address is 127.0.0.1 listens on loopback alone. Ray's command turns that address into
one that others can reach, except where it takes the machine for one that cannot be in a cluster,
and there it refuses further nodes. Here loopback stays loopback, on the head and on others.

A password of Redis comes by the variable RAY_REDIS_PASSWORD. Ray writes it into the command lines
of the GCS and of the raylet, which everybody on the machine can read, and into what the raylet
gives every worker. Here the GCS takes it from its environment, and nobody else has it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ray._private import ray_constants, services
from ray.scripts.scripts import start

from m3pc.ray_nodes.gcs_storage import PASSWORD

FLAG = "redis_password"  # of gcs_server, whose flags may come from variables FLAGS_...


def main(words: Sequence[str]) -> None:
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    password = os.environ.pop(PASSWORD, "")
    if password:
        services.start_raylet = _untold(services.start_raylet)
        services.start_ray_client_server = _untold(services.start_ray_client_server)
        services.start_ray_process = _by_environment(services.start_ray_process, password)
    start.main([*words, f"--redis-password={password}"])


def _untold(start_service: Callable[..., Any]) -> Callable[..., Any]:
    """A service that never asks Redis."""
    return lambda *rest, **named: start_service(*rest, **named | {FLAG: ""})


def _by_environment(start_process: Callable[..., Any], password: str) -> Callable[..., Any]:
    def started(command: list[str], *rest: Any, **named: Any) -> Any:
        if command[0] == services.GCS_SERVER_EXECUTABLE:
            command = [word for word in command if word != f"--{FLAG}={password}"]
            command.append(f"--fromenv={FLAG}")
            named["env_updates"] = {f"FLAGS_{FLAG}": password}
        return start_process(command, *rest, **named)

    return started


if __name__ == "__main__":
    main(sys.argv[1:])
