"""A store that lives in another process."""

import logging
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError

from m3pc.telemetry.recorder import Snapshot
from m3pc.types import Ack, AckStatus, AppendKey, StoreUnavailableError

if TYPE_CHECKING:
    from replay.server.service import StoreTotals

UNREACHABLE = (GetTimeoutError, RayActorError, RaySystemError, StoreUnavailableError)

X = TypeVar("X")

log = logging.getLogger(__name__)


class StoreClient:
    """An EpisodeSink that carries a name only: whoever bears it in the cluster is asked.

    Every call ends within `deadline` seconds, and every call may be repeated.
    """

    def __init__(self, name: str, namespace: str, deadline: float = 10.0) -> None:
        self._name, self._namespace, self._deadline = name, namespace, deadline
        self._actor: Any = None
        self._search: Future[Any] | None = None

    def __reduce__(self) -> tuple[type["StoreClient"], tuple[str, str, float]]:
        return StoreClient, (self._name, self._namespace, self._deadline)

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        """RETRY_LATER where the store cannot be reached: it may hold the episode or not. The key
        makes it safe to send it again."""
        try:
            ack: Ack = self._ask("append", key, payload)
        except StoreUnavailableError as error:
            return Ack(status=AckStatus.RETRY_LATER, expected=0, durability="os", reason=str(error))
        return ack

    def may_update(self, epoch: int, done: int, total: int, timeout: float = 1.0) -> int:
        """See `StoreService.may_update`. StoreUnavailableError: ask again."""
        allowed: int = self._ask("may_update", epoch, done, total, timeout)
        return allowed

    def totals(self) -> "StoreTotals":
        found: StoreTotals = self._ask("totals")
        return found

    def report(self) -> Snapshot:
        found: Snapshot = self._ask("report")
        return found

    def set_slack(self, steps: int) -> None:
        self._ask("set_slack", steps)

    def close(self) -> None:
        """The store ends in order; its process stays until it is killed."""
        self._ask("close")

    def _ask(self, method: str, *arguments: object) -> Any:
        actor = self._actor or self._find()
        try:
            call = getattr(actor, method).remote(*arguments)
            answer = ray.get(call, timeout=self._deadline)
        except UNREACHABLE as error:
            self._actor = None
            raise self._unavailable(f"{type(error).__name__}: {error}") from None
        self._actor = actor
        return answer

    def _find(self) -> Any:
        """The actor by its name. Ray itself may look for it for a minute, so that is done aside."""
        if self._search is None:
            self._search = Future()
            threading.Thread(target=self._look, args=[self._search], daemon=True).start()
        search = self._search
        try:
            return search.result(self._deadline)
        except TimeoutError:
            raise self._unavailable("the cluster does not tell who bears the name") from None
        except ValueError:
            raise self._unavailable("nobody bears the name now") from None
        finally:
            if search.done():
                self._search = None

    def _look(self, search: "Future[Any]") -> None:
        try:
            search.set_result(ray.get_actor(self._name, self._namespace))
        except Exception as error:
            search.set_exception(error)

    def _unavailable(self, why: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the store {self._name!r} gave no answer within {self._deadline:g} seconds ({why}); "
            "ask again"
        )
