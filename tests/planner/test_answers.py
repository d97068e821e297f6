"""Requests of all modes in one batch: each gets what it would get alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from m3pc.config.schema import MODES
from m3pc.types import Decision, InputError, PlanRequest, Window
from planner.forward import propose
from planner.policy import Policy
from planner.requests import in_pieces
from tests.support.models.small_weights import rows, tiny_config, tiny_weights, windows

NAMES = ("actions", "target_returns", "utilities", "effective_candidates", "utility_std")
# Each of its own, so that no two can be mistaken for each other.
TUNED: dict[str, Any] = {
    "planner__m__spread": 0.7,
    "planner__q__spread": 1.3,
    "planner__m__inverse_temperature": 0.3,
    "planner__q__inverse_temperature": 2.0,
    "conditioning__exploration_ratio": 0.8,
}


def policy(**changes: Any) -> Policy:
    return Policy(tiny_weights(tiny_config(**TUNED | changes)))


def every_kind() -> list[PlanRequest]:
    """All modes, both ways to act, several places in the window, 1 to 3 rows, mixed up."""
    places = ([4, 0, 2], [4], [1, 4])
    asks = [
        PlanRequest(window=windows(now, seed=n), mode=mode, ratio=ratio, explore=explore)
        for n, (mode, explore, (now, ratio)) in enumerate(
            (mode, explore, pair)
            for mode in (None, *MODES)
            for explore in (False, True)
            for pair in zip(places, (None, 0.5, 1.2), strict=True)
        )
    ]
    order = np.random.default_rng(0).permutation(len(asks))
    return [asks[n] for n in order]


def assert_same(one: Decision, other: Decision) -> None:
    for name in NAMES:
        np.testing.assert_allclose(
            getattr(one, name), getattr(other, name), rtol=1e-3, atol=1e-4, err_msg=name
        )
    assert one.version == other.version


def test_an_answer_does_not_depend_on_the_company() -> None:
    planner = policy()
    asks = every_kind()
    assert len(asks) == 42
    for ask, found in zip(asks, planner.answer(asks), strict=True):
        assert_same(found, planner.answer([ask])[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("explore", [False, True])
def test_a_mode_that_is_asked_for_is_that_mode(mode: str, explore: bool) -> None:
    window = windows([4, 1, 4])
    asked = policy(planner__mode="rcbc" if mode == "q" else "q")
    found = asked.answer([PlanRequest(window=window, mode=mode, explore=explore)])[0]
    expected = policy(planner__mode=mode).decide(window, explore=explore)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_a_ratio_that_is_asked_for_is_that_ratio() -> None:
    window = windows([4, 1])
    found = policy().answer(
        [PlanRequest(window=window, ratio=0.5), PlanRequest(window=window, ratio=1.5)]
    )
    for ratio, each in zip((0.5, 1.5), found, strict=True):
        assert_same(each, policy(conditioning__evaluation_ratio=ratio).decide(window))
    assert not np.array_equal(found[0].actions, found[1].actions)


@pytest.mark.parametrize("kind", ["envelope", "maximum"])
def test_a_ratio_counts_in_exploration_too(kind: str) -> None:
    window = windows([4])
    found = policy(conditioning__exploration=kind).answer(
        [PlanRequest(window=window, ratio=0.5, explore=True)]
    )[0]
    expected = policy(conditioning__exploration=kind, conditioning__exploration_ratio=0.5)
    assert_same(found, expected.decide(window, explore=True))


@pytest.mark.parametrize("mode", ["rcbc", "m", "q"])
@pytest.mark.parametrize("explore", [False, True])
def test_a_mean_that_is_asked_for_is_taken_and_changes_nothing_else(
    mode: str, explore: bool
) -> None:
    window = windows([4, 1, 4])
    drawing = policy(planner__evaluate_by="sample", planner__explore_by="sample")
    ask = PlanRequest(window=window, mode=mode, explore=explore, mean=True)
    found, drawn = (drawing.answer([each])[0] for each in (ask, replace(ask, mean=False)))
    averaging = policy(planner__evaluate_by="mean", planner__explore_by="mean")
    expected = averaging.answer([replace(ask, mean=False)])[0]
    for name in NAMES:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert not np.array_equal(found.actions, drawn.actions)


def test_forward_modes_share_one_proposal_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner import policy as module

    sizes: list[tuple[int, int]] = []

    def counted(model: Any, normaliser: Any, question: Any, conditions: Any) -> Any:
        sizes.append((question.now, len(conditions)))
        return propose(model, normaliser, question, conditions)

    monkeypatch.setattr(module, "propose", counted)
    policy().answer([PlanRequest(window=windows([4, 2]), mode=mode) for mode in MODES])
    assert sizes == [(2, 4), (4, 4)]


def test_nothing_asked_is_nothing_answered() -> None:
    found = policy().answer(
        [PlanRequest(window=rows(windows([4]), [])), PlanRequest(window=windows([4]))]
    )
    assert [len(each.actions) for each in found] == [0, 1]


def test_pieces_of_requests_give_the_answers_of_whole_ones() -> None:
    planner = policy()
    asks = every_kind()[:6]
    whole = planner.answer(asks)
    for most in (1, 2, 5):
        for one, other in zip(in_pieces(planner.answer, asks, most), whole, strict=True):
            assert_same(one, other)


def changed(**arrays: Any) -> Window:
    return replace(windows([4, 2]), **arrays)


GOOD = windows([4, 2])
BAD: dict[str, tuple[PlanRequest, str]] = {
    "unknown mode": (PlanRequest(window=GOOD, mode="best"), "mode is 'best'"),
    "ratio that is no number": (PlanRequest(window=GOOD, ratio=float("nan")), "ratio"),
    "negative ratio": (PlanRequest(window=GOOD, ratio=-0.1), "ratio"),
    "huge ratio": (PlanRequest(window=GOOD, ratio=1e9), "ratio"),
    "shorter": (PlanRequest(window=windows([4, 2], length=7)), "expected"),
    "fewer states": (PlanRequest(window=changed(states=GOOD.states[..., :4])), "states"),
    "fewer actions": (PlanRequest(window=changed(actions=GOOD.actions[..., :1])), "actions"),
    "fewer rows": (PlanRequest(window=changed(steps=GOOD.steps[:1])), "steps"),
    "two dimensions": (PlanRequest(window=changed(now=GOOD.now[:, None])), "now"),
    "doubles": (PlanRequest(window=changed(states=GOOD.states.astype("f8"))), "float64"),
    "objects": (PlanRequest(window=changed(states=GOOD.states.astype(object))), "object"),
    "a list": (PlanRequest(window=changed(states=GOOD.states.tolist())), "list"),
    "nothing": (PlanRequest(window=changed(now=None)), "now are a NoneType"),
    "not finite": (PlanRequest(window=changed(states=GOOD.states * np.float32(np.inf))), "NaN"),
    "actions not finite": (
        PlanRequest(window=changed(actions=GOOD.actions * np.float32(np.nan))),
        "NaN",
    ),
    "beyond the window": (PlanRequest(window=changed(now=GOOD.now + 4)), "current step"),
    "before the window": (PlanRequest(window=changed(now=GOOD.now - 3)), "current step"),
    "negative seed": (PlanRequest(window=changed(seeds=GOOD.seeds - 5)), "seeds"),
    "negative step": (PlanRequest(window=changed(steps=GOOD.steps - 50)), "steps"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_is_refused_in_words(kind: str) -> None:
    ask, words = BAD[kind]
    with pytest.raises(InputError, match=words):
        policy().check(ask)
