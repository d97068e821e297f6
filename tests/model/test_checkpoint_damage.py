"""A checkpoint that was changed, by an accident or on purpose, is refused in one sentence."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from m3pc.model import checkpoint
from m3pc.model.checkpoint import METADATA, TRAINING, WEIGHTS
from m3pc.types import InputError
from tests.support.models.small_checkpoint import (
    FILES,
    PROGRESS,
    contents,
    first,
    poke,
    put,
    refusal,
    training,
    weights,
    with_content,
    with_metadata,
    with_tensors,
)

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
    before, path = contents(checkpoint.read(one)), one / name
    good = path.read_bytes()
    unseen, other = 0, []
    for place, bit in bit_flips(path, 200):
        bad = bytearray(good)
        bad[place] ^= 1 << bit
        path.write_bytes(bad)
        try:
            damaged = contents(checkpoint.read(one))
        except InputError as error:
            assert "\n" not in str(error)
        except Exception as error:
            other.append((place, bit, repr(error)))
        else:
            unseen += 1
            if damaged != before:
                other.append((place, bit, good[place - 20 : place + 20].decode()))
    path.write_bytes(good)
    assert other == []
    assert contents(checkpoint.read(one)) == before
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


def test_hashes_that_are_made_to_fit_are_accepted(one: Path) -> None:
    """So what is refused below is refused for its own sake."""
    before = contents(checkpoint.read(one))
    with_tensors(one, lambda tensors: None)
    with_metadata(one, lambda tree: None)
    assert contents(checkpoint.read(one)) == before


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
    "conflict": ("config/model/heads", 3, "not a multiple of model.heads = 3"),
    "other width": ("config/model/width", 16, "expected float32"),
    "huge model": ("config/model/width", 16384, "expected float32"),
    "more layers": ("config/model/encoder_layers", 2, "weights lack"),
    "lone surrogate": ("config/planner/mode", "\ud800", "the settings in metadata.json"),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lie_are_refused(name: str, one: Path) -> None:
    field, value, words = LIES[name]
    with_metadata(one, put(field, value))
    message = refusal(one)
    assert words in message
    assert str(one) in message


@pytest.mark.parametrize("name", [f"files/{WEIGHTS}", f"files/{TRAINING}", "env"])
def test_a_field_that_is_absent_is_refused(name: str, one: Path) -> None:
    with_metadata(one, put(name, ...))
    refusal(one)


def test_a_setting_with_a_line_break_in_its_name_is_one_sentence(one: Path) -> None:
    with_metadata(one, put("config/plan\nner", {}))
    refusal(one)


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
    "no scale": (made("normaliser.states.std", lambda x: 0 * x), "std holds numbers that are not"),
    "no scale of the critic": (
        made("critic.state_std", lambda x: 0 * x),
        "state_std holds numbers",
    ),
    "turned scale": (made("normaliser.rewards.std", lambda x: -x), "std holds numbers that are"),
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
    message = refusal(one)
    assert words in message
    assert str(one) in message


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
    with_metadata(one, put("progress/note", "x" * checkpoint.MAX_METADATA))
    assert METADATA in refusal(one)
    with (one / METADATA).open("r+b") as file:
        file.truncate(1 << 40)  # a hole: takes no room on disk, and would not fit in memory
    assert METADATA in refusal(one)
