"""Samples per insert: the band is kept, and one side at least is always allowed."""

import random
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3pc.types import InputError
from replay.server.sample_ratio import FINEST, RateLimits, SampleInsertRatio


def band(low: float, high: float, **fields: Any) -> RateLimits:
    plain: dict[str, Any] = {
        "samples_per_insert": Fraction(2),
        "batch": 8,
        "max_insert": 5,
        "min_size": 10,
        "min_diff": Fraction(low),
        "max_diff": Fraction(high),
    }
    return RateLimits(**(plain | fields))


def inserted(ratio: SampleInsertRatio, count: int) -> SampleInsertRatio:
    assert not ratio.samples_missing(count)
    return replace(ratio, inserts=ratio.inserts + count)


def may_sample(ratio: SampleInsertRatio) -> bool:
    return ratio.samples + ratio.limits.batch <= ratio.max_samples


def sampled(ratio: SampleInsertRatio) -> SampleInsertRatio:
    assert may_sample(ratio)
    return replace(ratio, samples=ratio.samples + ratio.limits.batch)


# By hand: 2 samples an insert, batches of 8, inserts of up to 5, 10 before the first batch.


def test_inserts_come_first_until_there_are_enough() -> None:
    ratio = SampleInsertRatio(band(10, 28))
    assert (ratio.samples_missing(5), ratio.max_samples) == (0, 0)
    ratio = inserted(inserted(ratio, 5), 4)
    assert (ratio.samples_missing(5), ratio.max_samples) == (0, 0)
    assert inserted(ratio, 1).max_samples == 10


def test_an_insert_may_go_to_the_upper_edge_and_not_beyond() -> None:
    ratio = SampleInsertRatio(band(10, 28), inserts=14, samples=8)
    assert ratio.error == 20
    assert [ratio.samples_missing(n) for n in range(1, 6)] == [0, 0, 0, 0, 2]
    assert inserted(ratio, 4).error == 28


def test_samples_may_go_to_the_lower_edge_and_not_beyond() -> None:
    ratio = SampleInsertRatio(band(10, 28), inserts=13, samples=8)
    assert ratio.error == 18
    assert ratio.max_samples == 16
    assert sampled(ratio).error == 10
    assert not may_sample(replace(ratio, samples=9))


def test_as_many_samples_are_missing_as_an_insert_needs() -> None:
    full = SampleInsertRatio(band(10, 28), inserts=20)
    assert full.samples_missing(3) == 18
    assert replace(full, samples=17).samples_missing(3) == 1
    assert replace(full, samples=18).samples_missing(3) == 0


@pytest.mark.parametrize("size", [0, 6, -1])
def test_an_insert_of_a_size_that_the_limits_do_not_cover_is_refused(size: int) -> None:
    with pytest.raises(InputError, match="expected 1 to 5"):
        SampleInsertRatio(band(10, 28)).samples_missing(size)


# Which limits are live.


def test_a_band_just_wide_enough_is_accepted_and_one_narrower_is_not() -> None:
    band(10, 28)
    with pytest.raises(InputError, match=r"are 17\.5, expected 18 or more; widen"):
        band(10.5, 28)


def test_an_upper_edge_that_the_first_inserts_reach_is_refused() -> None:
    band(0, 28)
    with pytest.raises(InputError, match=r"max_diff is 27\.5, expected 28 or more; raise it"):
        band(0, 27.5)
    band(-14, 4, min_size=0)  # without a first stage there is nothing to reach


@pytest.mark.parametrize(
    "bad",
    [{"samples_per_insert": Fraction(0)}, {"batch": 0}, {"max_insert": 0}, {"min_size": -1}],
)
def test_sizes_that_are_not_positive_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="give numbers above 0"):
        band(-100, 100, **bad)
    with pytest.raises(InputError, match="expected 0 or more"):
        SampleInsertRatio(band(10, 28), samples=-1)
    with pytest.raises(InputError, match="expected 0 or more"):
        SampleInsertRatio(band(10, 28), inserts=-1)


