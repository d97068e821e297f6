"""The plain network and planner by hand, on a small random network."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from benchmarks import reference
from benchmarks.reference import (
    MODALITIES,
    Critic,
    Guidance,
    Outputs,
    backward,
    choose,
    mask,
    network,
    propose,
    score,
    utility,
)
from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config
from tests.support.models.their_names import STACKED, renamed

SIZES = {"states": 3, "actions": 2, "rewards": 1, "returns": 1}  # of the small random network
WINDOW = 6


# A small random network


def small(changes: Mapping[str, object]) -> Config:
    sizes = {"model.width": 8, "model.heads": 2, "model.window": WINDOW, "planner.horizon": 2}
    return replace(PRESETS["paper"], {**sizes, **changes})


PAPER = small({})
PLAIN = {name: (torch.zeros(1), torch.ones(1)) for name in MODALITIES}  # normalised is raw


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Weight of each linear layer and norm; their biases have the first of the sizes."""
    square, row = (width, width), (width,)
    sizes: dict[str, tuple[int, ...]] = {"encoder_norm": row, "decoder_norm": row}
    for name, size in SIZES.items():
        out = 2 * size if name == "actions" else size
        sizes |= {f"embed.{name}": (width, size), f"decoder_embed.{name}": square}
        sizes |= {f"heads.{name}.0": row, f"heads.{name}.1": square}
        sizes |= {f"heads.{name}.3": (out, width)}
    for layer in ("encoder.0", "encoder.1", "decoder.0"):
        sizes |= {f"{layer}.norm1": row, f"{layer}.norm2": row}
        sizes |= {f"{layer}.qkv": (3 * width, width), f"{layer}.out": square}
        sizes |= {f"{layer}.expand": (4 * width, width), f"{layer}.contract": (width, 4 * width)}
    return sizes


def random_state() -> dict[str, Tensor]:
    """Weights of the small network with the paper's two-layer action head."""
    rng, width = torch.Generator().manual_seed(0), PAPER.model.width
    sizes: dict[str, tuple[int, ...]] = dict.fromkeys(STACKED, (4, width))
    layers = shapes(width)
    sizes |= {f"{name}.weight": shape for name, shape in layers.items()}
    sizes |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    return {name: torch.randn(size, generator=rng) / 2 for name, size in sizes.items()}


def random_inputs(batch: int = 3) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return {name: torch.randn(batch, WINDOW, size, generator=rng) for name, size in SIZES.items()}


def answers(inputs: Mapping[str, Tensor], visible: Tensor) -> Outputs:
    return network(random_state(), PAPER.model, inputs, visible)


def test_layers_are_the_pre_norm_layers_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 32, dropout=0, activation="gelu", batch_first=True, norm_first=True
    )
    stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    for parameter in stack.parameters():
        nn.init.normal_(parameter)
    state = renamed({f"encoder.{name}": value for name, value in stack.state_dict().items()})
    tokens = torch.randn(3, 5, 8)
    torch.testing.assert_close(reference.transformer(state, "encoder", 2, 2, tokens), stack(tokens))


def test_hidden_inputs_do_not_reach_the_answer() -> None:
    inputs, visible = random_inputs(), mask("policy", now=2, length=WINDOW)
    spoilt = {
        name: torch.where(row[:, None], inputs[name], torch.nan)
        for name, row in zip(MODALITIES, visible, strict=True)
    }
    torch.testing.assert_close(answers(spoilt, visible).mu, answers(inputs, visible).mu)


def test_visible_inputs_of_every_modality_reach_the_answer() -> None:
    inputs, visible = random_inputs(), torch.ones(4, WINDOW, dtype=torch.bool)
    before = answers(inputs, visible).mu
    for name in MODALITIES:
        changed = {**inputs, name: inputs[name] + 1}
        assert not torch.allclose(answers(changed, visible).mu, before)


def test_network_that_sees_nothing_gives_every_row_the_same_finite_answer() -> None:
    outputs = answers(random_inputs(), torch.zeros(4, WINDOW, dtype=torch.bool))
    assert outputs.states.isfinite().all()
    torch.testing.assert_close(outputs.states[0], outputs.states[1])


def test_two_layer_action_head_gives_mu_and_then_a_bounded_log_sigma() -> None:
    state = random_state()
    state["heads.actions.3.weight"].zero_()
    state["heads.actions.3.bias"] = torch.tensor([1.0, 2.0, 50.0, -50.0])
    config = small({"model.log_sigma_min": -3.0, "model.log_sigma_max": 1.0}).model
    outputs = network(state, config, random_inputs(), mask("policy", now=2, length=WINDOW))
    assert outputs.mu[0, 0].tolist() == [1, 2]
    assert outputs.log_sigma[0, 0].tolist() == [1, -3]


