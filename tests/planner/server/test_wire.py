"""Requests and decisions as bytes."""

import asyncio
import dataclasses
import struct

import numpy as np
import pytest

from m3pc.config.schema import MODES
from m3pc.types import Decision, InputError, PlanRequest, Rejection, RejectReason
from planner.policy import Policy
from planner.server.service import PlannerService
from planner.server.wire import (
    FORMAT,
    decision_from_bytes,
    decision_to_bytes,
    request_from_bytes,
    request_to_bytes,
)
from tests.support.models.published import small_config, versioned
from tests.support.models.small_weights import windows

SECONDS = 30.0
WINDOW = windows([4, 1, 3])


def assert_same(one: object, other: object) -> None:
    """Every field is equal to the bit, NaN too."""
    assert type(one) is type(other)
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        elif dataclasses.is_dataclass(a):
            assert_same(a, b)
        else:
            assert a == b


@pytest.mark.parametrize(
    "plan_request",
    [
        PlanRequest(window=WINDOW),
        PlanRequest(window=WINDOW, ratio=0.0, explore=True),
        PlanRequest(window=WINDOW, mean=True, candidates=7),
        PlanRequest(window=WINDOW, target_remaining=-12.5),
        *(PlanRequest(window=windows([2]), mode=mode, ratio=0.5) for mode in MODES),
        PlanRequest(window=windows([])),
    ],
)
def test_a_request_comes_back_as_it_was(plan_request: PlanRequest) -> None:
    assert_same(request_from_bytes(request_to_bytes(plan_request)), plan_request)


def test_a_decision_comes_back_as_it_was_and_may_be_written_to() -> None:
    sent = Policy(versioned(1 << 39), small_config()).answer(
        [PlanRequest(window=WINDOW, mode="rcbc")]
    )[0]
    assert np.isnan(sent.utilities).all()
    received = decision_from_bytes(decision_to_bytes(sent))
    assert_same(received, sent)
    received.actions[0] = 0.5
    assert (received.target_returns == sent.target_returns).all()


def test_an_array_of_another_type_or_size_is_not_sent() -> None:
    doubles = dataclasses.replace(WINDOW, states=WINDOW.states.astype(np.float64))
    short = dataclasses.replace(WINDOW, seeds=WINDOW.seeds[:2])
    for window in (doubles, short):
        with pytest.raises(InputError, match="a window has"):
            request_to_bytes(PlanRequest(window=window))
    with pytest.raises(InputError, match="mode is 'fly'"):
        request_to_bytes(PlanRequest(window=WINDOW, mode="fly"))


GOOD = request_to_bytes(PlanRequest(window=WINDOW))
BAD = {
    "nothing": b"",
    "half of a head": GOOD[:20],
    "one byte less": GOOD[:-1],
    "one byte more": GOOD + b"\0",
    "another format": struct.pack("<H", FORMAT + 1) + GOOD[2:],
    "a mode too high": GOOD[:2] + struct.pack("<h", len(MODES)) + GOOD[4:],
    "a mode too low": GOOD[:2] + struct.pack("<h", -2) + GOOD[4:],
    "sizes beyond all memory": GOOD[:16] + b"\xff" * 16 + GOOD[32:],
}


@pytest.mark.parametrize("kind", BAD)
def test_other_bytes_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match="no message of a planner"):
        request_from_bytes(BAD[kind])


def test_other_bytes_are_no_decision() -> None:
    content = decision_to_bytes(Policy(versioned(1)).decide(WINDOW))
    for broken in (b"", content[:-4], content + b"\0" * 4, b"\7\7" + content[2:]):
        with pytest.raises(InputError, match="no message of a planner"):
            decision_from_bytes(broken)


def test_a_server_answers_bytes_as_it_answers_requests() -> None:
    requests = [PlanRequest(window=WINDOW, mode=mode, explore=True) for mode in ("rcbc", "m", "q")]
    expected = Policy(versioned(1)).answer(requests)
    nan = dataclasses.replace(WINDOW, states=np.full_like(WINDOW.states, np.nan))
    rejected = [
        (GOOD[:-1], SECONDS, RejectReason.BAD),
        (request_to_bytes(PlanRequest(window=nan)), SECONDS, RejectReason.BAD),
        (GOOD, 0.0, RejectReason.LATE),
    ]
    with PlannerService(versioned(1)) as service:
        for request, one in zip(requests, expected, strict=True):
            reply = asyncio.run(service.plan(request_to_bytes(request), SECONDS))
            assert isinstance(reply, bytes)
            decision = decision_from_bytes(reply)
            np.testing.assert_allclose(decision.actions, one.actions, rtol=1e-3, atol=1e-4)
            assert decision.version == one.version
        for content, deadline, reason in rejected:
            rejection = asyncio.run(service.plan(content, deadline))
            assert isinstance(rejection, Rejection) and rejection.why == reason


def test_a_decision_is_only_as_long_as_its_numbers() -> None:
    decision = Decision(
        actions=np.zeros((2, 3), np.float32),
        **{
            name: np.zeros(2, np.float32)
            for name in ("target_returns", "utilities", "effective_candidates")
        },
        utility_std=np.zeros(2, np.float32),
        version=0,
    )
    assert len(decision_to_bytes(decision)) == 24 + 2 * (3 + 4) * 4
