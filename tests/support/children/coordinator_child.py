"""A process that uses a coordinator: ADDRESS RUN GENERATIONS COUNT, numbers as JSON to stdout."""

import json
import sys
from pathlib import Path

from m3pc.coordinator import connect


def main(address: str, run: str, generations: str, count: str) -> None:
    client = connect(address, run=run, generations=Path(generations), deadline=60)
    numbers = [(client.register(0), client.new_epoch("weights")) for _ in range(int(count))]
    client.close()
    sys.stdout.write(json.dumps(numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