# Forward planning


@pytest.mark.parametrize(
    ("rewards", "values", "start", "expected"),
    [
        ([1, 1, 1, 1], [10, 10, 10, 10], 0, 11.05129144),
        ([1, 1, 1, 1], [10, 10, 10, 10], 1, 10.94077853),
        ([1, 2, 3, 4], [5, 1, 2, 8], 0, 6.144450272),
        ([7], [5], 0, 5),
    ],
)
def test_utility_matches_the_worked_examples(
    rewards: list[float], values: list[float], start: int, expected: float
) -> None:
    rows = torch.tensor([[rewards], [values]], dtype=torch.float64)
    utilities = utility(rows[0], rows[1], discount=0.99, lam=0.6, start=start)
    assert utilities.tolist() == pytest.approx([expected], abs=5e-9)


@pytest.mark.parametrize(("lam", "expected"), [(0, 5), (1, 1 + 2 + 3 + 8)])
def test_lambda_0_trusts_the_first_value_and_1_the_rewards(lam: float, expected: float) -> None:
    rows = torch.tensor([[[1.0, 2, 3, 4]], [[5.0, 1, 2, 8]]])
    assert utility(rows[0], rows[1], discount=1, lam=lam, start=0).tolist() == [expected]


def test_candidates_are_squashed_draws_around_mu() -> None:
    mu, log_sigma = torch.tensor([[0.5]]), torch.tensor([[2.0]]).log()
    noise = torch.tensor([0.0, 1.0, -1.0])[:, None, None]
    candidates = propose(mu, log_sigma, noise, noise_scale=0.25)
    torch.testing.assert_close(candidates.flatten(), torch.tensor([0.5, 1.0, 0.0]).tanh())


class FixedCritic:
    """Values everything alike and remembers what it was asked about."""

    def __init__(self, value: float) -> None:
        self._value = value
        self.states = self.actions = torch.empty(0)

    def __call__(self, states: Tensor, actions: Tensor) -> Tensor:
        self.states, self.actions = states, actions
        return torch.full((len(states),), self._value)


def scored(
    config: Config, guide: Guidance, critic: Critic, *, reward: float, ret: float, step: int = 0
) -> list[float]:
    """Two candidates at now = 2, H = 10, under a network that predicts the same everywhere."""
    inputs, candidates = random_inputs(), torch.zeros(2, WINDOW - 2, SIZES["actions"])
    means = {"rewards": torch.tensor([reward]), "returns": torch.tensor([ret])}
    moments = PLAIN | {name: (mean, torch.zeros(1)) for name, mean in means.items()}
    place = (inputs["states"][0], inputs["actions"][0], 2, step, 10)
    return score(random_state(), critic, config, moments, *place, candidates, guide).tolist()


@pytest.mark.parametrize(
    ("changes", "ret", "expected"),
    [
        ({"returns.mode": "sum"}, 10, 11.05129144),
        ({"returns.mode": "sum", "planner.return_scale": "1000-steps"}, 10, 11.05129144),
        ({"returns.mode": "sum", "planner.discount_start": 1}, 10, 10.94077853),
        ({"planner.return_scale": "1000-steps"}, 0.01, 11.05129144),
        ({"planner.lam": 0.0}, 5, 15),  # 3 steps remain
        ({"planner.lam": 1.0, "planner.discount": 1.0}, 5, 3),  # none at the last one
    ],
)
def test_predicted_returns_are_brought_to_the_scale_of_sums(
    changes: Mapping[str, object], ret: float, expected: float
) -> None:
    utilities = scored(small(changes), "m", FixedCritic(0), reward=1, ret=ret, step=7)
    assert utilities == pytest.approx([expected] * 2)


def test_no_reward_remains_after_the_step_limit() -> None:
    utilities = scored(small({"planner.lam": 0.0}), "m", FixedCritic(0), reward=1, ret=5, step=12)
    assert utilities == [0, 0]


def test_critic_values_every_imagined_step() -> None:
    critic = FixedCritic(10)
    assert scored(PAPER, "q", critic, reward=1, ret=0) == pytest.approx([11.05129144] * 2)
    assert critic.states.shape == (2 * 4, SIZES["states"])
    assert critic.actions.shape == (2 * 4, SIZES["actions"])


