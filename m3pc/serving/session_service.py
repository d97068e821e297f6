"""Implements the HTTP operations with the sessions, the planner and the store.

Sessions are used in one event loop only, so code between two awaits is atomic.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

from m3pc.model import checkpoint
from m3pc.serving.messages import (
    ActionResponse,
    End,
    EndResponse,
    ModelInfo,
    Opening,
    SessionCreated,
    SessionStatus,
    Step,
)
from m3pc.serving.problems import ProblemError
from m3pc.serving.recording import EpisodeRecording, StoreBusyError
from m3pc.serving.service_spec import CRITIC_MODES, ServiceSpec
from m3pc.serving.sessions import EpisodeEnd, Session, Sessions, StepAnswer
from m3pc.serving.step_planner import StepPlanner
from m3pc.telemetry.catalogue import SERVED_EPISODES, SESSIONS
from m3pc.telemetry.recorder import Recorder, Snapshot, merge
from m3pc.types import Episode, Floats, InputError, Version
from planner.server.service import PlannerService

CLOSE_SECONDS: Final = 10.0  # time to store all open episodes when the server stops
MAX_REMEMBERED: Final = 1024  # closed sessions, and idempotency keys

V = TypeVar("V")

log = logging.getLogger(__name__)


class BoundedDict(OrderedDict[str, V]):
    """Drops the oldest entry beyond `max_entries`."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._max_entries:
            self.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSession:
    status: SessionStatus
    reason: str  # completes "this session ..."
    request: End | None = None  # ended the session; a repetition gets `response` again
    response: EndResponse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """The response to an opening that was sent with a key."""

    digest: bytes  # SHA-256 of the opening
    response: SessionCreated


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingEnd:
    """An end whose episode is being stored."""

    request: End
    task: asyncio.Task[EndResponse]


