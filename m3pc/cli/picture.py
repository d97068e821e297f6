"""Where a picture goes: what could not be drawn there is refused before any work."""

from pathlib import Path

ENDINGS = (".png", ".pdf", ".svg")


def picture(path: Path | None) -> Path | None:
    """The callback of every --png."""
    from m3pc.types import InputError

    if path is None:
        return None
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"--png is {path}; give a file whose name ends in {' or '.join(ENDINGS)}")
    if path.is_dir():
        raise InputError(f"--png is {path}, a folder; give a file")
    return path
