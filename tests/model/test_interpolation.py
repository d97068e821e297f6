"""Lines through known states, on cases that can be checked by hand."""

import pytest
import torch

from m3pc.model.btm import TrajectoryModel
from m3pc.model.interpolation import CHANGE_SCALE, line_weights, with_changes
from m3pc.model.masks import STATES, token_mask
from m3pc.model.normalisation import Tokens
from tests.support.models.small_weights import tiny_config


@pytest.mark.parametrize(
    ("known", "values", "expected"),
    [
        pytest.param((0, 4), (0.0, 8.0), [0, 2, 4, 6, 8, 8], id="between, then level"),
        pytest.param((1, 2, 5), (3.0, 5.0, -1.0), [3, 3, 5, 3, 1, -1], id="from knot to knot"),
        pytest.param((3,), (7.0,), [7, 7, 7, 7, 7, 7], id="one"),
        pytest.param((), (), [0, 0, 0, 0, 0, 0], id="none"),
    ],
)
def test_a_line_goes_from_known_step_to_known_step(
    known: tuple[int, ...], values: tuple[float, ...], expected: list[float]
) -> None:
    weights = line_weights(known, tuple(range(6)))
    assert (weights @ torch.tensor(values, dtype=torch.float32)).tolist() == pytest.approx(expected)


def test_weights_are_of_the_queried_steps_alone() -> None:
    assert line_weights((0, 4), (3,)).tolist() == [[0.25, 0.75]]


def test_a_new_model_predicts_the_line_itself() -> None:
    torch.manual_seed(0)
    model = TrajectoryModel(tiny_config(model__state_head="from-line").model, 2, 1)
    states = torch.full((1, 8, 2), torch.nan)
    states[0, 0], states[0, 7] = torch.tensor([0.0, 7.0]), torch.tensor([7.0, 0.0])
    unknown = torch.full((1, 8, 1), torch.nan)
    ends = token_mask(8, {STATES: [0, 7]})
    predicted = model(Tokens(states, unknown, unknown, unknown), ends).states
    line = torch.arange(8.0)
    torch.testing.assert_close(predicted, torch.stack([line, 7 - line], dim=1)[None])


def test_a_change_is_the_slope_since_the_state_before() -> None:
    states = torch.tensor([[[1.0, 0.0], [3.0, 0.5], [9.0, 0.5]]])
    slopes = [[0, 0], [2, 0.5], [2, 0]]  # 6 in three steps are 2 a step
    extended = with_changes(states, [0, 1, 4])
    assert extended[0, :, :2].tolist() == states[0].tolist()
    assert (extended[0, :, 2:] / CHANGE_SCALE).tolist() == slopes
    assert with_changes(states[:, :1], [5]).tolist() == [[[1.0, 0.0, 0.0, 0.0]]]
