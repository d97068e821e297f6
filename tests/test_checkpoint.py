"""A checkpoint is read back bit for bit, or refused; a write that fails leaves the one before."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from m3pc import checkpoint
from m3pc.checkpoint import LATEST, METADATA, TRAINING, WEIGHTS, Checkpoint
from m3pc.types import InputError
from m3pc.weights import Weights, tensors_digest
from tests.refusals import sentence
from tests.small_weights import tiny_config, tiny_weights

FILES = (METADATA, WEIGHTS, TRAINING)
PROGRESS = {"model_updates": 7, "critic_updates": 3, "data": "/data/hopper", "checksum": "ab" * 32}
CONFIG = tiny_config(
    model__width=8, model__encoder_layers=1, model__expansion=1, critic__width=4, seed=5
)


@cache
def weights(seed: int = 0) -> Weights:
    return tiny_weights(CONFIG, seed=seed, states=2, actions=1, env="Pendulum-v1")


def training(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "model.log_alpha": torch.tensor(-2.3 - seed, dtype=torch.float64),
        "model.exp_avg.embed": torch.randn(3, 4, generator=rng),
        "critic.step.q": torch.tensor(3.0),
    }


def whole(found: Checkpoint) -> tuple[object, ...]:
    """Everything that was read, the tensors by their bytes."""
    w = found.weights
    about = (w.version, w.config, w.state_size, w.action_size, w.horizon, w.env)
    return *about, tensors_digest(w.tensors), tensors_digest(found.training), dict(found.progress)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    path = tmp_path / "one"
    checkpoint.write(path, weights(), training(), PROGRESS)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints of a run: 10 of seed 1 and 20 of seed 2."""
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    for seed in (1, 2):
        add(path, seed)
    return path


def add(folder: Path, seed: int, keep: int = 2) -> Path:
    """The checkpoint numbered ten times `seed`."""
    progress = PROGRESS | {"model_updates": seed}
    return checkpoint.write_next(
        folder, weights(seed), training(seed), progress, number=10 * seed, keep=keep
    )


