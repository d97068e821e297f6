"""A checkpoint is read back bit for bit; a write that fails leaves the previous one."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from m3pc.model import checkpoint
from m3pc.model.checkpoint import LATEST, METADATA, TRAINING, WEIGHTS
from m3pc.model.weights import Weights, tensors_digest
from m3pc.types import InputError
from tests.support.models.small_checkpoint import (
    FILES,
    PROGRESS,
    add,
    contents,
    expected,
    names,
    poke,
    put,
    refusal,
    training,
    weights,
    with_metadata,
    with_tensors,
)
from tests.support.runs.refusals import sentence


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints of a run: 10 of seed 1 and 20 of seed 2."""
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    for seed in (1, 2):
        add(path, seed)
    return path


# Write and read


def test_what_is_read_is_what_was_written_to_the_bit(tmp_path: Path) -> None:
    """Numbers that a text, or a detour through another type, would not keep."""
    odd = torch.tensor([-0.0, 1e-45, 3.4028235e38, -1.1754944e-38])
    state = dict(weights().tensors)
    state["return_range"] = odd[:2]
    state["normaliser.states.mean"] = odd[2:]
    original = Weights(
        **{n: getattr(weights(), n) for n in Weights.__dataclass_fields__} | {"tensors": state}
    )
    extra = training() | {
        "doubles": torch.tensor([0.1, -0.0, 5e-324], dtype=torch.float64),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    checkpoint.write(tmp_path / "c", original, extra, PROGRESS)
    saved = checkpoint.read(tmp_path / "c")
    for written, read in ((state, saved.weights.tensors), (extra, saved.training)):
        assert written.keys() == read.keys()
        for name, tensor in written.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
            assert read[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes(), name
    assert saved.weights.config == original.config
    assert (saved.weights.version, saved.weights.max_episode_steps) == (7, 40)
    assert (saved.weights.state_size, saved.weights.action_size) == (2, 1)
    assert saved.weights.env == "Pendulum-v1"
    assert saved.progress == PROGRESS
    assert saved.path == tmp_path / "c"
    assert saved.weights.digest == original.digest


def test_the_same_state_is_the_same_bytes(one: Path, tmp_path: Path) -> None:
    saved = checkpoint.read(one)
    checkpoint.write(tmp_path / "again", saved.weights, saved.training, saved.progress)
    for name in FILES:
        assert (one / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert names(one) == sorted(FILES)


def test_a_checkpoint_that_can_only_plan_has_no_training_state(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", weights(), {}, {})
    saved = checkpoint.read(tmp_path / "c")
    assert (dict(saved.training), dict(saved.progress)) == ({}, {})


def test_a_name_that_is_taken_is_refused(one: Path) -> None:
    before = contents(checkpoint.read(one))
    with pytest.raises(InputError, match="exists already"):
        checkpoint.write(one, weights(1), training(1), PROGRESS)
    assert contents(checkpoint.read(one)) == before


def test_the_digest_changes_with_every_tensor() -> None:
    original = weights()
    assert original.digest == weights().digest == tensors_digest(original.tensors)
    digests = {original.digest}
    for name, tensor in original.tensors.items():
        other = tensor.clone()
        other.view(torch.int32).view(-1)[-1] ^= 1  # the last bit of the last number
        digests.add(tensors_digest({**original.tensors, name: other}))
    assert len(digests) == 1 + len(original.tensors)
    renamed = {f"x{name}": tensor for name, tensor in original.tensors.items()}
    reshaped = {**original.tensors, "envelope": original.tensors["envelope"][None]}
    doubled = {**original.tensors, "envelope": original.tensors["envelope"].double()}
    mean, std = (f"normaliser.states.{part}" for part in ("mean", "std"))
    swapped = dict(original.tensors) | {mean: original.tensors[std], std: original.tensors[mean]}
    digests |= {tensors_digest(tensors) for tensors in (renamed, reshaped, doubled, swapped)}
    assert len(digests) == 5 + len(original.tensors)


# The checkpoints of a run


def test_a_run_keeps_the_newest_and_names_the_last(tmp_path: Path) -> None:
    for seed in (1, 2, 3, 4):
        path = add(tmp_path, seed, keep=2)
        assert (tmp_path / LATEST).read_text() == f"{path.name}\n" == f"0000000{seed}0\n"
        assert contents(checkpoint.read(tmp_path)) == expected(seed)
    assert names(tmp_path) == ["000000030", "000000040", LATEST]


def test_a_run_a_folder_and_a_path_name_the_same_checkpoint(folder: Path) -> None:
    ways = (folder.parent, folder, folder / "000000020", str(folder))
    assert {checkpoint.read(way).path for way in ways} == {folder / "000000020"}
    assert contents(checkpoint.read(folder / "000000010")) == expected(1)
    assert contents(checkpoint.read_newest(folder)) == expected(2)


def test_a_checkpoint_from_before_a_crash_is_written_again(folder: Path) -> None:
    (folder / "000000020" / "left over").touch()
    add(folder, 2)
    assert names(folder / "000000020") == sorted(FILES)
    assert contents(checkpoint.read_newest(folder)) == expected(2)


@pytest.mark.parametrize("content", ["", "..", "/etc", "000000020/..", "twenty", "-1", "\0", "99"])
def test_a_latest_that_names_no_checkpoint_is_refused(content: str, folder: Path) -> None:
    (folder / LATEST).write_text(content)
    assert str(folder) in refusal(folder)
    assert contents(checkpoint.read_newest(folder)) == expected(2)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file", "."):
        assert "is not a checkpoint" in refusal(tmp_path / name)
    for name in ("nowhere", "."):
        with pytest.raises(InputError, match="has no checkpoint to go on from"):
            checkpoint.read_newest(tmp_path / name)


# What a resumed run continues from


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


DAMAGE: Mapping[str, Callable[[Path], object]] = {
    "flipped bit": lambda path: flip(path / TRAINING),
    "short file": lambda path: os.truncate(path / WEIGHTS, 100),
    "no weights": lambda path: (path / WEIGHTS).unlink(),
    "no metadata": lambda path: (path / METADATA).unlink(),
    "empty metadata": lambda path: (path / METADATA).write_bytes(b""),
    "zeros for metadata": lambda path: (path / METADATA).write_bytes(bytes(900)),
    "nothing": empty,
    "NaN": lambda path: with_tensors(path, poke(float("nan"))),
    "unknown setting": lambda path: with_metadata(path, put("config/x", 1)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_resumed_run_passes_over_damage_but_a_named_checkpoint_is_refused(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[name](folder / "000000020")
    saved = checkpoint.read_newest(folder)
    assert f"event=checkpoint-passed-over path={folder / '000000020'}" in caplog.text
    assert (saved.path, contents(saved)) == (folder / "000000010", expected(1))
    for path in (folder / "000000020", folder, folder.parent):
        refusal(path)
    add(folder, 3)  # and the run goes on
    assert contents(checkpoint.read(folder)) == expected(3)
    DAMAGE[name](folder / "000000030")
    for path in folder.glob("0000000[12]0"):
        shutil.rmtree(path)
    with pytest.raises(InputError) as refused:
        checkpoint.read_newest(folder)
    assert "000000030" in sentence(refused)


# Writes that fail or are killed

CALLS: Mapping[str, tuple[object, str, int]] = {  # owner, name, minimum of calls for one checkpoint
    "fsync": (os, "fsync", 11),
    "rename": (Path, "rename", 1),
    "replace": (Path, "replace", 1),
    "rmtree": (shutil, "rmtree", 1),
    "open": (Path, "open", 4),
}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_write_that_fails_anywhere_leaves_a_complete_checkpoint(
    name: str, keep: int, folder: Path, tmp_path: Path
) -> None:
    """The k-th call fails, for every k: the new one is complete or absent, the old one is left."""
    owner, attribute, min_calls = CALLS[name]
    real = getattr(owner, attribute)
    failed = 0
    for k in range(1, 60):
        copy = tmp_path / f"{k}" / "checkpoints"
        shutil.copytree(folder, copy)
        calls = 0

        def failing(*arguments: Any, at: int = k, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(5, "Input/output error")
            return real(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, failing)
            try:
                add(copy, 3, keep)
            except OSError:
                failed += 1
        if calls < k:
            break
        there = 3 if (copy / "000000030").exists() else 2
        assert contents(checkpoint.read_newest(copy)) == expected(there)
        assert contents(checkpoint.read(copy)) in (expected(2), expected(there))
        add(copy, 3, keep)
        assert (
            contents(checkpoint.read(copy)) == contents(checkpoint.read_newest(copy)) == expected(3)
        )
        kept = ["000000020", "000000030"][-keep:]
        assert names(copy) == [*kept, LATEST]
    assert failed >= min_calls
    assert calls < k, "no write succeeded"


DURABLE = ((os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree"))
ALL_CALLS = (*DURABLE, *((os, name) for name in ("mkdir", "open", "unlink", "rmdir")))


def watched(
    patch: pytest.MonkeyPatch,
    before: Callable[[str, Any], None],
    calls: Iterable[tuple[object, str]] = DURABLE,
) -> None:
    """Before each call that makes writes durable, pass its name and subject to `before`."""

    def watch(owner: object, attribute: str) -> None:
        real = getattr(owner, attribute)

        def call(what: Any, *arguments: Any, **options: Any) -> Any:
            before(attribute, what)
            return real(what, *arguments, **options)

        patch.setattr(owner, attribute, call)

    for owner, attribute in calls:
        watch(owner, attribute)


def test_a_kill_anywhere_in_a_write_leaves_a_complete_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    """A copy of the disk at each durable step is what a kill there leaves: no handler cleans up."""
    copies: list[Path] = []
    copy_tree = shutil.copytree

    def take(call: str, what: object) -> None:
        copies.append(tmp_path / f"{len(copies)}" / "checkpoints")
        copy_tree(folder, copies[-1])

    with pytest.MonkeyPatch.context() as patch:
        watched(patch, take)
        add(folder, 3, keep=1)
    seen = set()
    for copy in copies:
        there = 3 if (copy / "000000030").exists() else 2
        seen.add((there, (copy / ".000000030.partial").exists(), (copy / LATEST).read_text()))
        assert contents(checkpoint.read_newest(copy)) == expected(there)
        assert contents(checkpoint.read(copy)) in (expected(2), expected(there))
        add(copy, 3, keep=1)
        assert contents(checkpoint.read(copy)) == expected(3)
        assert names(copy) == ["000000030", LATEST]
    assert seen == {
        (2, True, "000000020\n"),
        (3, False, "000000020\n"),
        (3, False, "000000030\n"),
    }
    assert len(copies) >= 15


def contents_by_every_path(folder: Path) -> tuple[object, ...]:
    """The newest checkpoint, which is the same by every path to it."""
    newest = checkpoint.read_newest(folder)
    for path in (folder, folder.parent, newest.path):
        assert contents(checkpoint.read(path)) == contents(newest)
    return contents(newest)


@pytest.mark.parametrize("following", [10, 30])
def test_a_kill_anywhere_while_the_only_checkpoint_is_replaced_leaves_a_complete_one(
    following: int, tmp_path: Path
) -> None:
    """The run then continues from it, with the same number again or with another one."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    add(folder, 1)
    copies: list[Path] = []
    copying = False

    def take(call: str, what: object) -> None:
        nonlocal copying
        if not copying:
            copying = True
            copies.append(tmp_path / f"{len(copies)}" / "checkpoints")
            shutil.copytree(folder, copies[-1])
            copying = False

    with pytest.MonkeyPatch.context() as patch:
        watched(patch, take, ALL_CALLS)
        add(folder, 2, number=10)
    assert (contents_by_every_path(folder), names(folder)) == (expected(2), ["000000010", LATEST])
    seen = []
    for copy in copies:
        seen.append(contents_by_every_path(copy))
        checkpoint.publish(checkpoint.read_newest(copy).path)  # as a run that is resumed does
        assert contents_by_every_path(copy) == seen[-1]
        add(copy, 3, keep=1, number=following)
        assert contents_by_every_path(copy) == expected(3)
        left = [name for name in names(copy) if name != ".000000010.partial"]
        assert left == [f"{following:09d}", LATEST]
    before = seen.count(expected(1))
    assert seen == [expected(1)] * before + [expected(2)] * (len(seen) - before)
    assert min(before, len(seen) - before) >= 5


@pytest.mark.parametrize("name", CALLS)
def test_the_only_checkpoint_is_left_by_a_write_under_its_number_that_fails(
    name: str, tmp_path: Path
) -> None:
    owner, attribute, min_calls = CALLS[name]
    real, calls, k = getattr(owner, attribute), 1, 0
    while calls >= k:
        k, calls = k + 1, 0
        folder = tmp_path / f"{k}" / "checkpoints"
        folder.mkdir(parents=True)
        add(folder, 1)

        def failing(*arguments: Any, at: int = k, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(5, "Input/output error")
            return real(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch, suppress(OSError):
            patch.setattr(owner, attribute, failing)
            add(folder, 2, number=10)
        assert contents_by_every_path(folder) in (expected(1), expected(2))
        add(folder, 3, number=10)
        assert (contents_by_every_path(folder), names(folder)) == (
            expected(3),
            ["000000010", LATEST],
        )
    assert k > min_calls


@pytest.mark.skipif(sys.platform != "linux", reason="the paths of open files are read from /proc")
def test_every_byte_is_durable_before_its_name_is(folder: Path) -> None:
    """The order of writes that a power cut must not reverse."""
    calls: list[tuple[str, str]] = []

    def note(call: str, what: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{what}") if call == "fsync" else what
        calls.append((call, str(Path(path).relative_to(folder))))

    with pytest.MonkeyPatch.context() as patch:
        watched(patch, note)
        add(folder, 3, keep=1)
    stage = ".000000030.partial"
    named = calls.index(("rename", stage))
    synced = [path for call, path in calls[:named] if call == "fsync"]
    assert {f"{stage}/{name}" for name in FILES} < set(synced)
    assert synced.index(f"{stage}/{METADATA}") > max(
        synced.index(f"{stage}/{name}") for name in (WEIGHTS, TRAINING)
    )
    assert synced[-1] == stage
    latest = calls.index(("replace", f".{LATEST}.new"))
    assert ("fsync", ".") in calls[named:latest]  # the name of the folder
    assert ("fsync", f".{LATEST}.new") in calls[named:latest]
    gone = [place for place, (call, _) in enumerate(calls) if call == "rmtree"]
    assert [calls[place][1] for place in gone] == ["000000010", "000000020"]
    assert ("fsync", ".") in calls[latest : gone[0]]  # only then may the old ones go
