"""Robots at 20 Hz that ask one `m3pc serve` over HTTP, from their own process.

python -m benchmarks.serve CKPT [--planner m] [--clients 1,4,16] [--seconds 30] [--deadline-ms 50]

Milliseconds are round trips, as a robot measures them; answers after the deadline, by the robot's
clock, count as missed. Robots start at random moments and keep their pace: each asks at its next
tick, or at once if the last answer came after that. The exit code is 1 if answers were missed at 4
clients; other numbers of clients are reported only.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import table
from m3pc.core.subprocesses import python_path
from m3pc.robot_client import Planner, Session

HZ = 20.0
TARGET_CLIENTS = 4  # robots that must get every answer in time
START_SECONDS, STOP_SECONDS = 120.0, 30.0
WARM_UP = 2.0  # seconds that are not counted
HEAD = ("clients", "answers", "p50 ms", "p99 ms", "worst ms", "in the server p50, p99 ms",
        "missed", "candidates", "unplanned", "answers/s")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    address: str
    token: str
    clients: int
    seconds: float
    deadline_ms: float
    binary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    clients: int
    answers: int
    p50: float
    p99: float
    worst: float
    server_p50: float
    server_p99: float
    missed: int
    candidates: float
    unplanned: float  # share
    rate: float

    def cells(self) -> list[str]:
        return [
            *(str(self.clients), str(self.answers)),
            *(f"{number:.1f}" for number in (self.p50, self.p99, self.worst)),
            f"{self.server_p50:.1f}, {self.server_p99:.1f}",
            *(str(self.missed), f"{self.candidates:.1f}", f"{self.unplanned:.1%}"),
            f"{self.rate:.1f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--planner", default="m")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--deadline-ms", type=float, default=1000 / HZ)
    parser.add_argument("--json-messages", action="store_true", help="JSON instead of msgpack")
    parser.add_argument("--out", type=Path, help="a line of JSON for each row")
    options = parser.parse_args()
    counts = [int(count) for count in options.clients.split(",")]
    with served(options.checkpoint, options.planner) as (address, token):
        print(f"planner {options.planner}, {HZ:g} Hz, deadline {options.deadline_ms:g} ms\n")
        rows = [
            measure(
                Load(
                    address=address,
                    token=token,
                    clients=count,
                    seconds=options.seconds,
                    deadline_ms=options.deadline_ms,
                    binary=not options.json_messages,
                )
            )
            for count in counts
        ]
    table(HEAD, [row.cells() for row in rows])
    for row in rows:
        aim = " (aim 0)" if row.clients == TARGET_CLIENTS else ""
        print(f"- missed at {row.clients}: {row.missed} of {row.answers}{aim}")
    if options.out:
        options.out.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    raise SystemExit(exit_code(rows))


def exit_code(rows: Sequence[Row]) -> int:
    """1 if four robots did not get all of their answers in time."""
    return int(any(row.missed for row in rows if row.clients == TARGET_CLIENTS))


@contextmanager
def served(checkpoint: Path, planner: str) -> Iterator[tuple[str, str]]:
    """The command as users start it; yields its address and token."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        command = [sys.executable, "-P", "-m", "m3pc", "serve", str(checkpoint.absolute())]
        command += ["--port", str(port), "--token-file", str(token), "--planner", planner]
        environment = os.environ | {"PYTHONPATH": python_path()}
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for(port, process)
                yield f"http://127.0.0.1:{port}", token.read_text()
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(STOP_SECONDS) == 0


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            time.sleep(0.5)
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start; run `m3pc serve` to see why")


def measure(load: Load) -> Row:
    context = get_context("spawn")
    results: Any = context.Queue()
    process = context.Process(target=robots, args=(load, results))
    process.start()
    answers = results.get(timeout=load.seconds + WARM_UP + START_SECONDS)
    process.join(STOP_SECONDS)
    return row(load, answers)


def row(load: Load, answers: Sequence[tuple[float, float, int]]) -> Row:
    """`answers`: milliseconds of the round trip, milliseconds in the server, candidates."""
    round_trip, in_server, candidates = (np.asarray(x) for x in zip(*answers, strict=True))
    return Row(
        clients=load.clients,
        answers=len(answers),
        p50=float(np.quantile(round_trip, 0.5)),
        p99=float(np.quantile(round_trip, 0.99)),
        worst=float(round_trip.max()),
        server_p50=float(np.quantile(in_server, 0.5)),
        server_p99=float(np.quantile(in_server, 0.99)),
        missed=int((round_trip > load.deadline_ms).sum()),
        candidates=float(candidates.mean()),
        unplanned=float((candidates == 0).mean()),
        rate=len(answers) / load.seconds,
    )


def robots(load: Load, results: Any) -> None:
    """Each robot in a thread: they mostly wait."""
    answers: list[tuple[float, float, int]] = []
    begin = time.perf_counter() + WARM_UP
    threads = [
        threading.Thread(target=_robot, args=(load, number, begin, answers))
        for number in range(load.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(answers)


def _robot(load: Load, number: int, begin: float, answers: list[tuple[float, float, int]]) -> None:
    rng = random.Random(number)
    planner = Planner(load.address, load.token, binary=load.binary)
    terms = {"name": f"robot-{number}", "seed": number, "deadline_ms": load.deadline_ms}
    session = planner.session(**terms)
    state = [0.0] * session.opened["state_size"]
    at = time.perf_counter() + rng.random() / HZ
    while at < begin + load.seconds:
        time.sleep(max(at - time.perf_counter(), 0.0))
        state = [0.9 * value + rng.gauss(0, 0.1) for value in state]
        session = _with_steps_left(planner, session, terms)
        sent = time.perf_counter()
        answer = session.act(state)
        took = 1000 * (time.perf_counter() - sent)
        if sent >= begin:
            answers.append((took, answer.milliseconds, answer.candidates))
        at = max(at + 1 / HZ, time.perf_counter())
    session.leave()
    planner.close()


def _with_steps_left(planner: Planner, session: Session, terms: dict[str, Any]) -> Session:
    """The same session, or a new one if it has used all of its steps."""
    if session.steps < session.opened["step_limit"]:
        return session
    session.leave()
    return planner.session(**terms)


if __name__ == "__main__":
    main()
