"""One suite over both coordinators: numbers that only grow, leases, pointers, and losses."""

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
from m3pc.types import Coordinator, InputError, Lease, Published, RecoveredState, Version
from tests.support.servers.coordinators import Place, pointer

OK, STALE, FENCED = Published.OK, Published.STALE, Published.FENCED
SECOND = (
    1 << SlotRecord.bits
)  # incarnations and fencing numbers after the first loss are above this
LAST_GENERATION = (1 << GENERATION_BITS) - 1


@pytest.fixture
def client(place: Place) -> Coordinator:
    return place.client()


def leased(lease: Lease | None) -> Lease:
    assert lease is not None
    return lease


# Slots


def test_incarnations_of_a_slot_count_up_whoever_asks(place: Place) -> None:
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


def test_members_are_all_slots_with_the_age_of_their_heartbeat(place: Place) -> None:
    a, b = place.client(), place.client()
    assert b.members() == []
    for slot in (10, 9):
        a.register(slot)
    place.wait(1000)
    a.heartbeat(10, 1)
    nine, ten = b.members()
    assert (nine.slot, nine.incarnation, ten.slot, ten.incarnation) == (9, 1, 10, 1)
    assert ten.age < 1000 <= nine.age


def test_a_fenced_heartbeat_does_not_make_a_slot_look_alive(place: Place) -> None:
    client = place.client()
    for _ in range(2):
        client.register(0)
    place.wait(1000)
    assert not client.heartbeat(0, 1)
    [member] = client.members()
    assert (member.incarnation, member.age >= 1000) == (2, True)


# Leases


def test_a_lease_has_one_holder_until_it_is_released(place: Place) -> None:
    a, b = place.client(), place.client()
    first = leased(a.lease("run", "a", 60))
    assert b.lease("run", "b", 60) is None
    assert leased(b.lease("other", "b", 60)).fencing == 1
    a.release(first)
    second = leased(b.lease("run", "b", 60))
    assert (first.fencing, second.fencing, second.holder) == (1, 2, "b")
    assert a.renew(first) is None


def test_a_lease_runs_out_unless_it_is_renewed(place: Place) -> None:
    a, b = place.client(), place.client()
    mine = leased(a.lease("run", "a", 1000))
    place.wait(600)
    assert a.renew(mine) == mine
    place.wait(600)
    assert b.lease("run", "b", 1000) is None
    place.wait(600)
    assert leased(b.lease("run", "b", 60)).fencing == 2


def test_what_ran_out_cannot_be_renewed_though_nobody_took_it(place: Place) -> None:
    client = place.client()
    mine = leased(client.lease("run", "a", 1000))
    place.wait(1000)
    assert client.renew(mine) is None
    assert leased(client.lease("run", "a", 60)).fencing == 2


def test_a_holder_who_asks_again_gets_a_greater_number_and_the_old_lease_ends(
    client: Coordinator,
) -> None:
    first, second = (leased(client.lease("run", "a", 60)) for _ in range(2))
    assert (first.fencing, second.fencing) == (1, 2)
    assert client.renew(first) is None
    client.release(first)
    assert client.renew(second) == second


def test_a_lease_is_released_once(client: Coordinator) -> None:
    first = leased(client.lease("run", "a", 60))
    client.release(first)
    client.release(first)
    assert client.renew(first) is None
    second = leased(client.lease("run", "b", 60))
    client.release(first)
    assert client.renew(second) == second


def test_a_lease_of_old_does_not_release_the_new(place: Place) -> None:
    a, b = place.client(), place.client()
    first = leased(a.lease("run", "a", 60))
    a.release(first)
    leased(b.lease("run", "b", 60))
    place.client().release(first)
    assert place.client().lease("run", "c", 60) is None


def test_a_lease_is_renewed_by_its_holder_alone(client: Coordinator) -> None:
    mine = leased(client.lease("run", "a", 60))
    assert client.renew(replace(mine, holder="b")) is None


# Pointers


def test_a_pointer_moves_forwards_only(client: Coordinator) -> None:
    assert client.read("weights") is None
    assert client.new_epoch("weights") == 1
    answers = [client.publish("weights", pointer(1, number)) for number in (5, 4, 7, 6)]
    assert answers == [OK, STALE, OK, STALE]
    assert client.read("weights") == pointer(1, 7)


