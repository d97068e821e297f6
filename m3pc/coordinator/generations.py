"""A number on disk that grows at each call, for all processes."""

from pathlib import Path

from m3pc.core.files import sync_directory
from m3pc.types import InputError

GENERATION_BITS = 12  # as many generations as they allow have room in every number given out


def next_generation(folder: Path, least: int = 0) -> int:
    """Above all before it, and not below `least`.

    An empty file each, made exclusively, so that there is nothing to damage. None is ever
    removed: a slow caller would make it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        taken = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        generation = max([least, *(number + 1 for number in taken)])
        if generation >> GENERATION_BITS:
            raise InputError(
                f"{folder}: all {1 << GENERATION_BITS} generations are taken, the coordinator was "
                "lost as often; start a new run from the newest checkpoint"
            )
        try:
            (folder / str(generation)).touch(exist_ok=False)
        except FileExistsError:
            continue
        sync_directory(folder)
        sync_directory(folder.parent)
        return generation
