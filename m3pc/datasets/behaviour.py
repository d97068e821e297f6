"""Reads the behaviour policy in a D4RL file or an .npz: one small ReLU network.

D4RL and DOPE name layers fc0, fc1, ..., last_fc (mean) and last_fc_log_std, each with weight and
bias. An .npz may instead hold w0, b0, w1, b1, ..., whose last layer outputs the action itself.
"""

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from m3pc.datasets.hdf5 import (
    NUMBER_KINDS,
    member_names,
    open_hdf5,
    read_array,
    read_text,
    subgroup,
    to_float32,
)
from m3pc.types import Floats, InputError

LARGEST = 256 << 20  # bytes of all arrays
FC, PLAIN = r"fc\d+\.weight", r"w\d+"  # weights of hidden layers (D4RL); of all layers (.npz)
WeightArrays = dict[str, Floats]
LayerNames = tuple[str, str]  # names of a layer's weight [out, in] and bias [out]


def main(job: dict[str, Any]) -> None:
    """Runs in the sandbox: reads job['path'], writes the checked arrays to job['out'] as .npz."""
    path = Path(job["path"])
    raw = _from_npz(path) if zipfile.is_zipfile(path) else _from_hdf5(path)
    np.savez(job["out"], **check_arrays(raw, path.name))  # type: ignore[arg-type]


def load_checked(path: Path) -> WeightArrays:
    """The arrays that `main` wrote, checked again: the sandbox is not trusted."""
    with np.load(path, allow_pickle=False) as arrays:
        return check_arrays(dict(arrays), path.name)


def layer_names(names: Iterable[str]) -> tuple[list[LayerNames], list[LayerNames]]:
    """Return the hidden layers and the output layers: mean and log std, or the action."""
    counts = {kind: sum(bool(re.fullmatch(kind, name)) for name in names) for kind in (FC, PLAIN)}
    if counts[PLAIN]:
        plain = [(f"w{i}", f"b{i}") for i in range(counts[PLAIN])]
        return plain[:-1], plain[-1:]
    hidden = [f"fc{i}" for i in range(counts[FC])]
    outputs = ("last_fc", "last_fc_log_std")
    named = [(f"{layer}.weight", f"{layer}.bias") for layer in (*hidden, *outputs)]
    return named[: len(hidden)], named[len(hidden) :]


def check_arrays(raw: Mapping[str, np.ndarray], name: str) -> WeightArrays:
    """Return float32 arrays; InputError unless they are finite and each layer fits the next."""
    hidden, outputs = layer_names(raw)
    names = [key for layer in (*hidden, *outputs) for key in layer]
    missing = [key for key in names if key not in raw]
    if missing or not hidden:
        raise InputError(
            f"{name} holds no policy: {missing or ['fc0.weight']} missing, found {sorted(raw)[:8]}"
        )
    unusable = [key for key in names if np.asarray(raw[key]).dtype.kind not in NUMBER_KINDS]
    if unusable:
        raise InputError(f"{name}: {unusable} are not arrays of numbers")
    arrays = {key: to_float32(np.ascontiguousarray(raw[key])) for key in names}
    width = arrays[hidden[0][0]].shape[-1]
    for layer in (*hidden, *outputs):
        weight, bias = (arrays[key] for key in layer)
        label = layer[0].removesuffix(".weight")
        if weight.ndim != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
            raise InputError(
                f"{name}: {label} has shapes {list(weight.shape)}, {list(bias.shape)}; "
                f"expected [out, {width}], [out]"
            )
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise InputError(f"{name}: {label} holds NaN or Inf")
        width = len(weight) if layer in hidden else width
    if len({arrays[bias].shape for _, bias in outputs}) > 1:
        raise InputError(f"{name}: last_fc and last_fc_log_std give actions of different widths")
    return arrays


def _from_hdf5(path: Path) -> dict[str, np.ndarray]:
    with open_hdf5(path) as file:
        metadata = subgroup(file, "metadata") if "metadata" in member_names(file) else None
        if metadata is None or "policy" not in member_names(metadata):
            raise InputError(
                f"{path.name} holds no behaviour policy (metadata/policy); "
                "D4RL's medium and expert files do"
            )
        policy = subgroup(metadata, "policy")
        _refuse_other_networks(policy, path.name)
        layer = re.compile(r"fc\d+|last_fc|last_fc_log_std")
        return {
            f"{name}.{part}": read_array(subgroup(policy, name), part)
            for name in member_names(policy)
            if layer.fullmatch(name)
            for part in ("weight", "bias")
        }


def _refuse_other_networks(policy: h5py.Group, name: str) -> None:
    """D4RL may name other networks; only ReLU with a tanh-Gaussian output is supported."""
    for field, known in (("nonlinearity", b"relu"), ("output_distribution", b"tanh_gaussian")):
        value = read_text(policy, field) if field in member_names(policy) else known
        if value != known:
            raise InputError(f"{name}: the policy's {field} is {value!r}, expected {known!r}")


def _from_npz(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > LARGEST:
        raise InputError(f"{path.name} unpacks to {size} bytes; a policy needs at most {LARGEST}")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except ValueError as error:
        raise InputError(f"{path.name} is not a plain .npz of numbers: {error}") from None
