"""Requests of robots, one step at a time: sessions, the planner and the store meet here.

For one event loop, in which a session changes only where nothing is waited for. S state, A action.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from m3pc.model import checkpoint
from m3pc.serving.lru import LRU, ClosedSession, IdempotencyRecord
from m3pc.serving.messages import (
    ActionResponse,
    End,
    EndResponse,
    ModelInfo,
    SessionCreated,
    SessionStatus,
    Step,
)
from m3pc.serving.problems import ProblemError
from m3pc.serving.recording import PUT_SECONDS, EpisodeRecording, StoreBusyError
from m3pc.serving.responses import acted, refused
from m3pc.serving.service_spec import CRITICAL, AnyOpening, ServiceSpec
from m3pc.serving.sessions import Ending, Session, Sessions, StepAnswer
from m3pc.telemetry.catalogue import (
    SERVED,
    SERVED_CANDIDATES,
    SERVED_EPISODES,
    SERVED_SECONDS,
    SESSIONS,
)
from m3pc.telemetry.recorder import Recorder, Snapshot, merged
from m3pc.types import Episode, InputError, PlanRequest, Rejection, Version
from planner.latency_model import UNPLANNED
from planner.server.service import PlannerService

HARDEST: Final = 10.0  # seconds after which nobody waits for a plan any more, nor beyond a deadline
CLOSE_SECONDS: Final = 10.0  # for all episodes that are open at the end

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PendingEnd:
    """An end that is being stored."""

    asked: End
    task: asyncio.Task[EndResponse]


class SessionService:
    def __init__(
        self,
        service: PlannerService,
        house: ServiceSpec,
        *,
        recording: EpisodeRecording | None = None,
        source: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source`: a run or checkpoint from which weights may be read anew."""
        self._service, self.house, self._recording = service, house, recording
        self._source = source
        self._recorder, self.clock = Recorder(), clock
        self.sessions = Sessions(
            house.sizes, most=house.most, idle=house.idle, keep=recording is not None, clock=clock
        )
        self._planning: dict[str, asyncio.Task[StepAnswer]] = {}
        self._ending: dict[str, _PendingEnd] = {}
        self._storing: set[asyncio.Future[None]] = set()
        # A thread for whoever may wait for the disk: nobody waits behind another robot's episode.
        self._disk = ThreadPoolExecutor(house.most, thread_name_prefix="disk")
        self._until: float | None = None  # time.monotonic() by which all has to be stored
        self._past: LRU[ClosedSession] = LRU()
        self._came: LRU[IdempotencyRecord] = LRU()
        self._reloading = asyncio.Lock()
        self._count()

    # What a robot may ask

    def open(self, asked: AnyOpening) -> SessionCreated:
        """In one step: whoever asks again meets all of it, or nothing."""
        digest = hashlib.sha256(asked.model_dump_json().encode()).digest()
        if asked.key is not None and (came := self._came.get(asked.key)):
            if came.digest != digest:
                raise ProblemError(
                    409, "key was sent before with another message; give a new one", where="key"
                )
            return came.opened
        terms = self.house.terms(asked)
        if terms.name and (before := self.sessions.named(terms.name)):
            self._abandon(before, "was replaced by another one under its name")
        session = self.sessions.open(terms)
        self._count()
        opened = SessionCreated(
            session=session.id,
            name=terms.name,
            mode=terms.mode or self.house.mode,
            step_limit=terms.step_limit,
            deadline_ms=1000 * terms.deadline,
            idle_seconds=self.house.idle,
            recorded=self._recording is not None,
            version=str(Version.unpacked(self._service.version)),
            best_return=self._service.policy.weights.best_return,
            **self.house.about,
        )
        if asked.key is not None:
            self._came.put(asked.key, IdempotencyRecord(digest=digest, opened=opened))
        return opened

    async def act(self, id: str, asked: Step, arrived: float) -> ActionResponse:
        session = self._open(id)
        if id in self._ending:
            raise _is_ending()
        session.observe(
            asked.step,
            self.house.state(asked.observation, "observation"),
            asked.reward,
            self.house.action(asked.action),
        )
        answer = session.answer
        if answer is None:
            if id not in self._planning:
                seconds = session.terms.deadline
                if asked.deadline_ms is not None:
                    seconds = asked.deadline_ms / 1000
                task = asyncio.create_task(self._plan(session, seconds, arrived))
                self._planning[id] = task
                task.add_done_callback(_heard)
            # Whoever asks again waits for the same plan; the next step may come before he wakes.
            answer = await asyncio.shield(self._planning[id])
        return acted(asked.step, answer)

    async def end(self, id: str, asked: End) -> EndResponse:
        if (past := self._past.get(id)) is not None and past.said == asked and past.answer:
            return past.answer
        session = self._open(id)
        if id not in self._ending:
            ending = session.end(
                asked.step,
                self.house.state(asked.observation, "observation"),
                asked.reward,
                self.house.action(asked.action),
                terminated=asked.terminated,
                truncated=asked.truncated,
            )
            task = asyncio.create_task(self._end(session, asked, ending))
            self._ending[id] = _PendingEnd(asked=asked, task=task)
            task.add_done_callback(_heard)
        if self._ending[id].asked != asked:
            raise _is_ending()
        return await asyncio.shield(self._ending[id].task)

    def leave(self, id: str) -> None:
        """Nothing of the episode is kept; of one that is over, nothing but what is stored."""
        if self._past.forget(id):
            return
        session = self.sessions.find(id)
        if id in self._ending:
            raise _is_ending()
        self.sessions.remove(session)
        self._recorder.add(SERVED_EPISODES, label="dropped")
        self._count()

    def standing(self, id: str) -> SessionStatus:
        past = self._past.get(id)
        return self._standing(self.sessions.find(id)) if past is None else past.standing

    def _open(self, id: str) -> Session:
        if (past := self._past.get(id)) is not None:
            raise ProblemError(409, f"this session {past.why}; open one for the next episode")
        return self.sessions.find(id)

    def _standing(self, session: Session, *, ended: bool = False) -> SessionStatus:
        return SessionStatus(
            session=session.id,
            name=session.terms.name,
            mode=session.terms.mode or self.house.mode,
            steps=session.steps,
            step_limit=session.terms.step_limit,
            total=session.total,
            recorded=self._recording is not None,
            ended=ended,
        )

    # Weights

    def serving(self) -> ModelInfo:
        house, weights = self.house, self._service.policy.weights
        return ModelInfo(
            version=str(Version.unpacked(weights.version)),
            sha256=weights.digest,
            best_return=weights.best_return,
            step_limit=house.step_limit,
            mode=house.mode,
            modes=house.modes,
            deadline_ms=1000 * house.deadline,
            sessions=len(self.sessions),
            **house.about,
        )

    async def reload(self) -> ModelInfo:
        """The newest weights of the source, if they are sound; else those that are there go on."""
        if self._source is None:
            raise ProblemError(409, "the weights follow a run by themselves; nothing is to be done")
        async with self._reloading:
            found = await asyncio.to_thread(checkpoint.read, self._source)
            before, learned = self.house, found.progress.get("critic_updates") != 0
            if not learned:
                self._require_no_critic()
                self.house = replace(before, critic=False)  # for whoever comes meanwhile
            try:
                await asyncio.to_thread(self._service.take, found.weights)
            except BaseException:
                self.house = before
                raise
            self.house = replace(before, critic=learned)
        log.info("event=weights-taken version=%s", Version.unpacked(self._service.version))
        return self.serving()

    def _require_no_critic(self) -> None:
        guided = [each for each in self.sessions if each.terms.mode in CRITICAL]
        if self.house.mode in CRITICAL or guided:
            who = f"{len(guided)} open sessions plan" if guided else "the server plans"
            raise InputError(
                f"the critic of {self._source} has not learned yet, and {who} by it; finish the "
                "run, or serve by m or rcbc: version "
                f"{Version.unpacked(self._service.version)} goes on"
            )

    # Looking after them

    def sweep(self) -> None:
        """End what was idle for too long and is not being answered."""
        for session in self.sessions.expired():
            if session.id not in self._planning and session.id not in self._ending:
                self._abandon(session, f"was idle for {self.house.idle:g} seconds")

    async def close(self) -> None:
        """Store what is known of every open episode, all together in bounded time."""
        self._until = time.monotonic() + CLOSE_SECONDS
        if self._ending:
            await asyncio.wait([each.task for each in self._ending.values()], timeout=CLOSE_SECONDS)
        for session in self.sessions:
            self._abandon(session, "ended with the server")
        if self._storing:
            await asyncio.wait(self._storing)
        self._disk.shutdown(wait=False)

    def snapshot(self) -> Snapshot:
        parts = [self._recorder.snapshot(), self._service.report()[0]]
        if self._recording is not None:
            parts.append(self._recording.snapshot())
        return merged(parts)

    @property
    def lacks(self) -> str:
        """What there is not, to be ready; empty if nothing."""
        if not self._service.ready:
            return "the planner does not answer"
        if self._recording is not None and self._recording.broken:
            return "the store cannot be written any more; the log says why"
        return ""

    # Inside

    async def _plan(self, session: Session, deadline: float, arrived: float) -> StepAnswer:
        try:
            answer = await self._answer(session, deadline, arrived)
        except BaseException:
            session.failed()
            raise
        finally:
            self._planning.pop(session.id, None)
        session.answered(answer)
        return answer

    async def _answer(self, session: Session, deadline: float, arrived: float) -> StepAnswer:
        computed: list[PlanRequest] = []
        ask, hardest = session.ask(), max(HARDEST, deadline)
        soon = deadline - (self.clock() - arrived)
        future = self._service.submit(ask, hardest, soon=soon, told=computed.append)
        ready: list[float] = []
        future.add_done_callback(lambda _: ready.append(self.clock()))
        try:
            reply = await asyncio.wait_for(asyncio.wrap_future(future), 2 * hardest)
        except TimeoutError:
            raise ProblemError(503, "the planner did not answer; ask again") from None
        if isinstance(reply, Rejection):
            self._recorder.add(SERVED, label="refused")
            raise refused(reply)
        now = self.clock()
        seconds = now - arrived
        if self._service.pace is not None:
            self._service.pace.replied(now - ready[0])
        wanted, used = self._candidates(ask), self._candidates(computed[-1])
        late = seconds > deadline
        self._recorder.add(SERVED, label="late" if late else "ok")
        self._recorder.observe(SERVED_SECONDS, seconds)
        if wanted:
            self._recorder.observe(SERVED_CANDIDATES, used)
        return StepAnswer(
            decision=reply,
            candidates=used,
            hurried=used < wanted,
            seconds=seconds,
            deadline=deadline,
            late=late,
        )

    def _candidates(self, ask: PlanRequest) -> int:
        if (ask.mode or self.house.mode) in UNPLANNED:
            return 0
        return ask.candidates or self.house.candidates

    async def _end(self, session: Session, asked: End, ending: Ending) -> EndResponse:
        try:
            answer = await self._kept(session, ending)
        except ProblemError:
            if session not in self.sessions and ending.episode is not None:
                self._keep(session, ending.episode)  # replaced meanwhile: nobody can ask again
            raise
        finally:
            del self._ending[session.id]
        standing = self._standing(session, ended=True).model_copy(update={"total": ending.total})
        self._remove(
            session,
            ClosedSession(
                standing=standing, why="was ended by its robot", said=asked, answer=answer
            ),
        )
        self._recorder.add(SERVED_EPISODES, label="ended" if ending.steps else "dropped")
        self._count()
        return answer

    async def _kept(self, session: Session, ending: Ending) -> EndResponse:
        steps, total = ending.steps, ending.total
        if self._recording is None or ending.episode is None:
            stored: Literal["no step", "no store"] = "no store" if steps else "no step"
            return EndResponse(steps=steps, total=total, stored=stored, slot=None)
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._disk, self._recording.store, session.terms.name, ending.episode
            )
        except (StoreBusyError, OSError) as error:
            raise ProblemError(503, f"the episode is not stored: {error}") from None
        return EndResponse(
            steps=steps, total=total, stored=found.outcome, slot=found.slot, reason=found.reason
        )

    def _remove(self, session: Session, past: ClosedSession) -> None:
        self.sessions.remove(session)
        self._past.put(session.id, past)

    def _abandon(self, session: Session, why: str) -> None:
        """Its robot left, or came back anew: what is known of its episode was cut short."""
        self._remove(session, ClosedSession(standing=self._standing(session, ended=True), why=why))
        self._count()
        if session.id in self._ending:  # which its robot asked for in the last moment: that counts
            return
        episode = session.abandoned()
        kept = episode is not None and len(episode) >= self.house.least_steps
        self._recorder.add(SERVED_EPISODES, label="abandoned" if kept else "dropped")
        log.info("event=session-abandoned name=%s steps=%d", session.terms.name, session.steps)
        if episode is not None and kept:
            self._keep(session, episode)

    def _keep(self, session: Session, episode: Episode) -> None:
        """Store it while everything else goes on."""
        if self._recording is None:
            return
        recording, name = self._recording, session.terms.name

        def keep() -> None:
            left = PUT_SECONDS if self._until is None else self._until - time.monotonic()
            recording.keep(name, episode, max(left, 0.0))

        task = asyncio.get_running_loop().run_in_executor(self._disk, keep)
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    def _count(self) -> None:
        self._recorder.set(SESSIONS, len(self.sessions))
        if self._service.pace is not None:
            self._service.pace.company = len(self.sessions)


def _is_ending() -> ProblemError:
    return ProblemError(409, "this session is being ended; wait for that, or send the same end")


def _heard(done: "asyncio.Task[StepAnswer] | asyncio.Task[EndResponse]") -> None:
    """Whoever waited was told of a failure; if nobody did, nobody has to be."""
    if not done.cancelled():
        done.exception()
