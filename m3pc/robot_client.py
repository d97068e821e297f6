"""Ask `m3pc serve` for actions. Needs Python and nothing else: copy this file to a robot.

    planner = Planner("http://127.0.0.1:8400", token=Path("token").read_text())
    with planner.session(name="arm-1") as session:
        answer = session.act(observation)
        while True:
            observation, reward, done = robot.move(answer.action)
            if done:
                break
            answer = session.act(observation, reward)
        session.end(observation, reward, terminated=True)

A question that gets no answer is asked again; the server counts steps, so none is taken twice.
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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TRIES = 3
PAUSE, MOST_PAUSE = 1.0, 5.0  # seconds between two trials: by itself, whatever a server says
KEY_BYTES = 16
VECTORS = ("observation", "goal", "action")


class RefusedError(Exception):
    """The server's answer was no; `status` and `detail` say why."""

    def __init__(self, status: int, detail: str, expected_step: int | None = None) -> None:
        super().__init__(f"{status}: {detail}")
        self.status, self.detail, self.expected_step = status, detail, expected_step


class ClientAnswer(NamedTuple):
    action: list[float]  # in [-1, 1]
    late: bool  # after its deadline
    candidates: int  # plans that were weighed; 0: none
    milliseconds: float  # in the server
    version: str  # of the weights
    told: Mapping[str, Any]  # all that the server said


