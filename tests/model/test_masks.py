"""Masks: pictures of the patterns, and what the random ones show how often."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import reference
from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config, MasksConfig
from m3pc.model.masks import (
    ACTIONS,
    MODALITIES,
    PATTERNS,
    RETURNS,
    REWARDS,
    STATES,
    Mask,
    TokenIndex,
    draw_mask,
    token_indices,
    token_mask,
    visible,
)

T = 8
PICTURES = {  # by pattern and now: states, actions, rewards, returns
    ("policy", 0): "#....... ........ ........ ########",
    ("policy", 4): "#####... ####.... ........ ########",
    ("policy", 7): "######## #######. ........ ########",
    ("dynamics", 0): "#....... ######## ........ ........",
    ("dynamics", 4): "#####... ######## ........ ........",
    ("dynamics", 7): "######## ######## ........ ........",
    ("path", 0): "#......# ........ ........ ........",
    ("path", 4): "#####..# ####.... ........ ........",
    ("path", 7): "######## #######. ........ ........",
    ("inverse", 0): "######## ........ ........ ........",
    ("inverse", 4): "######## ####.... ........ ........",
    ("inverse", 7): "######## #######. ........ ........",
}
CUT_ORDER = (STATES, RETURNS, ACTIONS, REWARDS)
KEEP_COUNTS = {0.5: 4, 0.6: 4, 0.7: 5, 0.8: 6, 0.85: 6, 0.9: 7, 0.95: 7, 1.0: 8}


def picture(mask: Mask) -> str:
    return " ".join("".join(".#"[int(cell)] for cell in row) for row in mask)


def masks_config(**changes: object) -> MasksConfig:
    """The paper's masks with some fields changed; double underscores stand for dots."""
    named = {f"masks.{name.replace('__', '.')}": value for name, value in changes.items()}
    return replace(Config(), named).masks


def drawn(config: MasksConfig, count: int, *, seed: int = 0, length: int = T) -> NDArray[np.bool_]:
    """[count, modality, T]"""
    rng = np.random.default_rng(seed)
    return np.stack([draw_mask(config, length, rng) for _ in range(count)])


@cache
def random_masks() -> NDArray[np.bool_]:
    """What the authors' only kind of training mask shows: [20,000, modality, T]."""
    return drawn(PRESETS["parity"].masks, 20_000)


# Patterns


def test_every_pattern_is_drawn_below() -> None:
    assert {pattern for pattern, _ in PICTURES} == set(PATTERNS)
    assert MODALITIES == ("states", "actions", "rewards", "returns")


@pytest.mark.parametrize(("pattern", "now"), PICTURES)
def test_each_pattern_matches_its_picture(pattern: str, now: int) -> None:
    assert picture(visible(pattern, now=now, length=T)) == PICTURES[pattern, now]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_those_of_the_reference_at_every_step_and_length(pattern: str) -> None:
    for length in (2, 5, T):
        for now in range(length):
            expected = reference.mask(pattern, now, length).numpy()
            np.testing.assert_array_equal(visible(pattern, now=now, length=length), expected)


@pytest.mark.parametrize(
    ("pattern", "tokens"), [("policy", 17), ("dynamics", 13), ("path", 10), ("inverse", 12)]
)
def test_the_steady_state_shows_as_many_tokens_as_the_authors_planner(
    pattern: str, tokens: int
) -> None:
    now = Config().context
    assert len(token_indices(visible(pattern, now=now, length=T))) == tokens


def test_a_pattern_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        visible("policy", now=4, length=T)[STATES, 0] = False


# Masks by name


def test_a_token_mask_shows_the_steps_that_were_named() -> None:
    mask = token_mask(5, {RETURNS: [4], STATES: range(1, 3)})
    assert picture(mask) == ".##.. ..... ..... ....#"
    assert picture(token_mask(3, {})) == "... ... ... ..."
    assert picture(token_mask(3, {ACTIONS: [], REWARDS: [0, 2]})) == "... ... #.# ..."


def test_token_indices_are_ordered_by_modality_and_then_by_step() -> None:
    mask = token_mask(4, {REWARDS: [0], STATES: [3, 1], RETURNS: [2]})
    tokens = token_indices(mask)
    assert tokens == [
        TokenIndex(STATES, 1),
        TokenIndex(STATES, 3),
        TokenIndex(REWARDS, 0),
        TokenIndex(RETURNS, 2),
    ]
    assert {type(number) for token in tokens for number in token} == {int}
    assert token_indices(token_mask(4, {})) == []


