"""The coordinator of a run: incarnations of actors, learner epochs, newest published weights.

One interface (`m3pc.types.Coordinator`), kept in a SQLite file on one machine or in Redis on many.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from m3pc.coordinator.coordinator import TableCoordinator
from m3pc.coordinator.sqlite import SqliteTable
from m3pc.types import Coordinator, InputError, RecoveredState

if TYPE_CHECKING:
    from m3pc.coordinator.redis import RedisAddress

PASSWORD, PASSWORD_FILE = "M3PC_REDIS_PASSWORD", "M3PC_REDIS_PASSWORD_FILE"  # in the environment
EXPECTED = "give redis://USER@HOST:PORT/DATABASE, rediss://... or the path of a SQLite file"
PORT = 6390  # Redis' own default 6379 is also Ray's


def connect(
    address: str | Path,
    *,
    run: str,
    generations: Path,
    recover: Callable[[], RecoveredState] = RecoveredState,
    deadline: float = 5.0,
) -> Coordinator:
    """The coordinator of a run, at a Redis URL or in a SQLite file (a path, or sqlite:PATH).

    `generations` is a folder on a disk that all processes of the run share; `recover` reads the
    state of the run from that disk. `deadline` is in seconds per call. If the URL has no password,
    M3PC_REDIS_PASSWORD gives it, or the file that M3PC_REDIS_PASSWORD_FILE names.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run):
        raise InputError(
            f"run is {run[:120]!r}; give 1 to 100 letters, digits, dots, hyphens or underscores"
        )
    if _is_redis(address):
        from m3pc.coordinator.redis import RedisTable

        # The braces make a Redis Cluster keep all keys of a run on one node.
        prefix, patience = f"m3pc:{{{run}}}", min(1.0, deadline / 4)
        table = RedisTable(_redis_address(str(address)), prefix=prefix, patience=patience)
        return TableCoordinator(table, generations=generations, recover=recover, deadline=deadline)
    path = Path(str(address).removeprefix("sqlite:"))
    if not path.name or path.is_dir():
        raise InputError(f"the coordinator's address is {str(address)!r}, no file; {EXPECTED}")
    if not path.parent.is_dir():
        raise InputError(f"the coordinator's folder {path.parent} does not exist; make it first")
    return TableCoordinator(
        SqliteTable(path), generations=generations, recover=recover, deadline=deadline
    )


def _is_redis(address: str | Path) -> bool:
    """Whether the address is a Redis URL; other URLs are refused.

    Messages show the scheme only: the rest of a URL may hold a password.
    """
    if isinstance(address, Path):
        return False
    scheme, separator, _ = address.partition("://")
    if separator and scheme not in {"redis", "rediss"}:
        raise InputError(f"the coordinator's address begins with {scheme[:20]}://; {EXPECTED}")
    return bool(separator)


def _redis_address(url: str) -> "RedisAddress":
    from m3pc.coordinator.redis import RedisAddress

    try:
        parts = urlsplit(url)
        port = parts.port or PORT
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise InputError(f"the coordinator's URL cannot be read; {EXPECTED}") from None
    database = parts.path.removeprefix("/") or "0"
    if not parts.hostname or not re.fullmatch("[0-9]{1,4}", database) or parts.fragment:
        raise InputError(
            f"the coordinator's URL names host {parts.hostname!r} and database {database[:20]!r}; "
            f"{EXPECTED}"
        )
    ca_file = options.pop("ca", None)
    if options or (ca_file and parts.scheme != "rediss"):
        raise InputError(
            "the coordinator's URL has options that are not known; only rediss:// takes one, "
            "ca=FILE with the certificates to trust"
        )
    return RedisAddress(
        host=parts.hostname,
        port=port,
        database=int(database),
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else _password(),
        tls=parts.scheme == "rediss",
        ca_file=ca_file,
    )


def _password() -> str | None:
    if password := os.environ.get(PASSWORD):
        return password
    path = os.environ.get(PASSWORD_FILE)
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{PASSWORD_FILE} is {path}, which cannot be read: {type(error).__name__}; name a "
            "file that contains only the password"
        ) from None