class Planner:
    """A server. One connection, for one thread; several robots need one each."""

    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        timeout: float = 2.0,
        binary: bool = True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout`: seconds for an answer, after which it is asked again. `binary`: msgpack, in
        which numbers are float32 and cost little; else JSON. `context`: whom to trust at an
        address with https; default: whom this machine trusts."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"address is {address!r}; give one like http://127.0.0.1:8400")
        self._binary = binary
        self._prefix = parts.path.rstrip("/")  # where a proxy puts the server
        self._connection = (
            http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=timeout, context=context
            )
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
        )
        kind = "application/msgpack" if binary else "application/json"
        self._headers = {"Content-Type": kind}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token.strip()}"

    def session(self, **terms: Any) -> "Session":
        """A new episode: mode, ratio, target, goal, waypoints, seed, name, step_limit,
        deadline_ms, explore. Asked again because an answer was lost, it is the same one."""
        key = secrets.token_hex(KEY_BYTES)
        return Session(self, self.ask("POST", "/v1/sessions", {"key": key, **terms}))

    def weights(self) -> Mapping[str, Any]:
        """What answers."""
        found: Mapping[str, Any] = self.ask("GET", "/v1/weights")
        return found

    def reload(self) -> Mapping[str, Any]:
        """Let the server read its weights anew."""
        found: Mapping[str, Any] = self.ask("POST", "/v1/weights")
        return found

    def ask(self, method: str, path: str, message: Mapping[str, Any] | None = None) -> Any:
        """Again where there was no answer, or where the server says so: not for ever."""
        body = None if message is None else self._encoded(message)
        for last in (*[False] * (TRIES - 1), True):
            try:
                status, headers, content = self._exchange(method, path, body)
            except (OSError, http.client.HTTPException):
                self._connection.close()
                if last:
                    raise
                continue
            if status < 300:
                return self._decoded(headers, content)
            if status != 503 or last:
                raise _refusal(status, content)
            time.sleep(_pause(headers.get("Retry-After", "")))
        raise AssertionError

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "Planner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = self._connection
        connection.request(method, f"{self._prefix}{path}", body, self._headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()

    def _encoded(self, message: Mapping[str, Any]) -> bytes:
        given = {name: _plain(value) for name, value in message.items() if value is not None}
        for name in VECTORS:
            if name in given:
                given[name] = _floats(given[name])
        if "waypoints" in given:
            given["waypoints"] = [_floats(row) for row in given["waypoints"]]
        if self._binary:
            return packed(given)
        return json.dumps(given, default=list, allow_nan=False).encode()

    def _decoded(self, headers: http.client.HTTPMessage, content: bytes) -> Any:
        if not content:
            return None
        if headers.get_content_type() != "application/msgpack":
            return json.loads(content)
        found = unpacked(content)
        return found | {name: list(_numbers(found[name])) for name in VECTORS if name in found}


class Session:
    """One episode of one robot: `end` it to have it kept. Left by an exception it is dropped,
    unless server or network failed: then the server keeps what it knows, as cut short."""

    def __init__(self, planner: Planner, told: Mapping[str, Any]) -> None:
        self._planner, self.told = planner, told  # sizes, mode, limits: see the server's Opened
        self._path = f"/v1/sessions/{told['session']}"
        self.steps = 0  # answered
        self._open = True

    def act(
        self,
        observation: Iterable[float],
        reward: float | None = None,
        *,
        action: Iterable[float] | None = None,
        deadline_ms: float | None = None,
    ) -> ClientAnswer:
        """What to do where the robot is now; `reward` is of the step before, and so is `action`:
        what was really done, where that is not what the answer said."""
        asked = {"step": self.steps, "observation": observation, "reward": reward}
        asked |= {"action": action, "deadline_ms": deadline_ms}
        found = self._planner.ask("POST", f"{self._path}/act", asked)
        self.steps += 1
        return ClientAnswer(
            action=found["action"],
            late=found["late"],
            candidates=found["candidates"],
            milliseconds=found["milliseconds"],
            version=found["version"],
            told=found,
        )

    def end(
        self,
        observation: Iterable[float],
        reward: float | None = None,
        *,
        action: Iterable[float] | None = None,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Mapping[str, Any]:
        """Where the episode ended, which nobody acts on any more; says what became of it."""
        said = {"step": self.steps, "observation": observation, "reward": reward, "action": action}
        ends = {"terminated": terminated, "truncated": truncated}
        found: Mapping[str, Any] = self._planner.ask("POST", f"{self._path}/end", said | ends)
        self._open = False
        return found

    def leave(self) -> None:
        """Go without an end. Who is not there any more has left."""
        self._open = False
        try:
            self._planner.ask("DELETE", self._path)
        except RefusedError as refused:
            if refused.status != 404:
                raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._open and not _is_failure(error):
            try:
                self.leave()
            except (OSError, http.client.HTTPException, RefusedError):
                if kind is None:
                    raise


def _is_failure(error: object) -> bool:
    """Of the server or on the way to it: what the robot did is worth keeping."""
    if isinstance(error, RefusedError):
        return error.status == 503
    return isinstance(error, OSError | http.client.HTTPException)


def _pause(told: str) -> float:
    """Seconds, or a date, as HTTP has it for Retry-After."""
    seconds = PAUSE
    if told.isdecimal():
        seconds = float(told)
    elif told:
        with suppress(ValueError):
            seconds = parsedate_to_datetime(told).timestamp() - time.time()
    return min(max(seconds, 0.0), MOST_PAUSE)


def _refusal(status: int, content: bytes) -> RefusedError:
    try:
        told = json.loads(content)
        return RefusedError(status, told["detail"], told.get("expected_step"))
    except (ValueError, TypeError, KeyError):
        return RefusedError(status, content[:200].decode(errors="replace"))


# Numbers as the server wants them: float32, little-endian


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python's own."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _floats(numbers: Iterable[float]) -> "array[float]":
    return array("f", [float(number) for number in numbers])


def _numbers(content: bytes) -> "array[float]":
    found = array("f")
    found.frombytes(content)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def _bytes(numbers: "array[float]") -> bytes:
    found = array("f", numbers)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


# msgpack, as much of it as messages need


def packed(value: Any) -> bytes:
    if isinstance(value, Mapping):
        head = _head(len(value), 0x80, 15, {16: 0xDE, 32: 0xDF})
        return head + b"".join(packed(name) + packed(each) for name, each in value.items())
    if isinstance(value, list):
        return _head(len(value), 0x90, 15, {16: 0xDC, 32: 0xDD}) + b"".join(map(packed, value))
    if isinstance(value, str):
        text = value.encode()
        return _head(len(text), 0xA0, 31, {8: 0xD9, 16: 0xDA, 32: 0xDB}) + text
    if isinstance(value, array):
        content = _bytes(value)
        return _head(len(content), 0, -1, {8: 0xC4, 16: 0xC5, 32: 0xC6}) + content
    return _packed_scalar(value)


def _packed_scalar(value: float | None) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return struct.pack(">Bq", 0xD3, value)
    return struct.pack(">Bd", 0xCB, float(value))


SIZES = {8: ">BB", 16: ">BH", 32: ">BI"}


def _head(size: int, short: int, most: int, codes: Mapping[int, int]) -> bytes:
    """What tells kind and size: in one byte up to `most`, else after a code."""
    if size <= most:
        return bytes([short | size])
    bits = next(bits for bits in codes if size < 1 << bits)
    return struct.pack(SIZES[bits], codes[bits], size)


def unpacked(content: bytes) -> Any:
    value, end = _value(content, 0)
    if end != len(content):
        raise ValueError(f"{len(content) - end} bytes are left over")
    return value


PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = {
    **{0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"},
    **{0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"},
}
LONG = {
    **{0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I")},
    **{0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I")},
    **{0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I")},
}
SHORT = ((0x80, 0xF0, "map"), (0x90, 0xF0, "list"), (0xA0, 0xE0, "str"))


def _value(content: bytes, at: int) -> tuple[Any, int]:
    code = content[at]
    at += 1
    if code in PLAIN:
        return PLAIN[code], at
    if code < 0x80 or code >= 0xE0:  # a small number, perhaps negative
        return (code if code < 0x80 else code - 256), at
    if code in NUMBERS:
        form = NUMBERS[code]
        return struct.unpack_from(form, content, at)[0], at + struct.calcsize(form)
    if code in LONG:
        kind, form = LONG[code]
        (size,) = struct.unpack_from(form, content, at)
        return _sized(kind, size, content, at + struct.calcsize(form))
    for short, mask, kind in SHORT:
        if code & mask == short:
            return _sized(kind, code & ~mask & 0xFF, content, at)
    raise ValueError(f"a value begins with {code:#x}, which no message has")


def _sized(kind: str, size: int, content: bytes, at: int) -> tuple[Any, int]:
    if kind in ("str", "bin"):
        raw = content[at : at + size]
        return (raw.decode() if kind == "str" else raw), at + size
    items = []
    for _ in range(size * (2 if kind == "map" else 1)):
        item, at = _value(content, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), at
