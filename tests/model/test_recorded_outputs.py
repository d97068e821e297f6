"""The plain network and planner give what the authors' network gave when it was recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import reference
from benchmarks.reference import (
    MODALITIES,
    Critic,
    Guidance,
    Moments,
    backward,
    choose,
    mask,
    network,
    score,
)
from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config
from tests.support.episodes.shared_data import golden_file
from tests.support.models.their_names import renamed, stacked

PATTERNS = {"rcbc": "policy", "fd": "dynamics", "pi": "path", "id": "inverse"}
QUESTIONS = [f"{name}{now}" for name in PATTERNS for now in (0, 2, 4)]
RECORDED = [*QUESTIONS, "random0", "random1", "random2"]
THEIR_FIELDS = {name: name for name in ("states", "rewards", "returns", "mu")} | {
    "log_sigma": "log_std"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The authors' network under our names, and what it answered."""

    state: Mapping[str, Tensor]
    config: Config
    moments: Moments
    critic: Critic
    arrays: Mapping[str, Tensor]


def twin_critic(weights: Mapping[str, Tensor], moments: Moments) -> Critic:
    mean, std = moments["states"]

    def value(twin: str, x: Tensor) -> Tensor:
        for layer in (0, 2, 4):
            name = f"{twin}.net.{layer}"
            x = nn.functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
            x = x if layer == 4 else x.relu()
        return x[:, 0]

    def min_q(states: Tensor, actions: Tensor) -> Tensor:
        x = torch.cat([(states - mean) / std, actions], dim=1)
        return torch.minimum(value("q1", x), value("q2", x))

    return min_q


@cache
def golden() -> Golden:
    with np.load(golden_file("hopper_d64.npz")) as file:
        arrays = {name: torch.as_tensor(file[name]) for name in file}
    theirs = torch.load(golden_file("hopper_d64_btm.pt"), weights_only=True)["model"]
    critics = torch.load(golden_file("hopper_d64_critic.pt"), weights_only=True)
    _, _, width, heads, encoder, decoder, window = arrays["config"].tolist()
    discount, lam = arrays["plan_discount_lambda"].tolist()
    fields = {
        "model.width": width,
        "model.heads": heads,
        "model.encoder_layers": encoder,
        "model.decoder_layers": decoder,
        "model.window": window,
        "planner.discount": discount,
        "planner.lam": lam,
    }
    moments = {name: (arrays[f"mean_{name}"], arrays[f"std_{name}"]) for name in MODALITIES}
    return Golden(
        state=renamed(theirs) | stacked(theirs),
        config=replace(PRESETS["parity"], fields),
        moments=moments,
        critic=twin_critic(critics["q"], moments),
        arrays=arrays,
    )


def window(recorded: Golden) -> tuple[Tensor, Tensor]:
    """The recorded window that the authors planned on: raw states and actions."""
    return recorded.arrays["input_states"][0], recorded.arrays["input_actions"][0]


@pytest.mark.parametrize("name", RECORDED)
def test_network_answers_as_the_authors_network_did(name: str) -> None:
    recorded = golden()
    inputs = {
        modality: (recorded.arrays[f"input_{modality}"] - mean) / std
        for modality, (mean, std) in recorded.moments.items()
    }
    visible = recorded.arrays[f"visible_{name}"]
    outputs = network(recorded.state, recorded.config.model, inputs, visible)
    for field, theirs in THEIR_FIELDS.items():
        expected = recorded.arrays[f"out_{name}_{theirs}"]
        torch.testing.assert_close(getattr(outputs, field), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", QUESTIONS)
def test_masks_are_those_that_the_authors_asked_with(name: str) -> None:
    visible = mask(PATTERNS[name[:-1]], now=int(name[-1]), length=8)
    assert torch.equal(visible, golden().arrays[f"visible_{name}"])


def test_positions_are_those_of_the_authors_checkpoint() -> None:
    recorded = golden().state["pos_embed"][0, :, 0]  # [T, D], scaled
    scaled = PRESETS["parity"].model.position_scale * reference.position_waves(*recorded.shape)
    torch.testing.assert_close(scaled.float(), recorded, atol=1e-6, rtol=0)


@pytest.mark.parametrize("guide", ["m", "q"])
@pytest.mark.parametrize("now", [0, 2, 4])
def test_plans_are_scored_and_blended_as_the_authors_did(now: int, guide: Guidance) -> None:
    recorded = golden()
    theirs = f"plan{now}_{'rtg' if guide == 'm' else 'q'}"
    utilities, weights, action, xi = (
        recorded.arrays[f"{theirs}_{part}"] for part in ("utility", "weights", "action", "xi")
    )
    candidates = recorded.arrays[f"plan{now}_candidates"]
    config = replace(recorded.config, {f"planner.{guide}.inverse_temperature": xi.item()})
    place = (*window(recorded), now, 500, 1000)
    scored = score(
        recorded.state, recorded.critic, config, recorded.moments, *place, candidates, guide
    )
    torch.testing.assert_close(scored, utilities, atol=1e-5 * float(utilities.abs().max()), rtol=0)
    chosen = choose(config, guide, scored, candidates[:, 0])
    torch.testing.assert_close(chosen, (weights, action), atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    ("now", "name"),
    [(4, "pi4"), (2, "pi2"), (0, "id0")],  # as released, all waypoints are visible at 0
)
def test_one_mask_baseline_acts_on_the_recorded_path_answer(now: int, name: str) -> None:
    recorded = golden()
    action = backward(
        recorded.state, recorded.config, recorded.moments, *window(recorded), now, single_mask=True
    )
    expected = recorded.arrays[f"out_{name}_mu"][0, now].tanh()
    torch.testing.assert_close(action, expected, atol=1e-5, rtol=0)
