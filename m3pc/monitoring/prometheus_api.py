"""A client of Prometheus's HTTP API: series and alerts."""

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

DEADLINE = 20.0  # seconds to wait for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One labelled series of a result."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]  # seconds since 1970, value; no NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    state: str  # pending or firing
    since: str


class MetricsSource(Protocol):
    """A source of series and alerts. A wrong expression raises an InputError."""

    def range(self, expression: str, start: float, end: float, step: float) -> list[Series]: ...
    def instant(self, expression: str, at: float) -> list[Series]: ...
    def alerts(self) -> list[Alert]: ...


class Prometheus:
    """A MetricsSource over HTTP."""

    def __init__(self, url: str, *, deadline: float = DEADLINE) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InputError(f"{url!r} is no address of a Prometheus; give http://HOST:PORT")
        self._url, self._deadline = url.rstrip("/"), deadline

    def range(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        parameters = {"query": expression, "start": start, "end": end, "step": step}
        return self._request("query_range", parameters, _lines)

    def instant(self, expression: str, at: float) -> list[Series]:
        return self._request("query", {"query": expression, "time": at}, _last_values)

    def alerts(self) -> list[Alert]:
        return self._request("alerts", None, _alerts)

    def _request(
        self, endpoint: str, parameters: Mapping[str, object] | None, read: Callable[[Any], X]
    ) -> X:
        form = None if parameters is None else urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(
                f"{self._url}/api/v1/{endpoint}", form, timeout=self._deadline
            ) as answer:
                return read(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            with error:
                raise InputError(f"Prometheus refused {endpoint}: {_reason(error)}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"no Prometheus answers at {self._url}: {error}; start it, or give its address"
            ) from None


def _lines(data: Any) -> list[Series]:
    return [_series(item["metric"], item["values"]) for item in data["result"]]


def _last_values(data: Any) -> list[Series]:
    if data["resultType"] == "scalar":
        return [_series({}, [data["result"]])]
    return [_series(item["metric"], [item["value"]]) for item in data["result"]]


def _alerts(data: Any) -> list[Alert]:
    return [
        Alert(
            labels=item["labels"],
            annotations=item["annotations"],
            state=item["state"],
            since=item["activeAt"],
        )
        for item in data["alerts"]
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
