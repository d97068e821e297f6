"""Calls a store that runs in another process."""

import threading
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RaySystemError

from m3pc.types import Ack, AckStatus, AppendKey, StoreUnavailableError

UNREACHABLE = (GetTimeoutError, RayActorError, RaySystemError, StoreUnavailableError)


class StoreClient:
    """An EpisodeSink that sends each call to the actor registered under `name`.

    A call ends within `deadline` seconds (twice that if the actor must be looked up) and may be
    repeated.
    """

    def __init__(self, name: str, namespace: str, deadline: float = 10.0) -> None:
        self._name, self._namespace, self._deadline = name, namespace, deadline
        self._actor: Any = None
        self._search: Future[Any] | None = None

    def __reduce__(self) -> tuple[type["StoreClient"], tuple[str, str, float]]:
        return StoreClient, (self._name, self._namespace, self._deadline)

    def append(self, key: AppendKey, payload: bytes) -> Ack:
        """Append an episode. RETRY_LATER if the store cannot be reached: the episode may be stored
        or not, and can safely be sent again under the same key."""
        try:
            ack: Ack = self._call("append", key, payload)
        except StoreUnavailableError as error:
            return Ack(status=AckStatus.RETRY_LATER, expected=0, durability="os", reason=str(error))
        return ack

    def may_update(self, epoch: int, done: int, total: int, timeout: float = 1.0) -> int:
        """See `StoreService.may_update`. StoreUnavailableError: ask again."""
        allowed: int = self._call("may_update", epoch, done, total, timeout)
        return allowed

    def _call(self, method: str, *arguments: object) -> Any:
        actor = self._actor or self._find()
        try:
            answer = ray.get(getattr(actor, method).remote(*arguments), timeout=self._deadline)
        except UNREACHABLE as error:
            self._actor = None
            raise self._unavailable(f"{type(error).__name__}: {error}") from None
        self._actor = actor
        return answer

    def _find(self) -> Any:
        """Look up the actor, in a thread of its own because Ray may search for a minute."""
        if self._search is None:
            self._search = Future()
            threading.Thread(target=self._get_actor, args=[self._search], daemon=True).start()
        search = self._search
        try:
            return search.result(self._deadline)
        except TimeoutError:
            raise self._unavailable("the cluster does not answer a lookup of the name") from None
        except ValueError:
            raise self._unavailable("no actor is registered under this name") from None
        finally:
            if search.done():
                self._search = None

    def _get_actor(self, search: "Future[Any]") -> None:
        try:
            search.set_result(ray.get_actor(self._name, self._namespace))
        except Exception as error:
            search.set_exception(error)

    def _unavailable(self, reason: str) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the store {self._name!r} gave no answer within {self._deadline:g} seconds "
            f"({reason}); ask again"
        )
