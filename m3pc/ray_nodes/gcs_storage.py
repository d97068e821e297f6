"""Redis as the storage of Ray's GCS: the tables of nodes and actors outlive the GCS process.

Each start of a head uses a new Redis namespace, so a new cluster does not restore the nodes and
actors of an earlier one.
"""

import logging
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from m3pc.types import InputError

if TYPE_CHECKING:
    import redis

VARIABLE, PASSWORD = "M3PC_RAY_REDIS", "RAY_REDIS_PASSWORD"
EXPECTED = "give redis://[USER:PASSWORD@]HOST:PORT or rediss://..."
NAMESPACE = "namespace"  # file in the node's folder
PATIENCE = 5.0  # seconds to wait for Redis

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsStore:
    """The address of a head's Redis and the namespace of this start."""

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)
    encrypted: bool = False
    namespace: str = ""

    def environment(self) -> dict[str, str]:
        """Variables for `ray_start`, which passes the password to the GCS alone."""
        scheme = "rediss" if self.encrypted else "redis"
        return {
            "RAY_REDIS_ADDRESS": f"{scheme}://{self.host}:{self.port}",
            "RAY_external_storage_namespace": self.namespace,
            **({PASSWORD: self.password} if self.password else {}),
        }

    def arguments(self) -> list[str]:
        """Options of `ray start`."""
        return [f"--redis-username={self.user}"] if self.user else []

    def check(self) -> None:
        """Fail at once if Redis does not answer; Ray itself would wait for minutes."""
        from redis.exceptions import RedisError

        try:
            with self._client() as client:
                client.ping()
        except (RedisError, OSError) as error:
            raise InputError(
                f"no Redis for Ray at {self.host}:{self.port}: {error}; start it, or correct "
                f"--redis or {VARIABLE}; its port must not be Ray's own (6379 unless --port is "
                "given)"
            ) from None

    def clear(self) -> None:
        """Remove the data of a cluster that ended, if Redis answers."""
        from redis.exceptions import RedisError

        try:
            with self._client() as client:
                for key in client.scan_iter(match=f"RAY{self.namespace}@*"):
                    client.delete(key)
        except (RedisError, OSError) as error:
            log.warning("event=redis-not-cleaned namespace=%s reason=%s", self.namespace, error)

    def _client(self) -> "redis.Redis":
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        return redis.Redis(
            host=self.host,
            port=self.port,
            username=self.user or None,
            password=self.password or None,
            ssl=self.encrypted,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=PATIENCE,
            socket_connect_timeout=PATIENCE,
        )


def parse_gcs_store(url: str) -> GcsStore:
    """Parse a URL. Errors do not quote it, since it may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InputError(f"the address of Redis for Ray cannot be read; {EXPECTED}") from None
    if parts.scheme not in {"redis", "rediss"} or not parts.hostname or port is None:
        raise InputError(
            f"the address of Redis for Ray has scheme {parts.scheme[:10]!r}, host "
            f"{parts.hostname!r} and port {port}; {EXPECTED}"
        )
    if parts.path.strip("/") not in {"", "0"}:
        raise InputError(f"Ray uses database 0 of a Redis, not {parts.path[:20]!r}; {EXPECTED}")
    return GcsStore(
        host=parts.hostname,
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        encrypted=parts.scheme == "rediss",
        namespace=f"m3pc-{secrets.token_hex(8)}",
    )


def record_namespace(store: GcsStore, folder: Path) -> None:
    """Write the namespace into the node's folder. If a killed head left its namespace there, remove
    that head's data from Redis."""
    path = folder / NAMESPACE
    if path.exists() and (before := path.read_text().strip()):
        replace(store, namespace=before).clear()
    path.write_text(store.namespace)
