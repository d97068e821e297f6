"""The authors' network, critic and statistics as one of our checkpoints.

Their files are read in a child process: `main` runs there, and everything after it here, where what
came back is checked as if the child were a stranger.

S state, A action, D width, T steps, H step limit.
"""

import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from m3pc.config.overrides import replace
from m3pc.config.presets import PRESETS
from m3pc.config.schema import Config
from m3pc.core.files import refuse_existing, sha256
from m3pc.datasets.sandbox import SandboxLimits, run_limited
from m3pc.model import checkpoint
from m3pc.model.btm import TrajectoryModel
from m3pc.model.critic import Critic
from m3pc.model.masks import MODALITIES
from m3pc.model.weights import SCALES, Weights
from m3pc.types import InputError

LARGEST = 1 << 30  # bytes of the numbers in one file
DEFAULT_HEADS = 4  # weights do not reveal how many there are
STAND_IN = 2.0  # standard deviations from the mean, where the extremes of the returns are unknown

Tensors = dict[str, Tensor]
Shape = tuple[int, ...]
ReleasedTensors = Callable[
    [str, Shape], dict[str, Shape]
]  # our tensor -> those of theirs it is joined from

STATISTICS = {name: f"{name.split('.')[1]}_{name.split('.')[0]}" for name in SCALES}  # ours, theirs
OPTIONAL = {"config": 7, "max_returns": 1, "min_returns": 1}  # and how many numbers
CRITIC_SCALES = {"critic.state_mean": "critic_mean_states", "critic.state_std": "critic_std_states"}
CRITICS = (  # of the recorded file, and of their trainer's, which starts the targets as a copy
    {"q": "q", "q_target": "q_target", "v": "v"},
    {"q": "qf", "q_target": "qf", "v": "vf"},
)
RENAMES = (  # ours, theirs
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
STACKED = {  # ours has a row a modality, theirs a tensor each, with this many sizes of 1 in front
    "encoder_modalities": ("encoder_per_dim_encoding", 3),
    "decoder_modalities": ("decoder_per_dim_encoding", 3),
    "mask_tokens": ("mask_token_dict", 2),
}
SCALAR = np.float64(0).__reduce__()[0]  # how pickle names a number of numpy
# Their learning rates and best scores are such numbers. Beyond them no code in a file is known.
NUMPY_SCALARS: list[Any] = [
    (SCALAR, "numpy.core.multiarray.scalar"),
    (SCALAR, "numpy._core.multiarray.scalar"),
    (np.dtype, "numpy.dtype"),
    *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8")),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    model: Path  # {model, ...}
    critic: Path  # {q, q_target, v}, or {qf, vf, ...}
    stats: Path  # mean_states, std_states, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    weights: Weights
    guessed: tuple[str, ...]  # extremes of the returns that the statistics did not have
    shared_scales: bool  # the critic has the model's, for want of its own


def import_authors(
    files: Files,
    out: Path,
    *,
    heads: int | None,
    env: str | None,
    max_episode_steps: int,
    limits: SandboxLimits,
) -> Imported:
    """Write a checkpoint of the authors' numbers under the preset `parity`."""
    refuse_existing(out)
    for path in asdict(files).values():
        if not path.is_file():
            raise InputError(f"there is no file {path}; give one of the authors'")
    found = _read(files, limits)
    config, sizes = _derive(found, heads)
    with torch.device("meta"):
        model, critic = TrajectoryModel(config.model, *sizes), Critic(config.critic, *sizes)
    ours = found.model.joined(_shapes(model), _model_names)
    positions = ours.pop("positions")
    normaliser, extremes, guessed = _statistics(found.stats, sizes[0])
    critic_scales, shared = _critic_scales(found.stats, normaliser)
    weights = Weights(
        version=found.step,
        config=config,
        state_size=sizes[0],
        action_size=sizes[1],
        max_episode_steps=max_episode_steps,
        env=env,
        tensors={
            **_prefixed("model.", ours),
            **_prefixed("critic.q.", found.q.joined(_shapes(critic.q), _twin_names)),
            **_prefixed("critic.v.", found.v.joined(_shapes(critic.v), _value_names)),
            **critic_scales,
            **_prefixed("normaliser.", normaliser),
            "envelope": extremes[1].repeat(max_episode_steps),
            "return_range": extremes,
        },
    )
    if not torch.allclose(weights.model().positions, positions, atol=1e-5):
        raise InputError(f"{found.model.file}: pos_embed is not sines and cosines of the step")
    targets = found.q_target.joined(_shapes(critic.q), _twin_names)
    hashes = {name: sha256(path) for name, path in asdict(files).items()}
    checkpoint.write(out, weights, _prefixed("critic.target.", targets), {"authors": hashes})
    return Imported(weights=weights, guessed=guessed, shared_scales=shared)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz, none of them pickled, or an InputError."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > LARGEST:
            raise InputError(f"{path.name} unpacks to {size} bytes; at most {LARGEST} are read")
        with np.load(path, allow_pickle=False) as found:
            arrays = dict(found)
        strange = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
        if strange:
            raise InputError(f"{path.name}: {strange[:3]} are no arrays")
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zip, zlib and numpy raise what they like over a damaged file
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path.name} is not a plain .npz of numbers: {reason}") from None
    return arrays


# In the child


def main(job: dict[str, Any]) -> None:
    """Read the three files, write their tensors to job['out'] as safetensors."""
    model, critic, stats = (Path(job[name]) for name in ("model", "critic", "stats"))
    tree = _load(model)
    step = tree.get("step", 0)
    if not isinstance(step, int) or not 0 <= step < 1 << 31:
        raise InputError(f"{model.name}: step is {step!r}, expected a number of updates")
    found = _prefixed("model/", _state(tree, "model", model.name))
    tree = _load(critic)
    layout = next((names for names in CRITICS if names["q"] in tree), CRITICS[0])
    for ours, theirs in layout.items():
        found |= _prefixed(f"{ours}/", _state(tree, theirs, critic.name))
    found |= _prefixed("stats/", _numbers(stats))
    save_file(found | {"step": torch.tensor(step)}, job["out"])


def _load(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(NUMPY_SCALARS):
            tree = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch raises what it likes over a damaged file
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it calls {code[1]}, which is not done" if code else "it is damaged or something else"
        )
        raise InputError(f"{path.name} is not a file of tensors by torch.save: {reason}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path.name} holds a {type(tree).__name__}, expected a dict")
    return tree


def _state(tree: Mapping[str, Any], key: str, file: str) -> Tensors:
    state = tree.get(key)
    if not isinstance(state, dict):
        raise InputError(f"{file} has no state dict {key!r}; it has {sorted(map(str, tree))[:8]}")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InputError(f"{file}: {name!r} of {key!r} is no tensor")
    size = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    if size > LARGEST:
        raise InputError(f"{file}: {key!r} has {size} bytes; at most {LARGEST} are read")
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def _numbers(path: Path) -> Tensors:
    """The statistics that are of use, each as one row."""
    arrays = read_npz(path)
    found = {}
    for name in (*STATISTICS.values(), *OPTIONAL, *CRITIC_SCALES.values()):
        if name not in arrays:
            continue
        if arrays[name].dtype.kind not in "fiu":
            raise InputError(f"{path.name}: {name} is {arrays[name].dtype}, expected numbers")
        with np.errstate(over="ignore"):  # what overflows is infinite, and refused as such
            found[name] = torch.from_numpy(arrays[name].astype(np.float32).reshape(-1))
    return found


# In the parent


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPart:
    """Tensors of a file, or of one network in it, by the authors' names."""

    file: str
    tensors: Mapping[str, Tensor]

    def sizes(self, name: str, count: int) -> Shape:
        """Of a tensor from which the sizes of others follow."""
        shape = tuple(self.tensors[name].shape) if name in self.tensors else None
        if shape is None or len(shape) != count or 0 in shape:
            found = "missing" if shape is None else list(shape)
            raise InputError(f"{self.file}: {name} is {found}, expected {count} sizes")
        return shape

    def layers(self, pattern: str) -> int:
        """Different numbers in the names that begin so."""
        return len({found[1] for name in self.tensors if (found := re.match(pattern, name))})

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Refuse names that are missing or unknown, other shapes and types, NaN and Inf."""
        missing, unknown = set(expected) - set(self.tensors), set(self.tensors) - set(expected)
        for names, word in ((missing, "missing"), (unknown, "unknown")):
            if names:
                raise InputError(f"{self.file}: {', '.join(sorted(names)[:3])}: {word}")
        for name, tensor in self.tensors.items():
            if tensor.dtype != torch.float32 or tensor.shape != expected[name]:
                raise InputError(
                    f"{self.file}: {name} is {tensor.dtype} {list(tensor.shape)}, "
                    f"expected float32 {list(expected[name])}"
                )
            if not tensor.isfinite().all():
                raise InputError(f"{self.file}: {name} holds NaN or Inf")

    def joined(self, ours: Mapping[str, Shape], theirs: ReleasedTensors) -> Tensors:
        """Our tensors of these shapes, of which every one of theirs is a part."""
        recipes = {name: theirs(name, shape) for name, shape in ours.items()}
        self.check({name: shape for parts in recipes.values() for name, shape in parts.items()})
        return {
            name: torch.cat([self.tensors[part].flatten() for part in parts]).view(ours[name])
            for name, parts in recipes.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedFiles:
    model: WeightsPart
    q: WeightsPart
    q_target: WeightsPart
    v: WeightsPart
    stats: WeightsPart
    step: int  # updates behind the model


def _read(files: Files, limits: SandboxLimits) -> ReleasedFiles:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.safetensors"
        job = {name: str(path) for name, path in asdict(files).items()} | {"out": str(out)}
        run_limited("m3pc.interop.released_weights", job, limits, lambda progress: None)
        try:
            tensors = load_file(out)
        except (OSError, SafetensorError) as error:
            raise InputError(f"the reader gave no tensors: {error}") from None
    step = tensors.pop("step", torch.empty(0))
    groups: dict[str, Tensors] = {name: {} for name in ("model", "q", "q_target", "v", "stats")}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    if step.dtype != torch.int64 or step.numel() != 1 or int(step) < 0 or len(groups) != 5:
        raise InputError("the reader gave something else than what it was asked for; try again")
    names = {"model": files.model.name, "stats": files.stats.name}
    parts = {
        group: WeightsPart(file=names.get(group, files.critic.name), tensors=tensors)
        for group, tensors in groups.items()
    }
    return ReleasedFiles(**parts, step=int(step))


def _derive(found: ReleasedFiles, heads: int | None) -> tuple[Config, tuple[int, int]]:
    """The settings `parity` with the sizes of these networks, and S, A."""
    model, value = found.model, found.v
    width, state_size = model.sizes("encoder_embed_dict.states.weight", 2)
    _, action_size = model.sizes("encoder_embed_dict.actions.weight", 2)
    _, window, _, _ = model.sizes("pos_embed", 4)
    inner, _ = model.sizes("encoder.layers.0.linear1.weight", 2)
    if inner % width:
        raise InputError(f"{model.file}: a layer expands {width} to {inner}, not a multiple")
    encoder, decoder = (model.layers(rf"{n}\.layers\.(\d+)\.") for n in ("encoder", "decoder"))
    said = (state_size, action_size, width, None, encoder, decoder, window)
    parity = PRESETS["parity"]
    config = replace(
        parity,
        {
            "model.width": width,
            "model.heads": _heads(found.stats, said, heads),
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


def _heads(stats: WeightsPart, sizes: tuple[int | None, ...], asked: int | None) -> int:
    """From `config` among the statistics, whose other sizes must be those of the weights."""
    said = stats.tensors.get("config")
    if said is None:
        return DEFAULT_HEADS if asked is None else asked
    if said.shape != (7,) or not said.isfinite().all():
        raise InputError(f"{stats.file}: config is {said.tolist()[:8]}, expected 7 sizes")
    numbers = [int(number) for number in said.tolist()]
    expected = [found if size is None else size for found, size in zip(numbers, sizes, strict=True)]
    if numbers != expected:
        raise InputError(f"{stats.file}: config is {numbers}, but the weights are of {expected}")
    if asked not in (None, numbers[3]):
        raise InputError(f"--heads is {asked}, but config in {stats.file} says {numbers[3]}")
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
    """Of networks that lie side by side in ours; every second of their layers is a ReLU."""
    kind = name.rstrip("0123456789")
    number = 2 * int(name.removeprefix(kind))
    return {f"{network}.net.{number}.{kind}": shape[1:] for network in networks}


def _statistics(stats: WeightsPart, state_size: int) -> tuple[Tensors, Tensor, tuple[str, ...]]:
    """Our normaliser, least and greatest return [2], and which of these two is a guess."""
    known = OPTIONAL | dict.fromkeys(CRITIC_SCALES.values(), state_size)
    given = {name: (size,) for name, size in known.items() if name in stats.tensors}
    sizes = {name: (state_size if "states" in name else 1,) for name in STATISTICS.values()}
    stats.check(sizes | given)
    normaliser = {ours: stats.tensors[theirs] for ours, theirs in STATISTICS.items()}
    for name, tensor in normaliser.items():
        if name.endswith(".std") and not (tensor > 0).all():
            raise InputError(f"{stats.file}: {STATISTICS[name]} has numbers that are not above 0")
    mean, away = normaliser["returns.mean"], STAND_IN * normaliser["returns.std"]
    guesses = {"min_returns": mean - away, "max_returns": mean + away}
    extremes = torch.cat([stats.tensors.get(name, guess) for name, guess in guesses.items()])
    if extremes[0] > extremes[1]:
        raise InputError(f"{stats.file}: the returns are from {extremes[0]} to {extremes[1]}")
    return normaliser, extremes, tuple(name for name in guesses if name not in stats.tensors)


def _critic_scales(stats: WeightsPart, normaliser: Tensors) -> tuple[Tensors, bool]:
    """Mean and spread of the critic's states, and whether they are the model's.

    The authors' critic takes them from the data alone, their model from padded arrays.
    """
    given = [name for name in CRITIC_SCALES.values() if name in stats.tensors]
    if not given:
        stand_ins = zip(CRITIC_SCALES, ("states.mean", "states.std"), strict=True)
        return {ours: normaliser[name].clone() for ours, name in stand_ins}, True
    if len(given) < len(CRITIC_SCALES):
        raise InputError(f"{stats.file} has {given[0]} alone; give both, or none")
    return {ours: stats.tensors[theirs] for ours, theirs in CRITIC_SCALES.items()}, False


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}
