"""Following published weights: what is newer and sound is taken, nothing else."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from m3pc.model.weights import SETTINGS, Weights, check_sum, described, tensors_digest, to_bytes
from m3pc.telemetry import catalogue, recorder
from m3pc.telemetry.recorder import Recorder
from m3pc.types import Coordinator, CoordinatorUnavailableError, Pointer, Version
from planner.policy import Policy
from planner.server.weights_loader import LONGEST_PAUSE, WeightsLoader
from tests.support.models.published import publish, small_config, versioned, write
from tests.support.servers.coordinators import InFile


class Taken:
    """Keeps the policies that it was given; its clock stands still unless told."""

    def __init__(self, folder: Path, coordinator: Coordinator) -> None:
        self.folder, self.coordinator = folder, coordinator
        self.policies: list[Policy] = []
        self.now, self.recorder = 0.0, Recorder()
        self.loader = WeightsLoader(
            Policy(versioned(7, epoch=0)),
            self.policies.append,
            coordinator,
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
def taken(tmp_path: Path) -> Iterator[Taken]:
    place = InFile(tmp_path)
    found = Taken(tmp_path, place.client())
    assert found.coordinator.new_epoch("weights") == 1
    yield found
    found.loader.close()
    place.close()


def at(number: int, epoch: int = 1) -> Version:
    return Version(epoch=epoch, number=number)


def test_newer_weights_are_taken_as_they_were_published(taken: Taken) -> None:
    for number in (1, 2):
        publish(taken.coordinator, taken.folder, versioned(number))
        taken.loader.poll(0.0)
    assert taken.versions == [at(1), at(2)]
    assert taken.policies[1].weights.digest == versioned(2).digest
    assert taken.rejected() == {}


def test_nothing_new_is_nothing_taken(taken: Taken) -> None:
    taken.loader.poll(0.0)
    publish(taken.coordinator, taken.folder, versioned(1))
    for _ in range(3):
        taken.loader.poll(0.0)
    assert taken.versions == [at(1)]


def test_an_older_version_is_never_taken(taken: Taken) -> None:
    pointers = {
        version: write(taken.folder, to_bytes(versioned(version.number, version.epoch)), version)
        for version in (at(5), at(4), at(9, epoch=0), at(1, epoch=2), at(9))
    }
    assert [taken.loader.offer(pointer) for pointer in pointers.values()] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert not taken.loader.offer(pointers[at(1, epoch=2)]), "the same again"
    assert taken.versions == [at(5), at(1, epoch=2)]
    assert taken.rejected() == {}


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> bytes:
    """A file by somebody who makes mistakes, but knows how to seal them."""
    good = versioned(2)
    tensors = load(to_bytes(good))
    change(tensors)
    settings = {"format": 1, **described(good), "digest": tensors_digest(tensors)}
    return save(tensors, {SETTINGS: json.dumps(settings | {"check": check_sum(settings)})})


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
def test_a_file_that_is_not_sound_is_rejected(kind: str, taken: Taken) -> None:
    content, reason = CONTENTS[kind]
    taken.coordinator.publish("weights", write(taken.folder, content(), at(2)))
    taken.loader.poll(0.0)
    assert taken.rejected() == {reason: [1]}
    assert taken.policies == []
    publish(taken.coordinator, taken.folder, versioned(3))
    taken.loader.poll(0.0)
    assert taken.versions == [at(3)], "it goes on watching"


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
def test_a_file_that_was_damaged_is_rejected(kind: str, taken: Taken) -> None:
    damage, reason = DAMAGES[kind]
    pointer = publish(taken.coordinator, taken.folder, versioned(2))
    damage(taken.folder / pointer.path)
    taken.loader.poll(0.0)
    assert (taken.rejected(), taken.policies) == ({reason: [1]}, [])


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "weights/link"])
def test_a_file_outside_of_the_run_is_not_read(path: str, taken: Taken, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "weights").mkdir(parents=True)
    (tmp_path / "outside").write_bytes(GOOD)
    (run / "weights" / "link").symlink_to(tmp_path / "outside")
    inside = Taken(run, taken.coordinator)
    pointer = write(run, GOOD, at(2))
    assert not inside.loader.offer(dataclasses.replace(pointer, path=path))
    assert inside.rejected() == {"missing": [1]}
    assert inside.loader.offer(pointer)


def test_what_was_rejected_is_tried_again_after_a_pause_that_grows(taken: Taken) -> None:
    pointer = publish(taken.coordinator, taken.folder, versioned(2))
    path = taken.folder / pointer.path
    path.rename(path.with_name("aside"))
    tries = []
    for second in range(200):
        taken.now = float(second)
        taken.loader.poll(0.0)
        tries.append(int(taken.rejected()["missing"][0]))
    begun = [second for second, (a, b) in enumerate(zip([0, *tries], tries, strict=False)) if b > a]
    assert begun == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert begun[-1] - begun[-2] == LONGEST_PAUSE
    path.with_name("aside").rename(path)
    taken.now = 1000.0
    taken.loader.poll(0.0)
    assert taken.versions == [at(2)], "the file came late"


def test_something_newer_does_not_wait_for_the_pause(taken: Taken) -> None:
    bad = write(taken.folder, b"x", at(1))
    taken.coordinator.publish("weights", bad)
    taken.loader.poll(0.0)
    publish(taken.coordinator, taken.folder, versioned(2))
    taken.loader.poll(0.0)
    assert taken.versions == [at(2)]


class Absent:
    """A coordinator that answers only every other time."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._calls = coordinator, 0

    def watch(self, name: str, since: Version | None, timeout: float) -> Pointer | None:
        self._calls += 1
        if self._calls % 2:
            raise CoordinatorUnavailableError("nobody there")
        return self._coordinator.watch(name, since, timeout)


def test_a_coordinator_that_is_away_is_asked_again(taken: Taken) -> None:
    publish(taken.coordinator, taken.folder, versioned(1))
    taken.loader._coordinator = Absent(taken.coordinator)
    for _ in range(2):
        taken.loader.poll(0.0)
    assert taken.versions == [at(1)]
    assert recorder.value(taken.recorder.snapshot(), catalogue.COORDINATOR_DOWN) == 1
