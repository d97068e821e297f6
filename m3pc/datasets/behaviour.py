"""The behaviour policy inside a D4RL file, or in an .npz: arrays of one small ReLU network.

D4RL and DOPE name layers fc0, fc1, ..., last_fc (mean) and last_fc_log_std, each with weight and
bias. An .npz may also hold w0, b0, w1, b1, ..., whose last layer gives the action itself.
"""

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from m3pc.datasets.hdf5 import NUMBERS, array, members, open_hdf5, subgroup, text, to_float32
from m3pc.types import Floats, InputError

LARGEST = 256 << 20  # bytes of all arrays
FC, PLAIN = r"fc\d+\.weight", r"w\d+"  # weights of hidden layers, of all layers
WeightArrays = dict[str, Floats]
LayerNames = tuple[str, str]  # names of a weight [out, in] and a bias [out]


def main(job: dict[str, Any]) -> None:
    """In the sandbox: read job['path'], write its checked arrays to job['out'] as .npz."""
    path = Path(job["path"])
    raw = _from_npz(path) if zipfile.is_zipfile(path) else _from_hdf5(path)
    np.savez(job["out"], **check(raw, path.name))  # type: ignore[arg-type]


def load(path: Path) -> WeightArrays:
    """What `main` wrote, checked once more."""
    with np.load(path, allow_pickle=False) as found:
        return check(dict(found), path.name)


def layers(names: Iterable[str]) -> tuple[list[LayerNames], list[LayerNames]]:
    """Hidden layers, and those on top of the last one: mean and log std, or the action."""
    counts = {kind: sum(bool(re.fullmatch(kind, name)) for name in names) for kind in (FC, PLAIN)}
    if counts[PLAIN]:
        plain = [(f"w{i}", f"b{i}") for i in range(counts[PLAIN])]
        return plain[:-1], plain[-1:]
    hidden = [f"fc{i}" for i in range(counts[FC])]
    tops = ("last_fc", "last_fc_log_std")
    named = [(f"{layer}.weight", f"{layer}.bias") for layer in (*hidden, *tops)]
    return named[: len(hidden)], named[len(hidden) :]


def check(raw: Mapping[str, np.ndarray], name: str) -> WeightArrays:
    """Float32 arrays whose shapes chain from the state to the action, all finite."""
    hidden, tops = layers(raw)
    wanted = [key for layer in (*hidden, *tops) for key in layer]
    missing = [key for key in wanted if key not in raw]
    if missing or not hidden:
        raise InputError(
            f"{name} holds no policy: {missing or ['fc0.weight']} missing, found {sorted(raw)[:8]}"
        )
    strange = [key for key in wanted if np.asarray(raw[key]).dtype.kind not in NUMBERS]
    if strange:
        raise InputError(f"{name}: {strange} are not arrays of numbers")
    arrays = {key: to_float32(np.ascontiguousarray(raw[key])) for key in wanted}
    width = arrays[hidden[0][0]].shape[-1]
    for layer in (*hidden, *tops):
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
    if len({arrays[bias].shape for _, bias in tops}) > 1:
        raise InputError(f"{name}: last_fc and last_fc_log_std give actions of different widths")
    return arrays


def _from_hdf5(path: Path) -> dict[str, np.ndarray]:
    with open_hdf5(path) as file:
        if "metadata" not in members(file) or "policy" not in members(subgroup(file, "metadata")):
            raise InputError(
                f"{path.name} holds no behaviour policy (metadata/policy); "
                "D4RL's medium and expert files do"
            )
        policy = subgroup(subgroup(file, "metadata"), "policy")
        _refuse_other_networks(policy, path.name)
        layers = [
            name for name in members(policy) if re.fullmatch(r"fc\d+|last_fc|last_fc_log_std", name)
        ]
        return {
            f"{layer}.{part}": array(subgroup(policy, layer), part)
            for layer in layers
            for part in ("weight", "bias")
        }


def _refuse_other_networks(policy: h5py.Group, name: str) -> None:
    """D4RL says what lies between the layers and on top of them; we know one answer to each."""
    for field, known in (("nonlinearity", b"relu"), ("output_distribution", b"tanh_gaussian")):
        found = text(policy, field) if field in members(policy) else known
        if found != known:
            raise InputError(f"{name}: the policy's {field} is {found!r}, expected {known!r}")


def _from_npz(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > LARGEST:
        raise InputError(f"{path.name} unpacks to {size} bytes; a policy needs at most {LARGEST}")
    try:
        with np.load(path, allow_pickle=False) as found:
            return dict(found)
    except ValueError as error:
        raise InputError(f"{path.name} is not a plain .npz of numbers: {error}") from None
