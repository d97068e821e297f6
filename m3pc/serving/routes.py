"""The paths of the server: what may be asked, and how it may be answered.

One table for the router, the OpenAPI document and the page that shows it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from m3pc.serving.codec import JSON, content_kind, decoded, encoded
from m3pc.serving.messages import (
    END,
    OPENING,
    STEP,
    ActionResponse,
    EndResponse,
    Message,
    ModelInfo,
    SessionCreated,
    SessionStatus,
)
from m3pc.serving.request_guard import ARRIVED
from m3pc.serving.session_service import SessionService

SESSION: Final = "/v1/sessions/{session}"
# Why a request may be answered by a Problem.
WHY: Final[Mapping[int, str]] = {
    400: "The message broke off.",
    401: "No token, or another one.",
    403: "Asked by a page of another site.",
    404: "There is no such session, or not any more.",
    408: "The message took too long to arrive.",
    409: "Not now: another step is expected, or it was said otherwise before.",
    413: "The message is too large.",
    415: "Neither JSON nor msgpack.",
    421: "Asked by a name that a stranger may own.",
    422: "The message is not understood, or does not fit the model.",
    503: "Not now: ask again, after as many seconds as Retry-After says.",
}
ENTRY: Final = (401, 403, 421)
BODY: Final = (400, 408, 413, 415, 422)

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    summary: str
    answer: type[Message] | None  # None: text, or nothing
    status: int = 200
    body: TypeAdapter[Any] | None = None
    problems: tuple[int, ...] = ()
    guarded: bool = True  # by the token


def paths(robots: SessionService, metrics: Callable[[], Response]) -> list[Path]:
    return [*_sessions(robots), *_weights(robots), *_health(robots, metrics)]


def _sessions(robots: SessionService) -> list[Path]:
    async def come(request: Request) -> Response:
        kind, asked = await _message(request, OPENING)
        return encoded(robots.open(asked), kind, 201)

    async def act(request: Request) -> Response:
        kind, asked = await _message(request, STEP)
        return encoded(await robots.act(_id(request), asked, request.scope[ARRIVED]), kind)

    async def end(request: Request) -> Response:
        kind, asked = await _message(request, END)
        return encoded(await robots.end(_id(request), asked), kind)

    async def look(request: Request) -> Response:
        return encoded(robots.standing(_id(request)), JSON)

    async def leave(request: Request) -> Response:
        robots.leave(_id(request))
        return Response(status_code=204)

    return [
        Path(
            method="POST",
            path="/v1/sessions",
            handler=come,
            summary="Come: what is wanted in this episode. Without a field it is a high return.",
            answer=SessionCreated,
            status=201,
            body=OPENING,
            problems=(*ENTRY, *BODY, 409, 503),
        ),
        Path(
            method="POST",
            path=f"{SESSION}/act",
            handler=act,
            summary="Say where the robot is, get what it should do.",
            answer=ActionResponse,
            body=STEP,
            problems=(*ENTRY, *BODY, 404, 409, 503),
        ),
        Path(
            method="POST",
            path=f"{SESSION}/end",
            handler=end,
            summary="Say how the episode ended. Where episodes are stored, this one is then.",
            answer=EndResponse,
            body=END,
            problems=(*ENTRY, *BODY, 404, 409, 503),
        ),
        Path(
            method="GET",
            path=SESSION,
            handler=look,
            summary="How far a session is.",
            answer=SessionStatus,
            problems=(*ENTRY, 404),
        ),
        Path(
            method="DELETE",
            path=SESSION,
            handler=leave,
            summary="Go without an end: nothing of the episode is stored.",
            answer=None,
            status=204,
            problems=(*ENTRY, 404, 409),
        ),
    ]


def _weights(robots: SessionService) -> list[Path]:
    async def serving(request: Request) -> Response:
        return encoded(robots.serving(), JSON)

    async def reload(request: Request) -> Response:
        return encoded(await robots.reload(), JSON)

    return [
        Path(
            method="GET",
            path="/v1/weights",
            handler=serving,
            summary="Which weights answer, and for what.",
            answer=ModelInfo,
            problems=ENTRY,
        ),
        Path(
            method="POST",
            path="/v1/weights",
            handler=reload,
            summary="Read the weights anew from where they came. Sessions go on; what is not sound "
            "or does not fit is refused, and the weights from before go on.",
            answer=ModelInfo,
            problems=(*ENTRY, 409, 422),
        ),
    ]


def _health(robots: SessionService, metrics: Callable[[], Response]) -> list[Path]:
    async def alive(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def ready(request: Request) -> Response:
        lacks = robots.lacks
        return PlainTextResponse(f"{lacks or 'ready'}\n", 503 if lacks else 200)

    async def told(request: Request) -> Response:
        return metrics()

    rows: list[tuple[str, Handler, str]] = [
        ("/livez", alive, "Whether the server answers at all."),
        ("/readyz", ready, "Whether it can plan: 200, or 503 and why not."),
        ("/metrics", told, "For Prometheus."),
    ]
    return [
        Path(
            method="GET",
            path=path,
            handler=handler,
            summary=summary,
            answer=None,
            problems=ENTRY if path == "/metrics" else (403, 421),
            guarded=False,
        )
        for path, handler, summary in rows
    ]


async def _message(request: Request, of: TypeAdapter[Any]) -> tuple[str, Any]:
    kind = content_kind(request.headers)
    return kind, decoded(await request.body(), kind, of)


def _id(request: Request) -> str:
    return str(request.path_params["session"])
