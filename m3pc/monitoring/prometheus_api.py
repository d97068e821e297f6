"""What a Prometheus knows, by its HTTP API."""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from m3pc.types import InputError

X = TypeVar("X")

DEADLINE = 20.0  # seconds for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]  # seconds since 1970, value; no NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    state: str  # pending or firing
    since: str


class MetricsSource(Protocol):
    """Expressions that are wrong are an InputError."""

    def range(self, expression: str, start: float, end: float, step: float) -> list[Series]: ...
    def instant(self, expression: str, at: float) -> list[Series]: ...
    def alerts(self) -> list[Alert]: ...


class Prometheus:
    def __init__(self, url: str, *, deadline: float = DEADLINE) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InputError(f"{url!r} is no address of a Prometheus; give http://HOST:PORT")
        self._url, self._deadline = url.rstrip("/"), deadline

    def range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        asked = {"query": expression, "start": start, "end": end, "step": step}
        return self._ask("query_range", asked, _lines)

    def instant(self, expression: str, at: float) -> list[Series]:
        return self._ask("query", {"query": expression, "time": at}, _last_values)

    def alerts(self) -> list[Alert]:
        return self._ask("alerts", None, _alerts)

    def _ask(self, what: str, asked: Mapping[str, object] | None, read: Callable[[Any], X]) -> X:
        form = None if asked is None else urllib.parse.urlencode(asked).encode()
        try:
            with urllib.request.urlopen(
                f"{self._url}/api/v1/{what}", form, timeout=self._deadline
            ) as answer:
                return read(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            with error:
                raise InputError(f"Prometheus refused {what}: {_reason(error)}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"no Prometheus answers at {self._url}: {error}; start it, or give its address"
            ) from None


def _lines(told: Any) -> list[Series]:
    return [_series(each["metric"], each["values"]) for each in told["result"]]


def _last_values(told: Any) -> list[Series]:
    if told["resultType"] == "scalar":
        return [_series({}, [told["result"]])]
    return [_series(each["metric"], [each["value"]]) for each in told["result"]]


def _alerts(told: Any) -> list[Alert]:
    return [
        Alert(
            labels=each["labels"],
            annotations=each["annotations"],
            state=each["state"],
            since=each["activeAt"],
        )
        for each in told["alerts"]
    ]


def _series(labels: Mapping[str, str], values: Iterable[tuple[float, str]]) -> Series:
    points = ((float(at), float(value)) for at, value in values)
    return Series(
        labels=labels,
        points=tuple((at, value) for at, value in points if math.isfinite(value)),
    )


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
