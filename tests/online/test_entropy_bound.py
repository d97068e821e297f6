"""The entropy's bound and its multiplier: a bound violated on purpose is met again."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.online import OnlineLearner
from m3pc.config.schema import Config
from m3pc.model.device import prepare_compute
from m3pc.model.weights import Weights
from m3pc.types import WindowBatch
from tests.support.models.small_weights import (
    MAX_EPISODE_STEPS,
    tiny_config,
    tiny_weights,
    window_batch,
)

LAX = -10.0  # nats: below the entropy of the smallest sigma, so never violated
SETTINGS: dict[str, Any] = {
    "online__lr": 3e-3,
    "entropy__alpha": 1.0,
    "entropy__alpha_lr": 0.1,
    "model__encoder_layers": 1,
    "masks__mixture__dynamics": 0.0,  # every update scores actions
}


def always_the_same_action(number: int) -> WindowBatch[NDArray[Any]]:
    """The most likely policy is this action with the smallest sigma."""
    batch = window_batch(16, seed=number)
    return replace(batch, actions=np.full_like(batch.actions, 0.3))


def finetuned(weights: Weights, config: Config, updates: int) -> tuple[OnlineLearner, Any, Any]:
    """The learner after some updates, with the entropy and alpha of each."""
    prepare_compute(config.compute)
    learner = OnlineLearner(weights, {}, config)
    rows = [learner.update(k, always_the_same_action(k), ()) for k in range(updates)]
    return learner, [n["entropy"] for n in rows], [n["alpha"] for n in rows]


@pytest.fixture(scope="module")
def sharp() -> tuple[Weights, list[float], list[float]]:
    """A policy that became sharp without a bound, and its entropy and alpha on the way."""
    config = tiny_config(entropy__target=LAX, **SETTINGS)
    learner, entropy, alpha = finetuned(tiny_weights(config), config, 60)
    envelope = np.ones(MAX_EPISODE_STEPS, np.float32)
    return learner.weights(1, envelope=envelope), entropy, alpha


def test_alpha_falls_while_the_entropy_is_above_its_bound(
    sharp: tuple[Weights, list[float], list[float]],
) -> None:
    _, entropy, alpha = sharp
    assert min(entropy) > LAX
    assert all(later < earlier for earlier, later in pairwise([1.0, *alpha]))
    assert entropy[-1] < entropy[0] - 1  # the policy became sharper


def test_a_bound_that_is_violated_raises_alpha_until_it_is_met(
    sharp: tuple[Weights, list[float], list[float]],
) -> None:
    weights, before, _ = sharp
    bound = before[-1] + 1.0
    config = tiny_config(entropy__target=bound, **SETTINGS)
    _, entropy, alpha = finetuned(weights, config, 60)
    met = next(k for k, nats in enumerate(entropy) if nats > bound)
    assert met > 5
    assert all(later > earlier for earlier, later in pairwise([1.0, *alpha[:met]]))
    assert all(nats > bound for nats in entropy[met + 3 : met + 10])
    assert alpha[-1] < max(alpha)  # it falls again above the bound
