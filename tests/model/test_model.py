"""The trajectory model: its size, its predictions against the dense reference, their inputs."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import reference
from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config
from m3pc.model.btm import Prediction, TrajectoryModel, decode_plan
from m3pc.model.layers import LinearActionHead, TransformerLayer
from m3pc.model.masks import (
    ACTIONS,
    MODALITIES,
    PATTERNS,
    RETURNS,
    REWARDS,
    STATES,
    Mask,
    draw_mask,
    token_indices,
    token_mask,
    visible,
)
from m3pc.model.normalisation import Tokens
from tests.support.models.small_weights import ACTIONS as ACTION_SIZE
from tests.support.models.small_weights import STATES as STATE_SIZE
from tests.support.models.small_weights import tiny_config, tiny_weights

T = 8
FIELDS = ("states", "rewards", "returns", "mu", "log_sigma")
EMPTY, FULL = token_mask(T, {}), token_mask(T, {modality: range(T) for modality in range(4)})
SHAPES: dict[str, dict[str, object]] = {
    "linear, 2 + 1 layers": {},
    "linear, 1 + 2 layers": {"model__encoder_layers": 1, "model__decoder_layers": 2},
    "two-layer, 2 + 1 layers": {"model__action_head": "two-layer"},
    "two-layer, 1 + 1 layers": {"model__action_head": "two-layer", "model__encoder_layers": 1},
    "two-layer, 2 + 2 layers": {"model__action_head": "two-layer", "model__decoder_layers": 2},
    "states from a line": {"model__state_head": "from-line"},
    "states with changes": {"model__state_tokens": "with-change", "model__state_head": "from-line"},
    "one head, other scales": {
        "model__heads": 1,
        "model__expansion": 2,
        "model__position_scale": 2.0,
        "model__log_sigma_min": -1.0,
        "model__log_sigma_max": 0.5,
    },
}


def random_masks(count: int, *, seed: int = 0) -> list[Mask]:
    """Masks for training, and masks of independent tokens."""
    rng = np.random.default_rng(seed)
    trained = [draw_mask(PRESETS["paper"].masks, T, rng) for _ in range(count)]
    return trained + [rng.random((4, T)) < rng.random() for _ in range(count)]


def all_masks(count: int = 6) -> list[Mask]:
    patterns = [visible(name, now=now, length=T) for name in PATTERNS for now in (0, 3, 4, 7)]
    return [EMPTY, FULL, *patterns, *random_masks(count)]


def random_tokens(batch: int = 3, *, seed: int = 0) -> Tokens:
    rng = torch.Generator().manual_seed(seed)
    sizes = (STATE_SIZE, ACTION_SIZE, 1, 1)
    return Tokens(*(torch.randn(batch, T, size, generator=rng) for size in sizes))


def changed(tokens: Tokens, mask: Mask, number: float) -> Tokens:
    """Another number in every token of a mask."""
    return Tokens(
        *(
            torch.where(torch.tensor(row)[:, None], number, part)
            for part, row in zip(tokens, mask, strict=True)
        )
    )


def tiny_model(**changes: object) -> TrajectoryModel:
    return tiny_weights(tiny_config("small", **changes)).model()


def fields(prediction: Prediction) -> dict[str, Tensor]:
    """The fields of which some steps were read."""
    tensors = {name: getattr(prediction, name) for name in FIELDS}
    return {name: x for name, x in tensors.items() if x.shape[1]}


def differences(one: Prediction, other: Prediction) -> dict[str, float]:
    """The largest difference in each field."""
    left, right = fields(one), fields(other)
    assert left.keys() == right.keys()
    return {name: (left[name] - right[name]).abs().max().item() for name in left}


# Size


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        pytest.param((11, 3), 11_326_995, id="hopper"),
        pytest.param((17, 6), 11_337_759, id="walker2d and halfcheetah"),
        pytest.param((23, 7), 11_345_447, id="can and square"),
        pytest.param((19, 7), 11_341_347, id="lift"),
        pytest.param((12, 7), 11_334_172, id="can-lim"),
    ],
)
def test_parity_has_as_many_parameters_as_the_authors_model(
    sizes: tuple[int, int], count: int
) -> None:
    with torch.device("meta"):
        model = TrajectoryModel(PRESETS["parity"].model, *sizes)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_every_block_has_its_share_of_parameters() -> None:
    with torch.device("meta"):
        models = {name: TrajectoryModel(PRESETS[name].model, 11, 3) for name in ("parity", "paper")}
    blocks = {
        "embed.": 10_240,
        "decoder_embed.": 1_050_624,
        "mask_tokens": 2_048,
        "encoder_modalities": 2_048,
        "decoder_modalities": 2_048,
        "encoder.0.": 3_152_384,
        "encoder.1.": 3_152_384,
        "decoder.0.": 3_152_384,
        "encoder_norm.": 1_024,
        "decoder_norm.": 1_024,
        "heads.states.": 269_323,
        "heads.rewards.": 264_193,
        "heads.returns.": 264_193,
        "heads.actions.": 3_078,
    }
    heads = {"parity": 3_078, "paper": 1_024 + 262_656 + 3_078}  # LayerNorm, Linear, Linear
    for preset, model in models.items():
        counts = dict.fromkeys(blocks, 0)
        for name, parameter in model.named_parameters():
            (block,) = (block for block in blocks if name.startswith(block))
            counts[block] += parameter.numel()
        assert counts == blocks | {"heads.actions.": heads[preset]}


def test_positions_are_sines_then_cosines_of_the_step() -> None:
    """Width 4: rates 1 and 10000^(-1/2) = 0.01, all times a half."""
    config = replace(Config(), {"model.width": 4, "model.heads": 1})
    model = TrajectoryModel(config.model, 1, 1)
    rows = [[math.sin(t), math.sin(t / 100), math.cos(t), math.cos(t / 100)] for t in range(T)]
    torch.testing.assert_close(model.positions, 0.5 * torch.tensor(rows))


def test_modality_vectors_start_at_0_and_the_action_head_orthogonal() -> None:
    model = TrajectoryModel(tiny_config().model, STATE_SIZE, ACTION_SIZE)
    for parameter in (model.encoder_modalities, model.decoder_modalities, model.mask_tokens):
        assert not parameter.any()
    head = model.heads["actions"]
    assert isinstance(head, LinearActionHead)
    for part in (head.mu, head.log_sigma):
        torch.testing.assert_close(part.weight @ part.weight.T, torch.eye(ACTION_SIZE))
        assert not part.bias.any()


# Predictions


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_predictions_are_those_of_the_dense_reference(shape: str) -> None:
    config = tiny_config("small", **SHAPES[shape])
    weights = tiny_weights(config)
    model, tokens = weights.model(), random_tokens()
    named = dict(zip(MODALITIES, tokens, strict=True))
    for mask in all_masks():
        prediction = model(tokens, mask)
        expected = reference.network(model.state_dict(), config.model, named, torch.tensor(mask))
        for name in FIELDS:
            one, other = getattr(prediction, name), getattr(expected, name)
            assert one.shape == other.shape
            assert (one - other).abs().max().item() <= 1e-5, (name, token_indices(mask))


@torch.inference_mode()
def test_hidden_numbers_do_not_change_a_bit_of_any_prediction() -> None:
    model, tokens = tiny_model(), random_tokens()
    for mask in all_masks():
        expected = fields(model(tokens, mask))
        for number in (math.nan, 0.0, -1e30):
            other = fields(model(changed(tokens, ~mask, number), mask))
            for name in FIELDS:
                assert torch.equal(other[name], expected[name]), (name, number, token_indices(mask))


@torch.inference_mode()
def test_every_visible_token_reaches_every_field() -> None:
    model, tokens = tiny_model(), random_tokens()
    for mask in (FULL, visible("policy", now=4, length=T), *random_masks(2)):
        before = model(tokens, mask)
        for modality, step in token_indices(mask):
            one = token_mask(T, {modality: [step]})
            after = model(changed(tokens, one, 2.0), mask)
            assert min(differences(before, after).values()) > 1e-5, (modality, step)


@torch.inference_mode()
def test_a_model_that_sees_nothing_predicts_the_same_finite_numbers_for_every_row() -> None:
    for numbers in fields(tiny_model()(random_tokens(), EMPTY)).values():
        assert numbers.isfinite().all()
        assert torch.equal(numbers[0], numbers[1])


@pytest.mark.parametrize("shape", ["linear, 2 + 1 layers", "two-layer, 2 + 2 layers"])
@torch.inference_mode()
def test_reading_some_tokens_gives_what_reading_all_gives(shape: str) -> None:
    model, tokens = tiny_model(**SHAPES[shape]), random_tokens()
    reads = [
        token_mask(T, {STATES: [5]}),
        token_mask(T, {ACTIONS: [0, 3, 7]}),
        token_mask(T, {STATES: [1, 2, 6], REWARDS: [0], RETURNS: range(4, 8)}),
        *random_masks(2, seed=1)[2:],
    ]
    patterns = [visible(name, now=4, length=T) for name in ("policy", "dynamics")]
    for mask in (EMPTY, FULL, *patterns, *random_masks(3)):
        everything = fields(model(tokens, mask))
        for read in (*reads, mask, ~mask):
            if not read.any():
                continue
            steps = {name: read[row] for row, name in enumerate(MODALITIES)}
            steps |= {"mu": steps["actions"], "log_sigma": steps.pop("actions")}
            some = fields(model(tokens, mask, read))
            assert set(some) == {name for name in FIELDS if steps[name].any()}
            for name, numbers in some.items():
                expected = everything[name][:, torch.tensor(steps[name])]
                torch.testing.assert_close(numbers, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 6])
@torch.inference_mode()
def test_shared_tokens_are_encoded_as_if_every_row_had_its_own(layers: int, groups: int) -> None:
    model = tiny_model(model__encoder_layers=layers)
    rng = torch.Generator().manual_seed(0)
    own = torch.randn(6, 3, 16, generator=rng)
    shared = torch.randn(groups, 4, 16, generator=rng)
    copied = shared.repeat_interleave(6 // groups, dim=0)
    encoded = model.encode(own, shared)
    torch.testing.assert_close(encoded, model.encode(torch.cat([copied, own], dim=1)))
    assert encoded.shape == (6, 7, 16)


@pytest.mark.parametrize("layers", [1, 2])
@torch.inference_mode()
def test_decoding_takes_tokens_in_any_order(layers: int) -> None:
    model = tiny_model(model__decoder_layers=layers, model__state_head="from-line")
    rng = np.random.default_rng(0)
    read = token_indices(token_mask(T, {STATES: [0, 5], ACTIONS: [2, 3], RETURNS: range(T)}))
    for mask in (visible("dynamics", now=4, length=T), FULL, *random_masks(3)):
        given = token_indices(mask)
        encoded = torch.randn(3, len(given), 16, generator=torch.Generator().manual_seed(1))
        states = random_tokens().states[:, torch.tensor(mask[STATES])]
        expected = model.decode(encoded, decode_plan(tuple(given), tuple(read), T), states)
        for _ in range(3):
            order = rng.permutation(len(given)).tolist()
            shuffled = tuple(given[i] for i in order)
            reread = tuple(read[i] for i in rng.permutation(len(read)))
            prediction = model.decode(encoded[:, order], decode_plan(shuffled, reread, T), states)
            assert max(differences(prediction, expected).values()) <= 3e-6


@torch.inference_mode()
def test_encoding_has_no_order() -> None:
    model = tiny_model()
    own = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    order = [3, 0, 6, 2, 5, 1, 4]
    torch.testing.assert_close(model.encode(own[:, order]), model.encode(own)[:, order])


# Dropout


@torch.inference_mode()
def test_dropout_acts_in_training_only() -> None:
    model, tokens = tiny_model(model__dropout=0.1), random_tokens()
    mask = visible("policy", now=4, length=T)
    assert max(differences(model(tokens, mask), model(tokens, mask)).values()) == 0
    quiet = model(tokens, mask)
    model.train()
    torch.manual_seed(0)
    noisy = model(tokens, mask)
    assert min(differences(noisy, quiet).values()) > 1e-3
    assert min(differences(noisy, model(tokens, mask)).values()) > 1e-3
    torch.manual_seed(0)
    assert max(differences(noisy, model(tokens, mask)).values()) == 0


@torch.inference_mode()
def test_a_model_without_dropout_predicts_the_same_in_training() -> None:
    model, tokens = tiny_model(model__dropout=0.0), random_tokens()
    mask = visible("dynamics", now=4, length=T)
    quiet = model(tokens, mask)
    model.train()
    assert max(differences(model(tokens, mask), quiet).values()) == 0


@torch.no_grad()
def residual(**numbers: float) -> Tensor:
    """What a layer adds to its tokens in training, with dropout 1/2 and all parameters 0 except
    those given."""
    torch.manual_seed(0)
    layer = TransformerLayer(4, 1, 2, 0.5).train()
    for name in ("qkv", "out", "expand", "contract"):
        for part in ("weight", "bias"):
            layer.get_parameter(f"{name}.{part}").fill_(numbers.get(f"{name}_{part}", 0.0))
    tokens = torch.zeros(2_000, 4, 4)
    added: Tensor = layer(tokens) - tokens
    return added.flatten()


def test_dropout_is_on_both_residuals() -> None:
    """Two ones are added, each of them dropped or doubled."""
    added = residual(out_bias=1.0, contract_bias=1.0)
    assert set(added.tolist()) == {0, 2, 4}
    assert (added == 2).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert (
        set(residual(out_bias=1.0).tolist()) == set(residual(contract_bias=1.0).tolist()) == {0, 2}
    )


def test_dropout_is_on_the_feed_forward_part() -> None:
    """Of eight inner ones any number is dropped; gelu(1) = 0.8413, twice doubled."""
    added = residual(expand_bias=1.0, contract_weight=1 / 8)
    counts = added / (4 * 0.8413447 / 8)
    assert set(counts.round().tolist()) == set(range(9))
    assert (counts - counts.round()).abs().max() < 1e-4
    assert added.mean().item() == pytest.approx(0.8413, abs=0.02)


def test_dropout_is_on_attention() -> None:
    """Four tokens of value 4, seen alike: any number of them is dropped."""
    added = residual(qkv_bias=1.0, out_weight=1.0)
    assert set(added.tolist()) == {0, 4, 8, 12, 16}
    assert added.mean().item() == pytest.approx(4, abs=0.1)
