"""Ask `m3pc serve` for actions. One file, standard library only: copy it to a robot.

    planner = Planner("http://127.0.0.1:8400", token=Path("token").read_text())
    with planner.session(name="arm-1") as session:
        answer = session.act(observation)
        while True:
            observation, reward, done = robot.move(answer.action)
            if done:
                break
            answer = session.act(observation, reward)
        session.end(observation, reward, terminated=True)

A request without an answer is sent again. The server numbers steps, so none is taken twice.
"""

import http.client
import json
import secrets
import ssl
import struct
import sys
import time
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ATTEMPTS = 3
PAUSE, MAX_PAUSE = 1.0, 5.0  # seconds between two attempts: by default, and at most
JSON, MSGPACK = "application/json", "application/msgpack"
VECTORS = ("observation", "goal", "action")  # fields that are sent as float32 in msgpack


class RefusedError(Exception):
    """The server refused a request: an HTTP status, and a sentence that says why."""

    def __init__(self, status: int, detail: str, expected_step: int | None = None) -> None:
        super().__init__(f"{status}: {detail}")
        self.status, self.detail, self.expected_step = status, detail, expected_step


class ClientAnswer(NamedTuple):
    action: list[float]  # each in [-1, 1]
    late: bool  # whether the answer missed its deadline
    candidates: int  # plans that were weighed; 0: not planned
    milliseconds: float  # time in the server
    version: str  # version of the weights
    message: Mapping[str, Any]  # all fields of the server's answer

    @property
    def told(self) -> Mapping[str, Any]:
        """Former name of `message`, in 0.1."""
        return self.message