@cache
def expected(seed: int) -> tuple[object, ...]:
    w = weights(seed)
    about = (w.version, w.config, w.state_size, w.action_size, w.horizon, w.env)
    progress = PROGRESS | {"model_updates": seed}
    return *about, w.digest, tensors_digest(training(seed)), progress


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as refused:
        checkpoint.read(path)
    return sentence(refused)


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
    found = checkpoint.read(tmp_path / "c")
    for given, read in ((state, found.weights.tensors), (extra, found.training)):
        assert given.keys() == read.keys()
        for name, tensor in given.items():
            assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape), name
            assert read[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes(), name
    assert found.weights.config == original.config
    assert (found.weights.version, found.weights.horizon) == (7, 40)
    assert (found.weights.state_size, found.weights.action_size) == (2, 1)
    assert found.weights.env == "Pendulum-v1"
    assert found.progress == PROGRESS
    assert found.path == tmp_path / "c"
    assert found.weights.digest == original.digest


def test_the_same_state_is_the_same_bytes(one: Path, tmp_path: Path) -> None:
    found = checkpoint.read(one)
    checkpoint.write(tmp_path / "again", found.weights, found.training, found.progress)
    for name in FILES:
        assert (one / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert names(one) == sorted(FILES)


def test_a_model_to_plan_with_has_no_state_of_training(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "c", weights(), {}, {})
    found = checkpoint.read(tmp_path / "c")
    assert (dict(found.training), dict(found.progress)) == ({}, {})


def test_a_name_that_is_taken_is_refused(one: Path) -> None:
    before = whole(checkpoint.read(one))
    with pytest.raises(InputError, match="exists already"):
        checkpoint.write(one, weights(1), training(1), PROGRESS)
    assert whole(checkpoint.read(one)) == before


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
        assert whole(checkpoint.read(tmp_path)) == expected(seed)
    assert names(tmp_path) == ["000000030", "000000040", LATEST]


def test_a_run_a_folder_and_a_checkpoint_are_ways_to_the_same(folder: Path) -> None:
    ways = (folder.parent, folder, folder / "000000020", str(folder))
    assert {checkpoint.read(way).path for way in ways} == {folder / "000000020"}
    assert whole(checkpoint.read(folder / "000000010")) == expected(1)
    assert whole(checkpoint.newest(folder)) == expected(2)


def test_a_checkpoint_from_before_a_crash_is_written_anew(folder: Path) -> None:
    (folder / "000000020" / "left over").touch()
    add(folder, 2)
    assert names(folder / "000000020") == sorted(FILES)
    assert whole(checkpoint.newest(folder)) == expected(2)


@pytest.mark.parametrize("content", ["", "..", "/etc", "000000020/..", "twenty", "-1", "\0", "99"])
def test_a_latest_that_names_no_checkpoint_is_refused(content: str, folder: Path) -> None:
    (folder / LATEST).write_text(content)
    assert str(folder) in refusal(folder)
    assert whole(checkpoint.newest(folder)) == expected(2)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file", "."):
        assert "is not a checkpoint" in refusal(tmp_path / name)
    for name in ("nowhere", "."):
        with pytest.raises(InputError, match="has no checkpoint to go on from"):
            checkpoint.newest(tmp_path / name)


# Damage


def bit_flips(path: Path, count: int) -> list[tuple[int, int]]:
    """Position and bit: in each of the first 64 bytes, and in `count` drawn from all."""
    size = path.stat().st_size
    rng = np.random.default_rng(size)
    drawn = rng.integers(size, size=count).tolist()
    return [(place, int(rng.integers(8))) for place in [*range(64), *sorted(drawn)]]


@pytest.mark.parametrize(
    "name",
    [WEIGHTS, TRAINING, METADATA],
)
def test_no_flipped_bit_is_ever_read_as_something_else(name: str, one: Path) -> None:
    """Refused, or without any effect: 264 flips a file."""
    before, path = whole(checkpoint.read(one)), one / name
    good = path.read_bytes()
    unseen, other = 0, []
    for place, bit in bit_flips(path, 200):
        bad = bytearray(good)
        bad[place] ^= 1 << bit
        path.write_bytes(bad)
        try:
            found = whole(checkpoint.read(one))
        except InputError as error:
            assert "\n" not in str(error)
        except Exception as error:
            other.append((place, bit, repr(error)))
        else:
            unseen += 1
            if found != before:
                other.append((place, bit, good[place - 20 : place + 20].decode()))
    path.write_bytes(good)
    assert other == []
    assert whole(checkpoint.read(one)) == before
    assert name == METADATA or unseen == 0


@pytest.mark.parametrize("name", FILES)
def test_every_shorter_or_longer_file_is_refused(name: str, one: Path) -> None:
    path = one / name
    good = path.read_bytes()
    lengths = np.linspace(0, len(good) - 1, 40).astype(int).tolist()
    for content in (*(good[:length] for length in lengths), good + b"\0", good + good):
        path.write_bytes(content)
        assert path.name in refusal(one)


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING])
def test_a_file_that_is_missing_linked_or_a_folder_is_refused(
    name: str, one: Path, tmp_path: Path
) -> None:
    path = one / name
    path.rename(tmp_path / "moved")
    assert name in refusal(one)
    path.symlink_to(tmp_path / "moved")  # the right bytes, but they may change at any time
    assert name in refusal(one)
    path.unlink()
    path.mkdir()
    assert name in refusal(one)


def test_metadata_that_are_missing_or_a_folder_are_refused(one: Path) -> None:
    (one / METADATA).unlink()
    assert "is not a checkpoint" in refusal(one)
    (one / METADATA).mkdir()
    assert "is not a checkpoint" in refusal(one)


def test_metadata_that_are_linked_are_refused(one: Path, tmp_path: Path) -> None:
    (one / METADATA).rename(tmp_path / "moved")
    (one / METADATA).symlink_to(tmp_path / "moved")
    refusal(one)


def test_files_that_changed_places_are_refused(one: Path, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "two", weights(1), training(1), PROGRESS)
    for name in (WEIGHTS, TRAINING):
        good = (one / name).read_bytes()
        shutil.copy(tmp_path / "two" / name, one / name)
        assert f"{name} was changed" in refusal(one)
        (one / name).write_bytes(good)
    shutil.copy(tmp_path / "two" / METADATA, one / METADATA)
    assert "was changed" in refusal(one)


