"""Planning: the fast code against the dense reference, company, switches, known worlds."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import reference
from m3pc.config.schema import Config
from m3pc.core.rng import PLAN, counter_stream
from m3pc.model import device
from m3pc.model.weights import Weights
from m3pc.types import Decision, InputError, Window
from planner.backward import towards_goal
from planner.forward import Guidance, PlanningBatch, candidates, propose, score_plans
from planner.policy import Policy
from tests.support.models.small_weights import (
    ACTIONS,
    HORIZON,
    rows,
    tiny_config,
    tiny_weights,
    windows,
)

GUIDES: tuple[Guidance, ...] = ("m", "q", "q0")
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
    "changes told": {"model__state_tokens": "with-change"},
    "reconstructed from a line": {
        "model__state_head": "from-line",
        "planner__state_now": "reconstructed",
    },
}


def moments(weights: Weights) -> dict[str, tuple[Tensor, Tensor]]:
    scales = {
        name: getattr(weights.normaliser(), name) for name in ("states", "rewards", "returns")
    }
    return {name: (scale.mean, scale.std) for name, scale in scales.items()}


def model_state(weights: Weights) -> dict[str, Tensor]:
    prefix = "model."
    return {
        name.removeprefix(prefix): x
        for name, x in weights.tensors.items()
        if name.startswith(prefix)
    }


def question(window: Window) -> PlanningBatch:
    return PlanningBatch(
        states=torch.from_numpy(window.states),
        actions=torch.from_numpy(window.actions),
        now=int(window.now[0]),
        steps=torch.from_numpy(window.steps),
        max_episode_steps=HORIZON,
    )


def configured(name: str) -> Config:
    changes = dict(SWITCHES[name])
    preset = str(changes.pop("preset", "small"))
    return tiny_config(preset, **changes)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("now", [0, 1, 4, 7])
@torch.inference_mode()
def test_utilities_are_those_of_the_dense_reference(switch: str, guide: Guidance, now: int) -> None:
    config = configured(switch)
    weights = tiny_weights(config)
    window = windows([now] * 3)
    plans = torch.from_numpy(
        np.random.default_rng(1).uniform(-1, 1, (3, 6, 8 - now, ACTIONS)).astype(np.float32)
    )
    critic = weights.critic()
    found = score_plans(
        weights.model(), critic, weights.normaliser(), config, question(window), plans, guide
    )
    for row in range(3):
        expected = reference.score(
            model_state(weights),
            critic.quality,
            config,
            moments(weights),
            torch.from_numpy(window.states[row]),
            torch.from_numpy(window.actions[row]),
            now,
            int(window.steps[row]),
            HORIZON,
            plans[row],
            guide,
        )
        scale = expected.abs().max().item()
        assert (found[row] - expected).abs().max().item() <= 1e-5 * max(scale, 1)


def dense_proposal(
    weights: Weights, window: Window, row: int, condition: float
) -> tuple[Tensor, Tensor]:
    """Mean and log sigma [h, A] from the reference."""
    scales, now = moments(weights), int(window.now[row])
    mean, std = scales["states"]
    asked = (torch.full((1, 8, 1), condition) - scales["returns"][0]) / scales["returns"][1]
    found = reference.network(
        model_state(weights),
        weights.config.model,
        {
            "states": (torch.from_numpy(window.states[row : row + 1]) - mean) / std,
            "actions": torch.from_numpy(window.actions[row : row + 1]),
            "rewards": torch.full((1, 8, 1), torch.nan),
            "returns": asked,
        },
        reference.mask("policy", now, 8),
    )
    return found.mu[0, now:], found.log_sigma[0, now:]


@pytest.mark.parametrize("now", [0, 2, 4])
@torch.inference_mode()
def test_proposals_are_those_of_the_dense_reference(now: int) -> None:
    weights, window = tiny_weights(tiny_config()), windows([now] * 2)
    mu, log_sigma = propose(
        weights.model(), weights.normaliser(), question(window), torch.tensor([0.3, 2.0])
    )
    for row, condition in enumerate((0.3, 2.0)):
        expected_mu, expected_log_sigma = dense_proposal(weights, window, row, condition)
        assert (mu[row] - expected_mu).abs().max() <= 1e-5
        assert (log_sigma[row] - expected_log_sigma).abs().max() <= 1e-5


TUNED: dict[str, object] = {  # each of its own, so that no two can be mistaken for each other
    "planner__m__inverse_temperature": 0.3,
    "planner__q__inverse_temperature": 2.0,
    "planner__m__spread": 0.7,
    "planner__q__spread": 1.3,
}


@pytest.mark.parametrize("preset", ["parity", "paper", "small"])
@pytest.mark.parametrize("guide", GUIDES)
@torch.inference_mode()
def test_decisions_are_those_of_the_dense_reference(preset: str, guide: Guidance) -> None:
    """From the window to the action: propose, draw, score, weigh, average."""
    config = tiny_config(preset, planner__mode=guide, **TUNED)
    weights, window = tiny_weights(config), windows([4, 1, 4])
    found = Policy(weights).decide(window)
    settings = config.planner.m if guide == "m" else config.planner.q
    for row, now in enumerate(window.now.tolist()):
        step = int(window.steps[row])
        mu, log_sigma = dense_proposal(weights, window, row, float(found.target_returns[row]))
        rng = counter_stream(int(window.seeds[row]), step, PLAN)
        noise = rng.standard_normal((config.planner.candidates, *mu.shape), dtype=np.float32)
        plans = reference.propose(mu, log_sigma, torch.from_numpy(noise), settings.spread)
        utilities_ = reference.score(
            model_state(weights),
            weights.critic().quality,
            config,
            moments(weights),
            torch.from_numpy(window.states[row]),
            torch.from_numpy(window.actions[row]),
            now,
            step,
            HORIZON,
            plans,
            guide,
        )
        shares, action = reference.choose(config, guide, utilities_, plans[:, 0])
        np.testing.assert_allclose(found.actions[row], action, atol=1e-4)
        assert found.effective_candidates[row] == pytest.approx(
            1 / shares.square().sum().item(), rel=1e-3
        )
        assert found.utility_std[row] == pytest.approx(
            utilities_.std(correction=0).item(), rel=1e-3
        )
        mean = (shares * utilities_).sum().item()
        assert found.utilities[row] == pytest.approx(mean, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("guide", ["m", "q"])
@pytest.mark.parametrize("explore", [False, True])
@torch.inference_mode()
def test_one_candidate_is_drawn_by_weight_where_that_is_asked_for(
    guide: str, explore: bool
) -> None:
    """Cold, always the best one; hot, each of four by chance alone."""
    window = windows([4] * 200)
    for name in ("states", "actions", "steps"):
        getattr(window, name)[:] = getattr(window, name)[:1]  # one question, 200 chances
    step = int(window.steps[0])

    def policy(inverse_temperature: float, by: str) -> Policy:
        changes: dict[str, object] = {
            f"planner__{guide}__inverse_temperature": inverse_temperature,
            "planner__mode": guide,
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
    asked = torch.from_numpy(hot.conditions(window.steps[:1], explore=explore))
    mu, log_sigma = propose(
        hot.weights.model(), hot.weights.normaliser(), question(rows(window, [0])), asked
    )
    settings = hot.config.planner.m if guide == "m" else hot.config.planner.q
    for row in range(200):
        rng = counter_stream(int(window.seeds[row]), step, PLAN)
        noise = torch.from_numpy(rng.standard_normal((1, 4, 4, ACTIONS), dtype=np.float32))
        four = candidates(mu, log_sigma, noise, settings.spread)[0, :, 0].numpy()
        chosen = int(rng.random(dtype=np.float32) * 4)
        np.testing.assert_allclose(drawn[row], four[chosen], atol=1e-5)


def test_half_precision_is_the_networks_alone() -> None:
    """Values of hundreds that differ by hundredths: bfloat16 would make them one."""
    if not device.bf16_works():
        pytest.skip("this CPU cannot multiply bfloat16")
    exact = tiny_weights(tiny_config("small", planner__mode="q0"))
    tensors = {name: x.clone() for name, x in exact.tensors.items()}
    last = max(name for name in tensors if name.startswith("critic.q.bias"))
    tensors[last] += 300
    half = tiny_config("small", planner__mode="q0", compute__precision="bf16")
    window = windows([4, 2])
    spreads = []
    for config in (exact.config, half):
        weights = dataclasses.replace(exact, config=config, tensors=tensors)
        decision = Policy(weights).decide(window)
        assert decision.actions.dtype == np.float32
        spreads.append(decision.utility_std)
    np.testing.assert_allclose(spreads[1], spreads[0], rtol=0.1)
    assert (spreads[0] > 0).all()


@pytest.mark.parametrize("one_mask", [False, True])
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
    one_mask: bool, fill: str, first_visible: str, model: dict[str, str], now: int
) -> None:
    config = tiny_config(goal__fill=fill, goal__first_visible=first_visible, **model)
    weights, window = tiny_weights(config), windows([now] * 2)
    found = towards_goal(
        weights.model(), weights.normaliser(), config.goal, question(window), one_mask=one_mask
    )
    for row in range(2):
        expected = reference.backward(
            model_state(weights),
            config,
            moments(weights),
            torch.from_numpy(window.states[row]),
            torch.from_numpy(window.actions[row]),
            now,
            one_mask,
        )
        assert (found[row].tanh() - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", ["rcbc", "m", "q", "q0", "goal", "goal-mask"])
@pytest.mark.parametrize("explore", [False, True])
def test_many_environments_get_the_answers_that_each_gets_alone(mode: str, explore: bool) -> None:
    policy = Policy(tiny_weights(tiny_config(planner__mode=mode)))
    window = windows([4, 0, 2, 4, 1, 3, 4, 0])
    together = policy.decide(window, explore=explore)
    for row in range(len(window)):
        alone = policy.decide(rows(window, [row]), explore=explore)
        for name in ("actions", "target_returns", "utilities", "effective_candidates", "utility_std"):
            one, other = getattr(alone, name)[0], getattr(together, name)[row]
            # Utilities near each other are put on one scale, and with them their rounding.
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=name)
    assert together.version == 7


def test_chunks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_weights(tiny_config()))
    window = windows([4, 2, 4])
    whole = policy.decide(window)
    for rows_of_a_chunk in (1, 5, 25):
        monkeypatch.setattr("planner.forward.CHUNK", rows_of_a_chunk * 16)
        parts = policy.decide(window)
        np.testing.assert_allclose(parts.actions, whole.actions, atol=1e-4)
        np.testing.assert_allclose(parts.utilities, whole.utilities, rtol=1e-4, atol=1e-4)


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


def decided(**changes: object) -> Decision:
    return Policy(tiny_weights(tiny_config("small", **changes))).decide(windows([4]))


def test_the_effective_number_of_candidates_follows_the_temperature() -> None:
    flat = decided(planner__m__inverse_temperature=0.0)
    sharp = decided(planner__m__inverse_temperature=1e4)
    assert flat.effective_candidates[0] == pytest.approx(12)
    assert sharp.effective_candidates[0] == pytest.approx(1, abs=1e-3)
    assert flat.utility_std[0] == sharp.utility_std[0] > 0


def test_no_spread_leaves_one_candidate_in_many_copies() -> None:
    still = decided(planner__m__spread=0.0)
    cloned = decided(planner__mode="rcbc")
    np.testing.assert_allclose(still.actions, cloned.actions, atol=1e-6)
    assert still.utility_std[0] == pytest.approx(0, abs=1e-5)
    assert np.isnan(cloned.effective_candidates[0])


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
def test_the_return_asked_for_is_stated(
    changes: dict[str, object], explore: bool, expected: list[float]
) -> None:
    """The envelope falls from 2 to 1 over 40 steps, the range is -1 to 3."""
    policy = Policy(tiny_weights(tiny_config("small", **changes)))
    found = policy.conditions(np.asarray([5, 1000]), explore=explore)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_window_of_another_shape_is_refused() -> None:
    policy = Policy(tiny_weights(tiny_config()))
    window = windows([4], length=7)
    with pytest.raises(InputError, match="expected"):
        policy.decide(window)


def test_a_window_that_is_not_finite_is_refused() -> None:
    window = windows([4])
    window.states[0, 2, 1] = np.nan
    with pytest.raises(InputError, match="NaN"):
        Policy(tiny_weights(tiny_config())).decide(window)


def test_settings_of_the_model_cannot_change_after_training() -> None:
    weights = tiny_weights(tiny_config())
    with pytest.raises(InputError, match="belong to the weights"):
        Policy(weights, tiny_config(model__width=32))


def test_spread_widens_candidates_around_the_same_middle() -> None:
    mu, log_sigma = torch.full((1, 2, 1), 0.3), torch.full((1, 2, 1), np.log(0.5))
    noise = torch.tensor([0.0, 1.0])[None, :, None, None].expand(1, 2, 2, 1)
    for spread in (0.5, 1.0):
        plans = candidates(mu, log_sigma, noise, spread)
        expected = np.tanh([0.3, 0.3 + 0.5 * spread])
        assert plans[0, :, 0, 0].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
