"""From a window to a decision: against the dense reference, in batches, with the switches."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import reference
from m3pc.config.schema import MODES
from m3pc.core.rng import PLAN, counter_stream
from m3pc.model import device
from m3pc.model.btm import TrajectoryModel
from m3pc.types import Decision, InputError, PlanRequest, Window
from planner.forward import Guidance, draw_candidates, propose
from planner.policy import FORWARD, Policy
from planner.requests import DECISION_FIELDS, select_rows
from tests.support.models.dense import dense_proposal, dense_utilities, planning_batch
from tests.support.models.small_weights import ACTIONS, tiny_config, tiny_weights, windows

TUNED: dict[str, object] = {  # all different, so that no two can be mistaken for each other
    "planner__m__inverse_temperature": 0.3,
    "planner__q__inverse_temperature": 2.0,
    "planner__m__spread": 0.7,
    "planner__q__spread": 1.3,
}


@pytest.mark.parametrize("preset", ["parity", "paper", "small"])
@pytest.mark.parametrize("guidance", ["m", "q", "q0"])
@torch.inference_mode()
def test_decisions_are_those_of_the_dense_reference(preset: str, guidance: Guidance) -> None:
    """From the window to the action: propose, draw, imagine, score, weigh, average."""
    config = tiny_config(preset, planner__mode=guidance, **TUNED)
    weights, window = tiny_weights(config), windows([4, 1, 4])
    decision = Policy(weights).decide(window)
    settings = config.planner.m if guidance == "m" else config.planner.q
    for row in range(len(window)):
        target_return = float(decision.target_returns[row])
        mu, log_sigma = dense_proposal(weights, window, row, target_return)
        rng = counter_stream(int(window.seeds[row]), int(window.steps[row]), PLAN)
        noise = rng.standard_normal((config.planner.candidates, *mu.shape), dtype=np.float32)
        plans = reference.propose(mu, log_sigma, torch.from_numpy(noise), settings.spread)
        utilities = dense_utilities(weights, window, row, plans, guidance)
        shares, action = reference.choose(config, guidance, utilities, plans[:, 0])
        np.testing.assert_allclose(decision.actions[row], action, atol=1e-4)
        assert decision.effective_candidates[row] == pytest.approx(
            1 / shares.square().sum().item(), rel=1e-3
        )
        utility_std = utilities.std(correction=0).item()
        assert decision.utility_std[row] == pytest.approx(utility_std, rel=1e-3)
        mean = (shares * utilities).sum().item()
        assert decision.utilities[row] == pytest.approx(mean, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("guidance", ["m", "q"])
@pytest.mark.parametrize("explore", [False, True])
@torch.inference_mode()
def test_one_candidate_is_drawn_by_weight_where_the_settings_say_so(
    guidance: str, explore: bool
) -> None:
    """Cold, always the best one; hot, each of four by chance alone."""
    window = windows([4] * 200)
    for name in ("states", "actions", "steps"):
        getattr(window, name)[:] = getattr(window, name)[:1]  # one situation, 200 chances
    step = int(window.steps[0])

    def policy(inverse_temperature: float, by: str) -> Policy:
        changes: dict[str, object] = {
            f"planner__{guidance}__inverse_temperature": inverse_temperature,
            "planner__mode": guidance,
            "planner__candidates": 4,
            "planner__explore_by" if explore else "planner__evaluate_by": by,
            "planner__evaluate_by" if explore else "planner__explore_by": "mean",
        }
        return Policy(tiny_weights(tiny_config("small", **changes)))

    best = policy(1e6, "sample").decide(window, explore=explore)
    mean = policy(1e6, "mean").decide(window, explore=explore)
    np.testing.assert_allclose(best.actions, mean.actions, atol=1e-5)

    hot = policy(0.0, "sample")
    drawn = hot.decide(window, explore=explore).actions
    target_return = float(hot.target_returns(window.steps[:1], explore=explore)[0])
    batch = planning_batch(select_rows(window, slice(1)), target_return)
    proposal = propose(hot.weights.model(), hot.weights.normaliser(), hot.config, batch)
    settings = hot.config.planner.m if guidance == "m" else hot.config.planner.q
    for row in range(200):
        rng = counter_stream(int(window.seeds[row]), step, PLAN)
        noise = torch.from_numpy(rng.standard_normal((1, 4, 4, ACTIONS), dtype=np.float32))
        four = draw_candidates(proposal, noise, settings.spread)[0, :, 0].numpy()
        index = int(rng.random(dtype=np.float32) * 4)
        np.testing.assert_allclose(drawn[row], four[index], atol=1e-5)


def test_forward_modes_share_one_proposal_per_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imagining does not go through `forward`, so its calls are the proposals."""
    policy = Policy(tiny_weights(tiny_config()))
    batches: list[int] = []
    forward = TrajectoryModel.forward

    def counted(self: TrajectoryModel, tokens: Any, *masks: Any, **read: Any) -> Any:
        batches.append(len(tokens.states))
        return forward(self, tokens, *masks, **read)

    monkeypatch.setattr(TrajectoryModel, "forward", counted)
    policy.answer([PlanRequest(window=windows([4, 2]), mode=mode) for mode in FORWARD])
    assert batches == [len(FORWARD)] * 2


