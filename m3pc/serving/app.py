"""The server as an ASGI application: routes, documentation, problems and the request guard."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp

from m3pc import __version__
from m3pc.serving.docs_page import page
from m3pc.serving.openapi import ABOUT, openapi_document, sized
from m3pc.serving.problems import ProblemError, problem_of_input
from m3pc.serving.request_guard import RequestGuard
from m3pc.serving.routes import (
    MessageRoute,
    add_health_routes,
    add_session_routes,
    add_weights_routes,
    operation_id,
)
from m3pc.serving.service_spec import ServiceSpec
from m3pc.serving.session_service import SessionService
from m3pc.telemetry.exporter import PublishedMetrics
from m3pc.types import InputError

NUMBER_BYTES: Final = 32  # upper bound for one number in JSON
MIN_BODY_LIMIT: Final = 64 << 10  # bytes
CSP: Final = "default-src 'none'; style-src 'unsafe-inline'"


def application(
    service: SessionService,
    *,
    info: Mapping[str, str],
    token: str | None,
    metrics_token: str | None,
) -> ASGIApp:
    """`info` becomes the labels of the metric m3pc_build_info."""
    app = FastAPI(
        title="m3pc serve",
        version=__version__,
        description=ABOUT,
        openapi_url=None,  # _add_documentation serves it with the model's sizes
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
        exception_handlers=dict.fromkeys(
            (ProblemError, InputError, HTTPException, Exception), _problem_response
        ),
    )
    app.router.route_class = MessageRoute
    add_session_routes(app, service)
    add_weights_routes(app, service)
    metrics = PublishedMetrics(info)

    def current_metrics() -> Response:
        metrics.snapshot = service.snapshot()
        return Response(metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    add_health_routes(app, service, current_metrics)
    _add_documentation(app, service)
    spec = service.spec
    max_body = MIN_BODY_LIMIT + NUMBER_BYTES * spec.sizes.states * (spec.max_episode_steps + 1)
    return RequestGuard(
        app, token=token, metrics_token=metrics_token, max_body=max_body, clock=service.clock
    )


def _add_documentation(app: FastAPI, service: SessionService) -> None:
    document = openapi_document(app)
    for route in app.routes:
        if isinstance(route, MessageRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")  # like Starlette's own routes; not documented

    @cache
    def described(spec: ServiceSpec) -> tuple[Mapping[str, Any], str]:
        """Return JSON and HTML. Only two specs occur: with and without a trained critic."""
        fitted = sized(document, spec)
        return fitted, page(fitted)

    async def openapi_json(request: Request) -> Response:
        return JSONResponse(described(service.spec)[0])

    async def docs(request: Request) -> Response:
        return HTMLResponse(described(service.spec)[1], headers={"Content-Security-Policy": CSP})

    app.add_route("/openapi.json", openapi_json)
    app.add_route("/docs", docs)


async def _problem_response(request: Request, error: Exception) -> Response:
    if isinstance(error, ProblemError):
        return error.response()
    if isinstance(error, InputError):
        return problem_of_input(error).response()
    if not isinstance(error, HTTPException):  # the guard logs it
        return ProblemError(500, "the server failed; its log says why").response()
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    detail = {
        404: "there is no such path; /docs lists them",
        405: f"{request.method} is not for this path; Allow says what is",
    }.get(error.status_code, error.detail)
    return ProblemError(error.status_code, detail, headers=headers).response()


def _allowed_methods(request: Request) -> list[str]:
    """Methods of all routes to this path; Starlette reports only the first route's."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods
    return sorted(methods)
