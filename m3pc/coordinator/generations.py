"""Generation numbers on disk: each call, from any process, gets a greater number."""

from pathlib import Path

from m3pc.core.files import sync_directory
from m3pc.types import InputError

GENERATION_BITS = 12  # high bits of each number that hold its generation


def next_generation(folder: Path, minimum: int = 0) -> int:
    """Take a number above all numbers in the folder, and at least `minimum`.

    Each number is an empty file, created exclusively. Files are never removed: a slow caller
    would take a removed number again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        taken = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        generation = max([minimum, *(number + 1 for number in taken)])
        if generation >> GENERATION_BITS:
            raise InputError(
                f"{folder}: all {1 << GENERATION_BITS} generations are used, one for each time "
                "that the coordinator's records were lost; start a new run from the newest "
                "checkpoint"
            )
        try:
            (folder / str(generation)).touch(exist_ok=False)
        except FileExistsError:
            continue
        sync_directory(folder)
        sync_directory(folder.parent)
        return generation