def test_the_usual_conditions_are_not_enough() -> None:
    """Width of twice the larger step, and min_diff <= ratio * min_size <= max_diff: both hold here,
    yet after 9 single inserts one of 5 is refused, and so is the first batch."""
    ratio, batch, largest, min_size, low, high = 2, 8, 5, 10, 0, 20
    assert high - low >= 2 * max(batch, ratio * largest) and low <= ratio * min_size <= high
    stuck = Model(
        ratio=Fraction(ratio), batch=batch, min_size=min_size, low=low, high=high, inserts=9
    )
    assert not stuck.may_insert(largest) and not stuck.may_sample()
    with pytest.raises(InputError, match="raise it"):
        band(low, high)


# A model that knows nothing of the limiter, and random steps of both.


@dataclass
class Model:
    """The rules, as they are written down."""

    ratio: Fraction
    batch: int
    min_size: int
    low: Fraction | int
    high: Fraction | int
    inserts: int = 0
    samples: int = 0

    def may_insert(self, n: int) -> bool:
        return self.ratio * (self.inserts + n) - self.samples <= self.high

    def may_sample(self) -> bool:
        left = self.ratio * self.inserts - self.samples - self.batch
        return self.inserts >= self.min_size and left >= self.low


def stuck(model: Model, largest: int) -> bool:
    """Whether single and larger inserts and batches lead to where neither side may go on."""
    todo, seen = [(0, 0)], {(0, 0)}
    while todo:
        model.inserts, model.samples = now = todo.pop()
        sizes = [n for n in range(1, largest + 1) if model.may_insert(n)]
        nexts = [(now[0] + n, now[1]) for n in sizes]
        nexts += [(now[0], now[1] + model.batch)] if model.may_sample() else []
        if largest not in sizes and not model.may_sample():
            return True
        todo += {state for state in nexts if state[0] <= 30} - seen
        seen |= set(nexts)
    return False


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("largest", [1, 2, 5])
@pytest.mark.parametrize("min_size", [1, 2, 7])
def test_the_conditions_demand_no_more_than_is_needed(
    batch: int, largest: int, min_size: int
) -> None:
    """One sample an insert, so the grain of the error is 1."""
    high = min_size - 1 + largest
    low = high - batch - largest
    model = Model(ratio=Fraction(1), batch=batch, min_size=min_size, low=low, high=high)
    assert not stuck(model, largest)
    assert stuck(replace(model, low=low + 2), largest)
    assert stuck(replace(model, high=high - 1, low=low - 100), largest)


def live_limits(rng: random.Random) -> RateLimits:
    """Half of the time as narrow as it may be."""
    ratio = Fraction(rng.choice([0.1, 0.2, 1 / 3, 1.0, 2.5, 409.6])).limit_denominator(FINEST)
    batch, largest = rng.choice([1, 7, 256, 4096]), rng.choice([1, 3, 256, 1000])
    first = rng.choice([0, 1, 10, 5000])
    width, slack = batch + ratio * largest, rng.choice([0, 0, 1, 1000])
    # Around ratio * first, or with its upper edge where the first inserts just fit.
    high = ratio * first + max(width / 2, ratio * (largest - 1)) + slack
    low = high - width - 2 * slack * rng.randint(0, 1)
    return RateLimits(
        samples_per_insert=ratio,
        batch=batch,
        max_insert=largest,
        min_size=first,
        min_diff=low,
        max_diff=high,
    )


