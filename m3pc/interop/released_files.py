"""Reads the paper's released files (model, critic, statistics) into tensors under released names.

A child process parses the files in `main`; the parent does not trust the tensors it returns.
"""

import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from m3pc.datasets.sandbox import SandboxLimits, run_limited
from m3pc.model.weights import SCALES
from m3pc.types import InputError

MAX_BYTES: Final = 1 << 30  # limit for the numbers in one file

Tensors = dict[str, Tensor]
Shape = tuple[int, ...]
# Maps name and shape of one of our tensors to the released tensors that are joined into it.
ReleasedNames = Callable[[str, Shape], dict[str, Shape]]

STATISTICS = {  # our name: theirs
    name: f"{name.split('.')[1]}_{name.split('.')[0]}" for name in SCALES
}
OPTIONAL = {"config": 7, "max_returns": 1, "min_returns": 1}  # statistic: count of numbers
CRITIC_SCALES = {"critic.state_mean": "critic_mean_states", "critic.state_std": "critic_std_states"}
CRITICS = (  # our name: name in the released file, or in a trainer's file, which has no targets
    {"q": "q", "q_target": "q_target", "v": "v"},
    {"q": "qf", "q_target": "qf", "v": "vf"},
)
SCALAR = np.float64(0).__reduce__()[0]  # function that unpickles a numpy number
# The files hold learning rates and best scores as numpy numbers; no other call is allowed.
NUMPY_SCALARS: list[Any] = [
    (SCALAR, "numpy.core.multiarray.scalar"),
    (SCALAR, "numpy._core.multiarray.scalar"),
    (np.dtype, "numpy.dtype"),
    *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8")),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedPaths:
    """The released files; comments list the keys that each must have."""

    model: Path  # {model, ...}
    critic: Path  # {q, q_target, v}, or {qf, vf, ...}
    stats: Path  # mean_states, std_states, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPart:
    """Tensors of a file, or of one network in it, under their released names."""

    file: str
    tensors: Mapping[str, Tensor]

    def sizes(self, name: str, count: int) -> Shape:
        """Return a tensor's shape; InputError unless it has `count` sizes, all above 0."""
        shape = tuple(self.tensors[name].shape) if name in self.tensors else None
        if shape is None or len(shape) != count or 0 in shape:
            actual = "missing" if shape is None else list(shape)
            raise InputError(f"{self.file}: {name} is {actual}, expected {count} sizes")
        return shape

    def layers(self, pattern: str) -> int:
        """Count the layers: the distinct numbers that the pattern's group matches."""
        matches = (re.match(pattern, name) for name in self.tensors)
        return len({match[1] for match in matches if match})

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Refuse missing and unknown names, other shapes and types, NaN and Inf."""
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

    def joined(self, ours: Mapping[str, Shape], theirs: ReleasedNames) -> Tensors:
        """Join released tensors into ours, of these shapes. Every released tensor must be used."""
        recipes = {name: theirs(name, shape) for name, shape in ours.items()}
        self.check({name: shape for parts in recipes.values() for name, shape in parts.items()})
        return {
            name: torch.cat([self.tensors[part].flatten() for part in parts]).view(ours[name])
            for name, parts in recipes.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedFiles:
    """What the three files hold."""

    model: WeightsPart
    q: WeightsPart
    q_target: WeightsPart
    v: WeightsPart
    stats: WeightsPart
    step: int  # updates of the model


def read_released(paths: ReleasedPaths, limits: SandboxLimits) -> ReleasedFiles:
    """Parse the files in a limited child process; InputError if they hold anything unexpected."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tensors.safetensors"
        job = {name: str(path) for name, path in asdict(paths).items()} | {"out": str(out)}
        run_limited("m3pc.interop.released_files", job, limits, lambda progress: None)
        try:
            tensors = load_file(out)
        except (OSError, SafetensorError) as error:
            raise InputError(f"the reader returned no tensors: {error}") from None
    step = tensors.pop("step", torch.empty(0))
    groups: dict[str, Tensors] = {name: {} for name in ("model", "q", "q_target", "v", "stats")}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        groups.setdefault(group, {})[name] = tensor
    if step.dtype != torch.int64 or step.numel() != 1 or int(step) < 0 or len(groups) != 5:
        raise InputError("the reader returned unexpected tensors; try again")
    names = {"model": paths.model.name, "stats": paths.stats.name}
    parts = {
        group: WeightsPart(file=names.get(group, paths.critic.name), tensors=tensors)
        for group, tensors in groups.items()
    }
    return ReleasedFiles(**parts, step=int(step))


# In the child process


def main(job: dict[str, Any]) -> None:
    """Read the three files and write their tensors to job['out'] as safetensors."""
    model, critic, stats = (Path(job[name]) for name in ("model", "critic", "stats"))
    tree = _load(model)
    step = tree.get("step", 0)
    if not isinstance(step, int) or not 0 <= step < 1 << 31:
        raise InputError(f"{model.name}: step is {step!r}, expected a number of updates")
    tensors = prefixed("model/", _state(tree, "model", model.name))
    tree = _load(critic)
    layout = next((names for names in CRITICS if names["q"] in tree), CRITICS[0])
    for ours, theirs in layout.items():
        tensors |= prefixed(f"{ours}/", _state(tree, theirs, critic.name))
    tensors |= prefixed("stats/", _numbers(stats))
    save_file(tensors | {"step": torch.tensor(step)}, job["out"])


def _load(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(NUMPY_SCALARS):
            tree = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch raises many types on a damaged file
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
    if size > MAX_BYTES:
        raise InputError(f"{file}: {key!r} has {size} bytes; at most {MAX_BYTES} are read")
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def _numbers(path: Path) -> Tensors:
    """Read the statistics that are used, each as one row."""
    arrays = read_npz(path)
    numbers = {}
    for name in (*STATISTICS.values(), *OPTIONAL, *CRITIC_SCALES.values()):
        if name not in arrays:
            continue
        if arrays[name].dtype.kind not in "fiu":
            raise InputError(f"{path.name}: {name} is {arrays[name].dtype}, expected numbers")
        with np.errstate(over="ignore"):  # an overflow becomes Inf, which is refused
            numbers[name] = torch.from_numpy(arrays[name].astype(np.float32).reshape(-1))
    return numbers


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz; InputError if it is damaged or holds pickled objects."""
    try:
        with zipfile.ZipFile(path) as zipped:
            size = sum(member.file_size for member in zipped.infolist())
        if size > MAX_BYTES:
            raise InputError(f"{path.name} unpacks to {size} bytes; at most {MAX_BYTES} are read")
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        others = [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]
        if others:
            raise InputError(f"{path.name}: {others[:3]} are no arrays")
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zip, zlib and numpy raise many types on a damaged file
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path.name} is not a plain .npz of numbers: {reason}") from None
    return arrays


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}
