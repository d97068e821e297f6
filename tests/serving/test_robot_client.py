"""The client of robots: one file, standard library only, no step taken twice."""

import ast
import json
import math
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3pc import robot_client
from m3pc.evaluation.agent import Agent
from m3pc.robot_client import Planner, RefusedError, encoded, packed, pause_seconds, unpacked
from planner.policy import Policy
from replay.store.store import Store
from tests.support.episodes.shared_data import ROOT
from tests.support.models.small_weights import tiny_weights
from tests.support.servers.served import (
    PATIENCE,
    ServerProcess,
    as_process,
    config,
    weights,
    write_checkpoint,
)

FILE = ROOT / "m3pc" / "robot_client.py"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    path = write_checkpoint(folder / "one", weights(7))
    with as_process(path, folder / "token", "--record", folder / "store") as server:
        yield server


@pytest.mark.parametrize("binary", [True, False], ids=["msgpack", "json"])
def test_a_robot_gets_the_actions_of_an_agent(served: ServerProcess, binary: bool) -> None:
    agent = Agent(Policy(weights(7)))
    agent.reset(seed=5)
    planner = served.planner(binary=binary)
    state = np.zeros(3, np.float32)
    with planner.session(name="arm", seed=5, deadline_ms=60_000.0) as session:
        for step in range(6):
            answer = session.act(state, -1.0 if step else None)
            np.testing.assert_allclose(answer.action, agent.act(state), atol=1e-4)
            assert (answer.version, answer.late, answer.candidates) == ("0-7", False, 16)
            state = state + np.float32(0.1)
        ended = session.end(state, -1.0, terminated=True)
    assert (ended["steps"], ended["total"], ended["stored"]) == (6, -6.0, "durable")
    planner.close()


@pytest.mark.parametrize("binary", [True, False], ids=["msgpack", "json"])
def test_a_robot_goes_to_a_goal(served: ServerProcess, binary: bool) -> None:
    planner = served.planner(binary=binary)
    actions = []
    for opening in ({"goal": [1, 2, 3]}, {"waypoints": [(0, 0, 0), np.asarray([1, 2, 3])]}):
        with planner.session(**opening) as session:
            actions.append(session.act([0, 0, 0]).action)
    np.testing.assert_allclose(actions[0], actions[1], atol=1e-5)


def test_a_session_left_by_an_exception_is_dropped(served: ServerProcess) -> None:
    planner = served.planner()
    with pytest.raises(ZeroDivisionError), planner.session() as session:
        raise ZeroDivisionError
    with pytest.raises(RefusedError) as refused:
        session.act([0, 0, 0])
    assert refused.value.status == 404


@pytest.mark.parametrize("binary", [True, False], ids=["msgpack", "json"])
def test_a_refusal_has_a_reason(served: ServerProcess, binary: bool) -> None:
    planner = served.planner(binary=binary)
    with planner.session() as session:
        with pytest.raises(RefusedError, match="observation has 2 numbers; expected 3") as refused:
            session.act([0, 0])
        assert refused.value.status == 422
        session.act([0, 0, 0])
        session.steps = 5
        with pytest.raises(RefusedError) as refused:
            session.act([0, 0, 0], 0.0)
        assert (refused.value.status, refused.value.expected_step) == (409, 1)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(served: ServerProcess, number: float) -> None:
    with served.planner().session() as session, pytest.raises(RefusedError) as refused:
        session.act([0, 0, number])
    assert refused.value.status == 422


# The program that the documents show

SHOWN = {
    "docs/SERVE.md": (ROOT / "docs" / "SERVE.md")
    .read_text()
    .split("```python\n")[1]
    .split("```")[0],
    "robot_client.py": textwrap.dedent(
        "    " + str(robot_client.__doc__).split("\n\n    ")[1].rpartition("\n\n")[0]
    ),
}


class Robot:
    """Five moves, each of which brings 1."""

    moves = 0

    def move(self, action: list[float]) -> tuple[list[float], float, bool]:
        assert len(action) == 1
        self.moves += 1
        return [self.moves, 0.0, 0.0], 1.0, self.moves == 5


