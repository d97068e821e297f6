"""Connects to Ray: a private cluster on this machine, or a running cluster."""

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from m3pc.core.token_file import MODE, PATH, TOKEN, make_token, require_token_mode
from m3pc.types import InputError

# Ray listens on loopback alone only if the node's address is 127.0.0.1; it assumes that other
# machines use any other address, even 127.0.0.2. If clusters are enabled, Ray replaces 127.0.0.1 by
# a reachable address, so clusters are disabled for this process.
LOOPBACK, LOCAL_NAMES = "127.0.0.1", ("127.0.0.1", "localhost")
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
CONNECT_SECONDS = 5.0
CLIENT, CLIENT_TRIES = "ray://", 3
OBJECT_STORE = 256 << 20  # bytes; small, since data is in files and messages are short
# Defaults; variables that the user has set win.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_worker_num_grpc_internal_threads": "1",
    "RAY_prestart_worker_first_driver": "0",  # Ray's default starts one per logical CPU
    "RAY_ROTATION_MAX_BYTES": "20000000",
    "RAY_ROTATION_BACKUP_COUNT": "2",
    "RAY_memory_usage_threshold": "0.95",
}

log = logging.getLogger(__name__)


def prepare_environment(address: str | None) -> None:
    """Call this before importing Ray, which then reads its settings. A private cluster always
    requires a token; otherwise the user's settings decide."""
    if address is None:
        require_token_mode(os.environ, "unset it: a private cluster has a token of its own")
    own = {MODE: "token"} if address is None or PATH in os.environ else {}
    for name, value in (SETTINGS | own).items():
        os.environ.setdefault(name, value)


@contextmanager
def connected(
    address: str | None = None,
    *,
    namespace: str,
    cpus: int | None = None,
    gpus: int | None = None,
    logs: Path | None = None,
) -> Iterator[None]:
    """Connect to Ray during the block. Without an address, start a private cluster that requires a
    token and ends with the block; the logs of its processes are copied to the folder `logs`."""
    prepare_environment(address)
    if address is not None:
        _require_listener(address)
        with _session(address=address, namespace=namespace):
            yield
        return
    # The name is short: paths of Ray's sockets in this folder may have 107 bytes. Mode is 0700.
    with (
        TemporaryDirectory(prefix="m3pc-", dir="/tmp", ignore_cleanup_errors=True) as name,
        _token((folder := Path(name)) / "token"),
    ):
        options = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": OBJECT_STORE}
        place = {"_node_ip_address": LOOPBACK, "_temp_dir": str(folder / "r")}
        own: dict[str, Any] = {"address": "local", "include_dashboard": False, **options, **place}
        with _kept_logs(folder / "r", logs), _session(namespace=namespace, **own):
            yield


@contextmanager
def _session(**options: Any) -> Iterator[None]:
    import ray

    _connect(**options)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(**options: Any) -> None:
    """Initialise Ray; try ray:// several times. Its client server sometimes cannot start the
    process for a new client and fails after half a minute."""
    import ray

    address = options["address"]
    for left in reversed(range(CLIENT_TRIES if address.startswith(CLIENT) else 1)):
        try:
            with _loopback_only(address), _umask(0o077):
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except (ConnectionError, ValueError, RuntimeError) as error:
            if not left:
                raise InputError(_no_connection(address, error)) from error
            log.warning("event=connect-again address=%s reason=%s", address, error)


def _require_listener(address: str) -> None:
    """Fail at once if nothing listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not (host and port.isdecimal()):
        return  # "auto", which Ray resolves or refuses at once
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise InputError(_no_connection(address, error)) from None


def _no_connection(address: str, error: Exception) -> str:
    return (
        f"no connection to Ray at {address!r}: {error}; start a cluster with `m3pc node head`, "
        f"give its address and, where it asks for one, a token file in {PATH}"
    )


@contextmanager
def _kept_logs(ray_folder: Path, to: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        logs = (ray_folder / "session_latest" / "logs").glob("worker-*.err")
        written = [path for path in logs if path.stat().st_size] if to else []
        if to and written:
            shutil.rmtree(to, ignore_errors=True)
            to.mkdir()
            for path in written:
                shutil.copyfile(path, to / path.name)


@contextmanager
def _token(path: Path) -> Iterator[None]:
    """Make processes that start within the block authenticate with a new token."""
    make_token(path)
    before = {name: os.environ.pop(name) for name in (PATH, TOKEN) if name in os.environ}
    os.environ[PATH] = str(path)
    try:
        yield
    finally:
        del os.environ[PATH]
        os.environ.update(before)


@contextmanager
def _loopback_only(address: str) -> Iterator[None]:
    """Disable Ray's clusters while connecting to a private or a loopback address."""
    from ray._private import ray_constants

    constants: Any = ray_constants
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    local = named == "local" or named.rpartition(":")[0] in LOCAL_NAMES
    # This process's Ray has read its variables already.
    constants.ENABLE_RAY_CLUSTER = not local and constants.env_bool(
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not constants.IS_WINDOWS_OR_OSX
    )
    before = {name: os.environ.get(name) for name in LOOPBACK_ONLY}
    os.environ.update(LOOPBACK_ONLY if local else {})  # child processes read these
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    """Set the umask, so that only the owner can read Ray's files. Ray's own folders get mode 0777
    despite the umask, but lie in a folder of mode 0700."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