# Random masks: what the specification derives of the authors' rule (section 2.3).


def test_random_masks_show_as_much_as_the_specification_derives() -> None:
    masks = random_masks()
    tokens = masks.sum(axis=(1, 2))
    # Standard errors: 0.05 tokens, 0.02 actions, 0.0013.
    assert tokens.mean() == pytest.approx(11.5, abs=0.15)
    assert (~masks[:, ACTIONS]).sum(axis=1).mean() == pytest.approx(5.35, abs=0.06)
    assert (tokens == 0).mean() == pytest.approx(0.034, abs=0.004)
    assert not masks[:, REWARDS, 7].any()
    assert masks[:, ACTIONS, 7].mean() == pytest.approx(0.0076, abs=0.0025)
    assert masks[:, [STATES, RETURNS], 7].mean() > 0.05


@pytest.mark.parametrize(
    ("modality", "shares"),
    [
        (STATES, [0.72, 0.62, 0.54, 0.44, 0.35, 0.26, 0.17, 0.07]),
        (ACTIONS, [0.65, 0.56, 0.47, 0.38, 0.29, 0.19, 0.10, 0.01]),
        # 47/64 kept, times the share of cuts after it: (7 - t) / 8, and at it 0.7 / 8 or none
        (RETURNS, [0.71, 0.61, 0.52, 0.43, 0.34, 0.25, 0.16, 0.06]),
        (REWARDS, [0.64, 0.55, 0.46, 0.37, 0.28, 0.18, 0.09, 0.0]),
    ],
)
def test_random_masks_show_each_step_as_often_as_derived(
    modality: int, shares: list[float]
) -> None:
    """Rounding takes up to 0.005 of the shares; a standard error is at most 0.0035."""
    np.testing.assert_allclose(random_masks()[:, modality].mean(axis=0), shares, atol=0.01)


@pytest.mark.parametrize(("ratio", "count"), KEEP_COUNTS.items())
def test_a_keep_ratio_is_rounded_down_to_steps(ratio: float, count: int) -> None:
    """States lose nothing where the cut is at the last step and not theirs: one mask in ten."""
    counts = drawn(masks_config(keep_ratios=(ratio,)), 200)[:, STATES].sum(axis=1)
    assert counts.max() == count
    assert (counts == count).mean() > 0.05


def test_every_modality_draws_its_own_ratio() -> None:
    """Of masks that keep 8 or 1: cut at the last step, all states are there; half the returns."""
    masks = drawn(masks_config(keep_ratios=(0.125, 1.0), pivot__states=0), 600)
    complete = masks[masks[:, STATES].all(axis=1)]
    assert len(complete) > 20
    seen = complete[:, RETURNS].sum(axis=1)
    assert (seen <= 1).mean() == pytest.approx(0.5, abs=0.2)
    assert (seen >= 7).mean() == pytest.approx(0.5, abs=0.2)


def cut_at(step: int, pivot: int) -> Mask:
    """What a cut leaves: before the pivot in the cut's order up to `step`, from it on less."""
    return token_mask(T, {m: range(step + (rank < pivot)) for rank, m in enumerate(CUT_ORDER)})


def explains(cut: Mask, mask: Mask) -> bool:
    """Whether each modality could have kept 4 to 8 steps of which the cut left these.

    Nothing is visible past the cut; at most as many steps are missing before it as could be hidden.
    """
    missing = (cut & ~mask).sum(axis=1)
    return not (mask & ~cut).any() and bool((missing <= T - min(KEEP_COUNTS.values())).all())


def test_every_random_mask_is_explained_by_a_cut() -> None:
    cuts = [cut_at(step, pivot) for step, pivot in product(range(T), range(4))]
    for mask in random_masks()[:2_000]:
        assert any(explains(cut, mask) for cut in cuts), picture(mask)
    impossible = token_mask(T, {STATES: range(3), ACTIONS: [7]})
    assert not any(explains(cut, impossible) for cut in cuts)


