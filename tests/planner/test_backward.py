"""Backward planning against the dense reference."""

import pytest
import torch

from planner.backward import plan_backward
from tests.support.models.dense import dense_backward, planning_batch
from tests.support.models.small_weights import tiny_config, tiny_weights, windows


@pytest.mark.parametrize("single_mask", [False, True])
@pytest.mark.parametrize("fill", ["between", "released"])
@pytest.mark.parametrize("first_visible", ["goal", "waypoints"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="absolute"),
        pytest.param({"model__state_head": "from-line"}, id="from a line"),
        pytest.param({"model__state_tokens": "with-change"}, id="with changes"),
    ],
)
@pytest.mark.parametrize("now", [0, 3, 4])
@torch.inference_mode()
def test_backward_plans_are_those_of_the_dense_reference(
    single_mask: bool, fill: str, first_visible: str, model: dict[str, str], now: int
) -> None:
    config = tiny_config(goal__fill=fill, goal__first_visible=first_visible, **model)
    weights, window = tiny_weights(config), windows([now] * 2)
    actions = plan_backward(
        weights.model(),
        weights.normaliser(),
        config,
        planning_batch(window),
        single_mask=single_mask,
    )
    for row in range(2):
        expected = dense_backward(weights, window, row, single_mask=single_mask)
        assert (actions[row] - expected).abs().max() <= 1e-5