class Planner:
    """A connection to a server, for one thread."""

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        timeout: float = 2.0,
        binary: bool = True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout`: seconds for an answer, after which the request is sent again. `binary`: use
        msgpack with float32 arrays, which is faster than JSON. `context`: which certificates to
        trust at an https address; default: those that this machine trusts."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address is {address!r}; give one like http://127.0.0.1:8400")
        host, port = parts.hostname, parts.port
        self.connection = (
            http.client.HTTPSConnection(host, port, timeout=timeout, context=context)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=timeout)
        )
        self._prefix = parts.path.rstrip("/")  # path of a server behind a proxy
        self._binary = binary
        self._headers = {"Content-Type": MSGPACK if binary else JSON}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token.strip()}"

    def session(self, **terms: Any) -> "Session":
        """Open a session for a new episode. `terms`: mode, ratio, target, goal, waypoints, seed,
        name, step_limit, deadline_ms, explore; see docs/SERVE.md."""
        key = secrets.token_hex(16)  # the server opens one session per key, however often asked
        return Session(self, self.ask("POST", "/v1/sessions", {"key": key, **terms}))

    def weights(self) -> Mapping[str, Any]:
        """Which weights answer, and what they were trained for."""
        info: Mapping[str, Any] = self.ask("GET", "/v1/weights")
        return info

    def reload(self) -> Mapping[str, Any]:
        """Let the server read its weights again."""
        info: Mapping[str, Any] = self.ask("POST", "/v1/weights")
        return info

    def ask(self, method: str, path: str, message: Mapping[str, Any] | None = None) -> Any:
        """Return the decoded answer. A request is sent up to `ATTEMPTS` times if it gets no answer
        or status 503; RefusedError, OSError or HTTPException if the last attempt fails."""
        body = None if message is None else encoded(message, binary=self._binary)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.connection.request(method, self._prefix + path, body, self._headers)
                response = self.connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException):
                self.connection.close()
                if attempt == ATTEMPTS:
                    raise
                continue
            if response.status < 300:
                return decoded(content, response.headers.get_content_type())
            if response.status != 503 or attempt == ATTEMPTS:
                raise _refusal(response.status, content)
            time.sleep(pause_seconds(response.headers.get("Retry-After", "")))
        raise AssertionError

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> "Planner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session:
    """One episode of one robot; `end` it to have it stored.

    Leaving the `with` block without `end` drops the session, unless the server or the network
    failed: then the server keeps the episode so far, as cut short.
    """

    def __init__(self, planner: Planner, opened: Mapping[str, Any]) -> None:
        """`opened` is the server's SessionCreated message: sizes, mode and limits."""
        self._planner, self.opened = planner, opened
        self.path = f"/v1/sessions/{opened['session']}"
        self.told = opened  # former name of `opened`, in 0.1
        self.steps = 0  # answered steps
        self._open = True

    def act(
        self,
        observation: Iterable[float],
        reward: float | None = None,
        *,
        action: Iterable[float] | None = None,
        deadline_ms: float | None = None,
    ) -> ClientAnswer:
        """Return the next action. `reward` and `action` belong to the previous step; give `action`
        only if the robot did not execute the answered one."""
        step = {"step": self.steps, "observation": observation, "reward": reward}
        step |= {"action": action, "deadline_ms": deadline_ms}
        answer = self._planner.ask("POST", f"{self.path}/act", step)
        self.steps += 1
        fields = {name: answer[name] for name in ClientAnswer._fields if name != "message"}
        return ClientAnswer(**fields, message=answer)

    def end(
        self,
        observation: Iterable[float],
        reward: float | None = None,
        *,
        action: Iterable[float] | None = None,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Mapping[str, Any]:
        """Report the last observation of the episode; the answer says whether it is stored."""
        end = {"step": self.steps, "observation": observation, "reward": reward, "action": action}
        end |= {"terminated": terminated, "truncated": truncated}
        answer: Mapping[str, Any] = self._planner.ask("POST", f"{self.path}/end", end)
        self._open = False
        return answer

    def leave(self) -> None:
        """Drop the session without an end; no error if the server no longer has it."""
        self._open = False
        try:
            self._planner.ask("DELETE", self.path)
        except RefusedError as refused:
            if refused.status != 404:
                raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        server_failed = isinstance(error, OSError | http.client.HTTPException) or (
            isinstance(error, RefusedError) and error.status == 503
        )
        if self._open and not server_failed:
            try:
                self.leave()
            except (OSError, http.client.HTTPException, RefusedError):
                if kind is None:  # do not hide the exception of the robot's program
                    raise


def _refusal(status: int, content: bytes) -> RefusedError:
    """Read a problem document, or whatever else a proxy answered."""
    try:
        problem = json.loads(content)
        return RefusedError(status, problem["detail"], problem.get("expected_step"))
    except (ValueError, TypeError, KeyError):
        return RefusedError(status, content[:200].decode(errors="replace"))


def pause_seconds(retry_after: str) -> float:
    """Read a Retry-After header: a number of seconds, or a date."""
    seconds = PAUSE
    if retry_after.isdecimal():
        seconds = float(retry_after)
    elif retry_after:
        with suppress(ValueError):
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
    return min(max(seconds, 0.0), MAX_PAUSE)


# Messages


def encoded(message: Mapping[str, Any], *, binary: bool) -> bytes:
    """Encode as msgpack or JSON. Fields that are None are left out; arrays may be numpy's."""
    fields: dict[str, Any] = {}
    for name, value in message.items():
        if value is None:
            continue
        if name in VECTORS:
            fields[name] = array("f", map(float, value))
        elif name == "waypoints":
            fields[name] = [array("f", map(float, row)) for row in value]
        else:  # a numpy scalar becomes a Python number
            fields[name] = value.item() if getattr(value, "ndim", None) == 0 else value
    return packed(fields) if binary else json.dumps(fields, default=list, allow_nan=False).encode()


def decoded(content: bytes, content_type: str) -> Any:
    if not content:
        return None
    if content_type != MSGPACK:
        return json.loads(content)
    fields = unpacked(content)
    for name in VECTORS:
        if name in fields:
            fields[name] = list(_little_endian(array("f", fields[name])))
    return fields


def _little_endian(numbers: "array[float]") -> "array[float]":
    """Convert float32 numbers to or from little endian; swaps bytes on a big-endian machine."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# msgpack, as far as messages need it: https://github.com/msgpack/msgpack/blob/master/spec.md


def packed(value: Any) -> bytes:
    """Encode a value. Sizes always take four bytes, although msgpack has shorter forms."""
    match value:
        case None | False | True:
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            return struct.pack(">Bq", 0xD3, value)
        case str():
            content = value.encode()
            head = struct.pack(">BI", 0xDB, len(content))
        case array():
            content = _little_endian(value[:]).tobytes()
            head = struct.pack(">BI", 0xC6, len(content))
        case list():
            content = b"".join(map(packed, value))
            head = struct.pack(">BI", 0xDD, len(value))
        case Mapping():
            content = b"".join(packed(name) + packed(item) for name, item in value.items())
            head = struct.pack(">BI", 0xDF, len(value))
        case _:
            return struct.pack(">Bd", 0xCB, float(value))
    return head + content


CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = dict(zip(range(0xCA, 0xD4), (f">{code}" for code in "fdBHIQbhiq"), strict=True))
SIZES = {  # code: kind, struct format of its size
    **{0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I")},
    **{0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I")},
    **{0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I")},
}
SHORT = ((0x80, 0x0F, "map"), (0x90, 0x0F, "list"), (0xA0, 0x1F, "str"))  # first code, size bits


def unpacked(content: bytes) -> Any:
    stream = BytesIO(content)
    value = _read(stream)
    if rest := stream.read():
        raise ValueError(f"{len(rest)} bytes are left over")
    return value


def _read(stream: BytesIO) -> Any:
    code = _number(stream, ">B")
    if code < 0x80 or code >= 0xE0:  # a small number, perhaps negative
        return code if code < 0x80 else code - 256
    if code in CONSTANTS:
        return CONSTANTS[code]
    if code in NUMBERS:
        return _number(stream, NUMBERS[code])
    if code in SIZES:
        kind, form = SIZES[code]
        return _read_sized(stream, kind, _number(stream, form))
    for first, bits, kind in SHORT:
        if first <= code <= first + bits:
            return _read_sized(stream, kind, code & bits)
    raise ValueError(f"a value begins with {code:#x}, which no message has")


def _read_sized(stream: BytesIO, kind: str, size: int) -> Any:
    if kind == "map":
        return {_read(stream): _read(stream) for _ in range(size)}
    if kind == "list":
        return [_read(stream) for _ in range(size)]
    content = stream.read(size)
    return content.decode() if kind == "str" else content


def _number(stream: BytesIO, form: str) -> Any:
    (number,) = struct.unpack(form, stream.read(struct.calcsize(form)))
    return number