def test_complete_modalities_are_cut_in_their_order_at_every_step() -> None:
    """With nothing hidden before the cut, a mask is its cut; pivots come by their weights."""
    masks = drawn(masks_config(keep_ratios=(1.0,)), 2_000)
    pictures = [picture(mask) for mask in masks]
    weights = {0: 0.2, 1: 0.1, 2: 0.6, 3: 0.1}
    expected: dict[str, float] = {}
    for step, (pivot, weight) in product(range(T), weights.items()):
        cut = cut_at(step, pivot)
        if cut[ACTIONS].all():
            cut[ACTIONS, -1] = False  # one action stays to be predicted
        expected[picture(cut)] = expected.get(picture(cut), 0) + weight / T
    assert set(pictures) == set(expected)
    for text, share in expected.items():
        assert pictures.count(text) / len(pictures) == pytest.approx(share, abs=0.02), text


def test_pivot_weights_are_relative() -> None:
    """A cut through the states shows all modalities the same steps."""
    masks = drawn(
        masks_config(
            keep_ratios=(1.0,),
            pivot={"states": 3.0, "returns": 0.0, "actions": 0.0, "rewards": 1.0},
        ),
        1_000,
    )
    same = (masks == masks[:, :1]).all(axis=(1, 2))
    assert same.mean() == pytest.approx(0.75, abs=0.05)


def test_a_random_mask_hides_an_action() -> None:
    assert not random_masks()[:, ACTIONS].all(axis=1).any()
    late = masks_config(
        keep_ratios=(1.0,), pivot={"states": 0.0, "returns": 0.0, "actions": 0.0, "rewards": 1.0}
    )
    masks = drawn(late, 200)
    complete = masks[masks[:, STATES].all(axis=1)]
    assert {picture(mask[[ACTIONS]]) for mask in complete} == {"#######."}


@pytest.mark.parametrize("length", [2, 5, 13])
def test_random_masks_fit_windows_of_other_lengths(length: int) -> None:
    masks = drawn(masks_config(), 300, length=length)
    assert masks.shape == (300, 4, length)
    assert masks[:, STATES].any(axis=0).all()
    assert not masks[:, REWARDS, -1].any()


# The mixture


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_of_the_mixture_comes_at_every_step(pattern: str) -> None:
    mixture = {name: float(name == pattern) for name in ("random", *PATTERNS)}
    pictures = [picture(mask) for mask in drawn(masks_config(mixture=mixture), 400)]
    expected = [picture(visible(pattern, now=now, length=T)) for now in range(T)]
    assert set(pictures) == set(expected)
    for text in expected:
        assert pictures.count(text) / 400 == pytest.approx(1 / T, abs=0.06)


def test_kinds_come_by_their_relative_weights() -> None:
    """Only dynamics shows all actions, only policy and few random masks all returns."""
    mixture = {"random": 2.0, "policy": 1.0, "dynamics": 5.0, "path": 0.0, "inverse": 0.0}
    masks = drawn(masks_config(mixture=mixture), 2_000)
    dynamics = masks[:, ACTIONS].all(axis=1)
    patterns = {picture(visible("policy", now=now, length=T)) for now in range(T)}
    policy = np.asarray([picture(mask) in patterns for mask in masks])
    assert dynamics.mean() == pytest.approx(5 / 8, abs=0.03)
    assert policy.mean() == pytest.approx(1 / 8, abs=0.02)
    rest = masks[~dynamics & ~policy]
    assert len({picture(mask) for mask in rest}) > 250  # as varied as random masks are


def test_changing_a_mask_does_not_change_the_next_one() -> None:
    config = masks_config(mixture={"random": 1.0, "policy": 1.0, "path": 1.0})
    before = drawn(config, 60)
    rng = np.random.default_rng(0)
    for expected in before:
        mask = draw_mask(config, T, rng)
        np.testing.assert_array_equal(mask, expected)
        if mask.flags.writeable:
            mask[:] = ~mask
        else:
            with pytest.raises(ValueError, match="read-only"):
                mask[:] = True


def test_the_generator_decides_the_mask() -> None:
    config = masks_config(mixture={"random": 1.0, "policy": 1.0, "path": 1.0})
    np.testing.assert_array_equal(drawn(config, 20, seed=3), drawn(config, 20, seed=3))
    assert (drawn(config, 20, seed=3) != drawn(config, 20, seed=4)).any()