@pytest.mark.parametrize("place", SHOWN)
def test_the_documented_program_sends_each_reward_once(
    served: ServerProcess, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.token_file is not None
    monkeypatch.chdir(served.token_file.parent)
    monkeypatch.setitem(sys.modules, "robot_client", robot_client)
    program = SHOWN[place].replace("http://127.0.0.1:8400", served.address)
    names: dict[str, Any] = {"robot": Robot(), "observation": [0, 0, 0], "token": served.token}
    exec(program, {"Planner": Planner, "Path": Path} | names, names)
    with served.planner() as planner:
        status = planner.ask("GET", names["session"].path)
    assert (status["steps"], status["total"], status["ended"]) == (5, 5.0, True)
    names["planner"].close()


def test_an_episode_with_the_maximum_of_steps_can_be_ended(served: ServerProcess) -> None:
    """Its last observation goes to the end: to act on it would be one step too many."""
    with served.planner() as planner, planner.session(step_limit=5) as session:
        robot, answer, done = Robot(), session.act([0, 0, 0]), False
        while True:
            observation, reward, done = robot.move(answer.action)
            if done:
                break
            answer = session.act(observation, reward)
        assert session.end(observation, reward, truncated=True)["total"] == 5.0


# Answers that get lost

Handle = Callable[[BaseHTTPRequestHandler, bytes], None]


@contextmanager
def fake_server(handle: Handle) -> Iterator[str]:
    """The address of a server that answers each request by `handle`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            handle(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        do_GET = do_DELETE = do_POST  # noqa: N815 as http.server has it

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def reply(
    handler: BaseHTTPRequestHandler, status: int, message: dict[str, Any], **headers: str
) -> None:
    content = json.dumps(message).encode()
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def test_a_request_without_an_answer_is_sent_again_unchanged() -> None:
    asked: list[bytes] = []

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        asked.append(body)
        if len(asked) < 3:
            handler.close_connection = True  # without a word
            return
        reply(handler, 200, {"done": True})

    with fake_server(handle) as address, Planner(address) as planner:
        assert planner.ask("POST", "/x", {"step": 4}) == {"done": True}
    assert len(asked) == 3 and len(set(asked)) == 1


def test_the_number_of_attempts_is_limited() -> None:
    asked: list[bytes] = []

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        asked.append(body)
        handler.close_connection = True

    with (
        fake_server(handle) as address,
        Planner(address) as planner,
        pytest.raises((OSError, HTTPException)),
    ):
        planner.ask("POST", "/x", {"step": 4})
    assert len(asked) == 3


def test_a_busy_server_is_asked_again_later() -> None:
    asked: list[bytes] = []

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        asked.append(body)
        problem = {"detail": "too many"}
        if len(asked) == 1:
            reply(handler, 503, problem, Retry_After="0")
        else:
            reply(handler, 200, {"done": True})

    with fake_server(handle) as address, Planner(address) as planner:
        assert planner.ask("POST", "/x", {}) == {"done": True}


def test_a_refusal_is_not_repeated() -> None:
    asked: list[bytes] = []

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        asked.append(body)
        reply(handler, 409, {"detail": "not this step", "expected_step": 7})

    with (
        fake_server(handle) as address,
        Planner(address) as planner,
        pytest.raises(RefusedError, match="not this step") as refused,
    ):
        planner.ask("POST", "/x", {})
    assert refused.value.expected_step == 7 and len(asked) == 1


OPENED = {"session": "0" * 32, "step_limit": 40}


@pytest.mark.parametrize("why", ["no answer", "503", "409", "own"])
def test_a_session_is_dropped_by_its_robot_and_not_by_a_failure(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server or the network failed, the server keeps the episode so far."""
    monkeypatch.setattr(robot_client, "PAUSE", 0.0)
    methods: list[str] = []

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        methods.append(handler.command)
        if handler.path.endswith("/end"):
            if why == "no answer":
                handler.close_connection = True
            else:
                reply(handler, int(why), {"detail": "no disk"}, Retry_After="0")
        else:
            reply(handler, 201, OPENED)

    with (
        fake_server(handle) as address,
        Planner(address) as planner,
        pytest.raises((OSError, HTTPException, RefusedError, ZeroDivisionError)),
        planner.session() as session,
    ):
        if why == "own":
            raise ZeroDivisionError
        session.end([0, 0, 0])
    assert methods.count("DELETE") == (1 if why in ("409", "own") else 0)


def test_dropping_an_unknown_session_is_no_error() -> None:
    methods: list[str] = []

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        methods.append(handler.command)
        if handler.command == "POST":
            reply(handler, 201, OPENED)
        elif methods.count("DELETE") == 1:
            handler.close_connection = True  # it was dropped, but the answer was lost
        else:
            reply(handler, 404, {"detail": "no such session"})

    with fake_server(handle) as address, Planner(address) as planner, planner.session():
        pass
    assert methods == ["POST", "DELETE", "DELETE"]


def test_a_session_whose_answer_was_lost_is_opened_once(
    served: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = served.planner()
    count = planner.weights()["sessions"]
    sent: list[bytes | None] = []
    request, getresponse = HTTPConnection.request, HTTPConnection.getresponse

    def noted(link: HTTPConnection, method: str, path: str, body: Any, headers: Any) -> None:
        sent.append(body)
        request(link, method, path, body, headers)

    def lossy(link: HTTPConnection) -> HTTPResponse:
        response = getresponse(link)
        if len(sent) == 1:
            raise ConnectionResetError
        return response

    monkeypatch.setattr(HTTPConnection, "request", noted)
    monkeypatch.setattr(HTTPConnection, "getresponse", lossy)
    with planner.session(), planner.session():
        assert planner.weights()["sessions"] == count + 2
    assert len({body for body in sent if body}) == 2, "each with its own key"


def test_a_server_behind_a_proxy_is_asked_under_its_prefix() -> None:
    paths: list[str] = []

    def handle(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        paths.append(handler.path)
        reply(handler, 200, {})

    with fake_server(handle) as address:
        for prefix in ("", "/", "/m3pc", "/m3pc/"):
            with Planner(address + prefix) as planner:
                planner.weights()
    assert paths == ["/v1/weights"] * 2 + ["/m3pc/v1/weights"] * 2


def test_an_https_address_uses_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def first_byte() -> bytes:
            link, _ = server.accept()
            with link:
                return link.recv(1)

        received = pool.submit(first_byte)
        address = f"https://127.0.0.1:{server.getsockname()[1]}"
        with Planner(address, timeout=1.0) as planner, pytest.raises(OSError):
            planner.weights()
        assert received.result(PATIENCE) == b"\x16", "a TLS handshake"
    assert Planner("https://a.example").connection.port == 443


@pytest.mark.parametrize("binary", [True, False], ids=["msgpack", "json"])
def test_numpy_scalars_become_numbers_and_booleans(binary: bool) -> None:
    message = {"reward": np.float32(0.5), "terminated": np.bool_(True), "seed": np.int64(3)}
    content = encoded(message, binary=binary)
    plain = unpacked(content) if binary else json.loads(content)
    assert plain == {"reward": 0.5, "terminated": True, "seed": 3}
    assert [type(value) for value in plain.values()] == [float, bool, int]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("0", 0.0), ("3", 3.0), ("1000", 5.0), ("", 1.0), ("soon", 1.0), ("nan", 1.0)),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 5.0),
    ],
)
def test_a_pause_is_a_number_of_seconds_or_ends_at_a_date(header: str, seconds: float) -> None:
    assert pause_seconds(header) == seconds