@pytest.mark.parametrize("guide", ["q", "q0"])
@pytest.mark.parametrize("state_now", ["observed", "reconstructed"])
def test_critic_is_asked_about_the_current_state_as_configured(
    state_now: str, guide: Guidance
) -> None:
    inputs, critic = random_inputs(), FixedCritic(10)
    inputs["actions"][:, 2:] = 0  # the candidates of `scored`
    imagined = answers(inputs, mask("dynamics", now=2, length=WINDOW)).states[0, 2]
    scored(small({"planner.state_now": state_now}), guide, critic, reward=1, ret=0)
    expected = inputs["states"][0, 2] if state_now == "observed" else imagined
    torch.testing.assert_close(critic.states[0], expected)


def test_critic_now_scores_the_first_action_alone() -> None:
    critic = FixedCritic(10)
    assert scored(PAPER, "q0", critic, reward=1, ret=0) == [10, 10]
    assert critic.actions.shape == (2, SIZES["actions"])


ACTIONS = torch.tensor([[1.0], [-1.0]])


@pytest.mark.parametrize(("guide", "better"), [("m", 0.75), ("q", 0.9), ("q0", 0.9)])
def test_each_guide_has_its_own_temperature(guide: Guidance, better: float) -> None:
    xi = {"planner.m.inverse_temperature": 1.0, "planner.q.inverse_temperature": 2.0}
    weights, action = choose(small(xi), guide, torch.tensor([3.0, 1.0]).log(), ACTIONS)
    assert weights.tolist() == pytest.approx([better, 1 - better])
    assert action.tolist() == pytest.approx([2 * better - 1])


def test_standardised_utilities_have_no_unit() -> None:
    config, utilities = small({"planner.utility": "standardised"}), torch.tensor([3.0, 1.0])
    weights, _ = choose(config, "m", utilities, ACTIONS)
    assert weights.tolist() == pytest.approx([0.8807971, 0.1192029])  # 2 deviations apart
    torch.testing.assert_close(choose(config, "m", 100 * utilities, ACTIONS)[0], weights)


def test_equal_utilities_weigh_candidates_alike() -> None:
    config = small({"planner.utility": "standardised"})
    assert choose(config, "m", torch.tensor([3.0, 3.0]), ACTIONS)[0].tolist() == [0.5, 0.5]


def test_chosen_action_is_one_that_the_environment_takes() -> None:
    _, action = choose(PAPER, "m", torch.zeros(2), 1.5 * ACTIONS.abs())
    assert action.tolist() == [1]


# Backward planning


def towards(config: Config, now: int, *, moved: int | None = None, single: bool = False) -> Tensor:
    """The action in a random window, of which one state may be moved."""
    inputs = random_inputs()
    states = inputs["states"][0].clone()
    if moved is not None:
        states[moved] += 1
    return backward(random_state(), config, PLAIN, states, inputs["actions"][0], now, single)


def heeded(config: Config, now: int, *, single: bool = False) -> str:
    """A picture of the states that the action depends on."""
    before = towards(config, now, single=single)
    moved = [towards(config, now, moved=position, single=single) for position in range(WINDOW)]
    return "".join(".#"[not torch.allclose(after, before)] for after in moved)


@pytest.mark.parametrize(
    ("fill", "first_visible", "now", "picture"),
    [
        ("between", "goal", 1, "##...#"),
        ("between", "goal", 0, "#....#"),
        ("between", "waypoints", 0, "######"),
        ("released", "goal", 1, "###..#"),  # the next waypoint stays
        ("released", "goal", 0, "##...#"),
    ],
)
def test_backward_plans_heed_the_past_and_the_goal(
    fill: str, first_visible: str, now: int, picture: str
) -> None:
    assert heeded(small({"goal.fill": fill, "goal.first_visible": first_visible}), now) == picture


@pytest.mark.parametrize(
    ("first_visible", "now", "picture"),
    [("goal", 2, "###..#"), ("goal", 0, "#....#"), ("waypoints", 0, "######")],
)
def test_one_mask_baseline_heeds_what_its_mask_shows(
    first_visible: str, now: int, picture: str
) -> None:
    config = small({"goal.first_visible": first_visible})
    assert heeded(config, now, single=True) == picture


def test_the_observed_past_stays_unless_fill_is_as_released() -> None:
    picture = {"between": "...##.", "released": "###.#."}
    for fill, places in picture.items():
        filled = reference.inferred_steps(small({"goal.fill": fill}), 2, WINDOW)
        assert "".join(".#"[place in filled] for place in range(WINDOW)) == places


def test_one_step_before_the_goal_there_is_nothing_to_infer() -> None:
    now = WINDOW - 2
    direct = answers(random_inputs(), mask("inverse", now=now, length=WINDOW)).mu[0, now]
    torch.testing.assert_close(towards(PAPER, now), direct.tanh())
