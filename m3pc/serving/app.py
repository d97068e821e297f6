"""The server as an ASGI application: the paths, what describes them, and the guard before all."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from m3pc.serving.docs_page import page
from m3pc.serving.openapi import document
from m3pc.serving.problems import ProblemError, of_input
from m3pc.serving.request_guard import RequestGuard
from m3pc.serving.routes import paths
from m3pc.serving.service_spec import ServiceSpec
from m3pc.serving.session_service import SessionService
from m3pc.telemetry.exporter import PublishedSnapshot
from m3pc.types import InputError

NUMBER_BYTES = 32  # of a number in JSON, with room
LEAST_BODY = 64 << 10  # bytes
CSP = "default-src 'none'; style-src 'unsafe-inline'"


def application(
    robots: SessionService,
    house: ServiceSpec,
    *,
    info: Mapping[str, str],
    token: str | None,
    metrics_token: str | None,
) -> ASGIApp:
    """`info` is told as labels of m3pc_build_info."""
    rows = paths(robots, _metrics(robots, info))

    @cache
    def described(house: ServiceSpec) -> tuple[Mapping[str, Any], str]:
        """With a critic and without: made once each, as anybody may ask."""
        found = document(rows, house)
        return found, page(found)

    async def told(request: Request) -> Response:
        return JSONResponse(described(robots.house)[0])

    async def look(request: Request) -> Response:
        shown = described(robots.house)[1]
        return HTMLResponse(shown, headers={"Content-Security-Policy": CSP})

    routes = [Route(row.path, row.handler, methods=[row.method]) for row in rows]
    routes += [Route("/openapi.json", told), Route("/docs", look)]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    for kind in (ProblemError, InputError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)
    largest = LEAST_BODY + NUMBER_BYTES * house.sizes.states * (house.step_limit + 1)
    return RequestGuard(
        app, token=token, metrics_token=metrics_token, largest=largest, clock=robots.clock
    )


def _metrics(robots: SessionService, info: Mapping[str, str]) -> Callable[[], Response]:
    collector, registry = PublishedSnapshot(info), CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)

    def told() -> Response:
        collector.snapshot = robots.snapshot()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return told


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ProblemError):
        return error.response()
    if isinstance(error, InputError):
        return of_input(error).response()
    if not isinstance(error, HTTPException):  # the guard tells the log
        return ProblemError(500, "the server failed; its log says how").response()
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
    detail = {
        404: "there is no such path; /docs lists them",
        405: f"{request.method} is not for this path; Allow says what is",
    }.get(error.status_code, error.detail)
    return ProblemError(error.status_code, detail, headers=headers).response()


def _methods(request: Request) -> list[str]:
    """Of all routes to this path: Starlette tells those of the first."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods
    return sorted(found)
