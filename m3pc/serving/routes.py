"""The HTTP operations. FastAPI routes and describes them; codec.py reads and writes their messages.

FastAPI does not parse bodies: it knows no msgpack, and its errors are no problem documents.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Path
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from m3pc.serving.codec import JSON, content_kind, decoded, encoded
from m3pc.serving.messages import (
    ActionResponse,
    End,
    EndResponse,
    Message,
    ModelInfo,
    Opening,
    SessionCreated,
    SessionStatus,
    Step,
)
from m3pc.serving.problems import PROBLEM_JSON
from m3pc.serving.request_guard import ARRIVED
from m3pc.serving.session_service import SessionService

SESSION: Final = "/v1/sessions/{session}"
SessionId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
TOKEN: Final = [Depends(HTTPBearer(scheme_name="token"))]  # documentation; the guard checks it
PROBLEM: Final = {"$ref": "#/components/schemas/Problem"}
TEXT: Final = {"text/plain": {"schema": {"type": "string"}}}
# Why a request may be answered by a Problem.
WHY: Final[Mapping[int, str]] = {
    400: "The message broke off.",
    401: "No token, or a wrong one.",
    403: "Sent by a page of another site.",
    404: "There is no such session, or no longer.",
    408: "The message took too long to arrive.",
    409: "Another step is expected, or the same request was sent before with other content.",
    413: "The message is too large.",
    415: "Neither JSON nor msgpack.",
    421: "Sent to a host name that another site may own.",
    422: "The message is not understood, or does not fit the model.",
    503: "Not now: retry after the seconds in Retry-After.",
}
HEADERS: Final = {401: "WWW-Authenticate", 503: "Retry-After"}
BODY: Final = (400, 408, 413, 415, 422)


def problems(*statuses: int, token: bool = True) -> dict[int | str, dict[str, Any]]:
    """The problems of an operation as OpenAPI responses, with those of the request guard."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, 403, 421, *([401] if token else [])}):
        content = {PROBLEM_JSON: {"schema": PROBLEM}}
        responses[status] = {"description": WHY[status], "content": content}
        if status in HEADERS:
            responses[status]["headers"] = {HEADERS[status]: {"schema": {"type": "string"}}}
    return responses


def operation_id(route: APIRoute) -> str:
    """Make an id such as post_v1_sessions_session_act."""
    method = min(route.methods or {""})  # the only one
    return f"{method.lower()}{route.path_format.replace('/', '_').translate({123: '', 125: ''})}"


def session_links() -> dict[int | str, dict[str, Any]]:
    """OpenAPI links of a created session: the operations that take its id."""
    prefix, parameters = "v1_sessions_session", {"session": "$response.body#/session"}
    ids = {"act": f"post_{prefix}_act", "end": f"post_{prefix}_end"}
    ids |= {"status": f"get_{prefix}", "drop": f"delete_{prefix}"}
    links = {name: {"operationId": id, "parameters": parameters} for name, id in ids.items()}
    return {201: {"links": links}}


class MessageRoute(APIRoute):
    """Decodes the body by its Content-Type, calls the endpoint, answers in the same encoding."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        field, request_name = self.body_field, self.dependant.request_param_name
        message = TypeAdapter(self.endpoint.__annotations__[field.name]) if field else None

        async def handle(request: Request) -> Response:
            arguments, kind = dict(request.path_params), JSON
            if field and message:
                kind = content_kind(request.headers)
                arguments[field.name] = decoded(await request.body(), kind, message)
            if request_name:
                arguments[request_name] = request
            answer = await self.endpoint(**arguments)
            if isinstance(answer, Message):
                return encoded(answer, kind, self.status_code or 200)
            return answer if isinstance(answer, Response) else Response(status_code=204)

        return handle


def add_session_routes(app: FastAPI, service: SessionService) -> None:
    @app.post(
        "/v1/sessions",
        status_code=201,
        responses=session_links() | problems(*BODY, 409, 503),
        dependencies=TOKEN,
    )
    async def open_session(opening: Opening) -> SessionCreated:
        """Start an episode. By default the robot acts for a high return."""
        return service.open(opening)

    @app.post(f"{SESSION}/act", responses=problems(*BODY, 404, 409, 503), dependencies=TOKEN)
    async def act(request: Request, session: SessionId, step: Step) -> ActionResponse:
        """Report where the robot is and get its next action."""
        return await service.act(session, step, request.scope[ARRIVED])

    @app.post(f"{SESSION}/end", responses=problems(*BODY, 404, 409, 503), dependencies=TOKEN)
    async def end(session: SessionId, end: End) -> EndResponse:
        """Report how the episode ended. If this server records episodes, it is stored now."""
        return await service.end(session, end)

    @app.get(SESSION, responses=problems(404), dependencies=TOKEN)
    async def status(session: SessionId) -> SessionStatus:
        """How far a session is."""
        return service.status(session)

    @app.delete(SESSION, status_code=204, responses=problems(404, 409), dependencies=TOKEN)
    async def drop(session: SessionId) -> None:
        """Drop a session without an end: nothing of the episode is stored."""
        service.drop(session)


def add_weights_routes(app: FastAPI, service: SessionService) -> None:
    @app.get("/v1/weights", responses=problems(), dependencies=TOKEN)
    async def weights() -> ModelInfo:
        """Which weights answer, and what they were trained for."""
        return service.model_info()

    @app.post("/v1/weights", responses=problems(409, 422), dependencies=TOKEN)
    async def reload() -> ModelInfo:
        """Read the weights again from their source. Open sessions continue; weights that are
        damaged or do not fit are refused, and the current ones stay."""
        return await service.reload()


def add_health_routes(
    app: FastAPI, service: SessionService, metrics: Callable[[], Response]
) -> None:
    guard = problems(token=False)
    not_ready: dict[int | str, dict[str, Any]] = {503: {"description": WHY[503], "content": TEXT}}

    @app.get("/livez", responses=guard, response_class=PlainTextResponse)
    async def live() -> Response:
        """Whether the server answers at all."""
        return PlainTextResponse("alive\n")

    @app.get("/readyz", responses=guard | not_ready, response_class=PlainTextResponse)
    async def ready() -> Response:
        """Whether the server can plan: 200, or 503 and the reason."""
        reason = service.not_ready_reason
        return PlainTextResponse(f"{reason or 'ready'}\n", 503 if reason else 200)

    @app.get("/metrics", responses=problems(), response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return metrics()
