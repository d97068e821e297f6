"""A process that talks to a coordinator: ADDRESS RUN GENERATIONS COUNT, numbers to stdout."""

import json
import sys
from pathlib import Path

from m3pc.coordinator import connect


def main(address: str, run: str, generations: str, count: str) -> None:
    client = connect(address, run=run, generations=Path(generations), deadline=60)
    numbers = [
        [client.register(0), client.new_epoch("weights"), _granted(client.lease("run", "me", 60))]
        for _ in range(int(count))
    ]
    client.close()
    sys.stdout.write(json.dumps(numbers))


def _granted(lease: object) -> int:
    return int(getattr(lease, "fencing", -1))


if __name__ == "__main__":
    main(*sys.argv[1:])