def walk(steps: int, seed: int) -> dict[str, int]:
    """Random inserts, batches, crashes and restarts with other limits."""
    rng = random.Random(seed)
    counts = dict.fromkeys(("insert", "sample", "refused", "crash", "restart"), 0)
    now = live_limits(rng)
    model, limiter, inside, eager = _start(now), SampleInsertRatio(now), True, 0.5
    saved = 0  # samples in the learner's checkpoint
    for _ in range(steps):
        size = rng.randint(1, now.max_insert)
        can_insert, can_sample = model.may_insert(size), model.may_sample()
        assert can_insert == (limiter.samples_missing(size) == 0)
        assert can_sample == may_sample(limiter)
        assert model.may_insert(now.max_insert) or can_sample, "neither side is allowed"
        chance = rng.random()
        if chance < 0.001:
            counts["crash"] += 1  # the learner loses what it drew since its checkpoint
            model.samples, inside = saved, False
            limiter = SampleInsertRatio(now, limiter.inserts, saved)
        elif chance < 0.002:
            counts["restart"] += 1
            now, inside = live_limits(rng), False
            limiter = SampleInsertRatio(now, limiter.inserts, limiter.samples)
            model = _start(now, limiter.inserts, limiter.samples)
            saved, eager = model.samples, rng.random()
        elif rng.random() < eager:
            counts["insert" if can_insert else "refused"] += 1
            if can_insert:
                model.inserts += size
                limiter = inserted(limiter, size)
        else:
            counts["sample" if can_sample else "refused"] += 1
            if can_sample:
                model.samples += now.batch
                limiter = sampled(limiter)
                saved = model.samples if rng.random() < 0.01 else saved
        error = model.ratio * model.inserts - model.samples
        assert (limiter.inserts, limiter.samples) == (model.inserts, model.samples)
        # Once inside the band it is not left but by a crash or new limits; min_diff may be above
        # what the first inserts have reached.
        within = error <= model.high and (error >= model.low or model.samples == 0)
        assert within or not inside
        inside = within
    return counts


def _start(now: RateLimits, inserts: int = 0, samples: int = 0) -> Model:
    return Model(
        ratio=now.samples_per_insert,
        batch=now.batch,
        min_size=now.min_size,
        low=now.min_diff,
        high=now.max_diff,
        inserts=inserts,
        samples=samples,
    )


def test_in_20_000_random_steps_the_band_is_kept_and_no_side_is_stuck() -> None:
    counts = walk(20_000, seed=0)
    assert min(counts.values()) > 5


@pytest.mark.long
def test_in_a_million_random_steps_the_band_is_kept_and_no_side_is_stuck() -> None:
    counts = walk(1_000_000, seed=1)
    assert min(counts.values()) > 500


@settings(max_examples=200, deadline=None)
@given(
    ratio=st.fractions(min_value=Fraction(1, 5), max_value=50, max_denominator=50),
    batch=st.integers(1, 60),
    largest=st.integers(1, 60),
    min_size=st.integers(0, 60),
    slack=st.fractions(min_value=0, max_value=20, max_denominator=10),
    inserts=st.integers(0, 300),
    samples=st.integers(0, 300),
)
def test_whatever_the_counters_one_side_is_allowed_and_soon_the_other_too(
    ratio: Fraction,
    batch: int,
    largest: int,
    min_size: int,
    slack: Fraction,
    inserts: int,
    samples: int,
) -> None:
    """Also counters that no run under these limits could have reached."""
    high = ratio * (min_size - 1 + largest) + slack
    bounds = RateLimits(
        samples_per_insert=ratio,
        batch=batch,
        max_insert=largest,
        min_size=min_size,
        min_diff=high - batch - ratio * largest,
        max_diff=high,
    )
    limiter = SampleInsertRatio(bounds, inserts, samples)
    for _ in range(3):  # a batch and a largest insert in turn, each after what it waits for
        while not may_sample(limiter):
            limiter = inserted(limiter, largest)
        limiter = sampled(limiter)
        while limiter.samples_missing(largest):
            limiter = sampled(limiter)
        limiter = inserted(limiter, largest)
    assert bounds.min_diff <= limiter.error <= bounds.max_diff


# After a restart.


def test_what_a_learner_lost_in_a_crash_it_draws_again_while_inserts_wait() -> None:
    ratio = SampleInsertRatio(band(10, 28), inserts=100, samples=150)  # 180 before the crash
    assert ratio.error == 50
    assert ratio.samples_missing(5) == 32
    for _ in range(4):
        ratio = sampled(ratio)
    assert ratio.samples_missing(5) == 0


def test_after_the_loss_of_inserts_the_learner_waits_for_new_ones() -> None:
    ratio = SampleInsertRatio(band(10, 28), inserts=0, samples=180)
    assert ratio.samples_missing(5) == 0
    assert not may_sample(replace(ratio, inserts=98))
    assert may_sample(replace(ratio, inserts=99))
