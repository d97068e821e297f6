"""What a planner is asked and what it answers, as bytes."""

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
    ask_from_bytes,
    ask_to_bytes,
    decision_from_bytes,
    decision_to_bytes,
)
from tests.support.models.published import small_config, versioned
from tests.support.models.small_weights import windows

SECONDS = 30.0
WINDOW = windows([4, 1, 3])


def same(one: object, other: object) -> None:
    """Every field, to the bit: NaN too."""
    assert type(one) is type(other)
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        elif dataclasses.is_dataclass(a):
            same(a, b)
        else:
            assert a == b


@pytest.mark.parametrize(
    "ask",
    [
        PlanRequest(window=WINDOW),
        PlanRequest(window=WINDOW, ratio=0.0, explore=True),
        PlanRequest(window=WINDOW, mean=True, candidates=7),
        PlanRequest(window=WINDOW, target_remaining=-12.5),
        *(PlanRequest(window=windows([2]), mode=mode, ratio=0.5) for mode in MODES),
        PlanRequest(window=windows([])),
    ],
)
def test_a_request_comes_back_as_it_was(ask: PlanRequest) -> None:
    same(ask_from_bytes(ask_to_bytes(ask)), ask)


def test_a_decision_comes_back_as_it_was_and_may_be_written_to() -> None:
    sent = Policy(versioned(1 << 39), small_config()).answer(
        [PlanRequest(window=WINDOW, mode="rcbc")]
    )[0]
    assert np.isnan(sent.utilities).all()
    found = decision_from_bytes(decision_to_bytes(sent))
    same(found, sent)
    found.actions[0] = 0.5
    assert (found.target_returns == sent.target_returns).all()


def test_what_is_no_window_is_not_sent() -> None:
    doubles = dataclasses.replace(WINDOW, states=WINDOW.states.astype(np.float64))
    short = dataclasses.replace(WINDOW, seeds=WINDOW.seeds[:2])
    for window in (doubles, short):
        with pytest.raises(InputError, match="a window has"):
            ask_to_bytes(PlanRequest(window=window))
    with pytest.raises(InputError, match="mode is 'fly'"):
        ask_to_bytes(PlanRequest(window=WINDOW, mode="fly"))


GOOD = ask_to_bytes(PlanRequest(window=WINDOW))
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
        ask_from_bytes(BAD[kind])


def test_other_bytes_are_no_decision() -> None:
    whole = decision_to_bytes(Policy(versioned(1)).decide(WINDOW))
    for broken in (b"", whole[:-4], whole + b"\0" * 4, b"\7\7" + whole[2:]):
        with pytest.raises(InputError, match="no message of a planner"):
            decision_from_bytes(broken)


def test_a_server_answers_bytes_as_it_answers_requests() -> None:
    asks = [PlanRequest(window=WINDOW, mode=mode, explore=True) for mode in ("rcbc", "m", "q")]
    expected = Policy(versioned(1)).answer(asks)
    with PlannerService(versioned(1)) as service:
        for ask, wanted in zip(asks, expected, strict=True):
            reply = service.plan(ask_to_bytes(ask), SECONDS)
            assert isinstance(reply, bytes)
            found = decision_from_bytes(reply)
            np.testing.assert_allclose(found.actions, wanted.actions, rtol=1e-3, atol=1e-4)
            assert found.version == wanted.version
        bad = service.plan(GOOD[:-1], SECONDS)
        assert isinstance(bad, Rejection) and bad.why == RejectReason.BAD
        nan = dataclasses.replace(WINDOW, states=np.full_like(WINDOW.states, np.nan))
        bad = service.plan(ask_to_bytes(PlanRequest(window=nan)), SECONDS)
        assert isinstance(bad, Rejection) and bad.why == RejectReason.BAD
        late = service.plan(GOOD, 0.0)
        assert isinstance(late, Rejection) and late.why == RejectReason.LATE


def test_a_decision_is_only_as_long_as_its_numbers() -> None:
    decision = Decision(
        actions=np.zeros((2, 3), np.float32),
        **{name: np.zeros(2, np.float32) for name in ("target_returns", "utilities", "effective_candidates")},
        utility_std=np.zeros(2, np.float32),
        version=0,
    )
    assert len(decision_to_bytes(decision)) == 24 + 2 * (3 + 4) * 4
