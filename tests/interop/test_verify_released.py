"""`m3pc verify`: the recorded network passes, a network that is a little off does not.

B rows, T steps, S state, A action, N plans, M networks.
"""

import dataclasses
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import m3pc.interop.released_files
from m3pc.datasets.sandbox import SandboxLimits
from m3pc.interop.released_files import ReleasedPaths
from m3pc.interop.released_weights import import_released
from m3pc.interop.verify_released import ComparedItem, verify
from m3pc.model import checkpoint
from m3pc.types import InputError
from tests.interop.test_released_weights import command
from tests.support.episodes.foreign_files import write_npz
from tests.support.episodes.shared_data import golden_file
from tests.support.models.recorder import ROWS, Arrays, B, Recorder, S, T
from tests.support.runs.refusals import sentence

MASKS, NETWORKS, PLANS, LOSSES, UPDATES = 12, 15, 18, 14, 5  # items of the recorded file


# The recorded network


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded network as a checkpoint."""
    out = tmp_path_factory.mktemp("imported") / "hopper"
    files = ReleasedPaths(
        model=golden_file("hopper_d64_btm.pt"),
        critic=golden_file("hopper_d64_critic.pt"),
        stats=golden_file("hopper_d64.npz"),
    )
    import_released(
        files, out, heads=None, env=None, max_episode_steps=1000, limits=SandboxLimits()
    )
    return out


def load(path: Path) -> Arrays:
    with np.load(path) as file:
        return dict(file)


def by_kind(items: list[ComparedItem]) -> dict[str, int]:
    kinds = [item.name.split()[0] for item in items]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def missed(items: list[ComparedItem]) -> list[str]:
    return [item.name for item in items if not item.ok]


def test_every_recorded_number_is_within_tolerance(imported: Path) -> None:
    items = verify(imported, golden_file("hopper_d64.npz"))
    assert missed(items) == []
    assert by_kind(items) == {
        "mask": MASKS,
        "network": NETWORKS,
        "plan": PLANS,
        "loss": LOSSES,
        "iql": UPDATES,
    }
    assert {item.tolerance for item in items} == {0.0, 1e-5, 5e-4, 1e-4}


def test_the_command_prints_one_line_per_item(
    imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("verify", imported, golden_file("hopper_d64.npz")) == 0
    lines = capsys.readouterr().out.splitlines()
    total = MASKS + NETWORKS + PLANS + LOSSES + UPDATES
    assert sum(line.endswith(" ok ") for line in lines) == total
    assert lines[-1] == f"{total} of {total} items are within their tolerance"


def changed(imported: Path, out: Path, name: str, *, part: str = "weights") -> Path:
    """A copy of the checkpoint in which the largest number of one tensor is 1 % larger."""
    original = checkpoint.read(imported)
    tensors = dict(original.weights.tensors if part == "weights" else original.training)
    flat = tensors[name].flatten().clone()
    flat[flat.abs().argmax()] *= 1.01
    tensors[name] = flat.view(tensors[name].shape)
    if part == "weights":
        weights = dataclasses.replace(original.weights, tensors=tensors)
        checkpoint.write(out, weights, original.training, {})
    else:
        checkpoint.write(out, original.weights, tensors, {})
    return out


@pytest.mark.parametrize(
    ("name", "part", "kinds", "example"),
    [
        ("model.embed.states.weight", "weights", "network plan loss", "network fd2"),
        ("model.heads.actions.log_sigma.weight", "weights", "network loss", "loss rcbc4 entropy"),
        ("model.heads.returns.3.bias", "weights", "network plan", "plan 4 rtg utility"),
        ("critic.q.bias2", "weights", "plan iql", "plan 0 q utility"),
        ("critic.v.weight2", "weights", "iql", "iql after v"),
        ("critic.target.weight2", "training", "iql", "iql after q_target"),
        ("normaliser.rewards.std", "weights", "network plan loss", "network random1"),
    ],
)
def test_a_number_that_is_off_by_1_percent_is_found_where_it_matters(
    name: str, part: str, kinds: str, example: str, imported: Path, tmp_path: Path
) -> None:
    path = changed(imported, tmp_path / "changed", name, part=part)
    misses = [item for item in verify(path, golden_file("hopper_d64.npz")) if not item.ok]
    assert set(by_kind(misses)) == set(kinds.split())
    assert example in missed(misses)


def test_a_recording_with_nan_is_a_miss(imported: Path, tmp_path: Path) -> None:
    arrays = load(golden_file("hopper_d64.npz"))
    arrays["out_rcbc4_mu"][0, 0, 0] = np.nan
    golden = write_npz(tmp_path / "golden.npz", arrays)
    assert missed(verify(imported, golden)) == ["out_rcbc4_mu is finite"]
    assert command("verify", imported, golden) == 1


def test_nothing_is_within_a_tolerance_of_nan() -> None:
    assert not ComparedItem("a", math.nan, 1.0).ok
    assert ComparedItem("a", 0.0, 0.0).ok


# A network of other sizes, recorded here with the plain one


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return Recorder().write(tmp_path_factory.mktemp("other"))


def test_networks_of_any_size_are_compared(other: tuple[Path, Path]) -> None:
    items = verify(*other)
    assert missed(items) == []
    assert by_kind(items) == {"mask": 4, "network": 5, "plan": 6, "loss": 14, "iql": 5}


def test_a_miss_is_named_and_ends_with_exit_code_1(
    other: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(other[0], tmp_path / "changed", "critic.v.bias1")
    assert command("verify", path, other[1]) == 1
    lines = capsys.readouterr().out.splitlines()
    misses = {line[: line.index("  ")].strip() for line in lines if line.endswith(" MISS ")}
    assert misses == {"iql value_loss", "iql q_loss", "iql after v"}
    assert lines[-1] == "31 of 34 items are within their tolerance"


@pytest.mark.parametrize("name", ["out_id3_mu", "input_returns", "plan1_rtg_xi", "iql_settings"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_a_miss(
    name: str, value: float, other: tuple[Path, Path], tmp_path: Path
) -> None:
    arrays = load(other[1])
    arrays[name].reshape(-1)[-1:] = value
    golden = write_npz(tmp_path / "golden.npz", arrays)
    assert missed(verify(other[0], golden)) == [f"{name} is finite"]
    assert command("verify", other[0], golden) == 1


def test_masks_that_differ_are_counted(other: tuple[Path, Path], tmp_path: Path) -> None:
    arrays = load(other[1])
    arrays["visible_pi0"] = ~arrays["visible_pi0"]
    items = verify(other[0], write_npz(tmp_path / "golden.npz", arrays))
    assert [item.error for item in items if item.name == "mask pi0"] == [4 * T]
    assert missed(items) == ["mask pi0", "network pi0"]


def test_parts_that_were_not_recorded_are_not_compared(
    other: tuple[Path, Path], tmp_path: Path
) -> None:
    kept = {
        name: array
        for name, array in load(other[1]).items()
        if name.startswith(("input_", "visible_", "out_"))
    }
    items = verify(other[0], write_npz(tmp_path / "golden.npz", kept))
    assert by_kind(items) == {"mask": 4, "network": 5}


# Refusals


def refusal(path: Path, golden: Path) -> str:
    with pytest.raises(InputError) as refused:
        verify(path, golden)
    return sentence(refused)


def without(name: str) -> Any:
    return lambda arrays: {key: value for key, value in arrays.items() if key != name}


def put(name: str, value: Any) -> Any:
    return lambda arrays: arrays | {name: np.asarray(value)}


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (lambda arrays: {}, "has no input_states"),
    "inputs alone": (
        lambda arrays: {k: v for k, v in arrays.items() if k.startswith("input_")},
        "has no outputs to compare with",
    ),
    "a lost output": (without("out_fd1_mu"), "has no out_fd1_mu"),
    "a lost loss": (without("loss_rcbc1_nll"), "has no loss_rcbc1_nll"),
    "a lost temperature": (without("plan1_q_xi"), "has no plan1_q_xi"),
    "a lost batch": (without("iql_states"), "has no iql_states"),
    "other states": (put("input_states", np.zeros((B, T, S + 1))), "input_states is float64"),
    "no rows": (put("input_states", np.zeros((0, T, S))), "expected [any, 5, 4]"),
    "a mask of numbers": (put("visible_fd1", np.ones((4, T))), "visible_fd1 is float64"),
    "words": (put("out_fd1_mu", [["a"]]), "out_fd1_mu is <U1"),
    "a step outside": (put("visible_fd9", np.ones((4, T), bool)), "asks at step 9"),
    "no discount": (put("plan_discount_lambda", [2.0, 0.5]), "planner.discount is 2.0"),
    "no expectile": (put("iql_settings", [0.9, 1.0, 0.1, 0.1]), "critic.expectile is 1.0"),
    "more after than before": (put("iql_after_q", np.zeros(ROWS + 1)), "iql_after_q is float64"),
    "pickled objects": (put("extra", np.zeros(1, object)), "Object arrays cannot be loaded"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_recordings_are_refused(name: str, other: tuple[Path, Path], tmp_path: Path) -> None:
    change, word = BAD[name]
    golden = write_npz(tmp_path / "golden.npz", change(load(other[1])))
    assert word in refusal(other[0], golden)


def test_a_damaged_recording_ends_with_exit_code_2(
    other: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden, original = tmp_path / "golden.npz", other[1].read_bytes()
    damaged = original[:500] + bytes(500) + original[1000:]
    for content in (original[:-100], damaged, b"text", b""):
        golden.write_bytes(content)
        assert command("verify", other[0], golden) == 2
    assert command("verify", other[0], tmp_path / "nowhere.npz") == 2
    assert command("verify", tmp_path, other[1]) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 6)
    assert "Traceback" not in shown.err


def test_other_archive_members_are_refused(other: tuple[Path, Path], tmp_path: Path) -> None:
    golden = tmp_path / "golden.npz"
    golden.write_bytes(other[1].read_bytes())
    with zipfile.ZipFile(golden, "a") as archive:
        archive.writestr("note.txt", "no array")
    assert "['note.txt'] are no arrays" in refusal(other[0], golden)


def test_an_array_that_claims_a_huge_size_is_refused(
    other: tuple[Path, Path], tmp_path: Path
) -> None:
    golden = tmp_path / "golden.npz"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999,), }"
    size = len(header).to_bytes(2, "little")
    with zipfile.ZipFile(golden, "w") as archive:
        archive.writestr("input_states.npy", b"\x93NUMPY\x01\x00" + size + header)
    assert "is not a plain .npz of numbers" in refusal(other[0], golden)


def test_a_recording_that_unpacks_to_too_many_bytes_is_refused(
    other: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m3pc.interop.released_files, "MAX_BYTES", 10_000)
    assert "at most 10000 are read" in refusal(*other)


def test_a_checkpoint_without_targets_is_refused(other: tuple[Path, Path], tmp_path: Path) -> None:
    original = checkpoint.read(other[0])
    checkpoint.write(tmp_path / "bare", original.weights, {}, {})
    assert "holds no critic.target.weight0" in refusal(tmp_path / "bare", other[1])
