"""`ray start` with two changes to Ray 2.60; `m3pc node` runs this program.

A node whose address is 127.0.0.1 listens on loopback alone. Ray's command replaces that address by
one that other machines can reach; with clusters disabled it keeps the address but refuses further
nodes. This program keeps the address, on the head and on workers.

The password of Redis comes in the variable RAY_REDIS_PASSWORD. Ray passes it to every worker and on
the command lines of GCS and raylet, which every user of the machine can read. This program passes
it to the GCS only, in its environment.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ray._private import ray_constants, services
from ray.scripts.scripts import start

from m3pc.ray_nodes.gcs_storage import PASSWORD

FLAG = "redis_password"  # flag of gcs_server, which also reads flags from variables FLAGS_...


def main(words: Sequence[str]) -> None:
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda host: host
    password = os.environ.pop(PASSWORD, "")
    if password:
        services.start_raylet = _without_password(services.start_raylet)
        services.start_ray_client_server = _without_password(services.start_ray_client_server)
        services.start_ray_process = _by_environment(services.start_ray_process, password)
    start.main([*words, f"--redis-password={password}"])


def _without_password(start_service: Callable[..., Any]) -> Callable[..., Any]:
    """Start a service that does not use Redis without the password."""
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
