"""Converts the paper's released network, critic and statistics into one of our checkpoints.

S state size, A action size.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config
from m3pc.core.files import refuse_existing, sha256
from m3pc.datasets.sandbox import SandboxLimits
from m3pc.interop.released_files import (
    CRITIC_SCALES,
    OPTIONAL,
    STATISTICS,
    ReleasedFiles,
    ReleasedPaths,
    Shape,
    Tensors,
    WeightsPart,
    prefixed,
    read_released,
)
from m3pc.model import checkpoint
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.masks import MODALITIES
from m3pc.model.weights import Weights
from m3pc.types import InputError

DEFAULT_HEADS: Final = 4  # the weights do not reveal the number of heads
STAND_IN: Final = 2.0  # unknown extreme returns are this many standard deviations off the mean

RENAMES = (  # pattern in our name, replacement in the released name
    (r"^embed\.", "encoder_embed_dict."),
    (r"^decoder_embed\.", "decoder_embed_dict."),
    (r"^heads\.", "output_head_dict."),
    (r"\.log_sigma\.", ".log_std."),
    (r"^(encoder|decoder)_norm\.", r"\1.norm."),
    (r"^(encoder|decoder)\.(\d+)\.", r"\1.layers.\2."),
    (r"\.qkv\.", ".self_attn.in_proj_"),
    (r"\.out\.", ".self_attn.out_proj."),
    (r"\.expand\.", ".linear1."),
    (r"\.contract\.", ".linear2."),
)
STACKED = {  # we have a row per modality; they have a tensor each, with so many leading sizes of 1
    "encoder_modalities": ("encoder_per_dim_encoding", 3),
    "decoder_modalities": ("decoder_per_dim_encoding", 3),
    "mask_tokens": ("mask_token_dict", 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    weights: Weights
    guessed: tuple[str, ...]  # extreme returns that the statistics did not have
    shared_scales: bool  # whether the critic uses the model's, as the file has none for it


def import_released(
    paths: ReleasedPaths,
    out: Path,
    *,
    heads: int | None,
    env: str | None,
    max_episode_steps: int,
    limits: SandboxLimits,
) -> ImportReport:
    """Write a checkpoint of the released numbers with the settings of preset `parity`."""
    refuse_existing(out)
    for path in asdict(paths).values():
        if not path.is_file():
            raise InputError(f"there is no file {path}; give a released one")
    released = read_released(paths, limits)
    config, sizes = _derive(released, heads)
    with torch.device("meta"):
        model, critic = TrajectoryModel(config.model, *sizes), Critic(config.critic, *sizes)
    ours = released.model.joined(_shapes(model), _model_names)
    positions = ours.pop("positions")
    normaliser, extremes, guessed = _statistics(released.stats, sizes[0])
    critic_scales, shared = _critic_scales(released.stats, normaliser)
    weights = Weights(
        version=released.step,
        config=config,
        state_size=sizes[0],
        action_size=sizes[1],
        max_episode_steps=max_episode_steps,
        env=env,
        tensors={
            **prefixed("model.", ours),
            **prefixed("critic.q.", released.q.joined(_shapes(critic.q), _twin_names)),
            **prefixed("critic.v.", released.v.joined(_shapes(critic.v), _value_names)),
            **critic_scales,
            **prefixed("normaliser.", normaliser),
            "envelope": extremes[1].repeat(max_episode_steps),
            "return_range": extremes,
        },
    )
    if not torch.allclose(weights.model().positions, positions, atol=1e-5):
        raise InputError(f"{released.model.file}: pos_embed is not sines and cosines of the step")
    targets = released.q_target.joined(_shapes(critic.q), _twin_names)
    hashes = {name: sha256(path) for name, path in asdict(paths).items()}
    checkpoint.write(out, weights, prefixed("critic.target.", targets), {"authors": hashes})
    return ImportReport(weights=weights, guessed=guessed, shared_scales=shared)


def _derive(released: ReleasedFiles, heads: int | None) -> tuple[Config, tuple[int, int]]:
    """Preset `parity` with the sizes of these networks, and (S, A)."""
    model, value = released.model, released.v
    width, state_size = model.sizes("encoder_embed_dict.states.weight", 2)
    _, action_size = model.sizes("encoder_embed_dict.actions.weight", 2)
    _, window, _, _ = model.sizes("pos_embed", 4)
    inner, _ = model.sizes("encoder.layers.0.linear1.weight", 2)
    if inner % width:
        raise InputError(f"{model.file}: a layer expands {width} to {inner}, not a multiple")
    encoder, decoder = (model.layers(rf"{n}\.layers\.(\d+)\.") for n in ("encoder", "decoder"))
    sizes = (state_size, action_size, width, None, encoder, decoder, window)
    parity = PRESETS["parity"]
    config = replace(
        parity,
        {
            "model.width": width,
            "model.heads": _heads(released.stats, sizes, heads),
            "model.encoder_layers": encoder,
            "model.decoder_layers": decoder,
            "model.window": window,
            "model.expansion": inner // width,
            "critic.width": value.sizes("v.net.0.weight", 2)[0],
            "critic.layers": value.layers(r"v\.net\.(\d+)\.weight") - 1,
            "planner.horizon": min(parity.planner.horizon, window - 1),
            "dataset.min_length": max(parity.dataset.min_length, window),
        },
    )
    return config, (state_size, action_size)


def _heads(stats: WeightsPart, sizes: tuple[int | None, ...], requested: int | None) -> int:
    """Read the number of heads from the statistic `config`, whose other sizes must fit."""
    config = stats.tensors.get("config")
    if config is None:
        return DEFAULT_HEADS if requested is None else requested
    if config.shape != (7,) or not config.isfinite().all():
        raise InputError(f"{stats.file}: config is {config.tolist()[:8]}, expected 7 sizes")
    numbers = [int(number) for number in config.tolist()]
    expected = [n if size is None else size for n, size in zip(numbers, sizes, strict=True)]
    if numbers != expected:
        raise InputError(f"{stats.file}: config is {numbers}, but the weights are of {expected}")
    if requested not in (None, numbers[3]):
        raise InputError(f"--heads is {requested}, but config in {stats.file} says {numbers[3]}")
    return numbers[3]


def _shapes(module: nn.Module) -> dict[str, Shape]:
    tensors = module.state_dict() | dict(module.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _model_names(name: str, shape: Shape) -> dict[str, Shape]:
    if name == "positions":
        return {"pos_embed": (1, shape[0], 1, shape[1])}
    if name in STACKED:
        theirs, ones = STACKED[name]
        return {f"{theirs}.{modality}": (1,) * ones + shape[1:] for modality in MODALITIES}
    for ours, theirs in RENAMES:
        name = re.sub(ours, theirs, name)
    return {name: shape}


def _twin_names(name: str, shape: Shape) -> dict[str, Shape]:
    return _layer_names(("q1", "q2"), name, shape)


def _value_names(name: str, shape: Shape) -> dict[str, Shape]:
    return _layer_names(("v",), name, shape)


def _layer_names(networks: tuple[str, ...], name: str, shape: Shape) -> dict[str, Shape]:
    """Our tensor stacks these networks; every second layer of a released one is a ReLU."""
    kind = name.rstrip("0123456789")
    number = 2 * int(name.removeprefix(kind))
    return {f"{network}.net.{number}.{kind}": shape[1:] for network in networks}


def _statistics(stats: WeightsPart, state_size: int) -> tuple[Tensors, Tensor, tuple[str, ...]]:
    """Return our normaliser, lowest and highest return [2], and which of the two are guessed."""
    known = OPTIONAL | dict.fromkeys(CRITIC_SCALES.values(), state_size)
    optional = {name: (size,) for name, size in known.items() if name in stats.tensors}
    sizes = {name: (state_size if "states" in name else 1,) for name in STATISTICS.values()}
    stats.check(sizes | optional)
    normaliser = {ours: stats.tensors[theirs] for ours, theirs in STATISTICS.items()}
    for name, tensor in normaliser.items():
        if name.endswith(".std") and not (tensor > 0).all():
            raise InputError(f"{stats.file}: {STATISTICS[name]} has numbers that are not above 0")
    mean, margin = normaliser["returns.mean"], STAND_IN * normaliser["returns.std"]
    guesses = {"min_returns": mean - margin, "max_returns": mean + margin}
    extremes = torch.cat([stats.tensors.get(name, guess) for name, guess in guesses.items()])
    if extremes[0] > extremes[1]:
        raise InputError(f"{stats.file}: the returns are from {extremes[0]} to {extremes[1]}")
    return normaliser, extremes, tuple(name for name in guesses if name not in stats.tensors)


def _critic_scales(stats: WeightsPart, normaliser: Tensors) -> tuple[Tensors, bool]:
    """Return mean and standard deviation of the critic's states, and whether they are the model's.

    The released critic used statistics of the data alone, the model those of padded arrays.
    """
    present = [name for name in CRITIC_SCALES.values() if name in stats.tensors]
    if not present:
        stand_ins = zip(CRITIC_SCALES, ("states.mean", "states.std"), strict=True)
        return {ours: normaliser[name].clone() for ours, name in stand_ins}, True
    if len(present) < len(CRITIC_SCALES):
        raise InputError(f"{stats.file} has {present[0]} alone; give both, or none")
    return {ours: stats.tensors[theirs] for ours, theirs in CRITIC_SCALES.items()}, False
