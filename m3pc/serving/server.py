"""A checkpoint that answers robots until it is told to stop: everything put together."""

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
from m3pc.core.token_file import check_token, make_token
from m3pc.evaluation.agent import policy
from m3pc.model import checkpoint
from m3pc.serving.app import application
from m3pc.serving.connection import ConnectionTimeouts
from m3pc.serving.problems import ProblemError
from m3pc.serving.recording import EpisodeRecording
from m3pc.serving.service_spec import ServiceSpec
from m3pc.serving.session_service import SessionService
from m3pc.serving.weights_follower import PublishedVersions
from m3pc.types import InputError, Version
from planner.policy import Policy
from planner.server.service import PlannerService
from planner.server.watchdog import batch_watchdog

SWEEP: Final = 1.0  # seconds between two looks for idle sessions
KEEP_ALIVE: Final = 75  # seconds that a silent connection is kept
STOP_SECONDS: Final = 10  # for requests that are being answered
BACKLOG: Final = 128  # connections that may wait
LARGEST_HEAD: Final = 16 << 10  # bytes of a request's first lines
METRICS_TOKEN: Final = "M3PC_METRICS_TOKEN_FILE"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What to serve, where, and to whom."""

    path: Path  # a run or checkpoint
    host: str = "127.0.0.1"
    port: int = 8400
    token: Path | None = None  # made if there is none; None: everybody on this machine may ask
    sets: tuple[str, ...] = ()
    deadline: float = 0.05  # seconds
    record: Path | None = None  # a store
    follow: Path | None = None  # an online run
    sessions: int = 64
    idle: float = 600.0  # seconds


def serve(order: ServeConfig) -> int:
    """The exit code. What cannot be served is refused before anything listens, and nothing does
    before the planner can answer."""
    token = _token(order)
    found = checkpoint.read(order.path)
    ready = policy(found, order.sets)
    house = ServiceSpec.of(
        ready,
        critic=found.progress.get("critic_updates") != 0,
        deadline=order.deadline,
        most=order.sessions,
        idle=order.idle,
    )
    versions = PublishedVersions(order.follow) if order.follow else None
    with ExitStack() as stack:
        listening = stack.enter_context(closing(_socket(order)))
        recording = EpisodeRecording(order.record, ready.weights) if order.record else None
        try:
            service = stack.enter_context(_service(ready))
            if versions is not None and order.follow is not None:
                _warn_of_older(versions, ready.weights.version)
                service.follow(versions, order.follow)
            robots = SessionService(
                service, house, recording=recording, source=None if versions else order.path
            )
            app = application(
                robots,
                house,
                info={"version": __version__, "ray": "", "auth": "token" if token else "off"},
                token=token,
                metrics_token=_metrics_token(),
            )
            gc.collect()
            gc.freeze()  # what is there by now stays: looking through it would hold up all robots
            _listen(listening, order)  # from now on there is somebody who answers
            asyncio.run(_run(PlannerServer(config(app, order.sessions)), robots, listening))
        finally:
            lost = recording.close() if recording is not None else 0
    if lost:
        log.error("event=episodes-lost count=%d", lost)
    return IO_FAILED if lost else OK


def config(app: ASGIApp, sessions: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=ConnectionTimeouts,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        limit_concurrency=4 * sessions + 64,
    )


def _warn_of_older(versions: PublishedVersions, served: int) -> None:
    """They are never taken, and nothing else would say so."""
    newest, own = versions.newest(), Version.unpacked(served)
    if newest is not None and newest < own:
        log.warning(
            "event=run-is-older newest=%d-%d served=%d-%d: weights of an older run do not follow "
            "newer ones; serve a checkpoint that the run began with",
            *(newest.epoch, newest.number, own.epoch, own.number),
        )


class PlannerServer(uvicorn.Server):
    """Without handlers of its own, which would stand in front of ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(server: uvicorn.Server, robots: SessionService, listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def stop() -> None:
        log.info("event=stopping sessions=%d", len(robots.sessions))
        server.should_exit = True

    def reload() -> None:
        task = loop.create_task(_reload(robots))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    sweeping = loop.create_task(_sweep(robots))
    host, port = listening.getsockname()[:2]
    log.info("event=serving address=http://%s:%d", f"[{host}]" if ":" in host else host, port)
    try:
        await server.serve([listening])
    finally:
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping
        await robots.close()


async def _sweep(robots: SessionService) -> None:
    while True:
        await asyncio.sleep(SWEEP)
        try:
            robots.sweep()
        except Exception:  # the next look may do better
            log.exception("event=sweep-failed")


async def _reload(robots: SessionService) -> None:
    try:
        await robots.reload()
    except (InputError, ProblemError) as error:
        log.error("event=weights-not-taken reason=%r", str(error))


@contextmanager
def _service(ready: Policy) -> Iterator[PlannerService]:
    """Robots that ask meanwhile are company enough: a batch waits for no more."""
    config = replace(ready.config, {"fleet.batch_wait": 0.0})
    with PlannerService(ready.weights, config, paced=True) as service:
        watchdog = batch_watchdog(service.stuck_for)
        watchdog.start()
        try:
            yield service
        finally:
            watchdog.close()


def _token(order: ServeConfig) -> str | None:
    own = _is_loopback(order.host)
    if order.token is not None:
        if not own:
            log.warning(
                "event=not-encrypted host=%s: the token and all messages can be read on the way; "
                "use a private network or a proxy with TLS",
                order.host,
            )
        return make_token(order.token).read_text(encoding="utf-8").strip()
    if not own:
        raise InputError(
            f"--host is {order.host}, where others could move your robots; give --token-file"
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


def _socket(order: ServeConfig) -> socket.socket:
    """Of our own but silent: a port that is taken is told before anything else is begun.

    Asyncio sends small answers at once only where a socket says that it is TCP.
    """
    family = socket.AF_INET6 if ":" in order.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((order.host, order.port))
    except OSError as error:
        found.close()
        raise _is_taken(order, error) from None
    return found


def _listen(own: socket.socket, order: ServeConfig) -> None:
    """Somebody else may have begun to listen since."""
    try:
        own.listen(BACKLOG)
    except OSError as error:
        raise _is_taken(order, error) from None


def _is_taken(order: ServeConfig, error: OSError) -> InputError:
    return InputError(
        f"nothing can listen at {order.host}:{order.port}: {error.strerror or error}; give another "
        "--host or --port"
    )
