"""One suite over both tables: numbers that only grow, pointers, races, and lost records."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from m3pc.coordinator import rules
from m3pc.coordinator.generations import GENERATION_BITS, next_generation
from m3pc.coordinator.records import PointerRecord, SlotRecord
from m3pc.types import Coordinator, InputError, Published, RecoveredState, Version
from tests.support.servers.coordinators import Place, pointer

OK, STALE, FENCED = Published.OK, Published.STALE, Published.FENCED
SECOND = 1 << SlotRecord.bits  # incarnations given out after the first loss are above this
LAST_GENERATION = (1 << GENERATION_BITS) - 1


@pytest.fixture
def client(place: Place) -> Coordinator:
    return place.client()


# Slots


def test_incarnations_of_a_slot_count_up_over_all_clients(place: Place) -> None:
    a, b = place.client(), place.client()
    assert [a.register(3), b.register(3), a.register(3), b.register(4)] == [1, 2, 3, 1]


def test_a_heartbeat_fails_once_there_is_a_newer_incarnation(place: Place) -> None:
    old, new = place.client(), place.client()
    first = old.register(0)
    assert old.heartbeat(0, first)
    second = new.register(0)
    assert (old.heartbeat(0, first), new.heartbeat(0, second)) == (False, True)


def test_a_heartbeat_may_come_from_another_client_than_the_registration(place: Place) -> None:
    assert place.client().heartbeat(0, place.client().register(0))


def test_a_heartbeat_is_dated_unless_it_is_fenced() -> None:
    first, _ = rules.register(SlotRecord(), base=0, now=10)
    second, incarnation = rules.register(first, base=0, now=20)
    assert (first.beat, second.beat, incarnation) == (10, 20, 2)
    assert rules.heartbeat(second, 1, base=0, now=30) == (second, False)
    assert rules.heartbeat(second, 2, base=0, now=30)[0].beat == 30
    assert rules.heartbeat(second, 2, base=0, now=15)[0].beat == 20


# Pointers


def test_a_pointer_moves_forwards_only(client: Coordinator) -> None:
    assert client.read("weights") is None
    assert client.new_epoch("weights") == 1
    answers = [client.publish("weights", pointer(1, number)) for number in (5, 4, 7, 6)]
    assert answers == [OK, STALE, OK, STALE]
    assert client.read("weights") == pointer(1, 7)


def test_the_same_pointer_again_is_ok_and_another_of_its_version_is_stale(
    client: Coordinator,
) -> None:
    client.new_epoch("weights")
    contents = ("a", "a", "b", "a")
    answers = [client.publish("weights", pointer(1, 0, content)) for content in contents]
    assert answers == [OK, OK, STALE, OK]
    assert client.read("weights") == pointer(1, 0, "a")


def test_a_new_epoch_fences_the_old_before_it_publishes_anything(place: Place) -> None:
    old, new = place.client(), place.client()
    old.new_epoch("weights")
    old.publish("weights", pointer(1, 9))
    assert new.new_epoch("weights") == 2
    assert old.publish("weights", pointer(1, 10)) is FENCED
    assert new.read("weights") == pointer(1, 9)
    assert new.publish("weights", pointer(2, 0)) is OK
    assert old.publish("weights", pointer(1, 11)) is FENCED
    assert old.read("weights") == pointer(2, 0)


def test_pointers_of_different_names_are_independent(client: Coordinator) -> None:
    assert [client.new_epoch("a"), client.new_epoch("a"), client.new_epoch("b")] == [1, 2, 1]
    client.publish("a", pointer(2, 0))
    assert client.read("b") is None


def test_a_watch_returns_a_newer_pointer_or_none_after_its_timeout(place: Place) -> None:
    client = place.client()
    client.new_epoch("weights")
    assert client.watch("weights", None, 0) is None
    client.publish("weights", pointer(1, 3))
    assert client.watch("weights", None, 0) == pointer(1, 3)
    assert client.watch("weights", Version(epoch=1, number=2), 0) == pointer(1, 3)
    assert client.watch("weights", Version(epoch=1, number=3), 0.02) is None


def test_a_watch_sees_what_is_published_while_it_waits(place: Place) -> None:
    learner, planner = place.client(), place.client()
    learner.new_epoch("weights")
    later = threading.Timer(0.05, learner.publish, ("weights", pointer(1, 0)))
    later.start()
    assert planner.watch("weights", None, 10) == pointer(1, 0)
    later.join()


# Numbers that were never given out, and other misuse

MISUSES: dict[str, tuple[str, Callable[[Coordinator], object]]] = {
    "an incarnation": ("incarnation 1 was never", lambda c: c.heartbeat(0, 1)),
    "no incarnation": ("incarnation 0 was never", lambda c: c.heartbeat(0, 0)),
    "an epoch": ("epoch 1 was never", lambda c: c.publish("a", pointer(1, 0))),
    "a negative slot": ("slot is -1", lambda c: c.register(-1)),
    "a slot of 2^31": ("slot is 2147483648", lambda c: c.register(1 << 31)),
    "a name with a slash": ("name is 'a/b'", lambda c: c.read("a/b")),
    "no name": ("name is ''", lambda c: c.new_epoch("")),
    "an endless watch": ("timeout is inf s", lambda c: c.watch("a", None, math.inf)),
    "a watch until NaN": ("timeout is nan s", lambda c: c.watch("a", None, math.nan)),
    "a negative version": ("number is -1", lambda c: c.publish("a", pointer(1, -1))),
    "a long path": (
        "path is",
        lambda c: c.publish("a", replace(pointer(1, 0), path="p" * 2000)),
    ),
    "a short hash": (
        "sha256 is 'ab'",
        lambda c: c.publish("a", replace(pointer(1, 0), sha256="ab")),
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_with_what_was_wrong(name: str, client: Coordinator) -> None:
    message, do = MISUSES[name]
    with pytest.raises(InputError, match=message):
        do(client)


# Races


def test_threads_that_share_a_client_get_each_number_once(place: Place) -> None:
    client = place.client(deadline=60)
    with ThreadPoolExecutor(8) as threads:
        rows = list(threads.map(lambda _: [client.register(0) for _ in range(50)], range(8)))
    assert all(row == sorted(row) for row in rows)
    assert sorted(number for row in rows for number in row) == list(range(1, 401))


def test_processes_get_each_number_once(place: Place, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.children.coordinator_child",
        place.address,
        tmp_path.name,
    ]
    children = [
        subprocess.Popen([*command, str(place.generations), "25"], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    rows = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    for kind in range(2):  # incarnations, epochs
        columns = [[pair[kind] for pair in row] for row in rows]
        assert all(column == sorted(column) for column in columns)
        assert sorted(number for column in columns for number in column) == list(range(1, 76))


def test_of_several_clients_that_publish_one_version_one_wins(place: Place) -> None:
    place.client().new_epoch("weights")
    clients = {content: place.client(deadline=60) for content in "abcd"}
    with ThreadPoolExecutor(4) as threads:
        for number in range(20):
            answers = dict(
                zip(
                    clients,
                    threads.map(
                        lambda content, number=number: clients[content].publish(
                            "weights", pointer(1, number, content)
                        ),
                        clients,
                    ),
                    strict=True,
                )
            )
            assert sorted(answers.values(), key=str) == [OK, STALE, STALE, STALE]
            winner = next(content for content, answer in answers.items() if answer is OK)
            assert place.client().read("weights") == pointer(1, number, winner)


# Losses

DISK = RecoveredState(incarnations={0: 1}, pointers={"weights": pointer(2, 5)})


def test_what_the_disk_knows_is_there_from_the_start(place: Place) -> None:
    client = place.client(recover=lambda: DISK)
    assert client.read("weights") == pointer(2, 5)
    assert client.publish("weights", pointer(1, 6)) is FENCED
    assert client.publish("weights", pointer(2, 4)) is STALE
    assert client.heartbeat(0, 1)


def test_no_number_is_given_twice_though_the_disk_knows_of_none(place: Place) -> None:
    pairs: list[tuple[int, int]] = []
    for _ in range(4):
        client = place.client()  # remembers nothing
        pairs += [(client.register(0), client.new_epoch("weights")) for _ in range(3)]
        place.lose()
    for numbers, bits in zip(zip(*pairs, strict=True), (40, 11), strict=True):
        assert list(numbers) == sorted(set(numbers))
        assert numbers[3:6] == tuple((1 << bits) + number for number in (1, 2, 3))


def test_clients_from_before_a_loss_are_not_fenced_by_it(place: Place) -> None:
    """Even if the client that rebuilds the records does not know their numbers."""
    client = place.client()
    incarnation, epoch = client.register(0), client.new_epoch("weights")
    client.publish("weights", pointer(epoch, 0))
    place.lose()
    rebuilder = place.client()
    assert rebuilder.read("weights") is None
    survivor = place.client()  # remembers nothing, but its caller has the numbers
    assert survivor.heartbeat(0, incarnation)
    assert survivor.publish("weights", pointer(epoch, 1)) is OK
    assert rebuilder.register(0) == SECOND + 1
    assert not survivor.heartbeat(0, incarnation)


def test_after_a_loss_the_newest_of_the_old_numbers_wins_in_any_order(place: Place) -> None:
    client = place.client()
    for _ in range(2):
        client.register(0), client.new_epoch("weights")
    place.lose()
    newcomer = place.client()
    beats = [newcomer.heartbeat(0, number) for number in (1, 2, 1)]
    versions = ((1, 9), (2, 0), (1, 10))
    publishes = [newcomer.publish("weights", pointer(*version)) for version in versions]
    assert beats == [True, True, False]
    assert publishes == [OK, OK, FENCED]


def test_a_client_that_remembers_more_than_the_rebuilt_records_raises_them(place: Place) -> None:
    client = place.client()
    for _ in range(2):
        client.register(0), client.new_epoch("weights")
    client.publish("weights", pointer(2, 7))
    place.lose()
    newcomer = place.client(
        recover=lambda: RecoveredState(incarnations={0: 1}, pointers={"weights": pointer(2, 6)})
    )
    assert newcomer.read("weights") == pointer(2, 6)
    assert newcomer.heartbeat(0, 1)
    assert client.read("weights") == pointer(2, 7)
    assert client.heartbeat(0, 2)
    assert newcomer.read("weights") == pointer(2, 7)
    assert not newcomer.heartbeat(0, 1)


def test_a_rebuild_includes_what_its_client_remembers(place: Place) -> None:
    client = place.client(recover=lambda: DISK)
    slots = {slot: client.register(slot) for slot in (0, 8)}
    epoch = client.new_epoch("weights")
    client.publish("weights", pointer(epoch, 7))
    place.lose()
    assert client.read("weights") == pointer(epoch, 7)
    newcomer = place.client()
    assert newcomer.read("weights") == pointer(epoch, 7)
    for slot, incarnation in slots.items():
        assert newcomer.heartbeat(slot, incarnation)
    assert not newcomer.heartbeat(0, 1)  # the one that the disk knows


def test_a_loss_costs_one_generation_however_many_clients_notice_it(place: Place) -> None:
    clients = [place.client(deadline=60) for _ in range(8)]
    clients[0].register(0)
    place.lose()
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda client: client.register(1), clients))
    assert sorted(numbers) == list(range(SECOND + 1, SECOND + 9))
    assert len(list(place.generations.iterdir())) == 2


def test_numbers_grow_even_if_the_generations_are_removed_too(place: Place) -> None:
    place.client().register(0)
    for path in place.generations.iterdir():
        path.unlink()
    place.lose()
    disk = RecoveredState(incarnations={7: 1})
    assert place.client(recover=lambda: disk).register(0) == SECOND + 1
    place.lose()
    assert place.client(recover=lambda: disk).register(0) == 2 * SECOND + 1


def test_after_any_loss_a_version_fits_an_int64_and_stays_the_newest(place: Place) -> None:
    def packed() -> int:
        return Version(epoch=place.client().new_epoch("weights"), number=1_000_000).packed

    versions = [packed(), packed()]
    place.lose()
    versions += [packed(), packed()]
    place.lose()
    next_generation(place.generations, LAST_GENERATION - 1)
    versions += [packed(), packed()]
    assert versions == sorted(set(versions))
    assert versions[-1] < 1 << 63


def test_numbers_never_run_into_those_of_the_next_generation() -> None:
    last = (1 << PointerRecord.bits) - 1
    record, epoch = rules.new_epoch(PointerRecord(epoch=last - 1), base=0)
    assert epoch == last
    with pytest.raises(InputError, match="all given out"):
        rules.new_epoch(record, base=0)
    assert rules.new_epoch(record, base=last + 1)[1] == last + 2


def test_an_error_while_reading_the_disk_is_not_hidden(place: Place) -> None:
    def broken() -> RecoveredState:
        raise InputError("the manifest is damaged")

    with pytest.raises(InputError, match="manifest"):
        place.client(recover=broken).register(0)


# Generations


def test_generations_count_up_also_among_threads(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda _: next_generation(tmp_path / "g"), range(40)))
    assert sorted(numbers) == list(range(40))
    (tmp_path / "g" / "notes.txt").touch()
    minimums = (0, 60, 0)
    assert [next_generation(tmp_path / "g", minimum) for minimum in minimums] == [40, 60, 61]


def test_there_is_no_generation_beyond_the_last(tmp_path: Path) -> None:
    assert next_generation(tmp_path, LAST_GENERATION) == LAST_GENERATION
    with pytest.raises(InputError, match="start a new run"):
        next_generation(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [str(LAST_GENERATION)]
