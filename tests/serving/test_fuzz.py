"""A fuzzer that follows the OpenAPI document finds no failure, and neither does one that writes
msgpack."""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.servers.served import (
    PATIENCE,
    InProcessServer,
    as_process,
    in_process,
    weights,
    write_checkpoint,
)

EXAMPLES = 25  # of each operation
SECONDS = 600.0


@pytest.mark.parametrize(
    "stored",
    [pytest.param(False, id="plain"), pytest.param(True, id="stored", marks=pytest.mark.long)],
)
def test_schemathesis_finds_no_failure(tmp_path: Path, stored: bool) -> None:
    path = write_checkpoint(tmp_path / "one", weights(7))
    options = ["--record", str(tmp_path / "store")] if stored else []
    with as_process(path, tmp_path / "token", "--sessions", "1024", *options) as served:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run"),
                f"{served.address}/openapi.json",
                *("--header", f"Authorization: Bearer {served.token}", "--seed", "1"),
                *("--max-examples", str(EXAMPLES), "--request-timeout", str(PATIENCE)),
                *("--suppress-health-check", "all", "--checks", "all"),
            ],
            cwd=tmp_path,
            env=os.environ | {"NO_COLOR": "1", "COLUMNS": "160"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert served.stop() == 0
    assert b"Traceback" not in served.errors


# msgpack, which schemathesis cannot write

FIELDS = (
    *("step", "observation", "reward", "action", "deadline_ms", "terminated", "truncated", "name"),
    *("key", "seed", "step_limit", "mode", "ratio", "target", "explore", "goal", "waypoints"),
)
STATE = st.builds(lambda *x: struct.pack("<3f", *x), *[st.floats(width=32)] * 3)
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=13)
    | STATE
    | st.sampled_from(["m", "q", "goal", msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=9,
)
OPTIONS = {
    "reward": st.floats(-1, 1),
    "action": st.just(struct.pack("<f", 0.5)),
    "deadline_ms": st.integers(-1, 50),
    "terminated": st.booleans(),
}
NEAR = st.fixed_dictionaries(
    {"step": st.integers(-1, 3) | ANY, "observation": STATE | ANY}, optional=OPTIONS
)
MESSAGES = st.one_of(
    NEAR.map(msgpack.packb),
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), ANY).map(msgpack.packb),
    st.binary(max_size=40),
)


@pytest.fixture(scope="module")
def served() -> Iterator[InProcessServer]:
    with in_process(max_sessions=10_000) as server:
        yield server


@settings(max_examples=300, deadline=None)
@given(content=MESSAGES, place=st.sampled_from(["", "/act", "/end"]))
def test_no_msgpack_makes_the_server_fail(
    served: InProcessServer, content: bytes, place: str
) -> None:
    session = served.opened(name="fuzzed")
    headers = {"Content-Type": "application/msgpack"}
    path = f"/v1/sessions/{session}{place}" if place else "/v1/sessions"
    response: Any = served.client.post(path, content=content, headers=headers)
    assert response.status_code in (200, 201, 409, 422), response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["detail"]
    else:
        assert isinstance(msgpack.unpackb(response.content), dict)
