"""The token that Ray processes of one cluster share. Its holder may run any code there."""

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from m3pc.types import InputError

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
BYTES = 32


def require_token_mode(environment: Mapping[str, str], remedy: str) -> None:
    """Refuse settings with which a cluster would take commands without a token."""
    mode = environment.get(MODE, "token")
    if mode.lower() != "token":
        raise InputError(
            f"{MODE} is {mode!r}: everybody who reaches this cluster could run commands on it; "
            f"{remedy}"
        )


def make_token(path: Path) -> Path:
    """Write a new token; an existing file is kept and checked."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return check_token(path)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(BYTES))
    return path


def check_token(path: Path) -> Path:
    """Refuse a token file that others may read or that is empty."""
    try:
        mode = path.stat().st_mode
        empty = not path.read_bytes().strip()
    except OSError as error:
        raise InputError(
            f"the token file {path} cannot be read: {error.strerror}; copy the head's to this "
            f"machine (mode 0600) and name it by --token-file or {PATH}"
        ) from None
    if mode & 0o077:
        raise InputError(
            f"the token file {path} has mode {stat.S_IMODE(mode):04o}, so others may read "
            f"or change it, and who has the token runs commands here; make it its owner's alone: "
            f"chmod 600 {path}, and a new token if it may have been seen"
        )
    if empty:
        raise InputError(f"the token file {path} is empty; copy the head's, or remove the file")
    return path


def private_folder(path: Path) -> Path:
    """Make the folder for its owner alone; refuse one that others own or may enter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(0o700)
    status = path.lstat()
    mode = status.st_mode
    if not stat.S_ISDIR(mode) or status.st_uid != os.getuid() or mode & 0o077:
        raise InputError(
            f"{path} has mode {stat.filemode(mode)} and owner {status.st_uid}; a node's "
            "folder holds its token and sockets and must be a folder that only you may enter: "
            f"chmod 700 {path}, or give another by --folder"
        )
    return path