def test_half_precision_is_for_the_network_alone() -> None:
    """Values of hundreds that differ by hundredths: bfloat16 would make them one."""
    if not device.bf16_works():
        pytest.skip("this CPU cannot multiply bfloat16")
    exact = tiny_weights(tiny_config("small", planner__mode="q0"))
    tensors = {name: x.clone() for name, x in exact.tensors.items()}
    last = max(name for name in tensors if name.startswith("critic.q.bias"))
    tensors[last] += 300
    half = tiny_config("small", planner__mode="q0", compute__precision="bf16")
    window = windows([4, 2])
    utility_std = []
    for config in (exact.config, half):
        weights = dataclasses.replace(exact, config=config, tensors=tensors)
        decision = Policy(weights).decide(window)
        assert decision.actions.dtype == np.float32
        utility_std.append(decision.utility_std)
    np.testing.assert_allclose(utility_std[1], utility_std[0], rtol=0.1)
    assert (utility_std[0] > 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("explore", [False, True])
def test_many_environments_get_the_decisions_that_each_gets_alone(mode: str, explore: bool) -> None:
    policy = Policy(tiny_weights(tiny_config(planner__mode=mode)))
    window = windows([4, 0, 2, 4, 1, 3, 4, 0])
    together = policy.decide(window, explore=explore)
    for row in range(len(window)):
        alone = policy.decide(select_rows(window, slice(row, row + 1)), explore=explore)
        for name in DECISION_FIELDS:
            one, other = getattr(alone, name)[0], getattr(together, name)[row]
            # Utilities near each other are put on one scale, and with them their rounding.
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=name)
    assert together.version == 7


def test_another_seed_or_step_draws_other_candidates() -> None:
    policy = Policy(tiny_weights(tiny_config()))
    window = windows([4, 4])
    same = {name: getattr(window, name).copy() for name in window.__slots__}
    for name in ("states", "actions"):
        same[name][1] = same[name][0]
    first = policy.decide(Window(**same))
    assert np.abs(first.actions[0] - first.actions[1]).max() > 1e-3
    same["steps"][1], same["seeds"][1] = same["steps"][0], same["seeds"][0]
    again = policy.decide(Window(**same))
    np.testing.assert_allclose(again.actions[0], again.actions[1], atol=1e-4)


def decide(**changes: object) -> Decision:
    return Policy(tiny_weights(tiny_config("small", **changes))).decide(windows([4]))


def test_the_effective_number_of_candidates_follows_the_temperature() -> None:
    flat = decide(planner__m__inverse_temperature=0.0)
    sharp = decide(planner__m__inverse_temperature=1e4)
    assert flat.effective_candidates[0] == pytest.approx(12)
    assert sharp.effective_candidates[0] == pytest.approx(1, abs=1e-3)
    assert flat.utility_std[0] == sharp.utility_std[0] > 0


def test_without_noise_all_candidates_are_the_median() -> None:
    still = decide(planner__m__spread=0.0)
    median = decide(planner__mode="rcbc")
    np.testing.assert_allclose(still.actions, median.actions, atol=1e-6)
    assert still.utility_std[0] == pytest.approx(0, abs=1e-5)
    assert np.isnan(median.effective_candidates[0])


@pytest.mark.parametrize(
    ("changes", "explore", "expected"),
    [
        ({}, False, [2 - 5 / 39, 1.0]),
        ({"conditioning__evaluation_ratio": 0.5}, False, [1 - 5 / 78, 0.5]),
        ({"conditioning__evaluation": "maximum"}, False, [3, 3]),
        ({"conditioning__exploration": "maximum"}, True, [3, 3]),
        (
            {"conditioning__exploration": "maximum", "conditioning__exploration_ratio": 0.5},
            True,
            [1, 1],
        ),
        ({"conditioning__exploration_ratio": 0.5}, True, [1 - 5 / 78, 0.5]),
    ],
)
def test_target_returns_follow_the_settings(
    changes: dict[str, object], explore: bool, expected: list[float]
) -> None:
    """The envelope falls from 2 to 1 over 40 steps, the range is -1 to 3."""
    policy = Policy(tiny_weights(tiny_config("small", **changes)))
    target_returns = policy.target_returns(np.asarray([5, 1000]), explore=explore)
    np.testing.assert_allclose(target_returns, expected, rtol=1e-6)


def test_settings_of_the_model_cannot_change_after_training() -> None:
    weights = tiny_weights(tiny_config())
    with pytest.raises(InputError, match="belong to the weights"):
        Policy(weights, tiny_config(model__width=32))
