"""`m3pc serve`: answers robots with a checkpoint's plans until a signal stops it."""

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from m3pc import __version__
from m3pc.config.overrides import replace
from m3pc.core.exit_codes import IO_FAILED, OK
from m3pc.core.http_server import BACKLOG, HEAD_SECONDS, ServerConfig, address_of, bound_socket
from m3pc.core.token_file import check_token, make_token
from m3pc.evaluation.agent import configured_policy
from m3pc.model import checkpoint
from m3pc.serving.app import application
from m3pc.serving.problems import ProblemError
from m3pc.serving.recording import EpisodeRecording
from m3pc.serving.service_spec import ServiceSpec
from m3pc.serving.session_service import SessionService
from m3pc.serving.weights_follower import PublishedVersions
from m3pc.types import InputError, Version
from planner.policy import Policy
from planner.server.service import PlannerService
from planner.server.watchdog import batch_watchdog

IDLE_CHECK_SECONDS: Final = 1.0  # interval of the checks for idle sessions
KEEP_ALIVE: Final = 75  # seconds that a connection may be silent between two requests
STOP_SECONDS: Final = 10  # time for open requests to finish when the server stops
METRICS_TOKEN: Final = "M3PC_METRICS_TOKEN_FILE"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What to serve, where, and to whom."""

    source: Path  # a run or checkpoint
    host: str = "127.0.0.1"
    port: int = 8400
    token_file: Path | None = None  # created if missing; None: anyone on this machine may ask
    overrides: tuple[str, ...] = ()  # PATH=VALUE of the configuration
    deadline: float = 0.05  # seconds
    record: Path | None = None  # a store
    follow: Path | None = None  # an online run
    max_sessions: int = 64
    idle_seconds: float = 600.0


def serve(config: ServeConfig) -> int:
    """Serve until a signal arrives; return the exit code.

    The port opens only once the settings are checked and the planner can answer."""
    token = _token(config)
    loaded = checkpoint.read(config.source)
    policy = configured_policy(loaded, config.overrides)
    spec = ServiceSpec.from_policy(
        policy,
        critic_trained=loaded.progress.get("critic_updates") != 0,
        deadline=config.deadline,
        max_sessions=config.max_sessions,
        idle_seconds=config.idle_seconds,
    )
    versions = PublishedVersions(config.follow) if config.follow else None
    with ExitStack() as stack:
        listener = stack.enter_context(closing(reserved_socket(config.host, config.port)))
        recording = EpisodeRecording(config.record, policy.weights) if config.record else None
        try:
            planner = stack.enter_context(_planner_service(policy))
            if versions is not None and config.follow is not None:
                _warn_if_run_is_older(versions, policy.weights.version)
                planner.follow(versions, config.follow)
            service = SessionService(
                planner, spec, recording=recording, source=None if versions else config.source
            )
            app = application(
                service,
                info={"version": __version__, "ray": "", "auth": "token" if token else "off"},
                token=token,
                metrics_token=_metrics_token(),
            )
            gc.collect()
            gc.freeze()  # exclude everything loaded so far from collections, which delay answers
            start_listening(listener)
            server = PlannerServer(server_config(app, config.max_sessions))
            asyncio.run(_run(server, service, listener))
        finally:
            lost = recording.close() if recording is not None else 0
    if lost:
        log.error("event=episodes-lost count=%d", lost)
    return IO_FAILED if lost else OK


def server_config(
    app: ASGIApp, max_sessions: int, *, head_seconds: float = HEAD_SECONDS
) -> ServerConfig:
    return ServerConfig(
        app,
        max_connections=4 * max_sessions + 64,
        keep_alive=KEEP_ALIVE,
        stop_seconds=STOP_SECONDS,
        head_seconds=head_seconds,
    )


def reserved_socket(host: str, port: int) -> socket.socket:
    """Bind without listening until `start_listening`, to report a port in use at once."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise _address_error(f"{host}:{port}", error) from None


def start_listening(listener: socket.socket) -> None:
    """InputError if another process began to listen meanwhile."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _address_error(address_of(listener), error) from None


def _address_error(address: str, error: OSError) -> InputError:
    return InputError(
        f"nothing can listen at {address}: {error.strerror or error}; give another --host or --port"
    )


def _warn_if_run_is_older(versions: PublishedVersions, served: int) -> None:
    """Warn, because the planner ignores older versions without a message."""
    newest, own = versions.newest(), Version.unpacked(served)
    if newest is not None and newest < own:
        log.warning(
            "event=run-is-older newest=%d-%d served=%d-%d: weights of an older run do not follow "
            "newer ones; serve a checkpoint that the run began with",
            *(newest.epoch, newest.number, own.epoch, own.number),
        )


class PlannerServer(uvicorn.Server):
    """Installs no signal handlers: uvicorn's would replace ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(server: uvicorn.Server, service: SessionService, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def stop() -> None:
        log.info("event=stopping sessions=%d", len(service.sessions))
        server.should_exit = True

    def reload() -> None:
        task = loop.create_task(_reload(service))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    idle_check = loop.create_task(_abandon_idle_sessions(service))
    log.info("event=serving address=http://%s", address_of(listener))
    try:
        await server.serve([listener])
    finally:
        idle_check.cancel()
        with suppress(asyncio.CancelledError):
            await idle_check
        await service.close()


async def _abandon_idle_sessions(service: SessionService) -> None:
    while True:
        await asyncio.sleep(IDLE_CHECK_SECONDS)
        try:
            service.abandon_idle()
        except Exception:  # try again at the next check
            log.exception("event=sweep-failed")


async def _reload(service: SessionService) -> None:
    try:
        await service.reload()
    except (InputError, ProblemError) as error:
        log.error("event=weights-not-taken reason=%r", str(error))


@contextmanager
def _planner_service(policy: Policy) -> Iterator[PlannerService]:
    """Start the planner with batch_wait 0: requests gather during the previous batch."""
    config = replace(policy.config, {"fleet.batch_wait": 0.0})
    with PlannerService(policy.weights, config, deadline_aware=True) as planner:
        watchdog = batch_watchdog(planner.stuck_for)
        watchdog.start()
        try:
            yield planner
        finally:
            watchdog.close()


def _token(config: ServeConfig) -> str | None:
    loopback = _is_loopback(config.host)
    if config.token_file is not None:
        if not loopback:
            log.warning(
                "event=not-encrypted host=%s: the token and all messages can be read on the way; "
                "use a private network or a proxy with TLS",
                config.host,
            )
        return make_token(config.token_file).read_text(encoding="utf-8").strip()
    if not loopback:
        raise InputError(
            f"--host is {config.host}, where others could move your robots; give --token-file"
        )
    return None


def _metrics_token() -> str | None:
    path = os.environ.get(METRICS_TOKEN)
    return check_token(Path(path)).read_text(encoding="utf-8").strip() if path else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
