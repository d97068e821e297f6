"""Pauses between attempts: doubled, bounded, and random within stated limits."""

import random

import numpy as np
import pytest

from m3pc.core.backoff import Backoff

BACKOFF = Backoff(first=0.5, longest=3.0)


def test_a_pause_doubles_with_each_failure_up_to_the_longest() -> None:
    assert [BACKOFF.pause(failures) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_has_a_pause() -> None:
    assert BACKOFF.pause(10**6) == 3.0


@pytest.mark.parametrize("rng", [random.Random(0), np.random.default_rng(0)])
@pytest.mark.parametrize("at_least", [0.0, 0.5])
def test_a_random_pause_is_spread_over_the_allowed_part(
    rng: random.Random | np.random.Generator, at_least: float
) -> None:
    pauses = [BACKOFF.jittered(3, rng, at_least=at_least) for _ in range(1000)]
    assert 2.0 * at_least <= min(pauses) < 2.0 * at_least + 0.05
    assert 1.95 < max(pauses) <= 2.0