class SessionService:
    """Opens, advances and ends sessions. One instance per server."""

    def __init__(
        self,
        planner: PlannerService,
        spec: ServiceSpec,
        *,
        recording: EpisodeRecording | None = None,
        source: Path | None = None,
        max_remembered: int = MAX_REMEMBERED,
        close_seconds: float = CLOSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source`: the run or checkpoint that `reload` reads."""
        self._planner, self.spec, self._recording = planner, spec, recording
        self._source, self._close_seconds = source, close_seconds
        self._recorder, self.clock = Recorder(), clock
        self.sessions = Sessions(
            spec.sizes,
            max_sessions=spec.max_sessions,
            idle_seconds=spec.idle_seconds,
            record=recording is not None,
            clock=clock,
        )
        self._step_planner = StepPlanner(planner, spec, self._recorder, clock)
        self._planning: dict[str, asyncio.Task[StepAnswer]] = {}
        self._ending: dict[str, _PendingEnd] = {}
        self._storing: set[asyncio.Future[None]] = set()
        # A thread per session, so that no robot waits behind another robot's episode.
        self._disk = ThreadPoolExecutor(spec.max_sessions, thread_name_prefix="disk")
        self._store_until: float | None = None  # time.monotonic() at which storing gives up
        self._closed = BoundedDict[ClosedSession](max_remembered)
        self._keys = BoundedDict[IdempotencyRecord](max_remembered)
        self._reloading = asyncio.Lock()
        self._count_sessions()

    # Requests of robots

    def open(self, opening: Opening) -> SessionCreated:
        """A repeated request finds the session open, or nothing done, as there is no await."""
        digest = hashlib.sha256(opening.model_dump_json().encode()).digest()
        if opening.key is not None and (known := self._keys.get(opening.key)):
            if known.digest != digest:
                raise ProblemError(
                    409, "key was sent before with another message; give a new one", where="key"
                )
            return known.response
        config = self.spec.session_config(opening)
        if config.name and (previous := self.sessions.find_by_name(config.name)):
            self._abandon(previous, "was replaced by another one under its name")
        session = self.sessions.open(config)
        self._count_sessions()
        response = SessionCreated(
            session=session.id,
            name=config.name,
            mode=config.mode or self.spec.mode,
            step_limit=config.step_limit,
            deadline_ms=1000 * config.deadline,
            idle_seconds=self.spec.idle_seconds,
            recorded=self._recording is not None,
            version=str(Version.unpacked(self._planner.version)),
            best_return=self._planner.policy.weights.best_return,
            **self.spec.model_fields,
        )
        if opening.key is not None:
            self._keys[opening.key] = IdempotencyRecord(digest=digest, response=response)
        return response

    async def act(self, id: str, step: Step, arrived: float) -> ActionResponse:
        """`arrived` is the time at which the request began, by `clock`."""
        session = self._open_session(id)
        if id in self._ending:
            raise _is_ending()
        session.observe(
            step.step,
            self.spec.parse_state(step.observation, "observation"),
            step.reward,
            self.spec.parse_action(step.action),
        )
        answer = session.answer
        if answer is None:
            if id not in self._planning:
                deadline = session.config.deadline
                if step.deadline_ms is not None:
                    deadline = step.deadline_ms / 1000
                task = asyncio.create_task(self._plan(session, deadline, arrived))
                self._planning[id] = task
                task.add_done_callback(_retrieve_exception)
            # A repeated request waits for the same plan. Before it wakes, the session may already
            # be at its next step, so the answer is taken from the task.
            answer = await asyncio.shield(self._planning[id])
        return _action_response(step.step, answer)

    async def end(self, id: str, end: End) -> EndResponse:
        closed = self._closed.get(id)
        if closed is not None and closed.request == end and closed.response:
            return closed.response
        session = self._open_session(id)
        if id not in self._ending:
            ending = session.episode_end(
                end.step,
                self.spec.parse_state(end.observation, "observation"),
                end.reward,
                self.spec.parse_action(end.action),
                terminated=end.terminated,
                truncated=end.truncated,
            )
            task = asyncio.create_task(self._end(session, end, ending))
            self._ending[id] = _PendingEnd(request=end, task=task)
            task.add_done_callback(_retrieve_exception)
        if self._ending[id].request != end:
            raise _is_ending()
        return await asyncio.shield(self._ending[id].task)

    def drop(self, id: str) -> None:
        """Forget an open session and its episode, or the record of a closed one."""
        if self._closed.pop(id, None) is not None:
            return
        session = self.sessions.find(id)
        if id in self._ending:
            raise _is_ending()
        self.sessions.remove(session)
        self._recorder.add(SERVED_EPISODES, label="dropped")
        self._count_sessions()

    def status(self, id: str) -> SessionStatus:
        closed = self._closed.get(id)
        return self._status(self.sessions.find(id)) if closed is None else closed.status

    # Weights

    def model_info(self) -> ModelInfo:
        spec, weights = self.spec, self._planner.policy.weights
        return ModelInfo(
            version=str(Version.unpacked(weights.version)),
            sha256=weights.digest,
            best_return=weights.best_return,
            step_limit=spec.max_episode_steps,
            mode=spec.mode,
            modes=spec.modes,
            deadline_ms=1000 * spec.deadline,
            sessions=len(self.sessions),
            **spec.model_fields,
        )

    async def reload(self) -> ModelInfo:
        """Swap in the newest weights of the source; if they are refused, the current ones stay."""
        if self._source is None:
            raise ProblemError(409, "this server follows a run; reloading by hand is disabled")
        async with self._reloading:
            source = await asyncio.to_thread(checkpoint.read, self._source)
            previous, trained = self.spec, source.progress.get("critic_updates") != 0
            if not trained:
                self._require_no_critic()
                self.spec = replace(previous, critic_trained=False)  # openings get no critic mode
            try:
                await asyncio.to_thread(self._planner.swap_weights, source.weights)
            except BaseException:
                self.spec = previous
                raise
            self.spec = replace(previous, critic_trained=trained)
        log.info("event=weights-taken version=%s", Version.unpacked(self._planner.version))
        return self.model_info()

    def _require_no_critic(self) -> None:
        guided = [session for session in self.sessions if session.config.mode in CRITIC_MODES]
        if self.spec.mode in CRITIC_MODES or guided:
            users = f"{len(guided)} open sessions plan" if guided else "the server plans"
            raise InputError(
                f"the critic of {self._source} has not learned yet, and {users} by it; finish the "
                "run, or serve by m or rcbc: version "
                f"{Version.unpacked(self._planner.version)} goes on"
            )

    # Supervision

    def abandon_idle(self) -> None:
        """End sessions that were idle for too long and are not being answered."""
        for session in self.sessions.expired():
            if session.id not in self._planning and session.id not in self._ending:
                self._abandon(session, f"was idle for {self.spec.idle_seconds:g} seconds")

    async def close(self) -> None:
        """End all sessions and store their episodes, in parallel and in bounded time."""
        self._store_until = time.monotonic() + self._close_seconds
        if self._ending:
            tasks = [pending.task for pending in self._ending.values()]
            await asyncio.wait(tasks, timeout=self._close_seconds)
        for session in self.sessions:
            self._abandon(session, "ended with the server")
        if self._storing:
            await asyncio.wait(self._storing)
        self._disk.shutdown(wait=False)

    def snapshot(self) -> Snapshot:
        parts = [self._recorder.snapshot(), self._planner.report().snapshot]
        if self._recording is not None:
            parts.append(self._recording.snapshot())
        return merge(parts)

    @property
    def not_ready_reason(self) -> str:
        """Empty if the server is ready."""
        if not self._planner.ready:
            return "the planner does not answer"
        if self._recording is not None and self._recording.broken:
            return "the store cannot be written any more; the log says why"
        return ""

    # Inside

    def _open_session(self, id: str) -> Session:
        if (closed := self._closed.get(id)) is not None:
            raise ProblemError(409, f"this session {closed.reason}; open one for the next episode")
        return self.sessions.find(id)

    def _status(self, session: Session, *, ended: bool = False) -> SessionStatus:
        return SessionStatus(
            session=session.id,
            name=session.config.name,
            mode=session.config.mode or self.spec.mode,
            steps=session.steps,
            step_limit=session.config.step_limit,
            total=session.total_reward,
            recorded=self._recording is not None,
            ended=ended,
        )

    async def _plan(self, session: Session, deadline: float, arrived: float) -> StepAnswer:
        try:
            answer = await self._step_planner.plan(session.plan_request(), deadline, arrived)
        except BaseException:
            session.record_failure()
            raise
        finally:
            self._planning.pop(session.id, None)
        session.record_answer(answer)
        return answer

    async def _end(self, session: Session, request: End, ending: EpisodeEnd) -> EndResponse:
        try:
            response = await self._stored(session, ending)
        except ProblemError:
            if session not in self.sessions and ending.episode is not None:
                # The session was replaced meanwhile, so its robot cannot send the end again.
                self._store_later(session, ending.episode)
            raise
        finally:
            del self._ending[session.id]
        status = self._status(session, ended=True)
        self._close_session(
            session,
            ClosedSession(
                status=status.model_copy(update={"total": ending.total_reward}),
                reason="was ended by its robot",
                request=request,
                response=response,
            ),
        )
        self._recorder.add(SERVED_EPISODES, label="ended" if ending.steps else "dropped")
        return response

    async def _stored(self, session: Session, ending: EpisodeEnd) -> EndResponse:
        steps, total = ending.steps, ending.total_reward
        if self._recording is None or ending.episode is None:
            reason: Literal["no step", "no store"] = "no store" if steps else "no step"
            return EndResponse(steps=steps, total=total, stored=reason, slot=None)
        try:
            result = await asyncio.get_running_loop().run_in_executor(
                self._disk, self._recording.store, session.config.name, ending.episode
            )
        except (StoreBusyError, OSError) as error:
            raise ProblemError(503, f"the episode is not stored: {error}") from None
        return EndResponse(
            steps=steps, total=total, stored=result.outcome, slot=result.slot, reason=result.reason
        )

    def _abandon(self, session: Session, reason: str) -> None:
        """Close a session without an end; its episode is stored as cut short if long enough."""
        status = self._status(session, ended=True)
        self._close_session(session, ClosedSession(status=status, reason=reason))
        if session.id in self._ending:  # the end that its robot sent is being stored
            return
        episode = session.partial_episode()
        stored = episode is not None and len(episode) >= self.spec.min_stored_steps
        self._recorder.add(SERVED_EPISODES, label="abandoned" if stored else "dropped")
        log.info("event=session-abandoned name=%s steps=%d", session.config.name, session.steps)
        if episode is not None and stored:
            self._store_later(session, episode)

    def _close_session(self, session: Session, closed: ClosedSession) -> None:
        self.sessions.remove(session)
        self._closed[session.id] = closed
        self._count_sessions()

    def _store_later(self, session: Session, episode: Episode) -> None:
        """Store an episode in a disk thread; no request waits for it."""
        if self._recording is None:
            return
        recording, name = self._recording, session.config.name

        def store() -> None:
            until = self._store_until
            seconds = None if until is None else max(until - time.monotonic(), 0.0)
            recording.store_later(name, episode, seconds)

        task = asyncio.get_running_loop().run_in_executor(self._disk, store)
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    def _count_sessions(self) -> None:
        self._recorder.set(SESSIONS, len(self.sessions))
        if self._planner.latency_model is not None:
            self._planner.latency_model.active_sessions = len(self.sessions)


def _action_response(step: int, answer: StepAnswer) -> ActionResponse:
    decision = answer.decision

    def finite(row: Floats) -> float | None:
        return float(row[0]) if math.isfinite(row[0]) else None

    return ActionResponse(
        step=step,
        action=decision.actions[0].tolist(),
        version=str(Version.unpacked(decision.version)),
        candidates=answer.candidates,
        hurried=answer.hurried,
        effective=finite(decision.effective_candidates),
        utility=finite(decision.utilities),
        condition=finite(decision.target_returns),
        milliseconds=round(1000 * answer.seconds, 3),
        deadline_ms=1000 * answer.deadline,
        late=answer.late,
    )


def _is_ending() -> ProblemError:
    return ProblemError(409, "this session is being ended; wait for that, or send the same end")


def _retrieve_exception(done: "asyncio.Task[StepAnswer] | asyncio.Task[EndResponse]") -> None:
    """Retrieve the exception, or asyncio warns although awaiting requests got it."""
    if not done.cancelled():
        done.exception()
