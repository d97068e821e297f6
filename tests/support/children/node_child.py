"""A node whose processes only sleep, under the supervisor of a real one.

Each process is a copy of `sleep` under the name of Ray's. A shell starts them and ends, as `ray
start` does.
"""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from m3pc.ray_nodes.gcs_storage import GcsStore
from m3pc.ray_nodes.node import Node
from m3pc.ray_nodes.node_watch import NodeWatch, end_leftovers
from m3pc.ray_nodes.ports import node_ports

SCRIPT = 'for name in "$@"; do (setsid "$name" 600 &); done; date >> "$STARTS"'


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepingNode(Node):
    names: tuple[str, ...] = ()

    def command(self) -> list[str]:
        programs = [str(self.folder / name) for name in self.names]
        return ["/bin/sh", "-c", SCRIPT, "start", *programs]

    def environment(self, outside: object = None) -> dict[str, str]:
        return {**os.environ, "STARTS": str(self.folder / "starts"), "M3PC_NODE": str(self.folder)}


def main(folder: Path, joins: str, redis: str, *names: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    node = SleepingNode(
        head_address=joins or None,
        ip="127.0.0.1",
        ports=node_ports(int(os.environ["FIRST_PORT"])),
        folder=folder,
        token=None,
        store=GcsStore(host="127.0.0.1", port=1) if redis else None,
        names=names,
    )
    end_leftovers(folder)
    return NodeWatch(node, lambda: None).run()


if __name__ == "__main__":
    folder, joins, redis, *names = sys.argv[1:]
    sys.exit(main(Path(folder), joins, redis, *names))