@pytest.mark.parametrize("address", ["127.0.0.1:8400", "ftp://a", "http://", ""])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="give one like"):
        Planner(address)


# Its own msgpack

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=40),
    max_leaves=50,
)


@given(VALUES)
def test_packed_values_are_msgpack(value: Any) -> None:
    assert msgpack.unpackb(packed(value)) == value


@given(VALUES)
def test_values_written_by_msgpack_are_unpacked(value: Any) -> None:
    assert unpacked(msgpack.packb(value)) == value


@given(st.binary(max_size=70_000) | st.text(min_size=250, max_size=70_000))
def test_long_strings_are_unpacked(value: Any) -> None:
    assert unpacked(msgpack.packb(value)) == value


@pytest.mark.parametrize("size", [0, 3, 63, 64, 20_000])
def test_numbers_are_little_endian_floats(size: int) -> None:
    numbers = msgpack.unpackb(packed(array("f", range(size))))
    assert np.frombuffer(numbers, "<f4").tolist() == list(range(size))


@pytest.mark.parametrize("content", [b"\xc1", b"\x01\x02", b"\xd4\x00\x00"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"no message has|left over"):
        unpacked(content)


# Alone


def test_it_imports_only_the_standard_library() -> None:
    tree = ast.parse(FILE.read_text())
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names <= sys.stdlib_module_names


def test_a_copy_of_the_file_works_anywhere(served: ServerProcess, tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "robot_client.py")
    script = f"""
from robot_client import Planner
planner = Planner({served.address!r}, {served.token!r}, timeout={PATIENCE})
with planner, planner.session() as session:
    print(len(session.act([0, 0, 0]).action))
"""
    (tmp_path / "robot.py").write_text(script)
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import robot",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def example(
    served: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Its output lines about two episodes of 12 steps."""
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "examples"))
        robot_loop = import_module("robot_loop")
    monkeypatch.delitem(sys.modules, "robot_loop")
    assert served.token_file is not None
    options = ["--address", served.address, "--token-file", str(served.token_file)]
    robot_loop.main([*options, "--steps", "12", "--hz", "200", "--episodes", "2"])
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith(("return", "success"))]


def test_the_example_drives_a_simulated_robot(
    served: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = example(served, monkeypatch, capsys)
    assert len(lines) == 2
    assert all("steps 12" in line and "stored: durable" in line for line in lines)


@pytest.mark.skipif(
    find_spec("robosuite") is None,
    reason="robosuite is not installed: pip install 'm3pc[robosuite]'",
)
def test_the_example_drives_a_simulated_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Panda that should lift a cube, with an untrained model."""
    model = tiny_weights(config(), states=19, actions=7, env="robosuite/Lift")
    path = write_checkpoint(tmp_path / "lift", model)
    with as_process(path, tmp_path / "token", "--record", tmp_path / "store") as arm:
        lines = example(arm, monkeypatch, capsys)
        assert arm.stop() == 0
    assert len(lines) == 2
    assert all("success no" in line and "stored: durable" in line for line in lines)
    store = Store(tmp_path / "store")
    assert store.header.env == "robosuite/Lift"
    shapes = [(episode.states.shape, episode.actions.shape) for episode in store.episodes()]
    assert shapes == [((13, 19), (12, 7))] * 2
