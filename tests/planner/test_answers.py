"""Requests of all modes in one batch: each gets the decision that it would get alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m3pc.config.schema import MODES
from m3pc.types import Decision, InputError, PlanRequest
from planner.policy import Policy
from planner.requests import DECISION_FIELDS, answer_in_chunks, select_rows
from tests.support.models.plan_requests import BAD_REQUESTS, mixed_requests
from tests.support.models.small_weights import tiny_config, tiny_weights, windows

# All different, so that no two can be mistaken for each other.
TUNED: dict[str, Any] = {
    "planner__m__spread": 0.7,
    "planner__q__spread": 1.3,
    "planner__m__inverse_temperature": 0.3,
    "planner__q__inverse_temperature": 2.0,
    "conditioning__exploration_ratio": 0.8,
}


def policy(**changes: Any) -> Policy:
    return Policy(tiny_weights(tiny_config(**TUNED | changes)))


def assert_close(one: Decision, other: Decision) -> None:
    for name in DECISION_FIELDS:
        np.testing.assert_allclose(
            getattr(one, name), getattr(other, name), rtol=1e-3, atol=1e-4, err_msg=name
        )
    assert one.version == other.version


def assert_equal(one: Decision, other: Decision) -> None:
    for name in DECISION_FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_a_decision_does_not_depend_on_other_requests_of_the_batch() -> None:
    planner = policy()
    requests = mixed_requests()
    assert len(requests) == 42
    for request, decision in zip(requests, planner.answer(requests), strict=True):
        assert_close(decision, planner.answer([request])[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("explore", [False, True])
def test_a_request_may_name_its_mode(mode: str, explore: bool) -> None:
    window = windows([4, 1, 4])
    other = policy(planner__mode="rcbc" if mode == "q" else "q")
    decision = other.answer([PlanRequest(window=window, mode=mode, explore=explore)])[0]
    assert_equal(decision, policy(planner__mode=mode).decide(window, explore=explore))


def test_a_request_may_name_its_ratio() -> None:
    window, ratios = windows([4, 1]), (0.5, 1.5)
    decisions = policy().answer([PlanRequest(window=window, ratio=ratio) for ratio in ratios])
    for ratio, decision in zip(ratios, decisions, strict=True):
        assert_close(decision, policy(conditioning__evaluation_ratio=ratio).decide(window))
    assert not np.array_equal(decisions[0].actions, decisions[1].actions)


@pytest.mark.parametrize("rule", ["envelope", "maximum"])
def test_a_ratio_counts_in_exploration_too(rule: str) -> None:
    window = windows([4])
    decision = policy(conditioning__exploration=rule).answer(
        [PlanRequest(window=window, ratio=0.5, explore=True)]
    )[0]
    expected = policy(conditioning__exploration=rule, conditioning__exploration_ratio=0.5)
    assert_close(decision, expected.decide(window, explore=True))


@pytest.mark.parametrize("mode", ["rcbc", "m", "q"])
@pytest.mark.parametrize("explore", [False, True])
def test_a_request_may_name_the_mean_and_nothing_else_changes(mode: str, explore: bool) -> None:
    request = PlanRequest(window=windows([4, 1, 4]), mode=mode, explore=explore)
    sampling = policy(planner__evaluate_by="sample", planner__explore_by="sample")
    mean, sampled = (sampling.answer([replace(request, mean=m)])[0] for m in (True, False))
    averaging = policy(planner__evaluate_by="mean", planner__explore_by="mean")
    assert_equal(mean, averaging.answer([request])[0])
    assert not np.array_equal(mean.actions, sampled.actions)


def test_an_empty_request_gets_an_empty_decision() -> None:
    empty = select_rows(windows([4]), slice(0))
    decisions = policy().answer([PlanRequest(window=empty), PlanRequest(window=windows([4]))])
    assert [len(decision.actions) for decision in decisions] == [0, 1]


def test_requests_computed_in_chunks_get_the_same_decisions() -> None:
    planner = policy()
    requests = mixed_requests()[:6]
    expected = planner.answer(requests)
    for max_rows in (1, 2, 5):
        decisions = answer_in_chunks(planner.answer, requests, max_rows)
        for one, other in zip(decisions, expected, strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("kind", BAD_REQUESTS)
def test_a_bad_request_is_refused_in_words(kind: str) -> None:
    request, words = BAD_REQUESTS[kind]
    with pytest.raises(InputError, match=words):
        policy().answer([request])
