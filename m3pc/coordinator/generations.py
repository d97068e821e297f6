"""A number on disk that grows at each call, for ever and for all processes."""

from pathlib import Path

from m3pc.files import sync_directory


def next_generation(folder: Path, least: int = 0) -> int:
    """Above all before it, and not below `least`.

    An empty file each, made exclusively, so that there is nothing to damage. None is ever
    removed: a slow caller would make it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        taken = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        generation = max([least, *(number + 1 for number in taken)])
        try:
            (folder / str(generation)).touch(exist_ok=False)
        except FileExistsError:
            continue
        sync_directory(folder)
        sync_directory(folder.parent)
        return generation
