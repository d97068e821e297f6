"""Bad behaviour policies are refused, and nothing pickled is loaded."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from m3pc.datagen.regenerate import load_policy
from m3pc.datasets.behaviour import LARGEST
from m3pc.types import InputError
from tests.support.episodes.foreign_files import (
    nothing_left,
    policy,
    transitions,
    write_hdf5,
    write_npz,
)
from tests.support.runs.refusals import LIMITS, sentence, shape, without


def policy_refusal(path: Path) -> str:
    with nothing_left(path.parent), pytest.raises(InputError) as refused:
        load_policy(path, LIMITS)
    return sentence(refused)


Policy = dict[str, Any]
POLICIES: dict[str, tuple[Callable[[Policy], Policy], str]] = {
    "nothing": (lambda p: {}, "holds no policy"),
    "no bias": (without("fc1.bias"), "['fc1.bias'] missing"),
    "no last layer": (without("last_fc.weight"), "['last_fc.weight'] missing"),
    "a lost layer": (
        lambda p: {k.replace("fc1", "fc2"): v for k, v in p.items()},
        "['fc1.weight', 'fc1.bias'] missing",
    ),
    "NaN": (shape("fc1.weight", lambda w: w * np.nan), "fc1 holds NaN or Inf"),
    "too large": (
        shape("fc0.bias", lambda b: b.astype(np.float64) * 1e300),
        "fc0 holds NaN or Inf",
    ),
    "a narrow layer": (shape("fc1.weight", lambda w: w[:, 1:]), "expected [out, 8], [out]"),
    "a short bias": (shape("fc1.bias", lambda b: b[1:]), "fc1 has shapes [8, 8], [7]"),
    "a flat weight": (shape("fc0.weight", lambda w: w[0]), "fc0 has shapes [11], [8]"),
    "two widths": (
        lambda p: {k: v[:1] if "log_std" in k else v for k, v in p.items()},
        "different widths",
    ),
    "text": (shape("fc0.bias", lambda b: b.astype("U8")), "['fc0.bias'] are not arrays of numbers"),
    "complex": (shape("fc0.bias", lambda b: b * 1j), "['fc0.bias'] are not arrays of numbers"),
    "pickled objects": (shape("fc0.bias", lambda b: b.astype(object)), "Object arrays cannot be"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_bad_policies_are_refused(name: str, tmp_path: Path) -> None:
    change, word = POLICIES[name]
    path = write_npz(tmp_path / "hopper.npz", change(policy(np.random.default_rng(9))))
    assert word in policy_refusal(path)


def test_a_pickle_inside_a_policy_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    harm = np.empty(1, dtype=object)
    harm[0] = Harm()
    arrays = policy(np.random.default_rng(9)) | {"extra": harm}
    path = write_npz(tmp_path / "hopper.npz", arrays)
    assert "Object arrays cannot be loaded" in policy_refusal(path)
    assert not marker.exists()


def test_a_policy_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hopper.npz"
    block = bytes(1 << 20)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("fc0.weight.npy", "w") as member,
    ):
        for _ in range((LARGEST >> 20) + 1):
            member.write(block)
    assert path.stat().st_size < LARGEST / 100
    assert f"a policy needs at most {LARGEST}" in policy_refusal(path)


def test_an_array_that_says_it_is_larger_than_it_is_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hopper.npz"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,), }"
    with zipfile.ZipFile(path, "w") as archive:
        size = len(header).to_bytes(2, "little")
        archive.writestr("fc0.weight.npy", b"\x93NUMPY\x01\x00" + size + header)
    assert "raise --memory-limit" in policy_refusal(path)


def test_files_without_a_policy_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "hopper.npz"
    arrays = write_npz(tmp_path / "good.npz", policy(np.random.default_rng(9))).read_bytes()
    for content, word in (
        (b"", "is not readable as HDF5"),
        (b"text", "is not readable as HDF5"),
        (arrays[:-100], "is not readable as HDF5"),  # the list of a zip stands at its end
        (arrays[:200] + bytes(400) + arrays[600:], "cannot be read"),
    ):
        file.write_bytes(content)
        assert word in policy_refusal(file)
    columns = transitions(np.random.default_rng(9))
    assert "holds no behaviour policy" in policy_refusal(
        write_hdf5(tmp_path / "hopper.hdf5", columns)
    )
    linked = tmp_path / "hopper-linked.hdf5"
    with h5py.File(linked, "w") as f:
        f["metadata"] = h5py.ExternalLink("hopper.hdf5", "/")
    assert "/metadata is a ExternalLink" in policy_refusal(linked)