def test_the_very_same_pointer_again_is_ok_and_another_under_its_version_stale(
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


def test_pointers_have_nothing_to_do_with_each_other(client: Coordinator) -> None:
    assert [client.new_epoch("a"), client.new_epoch("a"), client.new_epoch("b")] == [1, 2, 1]
    client.publish("a", pointer(2, 0))
    assert client.read("b") is None


def test_a_watch_ends_with_what_is_beyond_or_with_nothing(place: Place) -> None:
    client = place.client()
    client.new_epoch("weights")
    assert client.watch("weights", None, 0) is None
    client.publish("weights", pointer(1, 3))
    assert client.watch("weights", None, 0) == pointer(1, 3)
    assert client.watch("weights", Version(epoch=1, number=2), 0) == pointer(1, 3)
    assert client.watch("weights", Version(epoch=1, number=3), 0.02) is None


def test_a_watch_sees_what_is_published_meanwhile(place: Place) -> None:
    learner, planner = place.client(), place.client()
    learner.new_epoch("weights")
    later = threading.Timer(0.05, learner.publish, ("weights", pointer(1, 0)))
    later.start()
    assert planner.watch("weights", None, 10) == pointer(1, 0)
    later.join()


# Numbers that nobody was given, and other misuse

MISUSES: dict[str, tuple[str, Callable[[Coordinator], object]]] = {
    "an incarnation": ("incarnation 1 was never", lambda c: c.heartbeat(0, 1)),
    "no incarnation": ("incarnation 0 was never", lambda c: c.heartbeat(0, 0)),
    "an epoch": ("epoch 1 was never", lambda c: c.publish("a", pointer(1, 0))),
    "a lease": (
        "fencing number 1 was never",
        lambda c: c.renew(Lease(name="a", holder="b", fencing=1, seconds=1)),
    ),
    "a lease to release": (
        "fencing number 1 was never",
        lambda c: c.release(Lease(name="a", holder="b", fencing=1, seconds=1)),
    ),
    "a negative slot": ("slot is -1", lambda c: c.register(-1)),
    "a slot of 2^31": ("slot is 2147483648", lambda c: c.register(1 << 31)),
    "a name with a slash": ("name is 'a/b'", lambda c: c.read("a/b")),
    "no name": ("name is ''", lambda c: c.new_epoch("")),
    "no holder": ("holder is ''", lambda c: c.lease("a", "", 1)),
    "a lease for ever": ("lease is inf s", lambda c: c.lease("a", "b", math.inf)),
    "a lease of no time": ("lease is 0 s", lambda c: c.lease("a", "b", 0)),
    "a watch for ever": ("timeout is inf s", lambda c: c.watch("a", None, math.inf)),
    "a watch until no number": ("timeout is nan s", lambda c: c.watch("a", None, math.nan)),
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
def test_misuse_is_told(name: str, client: Coordinator) -> None:
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
    for kind in range(3):  # incarnations, epochs, fencing numbers
        columns = [[each[kind] for each in row] for row in rows]
        assert all(column == sorted(column) for column in columns)
        assert sorted(number for column in columns for number in column) == list(range(1, 76))


def test_of_those_who_publish_one_version_one_wins(place: Place) -> None:
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


def test_of_those_who_ask_for_a_free_lease_one_gets_it(place: Place) -> None:
    clients = [place.client(deadline=60) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for number in range(1, 11):
            leases = threads.map(lambda i: clients[i].lease("run", f"holder {i}", 60), range(4))
            [lease] = [lease for lease in leases if lease]
            assert lease.fencing == number
            clients[0].release(lease)


# Losses

LEAST = RecoveredState(
    incarnations={0: 1},
    epochs={"weights": 2},
    pointers={"weights": pointer(1, 5)},
    fencings={"run": 3},
)


def test_what_the_disk_knows_is_there_from_the_start(place: Place) -> None:
    client = place.client(floor=lambda: LEAST)
    assert client.read("weights") == pointer(1, 5)
    assert client.publish("weights", pointer(1, 6)) is FENCED
    [member] = client.members()
    assert (member.slot, member.incarnation) == (0, 1)
    assert member.age < 1000  # silence counts from the start


def test_no_number_is_given_twice_though_the_disk_knows_of_none(place: Place) -> None:
    given: list[tuple[int, ...]] = []
    for _ in range(4):
        client = place.client()  # remembers nothing
        for _ in range(3):
            lease = leased(client.lease("run", "a", 60))
            given.append((client.register(0), client.new_epoch("weights"), lease.fencing))
        place.lose()
    for numbers, bits in zip(zip(*given, strict=True), (40, 11, 40), strict=True):
        assert list(numbers) == sorted(set(numbers))
        assert numbers[3:6] == tuple((1 << bits) + number for number in (1, 2, 3))


def test_those_who_lived_before_a_loss_live_on(place: Place) -> None:
    """They are not fenced, though those who rebuild have never heard of them."""
    client = place.client()
    incarnation, epoch = client.register(0), client.new_epoch("weights")
    client.publish("weights", pointer(epoch, 0))
    lease = leased(client.lease("run", "a", 60))
    place.lose()
    stranger = place.client()
    assert (stranger.members(), stranger.read("weights")) == ([], None)
    newcomer = place.client()  # has the numbers from somebody else
    assert newcomer.heartbeat(0, incarnation)
    assert newcomer.publish("weights", pointer(epoch, 1)) is OK
    assert newcomer.renew(lease) == lease
    assert stranger.lease("run", "b", 60) is None
    assert stranger.register(0) == SECOND + 1
    assert not newcomer.heartbeat(0, incarnation)


def test_after_a_loss_the_newest_of_the_old_wins_in_whatever_order_they_come(
    place: Place,
) -> None:
    client = place.client()
    for _ in range(2):
        client.register(0), client.new_epoch("weights"), client.lease("run", "a", 60)
    place.lose()
    stranger = place.client()
    old, new = (Lease(name="run", holder="a", fencing=number, seconds=60) for number in (1, 2))
    beats = [stranger.heartbeat(0, number) for number in (1, 2, 1)]
    publishes = [stranger.publish("weights", pointer(*each)) for each in ((1, 9), (2, 0), (1, 10))]
    assert beats == [True, True, False]
    assert publishes == [OK, OK, FENCED]
    assert [stranger.renew(lease) for lease in (old, new, old)] == [old, new, None]


def test_a_client_that_remembers_more_than_the_rebuilt_raises_it(place: Place) -> None:
    client = place.client()
    for _ in range(2):
        client.register(0), client.new_epoch("weights")
    client.publish("weights", pointer(2, 7))
    place.lose()
    stranger = place.client(
        floor=lambda: RecoveredState(incarnations={0: 1}, pointers={"weights": pointer(2, 6)})
    )
    assert stranger.read("weights") == pointer(2, 6)
    assert stranger.heartbeat(0, 1)
    assert client.read("weights") == pointer(2, 7)
    assert [member.incarnation for member in client.members()] == [2]
    assert stranger.read("weights") == pointer(2, 7)
    assert not stranger.heartbeat(0, 1)


def test_who_rebuilds_brings_what_it_remembers(place: Place) -> None:
    client = place.client(floor=lambda: LEAST)
    client.register(0), client.register(8)
    epoch = client.new_epoch("weights")
    client.publish("weights", pointer(epoch, 7))
    lease = leased(client.lease("run", "a", 60))
    place.lose()
    assert client.read("weights") == pointer(epoch, 7)
    stranger = place.client()
    assert [member.slot for member in stranger.members()] == [0, 8]
    assert stranger.read("weights") == pointer(epoch, 7)
    assert stranger.lease("run", "b", 60) is None
    assert client.renew(lease) == lease


def test_a_lease_that_only_the_disk_remembers_is_free_or_renewed(place: Place) -> None:
    client = place.client(floor=lambda: LEAST)
    theirs = Lease(name="run", holder="a", fencing=3, seconds=60)
    assert client.renew(replace(theirs, fencing=2)) is None
    assert client.renew(theirs) == theirs
    assert client.lease("run", "b", 60) is None
    client.release(theirs)
    assert leased(client.lease("run", "b", 60)).fencing == SECOND + 1


def test_a_loss_shows_in_one_generation_however_many_notice(place: Place) -> None:
    clients = [place.client(deadline=60) for _ in range(8)]
    clients[0].register(0)
    place.lose()
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda client: client.register(1), clients))
    assert sorted(numbers) == list(range(SECOND + 1, SECOND + 9))
    assert len(list(place.generations.iterdir())) == 2


def test_numbers_grow_even_if_the_generations_were_removed_too(place: Place) -> None:
    place.client().register(0)
    for path in place.generations.iterdir():
        path.unlink()
    place.lose()
    disk = RecoveredState(incarnations={7: 1})
    assert place.client(floor=lambda: disk).register(0) == SECOND + 1
    place.lose()
    assert place.client(floor=lambda: disk).register(0) == 2 * SECOND + 1


def test_after_any_loss_a_version_fits_an_int64_and_stays_the_newest(place: Place) -> None:
    def packed() -> int:
        return Version(epoch=place.client().new_epoch("weights"), number=1_000_000).packed

    found = [packed(), packed()]
    place.lose()
    found += [packed(), packed()]
    place.lose()
    next_generation(place.generations, LAST_GENERATION - 1)
    found += [packed(), packed()]
    assert found == sorted(set(found))
    assert found[-1] < 1 << 63


def test_numbers_never_run_into_those_of_the_next_generation() -> None:
    last = (1 << PointerRecord.bits) - 1
    track, epoch = rules.new_epoch(PointerRecord(epoch=last - 1), base=0)
    assert epoch == last
    with pytest.raises(InputError, match="all given out"):
        rules.new_epoch(track, base=0)
    assert rules.new_epoch(track, base=last + 1)[1] == last + 2


def test_an_error_of_the_floor_is_not_hidden(place: Place) -> None:
    def broken() -> RecoveredState:
        raise InputError("the manifest is damaged")

    with pytest.raises(InputError, match="manifest"):
        place.client(floor=broken).register(0)


# Generations


def test_generations_count_up_also_among_threads(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        numbers = list(threads.map(lambda _: next_generation(tmp_path / "g"), range(40)))
    assert sorted(numbers) == list(range(40))
    (tmp_path / "g" / "notes.txt").touch()
    assert [next_generation(tmp_path / "g", least) for least in (0, 60, 0)] == [40, 60, 61]


def test_there_is_no_generation_beyond_the_last(tmp_path: Path) -> None:
    assert next_generation(tmp_path, LAST_GENERATION) == LAST_GENERATION
    with pytest.raises(InputError, match="start a new run"):
        next_generation(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [str(LAST_GENERATION)]
