"""Forward planning: every stage against the dense reference, chunks, and how a plan is drawn."""

import numpy as np
import pytest
import torch
from torch import Tensor

from m3pc.config.schema import Config
from m3pc.model.device import chunk_rows
from planner.forward import (
    Guidance,
    PlanOutput,
    Proposal,
    chunks,
    draw_candidates,
    imagine,
    plan,
    propose,
    score,
)
from tests.support.models.dense import dense_proposal, dense_utilities, planning_batch
from tests.support.models.small_weights import ACTIONS, tiny_config, tiny_weights, windows

GUIDANCES: tuple[Guidance, ...] = ("m", "q", "q0")
SWITCHES: dict[str, dict[str, object]] = {
    "small": {},
    "parity": {"preset": "parity"},
    "paper": {"preset": "paper"},
    "discount starts at 1": {"planner__discount_start": 1},
    "reconstructed": {"planner__state_now": "reconstructed"},
    "a thousand steps": {"planner__return_scale": "1000-steps"},
    "sums": {"returns__mode": "sum", "returns__discount": 0.9},
    "other numbers": {"planner__discount": 0.7, "planner__lam": 0.2},
    "two decoder layers": {"model__decoder_layers": 2, "model__encoder_layers": 1},
    "states from a line": {"model__state_head": "from-line"},
    "states with changes": {"model__state_tokens": "with-change"},
    "reconstructed from a line": {
        "model__state_head": "from-line",
        "planner__state_now": "reconstructed",
    },
}


def configured(switch: str) -> Config:
    changes = dict(SWITCHES[switch])
    preset = str(changes.pop("preset", "small"))
    return tiny_config(preset, **changes)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("guidance", GUIDANCES)
@pytest.mark.parametrize("now", [0, 1, 4, 7])
@torch.inference_mode()
def test_utilities_are_those_of_the_dense_reference(
    switch: str, guidance: Guidance, now: int
) -> None:
    config = configured(switch)
    weights, window = tiny_weights(config), windows([now] * 3)
    plans = torch.from_numpy(
        np.random.default_rng(1).uniform(-1, 1, (3, 6, 8 - now, ACTIONS)).astype(np.float32)
    )
    batch = planning_batch(window)
    imagined = imagine(
        weights.model(), weights.normaliser(), config.planner, batch, plans, guidance
    )
    utilities = score(imagined, plans, batch, config, guidance, weights.critic().min_q)
    for row in range(3):
        expected = dense_utilities(weights, window, row, plans[row], guidance)
        scale = expected.abs().max().item()
        assert (utilities[row] - expected).abs().max().item() <= 1e-5 * max(scale, 1)


@pytest.mark.parametrize("now", [0, 2, 4])
@torch.inference_mode()
def test_proposals_are_those_of_the_dense_reference(now: int) -> None:
    config = tiny_config()
    weights, window = tiny_weights(config), windows([now] * 2)
    for target_return in (0.3, 2.0):
        batch = planning_batch(window, target_return)
        proposal = propose(weights.model(), weights.normaliser(), config, batch)
        for row in range(2):
            mu, log_sigma = dense_proposal(weights, window, row, target_return)
            assert (proposal.mu[row] - mu).abs().max() <= 1e-5
            assert (proposal.log_sigma[row] - log_sigma).abs().max() <= 1e-5


def test_noise_scale_widens_candidates_around_the_same_median() -> None:
    proposal = Proposal(mu=torch.full((1, 2, 1), 0.3), log_sigma=torch.full((1, 2, 1), np.log(0.5)))
    noise = torch.tensor([0.0, 1.0])[None, :, None, None].expand(1, 2, 2, 1)
    for noise_scale in (0.5, 1.0):
        plans = draw_candidates(proposal, noise, noise_scale)
        expected = np.tanh([0.3, 0.3 + 0.5 * noise_scale])
        assert plans[0, :, 0, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def planned(
    config: Config, *, environments: int, candidates: int, proposal: Proposal | None = None
) -> tuple[PlanOutput, Tensor]:
    """The output for environments in the middle of an episode, and the plans behind it."""
    weights, now = tiny_weights(config), 4
    batch = planning_batch(windows([now] * environments), 1.0)
    model, critic, normaliser = weights.model(), weights.critic(), weights.normaliser()
    noise = torch.randn(
        environments, candidates, 8 - now, ACTIONS, generator=torch.Generator().manual_seed(0)
    )
    output = plan(
        model,
        critic,
        normaliser,
        config,
        batch,
        "m",
        noise=noise,
        chance=torch.linspace(0, 0.99, environments),
        sample=torch.arange(environments) % 2 == 0,
        proposal=proposal,
    )
    drawn = draw_candidates(
        propose(model, normaliser, config, batch), noise, config.planner.m.spread
    )
    return output, drawn


@torch.inference_mode()
def test_one_plan_is_drawn_or_the_mean_is_taken_as_each_row_says() -> None:
    output, plans = planned(tiny_config(), environments=10, candidates=6)
    first, weights = plans[:, :, 0], output.weighting.weights
    for row in range(10):
        if row % 2:
            torch.testing.assert_close(output.actions[row], weights[row] @ first[row])
        else:
            assert (output.actions[row] == first[row]).all(dim=-1).sum() == 1


@torch.inference_mode()
def test_a_proposal_that_is_passed_in_is_not_computed_again() -> None:
    fixed = Proposal(
        mu=torch.full((2, 4, ACTIONS), 0.1), log_sigma=torch.full((2, 4, ACTIONS), -9.0)
    )
    output, _ = planned(tiny_config(), environments=2, candidates=6, proposal=fixed)
    torch.testing.assert_close(output.actions, torch.full((2, ACTIONS), 0.1), atol=0.01, rtol=0)


@pytest.mark.parametrize(("environments", "candidates"), [(1, 4001), (801, 5), (3, 2001)])
@torch.inference_mode()
def test_chunks_change_nothing_but_rounding(environments: int, candidates: int) -> None:
    config = tiny_config()
    assert environments * candidates > chunk_rows("cpu", config.model.width)
    output, plans = planned(config, environments=environments, candidates=candidates)
    weights, batch = tiny_weights(config), planning_batch(windows([4] * environments))
    imagined = imagine(weights.model(), weights.normaliser(), config.planner, batch, plans, "m")
    expected = score(imagined, plans, batch, config, "m", weights.critic().min_q)
    torch.testing.assert_close(output.utilities, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_rows", [0, 1, 5, 12, 25, 60, 1000])
def test_chunks_cover_every_plan_once_and_hold_no_more_rows_than_allowed(max_rows: int) -> None:
    covered = np.zeros((5, 12), np.int64)
    for environments, plans in chunks(5, 12, max_rows):
        covered[environments, plans] += 1
        assert covered[environments, plans].size <= max(max_rows, 1)
    assert (covered == 1).all()


def test_an_accelerator_computes_everything_at_once() -> None:
    (only,) = chunks(64, 625, chunk_rows("cuda", 512))
    assert np.zeros((64, 625))[only].size == 64 * 625
    assert chunk_rows("cpu", 512) == 125