# Below, the hashes are made to fit, as a program with a fault or a person could.


def with_metadata(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads((path / METADATA).read_bytes())
    change(tree)
    (path / METADATA).write_text(json.dumps(tree | {"check": checkpoint.check(tree)}))


def with_content(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    with_metadata(path, lambda tree: tree["files"].__setitem__(name, entry))


def with_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load((path / WEIGHTS).read_bytes())
    change(tensors)
    with_content(path, WEIGHTS, save(tensors))


def put(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Change a field of metadata.json by its dotted path; an Ellipsis takes it away."""

    def change(tree: dict[str, Any]) -> None:
        *outer, last = name.split("/")
        for part in outer:
            tree = tree[part]
        if value is ...:
            del tree[last]
        else:
            tree[last] = value

    return change


def test_hashes_that_are_made_to_fit_are_accepted(one: Path) -> None:
    """So what is refused below is refused for its own sake."""
    before = whole(checkpoint.read(one))
    with_tensors(one, lambda tensors: None)
    with_metadata(one, lambda tree: None)
    assert whole(checkpoint.read(one)) == before


LIES: dict[str, tuple[str, object, str]] = {
    "later format": ("format", 2, "has format 2; this version reads format 1"),
    "older format": ("format", 0, "has format 0"),
    "format in words": ("format", "1", "has format '1'"),
    "no format": ("format", ..., "has format None"),
    "no version": ("version", ..., "version is None"),
    "half a version": ("version", 7.5, "version is 7.5"),
    "true version": ("version", True, "version is True"),
    "negative version": ("version", -1, "version is not sensible"),
    "another state size": ("state_size", 3, "expected float32"),
    "no state": ("state_size", 0, "sizes of states and actions are not sensible"),
    "huge state": ("state_size", 1 << 21, "sizes of states and actions are not sensible"),
    "large state": ("state_size", 1 << 20, "expected float32"),
    "another action size": ("action_size", 2, "expected float32"),
    "negative action size": ("action_size", -1, "sizes of states and actions are not sensible"),
    "another step limit": ("horizon", 41, "envelope is torch.float32 [40]"),
    "no step limit": ("horizon", 0, "step limit or version is not sensible"),
    "huge step limit": ("horizon", 1 << 40, "step limit or version is not sensible"),
    "a number for env": ("env", 3, "env is 3"),
    "no progress": ("progress", ..., "progress is None"),
    "list of progress": ("progress", [], "progress is []"),
    "no files": ("files", ..., "files is None"),
    "empty entry": (f"files/{WEIGHTS}", {}, f"{WEIGHTS} was changed"),
    "null entry": (f"files/{TRAINING}", None, f"{TRAINING} is missing"),
    "hash of nothing": (f"files/{TRAINING}/sha256", ..., f"{TRAINING} was changed"),
    "wrong size": (f"files/{WEIGHTS}/bytes", 1, f"{WEIGHTS} was changed"),
    "no config": ("config", ..., "config is None"),
    "unknown field": ("config/planner/candidate", 3, "planner.candidate: Extra inputs"),
    "unknown section": ("config/plan", {}, "plan: Extra inputs"),
    "bad value": ("config/planner/lam", 7, "planner.lam: Input should be less than"),
    "NaN value": ("config/planner/lam", float("nan"), "planner.lam"),
    "text value": ("config/model/width", "8", "model.width: Input should be a valid integer"),
    "conflict": ("config/model/heads", 3, "which model.heads = 3 does not divide"),
    "other width": ("config/model/width", 16, "expected float32"),
    "huge model": ("config/model/width", 16384, "expected float32"),
    "more layers": ("config/model/encoder_layers", 2, "weights lack"),
    "lone surrogate": ("config/planner/mode", "\ud800", "the settings in metadata.json"),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lie_are_refused(name: str, one: Path) -> None:
    field, value, words = LIES[name]
    with_metadata(one, put(field, value))
    found = refusal(one)
    assert words in found
    assert str(one) in found


@pytest.mark.parametrize("name", [f"files/{WEIGHTS}", f"files/{TRAINING}", "env"])
def test_a_field_that_is_absent_is_refused(name: str, one: Path) -> None:
    with_metadata(one, put(name, ...))
    refusal(one)


def test_a_setting_with_a_line_break_in_its_name_is_one_sentence(one: Path) -> None:
    with_metadata(one, put("config/plan\nner", {}))
    refusal(one)


def first(tensors: dict[str, Tensor]) -> str:
    return next(name for name in sorted(tensors) if name.startswith("model."))


def poke(value: float) -> Callable[[dict[str, Tensor]], None]:
    """One number of one tensor."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[first(tensors)].view(-1)[-1] = value

    return change


def made(name: str | None, tensor: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Another tensor in the place of the one named, or of the first."""

    def change(tensors: dict[str, Tensor]) -> None:
        key = name or first(tensors)
        tensors[key] = tensor(tensors[key]).contiguous()

    return change


HOSTILE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "NaN": (poke(float("nan")), "holds NaN or Inf"),
    "infinity": (poke(float("-inf")), "holds NaN or Inf"),
    "NaN envelope": (made("envelope", lambda x: x * float("nan")), "envelope holds NaN or Inf"),
    "a row less": (made(None, lambda x: x[:-1]), "expected float32"),
    "an axis more": (made(None, lambda x: x[None]), "expected float32"),
    "transposed": (made("critic.v.weight0", lambda x: x.mT), "critic.v.weight0 is torch.float32"),
    "doubles": (made("envelope", lambda x: x.double()), "envelope is torch.float64"),
    "halves": (made("critic.q.bias0", lambda x: x.half()), "critic.q.bias0 is torch.float16"),
    "integers": (made("return_range", lambda x: x.int()), "return_range is torch.int32"),
    "no number": (made("envelope", lambda x: x[:0]), "envelope is torch.float32 [0]"),
    "one unknown": (
        lambda tensors: tensors.__setitem__("model.backdoor", torch.ones(1)),
        "unknown ['model.backdoor']",
    ),
    "unknown\nname": (
        lambda tensors: tensors.__setitem__("model.a\nb", torch.ones(1)),
        r"unknown ['model.a\nb']",
    ),
    "one missing": (lambda tensors: tensors.pop("envelope"), "weights lack ['envelope']"),
    "none": (lambda tensors: tensors.clear(), "weights lack"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_tensors_that_fit_no_model_are_refused(name: str, one: Path) -> None:
    change, words = HOSTILE[name]
    with_tensors(one, change)
    found = refusal(one)
    assert words in found
    assert str(one) in found


def header(text: str, body: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + body


TENSOR = '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [%s]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        bytes(8),
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + b"{}",
        header("[]"),
        header("{"),
        header("{" * 5000),
        header('{"a": 1}'),
        header(TENSOR % ("1", "0, 4")),
        header(TENSOR % ("1", "4, 0"), bytes(4)),
        header(TENSOR % ("9", "0, 4"), bytes(4)),
        header(TENSOR % ("4611686018427387904, 4", "0, 4"), bytes(4)),
        header(TENSOR.replace("F32", "F99") % ("1", "0, 4"), bytes(4)),
        header(TENSOR % ("1", "0, 4"), bytes(8)),
    ],
    ids=range(15),
)
@pytest.mark.parametrize("name", [WEIGHTS, TRAINING])
def test_what_is_no_safetensors_file_is_refused_even_if_its_hash_fits(
    name: str, content: bytes, one: Path
) -> None:
    with_content(one, name, content)
    assert f"{name} is not readable as safetensors" in refusal(one)


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING])
def test_a_pickle_by_another_name_is_not_run(name: str, one: Path, tmp_path: Path) -> None:
    proof = tmp_path / "it was run"
    bomb = f"cos\nsystem\n(S'touch \"{proof}\"'\ntR.".encode()
    with_content(one, name, bomb)
    assert "is not readable as safetensors" in refusal(one)
    (one / METADATA).write_bytes(bomb)
    assert "cannot be read as JSON" in refusal(one)
    assert not proof.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"3", b"\xff\xfe", b"[" * 200_000, b'{"format": ' + b"9" * 5000],
    ids=range(8),
)
def test_what_is_no_metadata_is_refused(content: bytes, one: Path) -> None:
    (one / METADATA).write_bytes(content)
    assert METADATA in refusal(one)


def test_metadata_larger_than_any_of_ours_are_not_read(one: Path) -> None:
    with_metadata(one, put("progress/note", "x" * checkpoint.LARGEST_METADATA))
    assert METADATA in refusal(one)
    with (one / METADATA).open("r+b") as file:
        file.truncate(1 << 40)  # a hole: takes no room on disk, and would not fit in memory
    assert METADATA in refusal(one)


# What a resumed run goes on from


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
    name: str, folder: Path
) -> None:
    DAMAGE[name](folder / "000000020")
    found = checkpoint.newest(folder)
    assert (found.path, whole(found)) == (folder / "000000010", expected(1))
    for path in (folder / "000000020", folder, folder.parent):
        refusal(path)
    add(folder, 3)  # and the run goes on
    assert whole(checkpoint.read(folder)) == expected(3)
    DAMAGE[name](folder / "000000030")
    for path in folder.glob("0000000[12]0"):
        shutil.rmtree(path)
    with pytest.raises(InputError) as refused:
        checkpoint.newest(folder)
    assert "000000030" in sentence(refused)


# Writes that fail or are killed

CALLS: Mapping[str, tuple[object, str, int]] = {  # owner, name, least calls of one checkpoint
    "fsync": (os, "fsync", 11),
    "rename": (Path, "rename", 1),
    "replace": (Path, "replace", 1),
    "rmtree": (shutil, "rmtree", 1),
    "open": (Path, "open", 4),
}


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_write_that_fails_anywhere_leaves_a_whole_checkpoint(
    name: str, keep: int, folder: Path, tmp_path: Path
) -> None:
    """The k-th call fails, for every k: the new one is whole or absent, and the old one is left."""
    owner, attribute, least = CALLS[name]
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
        assert whole(checkpoint.newest(copy)) == expected(there)
        assert whole(checkpoint.read(copy)) in (expected(2), expected(there))
        add(copy, 3, keep)
        assert whole(checkpoint.read(copy)) == whole(checkpoint.newest(copy)) == expected(3)
        kept = ["000000020", "000000030"][-keep:]
        assert names(copy) == [*kept, LATEST]
    assert failed >= least
    assert calls < k, "no write got through"


def watched(patch: pytest.MonkeyPatch, before: Callable[[str, Any], None]) -> None:
    """Call `before` with the name and the subject of each call that makes things last."""

    def watch(owner: object, attribute: str) -> None:
        real = getattr(owner, attribute)

        def call(what: Any, *arguments: Any, **options: Any) -> Any:
            before(attribute, what)
            return real(what, *arguments, **options)

        patch.setattr(owner, attribute, call)

    for owner, attribute in (
        (os, "fsync"),
        (Path, "rename"),
        (Path, "replace"),
        (shutil, "rmtree"),
    ):
        watch(owner, attribute)


def test_a_kill_anywhere_in_a_write_leaves_a_whole_checkpoint(folder: Path, tmp_path: Path) -> None:
    """What is on disk at each durable step is what a kill there leaves: nothing tidies up."""
    taken: list[Path] = []
    copy_tree = shutil.copytree

    def take(call: str, what: object) -> None:
        taken.append(tmp_path / f"{len(taken)}" / "checkpoints")
        copy_tree(folder, taken[-1])

    with pytest.MonkeyPatch.context() as patch:
        watched(patch, take)
        add(folder, 3, keep=1)
    seen = set()
    for copy in taken:
        there = 3 if (copy / "000000030").exists() else 2
        seen.add((there, (copy / ".000000030.partial").exists(), (copy / LATEST).read_text()))
        assert whole(checkpoint.newest(copy)) == expected(there)
        assert whole(checkpoint.read(copy)) in (expected(2), expected(there))
        add(copy, 3, keep=1)
        assert whole(checkpoint.read(copy)) == expected(3)
        assert names(copy) == ["000000030", LATEST]
    assert seen == {
        (2, True, "000000020\n"),
        (3, False, "000000020\n"),
        (3, False, "000000030\n"),
    }
    assert len(taken) >= 15


@pytest.mark.skipif(sys.platform != "linux", reason="open files are told apart by /proc")
def test_every_byte_lasts_before_its_name_does(folder: Path) -> None:
    """The order of things that a power cut may not turn around."""
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
