"""Weights as one file: the same again, or a refusal."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from m3pc.model.weights import (
    MAX_HEADER,
    SETTINGS,
    NumbersError,
    TensorsError,
    Weights,
    checksum,
    description,
    from_bytes,
    to_bytes,
)
from m3pc.types import InputError, Version
from tests.support.models.small_weights import tiny_config, tiny_weights


def sample() -> Weights:
    return dataclasses.replace(tiny_weights(tiny_config(), env="Hopper-v5"), version=12)


def header(content: bytes) -> dict[str, Any]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    settings: dict[str, Any] = json.loads(header["__metadata__"][SETTINGS])
    return settings


def rewritten(change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> bytes:
    """The sample's file with other settings, by somebody who knows the checksum."""
    content = to_bytes(sample())
    settings = header(content)
    change(settings)
    if seal:
        settings["check"] = checksum(settings)
    return save(load(content), {SETTINGS: json.dumps(settings)})


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    content = to_bytes(sample())
    tensors = load(content)
    change(tensors)
    return save(tensors, {SETTINGS: json.dumps(header(content))})


def test_weights_survive_being_one_file() -> None:
    before = sample()
    after = from_bytes(to_bytes(before))
    assert description(after) == description(before)
    assert after.config == before.config
    assert all(torch.equal(after.tensors[name], x) for name, x in before.tensors.items())


def test_a_packed_version_survives() -> None:
    newest = Version(epoch=(3 << 20) + 1, number=2**39)
    content = to_bytes(dataclasses.replace(sample(), version=newest.packed))
    assert Version.unpacked(from_bytes(content).version) == newest


def test_a_version_that_an_int64_cannot_hold_is_refused() -> None:
    assert Version(epoch=2**23 - 1, number=2**40 - 1).packed == 2**63 - 1
    for epoch, number in ((2**23, 0), (0, 2**40), (2**40 + 1, 0), (-1, 0), (0, -1)):
        with pytest.raises(InputError, match="does not fit 64 bits"):
            _ = Version(epoch=epoch, number=number).packed


def test_the_same_weights_are_the_same_bytes() -> None:
    assert to_bytes(sample()) == to_bytes(sample())


def test_a_file_that_was_cut_anywhere_is_refused() -> None:
    content = to_bytes(sample())
    for length in (0, 3, 8, 100, 5_000, len(content) // 2, len(content) - 1):
        with pytest.raises(InputError):
            from_bytes(content[:length])
    with pytest.raises(InputError):
        from_bytes(content + b"\0")


def test_a_changed_byte_never_changes_what_is_read() -> None:
    before = sample()
    content = to_bytes(before)
    refused = 0
    for place in [*range(0, 9000, 97), *range(9000, len(content), len(content) // 200)]:
        changed = bytearray(content)
        changed[place] ^= 0x11
        try:
            after = from_bytes(bytes(changed))
        except InputError:
            refused += 1
        else:  # a space between two words of the header
            assert description(after) == description(before)
    assert refused >= 250


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version below 0": (lambda s: s.update(version=-1), "version"),
    "version beyond an int64": (lambda s: s.update(version=1 << 63), "version"),
    "version of another kind": (lambda s: s.update(version=True), "version"),
    "no horizon": (lambda s: s.pop("horizon"), "horizon"),
    "horizon of nothing": (lambda s: s.update(horizon=0), "step limit"),
    "huge states": (lambda s: s.update(state_size=1 << 40), "sizes"),
    "unknown setting": (lambda s: s["config"].update(x=1), "config|settings"),
    "settings of another kind": (lambda s: s.update(config=[]), "config"),
    "another format": (lambda s: s.update(format=2), "format"),
}


@pytest.mark.parametrize("lie", LIES)
def test_settings_that_lie_are_refused(lie: str) -> None:
    change, words = LIES[lie]
    with pytest.raises(InputError, match=words):
        from_bytes(rewritten(change))


def test_settings_that_were_changed_are_refused() -> None:
    with pytest.raises(InputError, match="checksum"):
        from_bytes(rewritten(lambda s: s.update(version=13), seal=False))


def test_sizes_that_the_tensors_do_not_have_are_refused() -> None:
    with pytest.raises(TensorsError):
        from_bytes(rewritten(lambda s: s.update(state_size=6)))


def test_a_tensor_that_is_not_there_is_refused() -> None:
    with pytest.raises(TensorsError, match="lack"):
        from_bytes(with_tensors(lambda tensors: tensors.pop("envelope")))


def test_a_number_that_is_not_finite_is_refused() -> None:
    with pytest.raises(NumbersError, match="NaN"):
        from_bytes(with_tensors(lambda tensors: tensors["envelope"].fill_(torch.nan)))


def test_a_changed_number_is_refused() -> None:
    with pytest.raises(InputError, match="hash"):
        from_bytes(with_tensors(lambda tensors: tensors["envelope"].mul_(2)))


def test_files_that_are_something_else_are_refused() -> None:
    plain = save({"x": torch.zeros(1)})
    for content in (b"", b"\x93NUMPY", b"PK\3\4" + bytes(100), b"\xff" * 100, plain):
        with pytest.raises(InputError):
            from_bytes(content)


def test_a_header_that_is_too_long_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(InputError, match=f"header of {MAX_HEADER + 1}"):
        from_bytes((MAX_HEADER + 1).to_bytes(8, "little") + bytes(MAX_HEADER + 2))
