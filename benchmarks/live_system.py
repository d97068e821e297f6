"""A live store at work, in three processes: producers, the store, a learner that only samples.

As in a run: each producer has its own connection and waits for its acknowledgement, the store has a
thread a connection and one Appender for all of them, the learner maps the store's files.
"""

import json
import math
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.traffic import HEADER, HORIZON, Audit, Parcel, Sent, audit, parcels
from benchmarks.unprotected_store import unprotected
from m3pc.core.returns import ReturnRule
from m3pc.types import AckStatus, AppendKey
from replay.sampling.mixture import Mixture, MixtureSource
from replay.sampling.sampler import WindowBatchBuilder
from replay.sampling.selectors import by_windows
from replay.store.store import Store
from replay.writing.group_commit import GroupCommitter
from replay.writing.writer import Writer, WriterOptions

LENGTH, BATCH, PRODUCERS = 8, 512, 8
KEY = struct.Struct("<QQQ")
PATIENCE = 120.0  # seconds; a child that takes longer hangs
SEGMENT_BYTES = 8 << 20  # of log: small enough that it rolls in every run

CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What happened while the learner drew for some seconds."""

    windows: float  # a second
    windows_by_cpu: float  # a second of the learner's own processor time
    refreshes: int
    refresh_seconds: float  # the mean of them
    offered: float  # transitions a second that were sent and acknowledged
    waits: list[float]  # seconds, one an acknowledgement
    store_cpu: float  # share of one core
    producers_cpu: float


class System:
    """Three processes on the store at `path`, which is made."""

    def __init__(self, path: Path, *, protected: bool = True) -> None:
        self._path, self._protected = path, protected
        ends = [CONTEXT.Pipe() for _ in range(PRODUCERS)]
        self._to_producers, producers = CONTEXT.Pipe()
        self._to_learner, learner = CONTEXT.Pipe()
        self._processes = [
            _start(keep_store, path, protected, [end for _, end in ends]),
            _start(produce, producers, [end for end, _ in ends]),
            _start(learn, learner, path, protected),
        ]
        for connection in (*(end for pair in ends for end in pair), producers, learner):
            connection.close()  # the children have theirs: when one dies, the other learns of it
        self._sent = [Sent(0, 0)] * PRODUCERS

    def fill(self, steps: int) -> None:
        """Store so many steps, as fast as the producers get their acknowledgements."""
        self._offer(rate=math.inf, seconds=math.inf, steps=steps)
        self._hear_producers()

    def turn(self, *, rate: float, seconds: float, refresh: int | None) -> Turn:
        """Draw while producers offer `rate` transitions a second; refresh the view of the store
        after as many updates, or never."""
        before = self._cpu()
        begin = time.perf_counter()
        if rate:
            self._offer(rate=rate, seconds=seconds, steps=math.inf)
        _send_json(self._to_learner, {"seconds": seconds, "refresh": refresh})
        drawn = _receive_json(self._to_learner)
        steps, waits = self._hear_producers() if rate else (0, [])
        took = time.perf_counter() - begin
        store, producers = (now - then for now, then in zip(self._cpu(), before, strict=True))
        return Turn(
            windows=drawn["updates"] * BATCH / drawn["seconds"],
            windows_by_cpu=drawn["updates"] * BATCH / drawn["cpu"],
            refreshes=drawn["refreshes"],
            refresh_seconds=drawn["refresh_seconds"] / max(drawn["refreshes"], 1),
            offered=steps / seconds,
            waits=waits,
            store_cpu=store / took,
            producers_cpu=producers / took,
        )

    def close(self) -> Audit:
        """End all three in order, then look for every episode that was acknowledged."""
        for connection in (self._to_producers, self._to_learner):
            connection.close()
        for process in self._processes:
            process.join(PATIENCE)
            assert process.exitcode == 0, f"{process.name} ended with {process.exitcode}"
        with nullcontext() if self._protected else unprotected():
            return audit(self._path, self._sent)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(PATIENCE)

    def _offer(self, *, rate: float, seconds: float, steps: float) -> None:
        task = {"rate": rate / PRODUCERS, "seconds": seconds, "steps": steps / PRODUCERS}
        _send_json(self._to_producers, task)

    def _hear_producers(self) -> tuple[int, list[float]]:
        reply = _receive_json(self._to_producers)
        sent = [Sent(*one) for one in reply["sent"]]
        news = sum(one.steps for one in sent) - sum(one.steps for one in self._sent)
        self._sent = sent
        return news, reply["waits"]

    def _cpu(self) -> tuple[float, float]:
        """Seconds of processor time that the store and the producers have used."""
        store, producers, _ = self._processes
        return cpu_seconds(store.pid), cpu_seconds(producers.pid)


def cpu_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _start(work: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    process = CONTEXT.Process(target=work, args=arguments, name=work.__name__, daemon=True)
    process.start()
    return process


def _send_json(connection: Connection, content: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(content).encode())


def _receive_json(connection: Connection) -> Any:
    if not connection.poll(PATIENCE):
        raise TimeoutError(f"a process of the benchmark said nothing for {PATIENCE:g} seconds")
    return json.loads(connection.recv_bytes())


# The store


def keep_store(path: Path, protected: bool, connections: list[Connection]) -> None:
    options = WriterOptions(segment_bytes=SEGMENT_BYTES, low_space=0, no_space=0)
    with (
        nullcontext() if protected else unprotected(),
        GroupCommitter(Writer(path, HEADER, options)) as appender,
        ThreadPoolExecutor(len(connections)) as pool,
    ):
        list(pool.map(lambda connection: _serve(appender, connection), connections))


def _serve(appender: GroupCommitter, connection: Connection) -> None:
    """One producer, until it hangs up."""
    while True:
        try:
            content = connection.recv_bytes()
        except EOFError:
            return
        key = AppendKey(*KEY.unpack_from(content))
        ack = appender.append(key, content[KEY.size :])
        connection.send_bytes(ack.status.encode())


# The producers


def produce(control: Connection, connections: list[Connection]) -> None:
    episodes = parcels()
    producers = [Producer(slot, end, episodes) for slot, end in enumerate(connections)]
    with ThreadPoolExecutor(len(producers)) as pool:
        while (task := _next_task(control)) is not None:
            start = threading.Barrier(len(producers))
            futures = [pool.submit(producer.offer, start, **task) for producer in producers]
            durations = [future.result() for future in futures]
            waits = [wait for of_producer in durations for wait in of_producer]
            _send_json(control, {"sent": [producer.sent for producer in producers], "waits": waits})


def _next_task(control: Connection) -> Any:
    """The next task; None when the other end has hung up."""
    try:
        return json.loads(control.recv_bytes())
    except EOFError:
        return None


class Producer:
    """Sends an episode whenever its environment would have ended one."""

    def __init__(self, slot: int, connection: Connection, given: list[Parcel]) -> None:
        self._slot, self._connection, self._parcels = slot, connection, given
        self.sent = Sent(0, 0)

    def offer(
        self, start: threading.Barrier, *, rate: float, seconds: float, steps: float
    ) -> list[float]:
        """Steps at so many a second for so long, or so many; how long each acknowledgement took."""
        start.wait()
        waits, begin, offered = [], time.perf_counter(), 0
        parcel = self._next()
        due = parcel.steps / rate * (self._slot + 1) / PRODUCERS  # they do not begin all at once
        while due < seconds and offered < steps:
            time.sleep(max(0.0, begin + due - time.perf_counter()))
            waits.append(self._send(parcel))
            offered += parcel.steps
            parcel = self._next()
            due += parcel.steps / rate
        return waits

    def _next(self) -> Parcel:
        return self._parcels[(self._slot * 5 + self.sent.episodes) % len(self._parcels)]

    def _send(self, parcel: Parcel) -> float:
        begin, sequence = time.perf_counter(), self.sent.episodes
        self._connection.send_bytes(KEY.pack(self._slot, 0, sequence) + parcel.payload)
        answer = self._connection.recv_bytes().decode()
        assert answer == AckStatus.DURABLE, answer
        self.sent = Sent(sequence + 1, self.sent.steps + parcel.steps)
        return time.perf_counter() - begin


# The learner


def mixture(store: Store) -> Mixture[Any]:
    """What the learner draws from: every window of the store is as likely."""
    source = MixtureSource(name="live", view=store, selector=by_windows(LENGTH), share=1.0)
    columns = WindowBatchBuilder(LENGTH, ReturnRule(max_episode_steps=HORIZON))
    return Mixture([source], columns, batch=BATCH, seed=0)


def learn(control: Connection, path: Path, protected: bool) -> None:
    with nullcontext() if protected else unprotected():
        draws: Mixture[Any] | None = None
        update = 0
        while (task := _next_task(control)) is not None:
            draws = mixture(Store(path)) if draws is None else draws.latest()
            first, refreshes, refreshing, refresh = update, 0, 0.0, task["refresh"]
            begin, cpu = time.perf_counter(), time.process_time()
            while (now := time.perf_counter()) < begin + task["seconds"]:
                if refresh and update > first and (update - first) % refresh == 0:
                    draws = draws.latest()
                    refreshes += 1
                    refreshing += time.perf_counter() - now
                draws.batch(update)
                update += 1
            result = {
                "updates": update - first,
                "seconds": time.perf_counter() - begin,
                "cpu": time.process_time() - cpu,
                "refreshes": refreshes,
                "refresh_seconds": refreshing,
            }
            _send_json(control, result)
