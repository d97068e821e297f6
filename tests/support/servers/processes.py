"""Names of running processes."""

from pathlib import Path


def program_name(pid: int) -> str:
    """The name of a process, cut to 15 letters; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
