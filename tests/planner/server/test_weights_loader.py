"""Following published weights: newer and valid versions are loaded, nothing else."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from m3pc.model.weights import SETTINGS, Weights, checksum, description, tensors_digest, to_bytes
from m3pc.telemetry import catalogue, recorder
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Coordinator, CoordinatorUnavailableError, Pointer, Version
from planner.policy import Policy
from planner.server.weights_loader import BACKOFF, PointerSource, WeightsLoader
from tests.support.models.published import publish, small_config, versioned, write
from tests.support.servers.coordinators import InFile


class Follower:
    """A loader, the policies that it loaded, and its clock, which a test moves."""

    def __init__(
        self, folder: Path, coordinator: Coordinator, source: PointerSource | None = None
    ) -> None:
        self.folder, self.coordinator = folder, coordinator
        self.policies: list[Policy] = []
        self.now, self.recorder = 0.0, Recorder()
        self.loader = WeightsLoader(
            Policy(versioned(7, epoch=0)),
            self.policies.append,
            source or coordinator,
            folder,
            recorder=self.recorder,
            clock=lambda: self.now,
        )

    @property
    def versions(self) -> list[Version]:
        return [Version.unpacked(policy.weights.version) for policy in self.policies]

    def rejected(self) -> dict[str, list[float]]:
        return dict(self.recorder.snapshot().get(catalogue.WEIGHTS_REJECTED.name, {}))


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Follower]:
    place = InFile(tmp_path)
    follower = Follower(tmp_path, place.client())
    assert follower.coordinator.new_epoch("weights") == 1
    yield follower
    follower.loader.close()
    place.close()


def at(number: int, epoch: int = 1) -> Version:
    return Version(epoch=epoch, number=number)


def test_newer_weights_are_loaded_as_they_were_published(follower: Follower) -> None:
    for number in (1, 2):
        publish(follower.coordinator, follower.folder, versioned(number))
        follower.loader.poll(0.0)
    assert follower.versions == [at(1), at(2)]
    assert follower.policies[1].weights.digest == versioned(2).digest
    assert follower.rejected() == {}


def test_a_version_is_loaded_once(follower: Follower) -> None:
    follower.loader.poll(0.0)
    publish(follower.coordinator, follower.folder, versioned(1))
    for _ in range(3):
        follower.loader.poll(0.0)
    assert follower.versions == [at(1)]


def test_an_older_version_is_never_loaded(follower: Follower) -> None:
    pointers = {
        version: write(follower.folder, to_bytes(versioned(version.number, version.epoch)), version)
        for version in (at(5), at(4), at(9, epoch=0), at(1, epoch=2), at(9))
    }
    assert [follower.loader.maybe_load(pointer) for pointer in pointers.values()] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not follower.loader.maybe_load(pointers[at(1, epoch=2)]), "the same version again"
    assert follower.versions == [at(5), at(1, epoch=2)]
    assert follower.rejected() == {}


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    """A file with changed tensors whose checksums fit."""
    good = versioned(2)
    tensors = load(to_bytes(good))
    change(tensors)
    settings = {"format": 1, **description(good), "digest": tensors_digest(tensors)}
    return save(tensors, {SETTINGS: json.dumps(settings | {"check": checksum(settings)})})


def other_sizes() -> Weights:
    from tests.support.models.small_weights import tiny_weights

    return dataclasses.replace(tiny_weights(small_config(), states=6), version=at(2).packed)


GOOD = to_bytes(versioned(2))
CONTENTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "no safetensors": (lambda: b"x" * 1000, "format"),
    "empty": (lambda: b"", "format"),
    "another version inside": (lambda: to_bytes(versioned(3)), "format"),
    "a tensor missing": (lambda: changed(lambda t: t.pop("envelope")), "shape"),
    "a tensor of another shape": (
        lambda: changed(lambda t: t.update(envelope=torch.zeros(3))),
        "shape",
    ),
    "states of another size": (lambda: to_bytes(other_sizes()), "shape"),
    "another model": (
        lambda: to_bytes(versioned(2, config=small_config(model__width=32))),
        "shape",
    ),
    "NaN": (lambda: changed(lambda t: t["envelope"].fill_(torch.nan)), "finite"),
    "infinite": (lambda: changed(lambda t: t["return_range"].fill_(torch.inf)), "finite"),
    "a scale of 0": (lambda: changed(lambda t: t["normaliser.states.std"].fill_(0)), "finite"),
    "numbers that overflow": (
        lambda: changed(lambda t: [x.fill_(3e38) for n, x in t.items() if n.startswith("model.")]),
        "canary",
    ),
    "a critic that overflows": (
        lambda: changed(lambda t: [x.fill_(3e38) for n, x in t.items() if ".q." in n]),
        "canary",
    ),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_file_that_is_not_valid_is_rejected(kind: str, follower: Follower) -> None:
    content, reason = CONTENTS[kind]
    follower.coordinator.publish("weights", write(follower.folder, content(), at(2)))
    follower.loader.poll(0.0)
    assert follower.rejected() == {reason: [1]}
    assert follower.policies == []
    publish(follower.coordinator, follower.folder, versioned(3))
    follower.loader.poll(0.0)
    assert follower.versions == [at(3)], "it goes on watching"


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "missing"),
    "a folder": (_replaced(Path.mkdir), "missing"),
    "a pipe": (_replaced(os.mkfifo), "missing"),
    "shorter": (lambda path: path.write_bytes(GOOD[:-1]), "size"),
    "longer": (lambda path: path.write_bytes(GOOD + b"\0"), "size"),
    "a bit": (lambda path: path.write_bytes(GOOD[:-9] + bytes([GOOD[-9] ^ 1]) + GOOD[-8:]), "hash"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_was_damaged_is_rejected(kind: str, follower: Follower) -> None:
    damage, reason = DAMAGES[kind]
    pointer = publish(follower.coordinator, follower.folder, versioned(2))
    damage(follower.folder / pointer.path)
    follower.loader.poll(0.0)
    assert (follower.rejected(), follower.policies) == ({reason: [1]}, [])


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "weights/link"])
def test_a_file_outside_of_the_run_is_not_read(
    path: str, follower: Follower, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "weights").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(GOOD)
    (run / "weights" / "link").symlink_to(tmp_path / "outside")
    inside = Follower(run, follower.coordinator)
    pointer = write(run, GOOD, at(2))
    assert not inside.loader.maybe_load(dataclasses.replace(pointer, path=path))
    assert inside.rejected() == {"missing": [1]}
    assert inside.loader.maybe_load(pointer)


def test_a_rejected_version_is_tried_again_after_a_pause_that_grows(follower: Follower) -> None:
    pointer = publish(follower.coordinator, follower.folder, versioned(2))
    path = follower.folder / pointer.path
    path.rename(path.with_name("aside"))
    tries = []
    for second in range(200):
        follower.now = float(second)
        follower.loader.poll(0.0)
        tries.append(int(follower.rejected()["missing"][0]))
    begun = [second for second, (a, b) in enumerate(zip([0, *tries], tries, strict=False)) if b > a]
    assert begun == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert begun[-1] - begun[-2] == BACKOFF.longest
    path.with_name("aside").rename(path)
    follower.now = 1000.0
    follower.loader.poll(0.0)
    assert follower.versions == [at(2)], "the file came late"


def test_a_newer_version_does_not_wait_for_the_pause(follower: Follower) -> None:
    bad = write(follower.folder, b"x", at(1))
    follower.coordinator.publish("weights", bad)
    follower.loader.poll(0.0)
    publish(follower.coordinator, follower.folder, versioned(2))
    follower.loader.poll(0.0)
    assert follower.versions == [at(2)]


class FlakySource:
    """A coordinator that fails every other time."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._calls = coordinator, 0

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        self._calls += 1
        if self._calls % 2:
            raise CoordinatorUnavailableError("no connection")
        return self._coordinator.watch(name, since, timeout)


def test_a_coordinator_that_is_unavailable_is_polled_again(
    follower: Follower, tmp_path: Path
) -> None:
    coordinator = follower.coordinator
    publish(coordinator, tmp_path, versioned(1))
    flaky = Follower(tmp_path, coordinator, FlakySource(coordinator))
    for _ in range(2):
        flaky.loader.poll(0.0)
    assert flaky.versions == [at(1)]
    assert recorder.value(flaky.recorder.snapshot(), catalogue.COORDINATOR_FAILURES) == 1
