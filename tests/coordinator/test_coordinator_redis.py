"""The coordinator in Redis: losses in the middle of a call, lost replies, garbage, credentials."""

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import redis

from m3pc.coordinator import connect
from m3pc.coordinator import coordinator as coordinator_module
from m3pc.coordinator.coordinator import TableCoordinator
from m3pc.coordinator.records import RECORD_TYPES, SlotRecord
from m3pc.coordinator.redis import RedisAddress, RedisTable
from m3pc.coordinator.table import Deadline, TableContents
from m3pc.types import Coordinator, CoordinatorUnavailableError, Published, RecoveredState
from tests.support.servers.coordinators import InRedis, pointer
from tests.support.servers.redis_server import PASSWORD, USER, RedisServer

KEYS = ("marker", "clock", *RECORD_TYPES)
GARBAGE = 1_000  # values per key


@pytest.fixture
def place(tmp_path: Path, redis_server: RedisServer) -> Iterator[InRedis]:
    place = InRedis(tmp_path, redis_server, run=tmp_path.name)
    yield place
    place.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[InRedis]:
    """With a server that may be killed."""
    server = RedisServer(tmp_path)
    place = InRedis(tmp_path, server, run="own")
    yield place
    place.close()
    server.kill()


class Client:
    """A client that has registered a slot and begun an epoch; both numbers must keep growing."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.incarnation, self.epoch = coordinator.register(0), coordinator.new_epoch("weights")

    @property
    def numbers(self) -> tuple[int, int]:
        return self.incarnation, self.epoch

    def is_newer_than(self, other: "Client") -> bool:
        return all(new > old for new, old in zip(self.numbers, other.numbers, strict=True))


CALLS: dict[str, Callable[[Client], bool]] = {
    "register": lambda client: client.coordinator.register(0) > client.incarnation,
    "heartbeat": lambda client: client.coordinator.heartbeat(0, client.incarnation),
    "new_epoch": lambda client: client.coordinator.new_epoch("weights") > client.epoch,
    "publish": lambda client: (
        client.coordinator.publish("weights", pointer(client.epoch, 3)) is Published.OK
        and client.coordinator.read("weights") == pointer(client.epoch, 3)
    ),
    "read": lambda client: client.coordinator.read("weights") is None,
    "watch": lambda client: client.coordinator.watch("weights", None, 0) is None,
}


def disturb(
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> list[str]:
    """Do something before or after the script call of this number; returns the calls made."""
    real, calls = RedisTable.evaluate, list[str]()

    def evaluate(self: RedisTable, script: str, *rest: Any) -> Any:
        calls.append(script)
        is_disturbed = len(calls) - 1 == number
        if is_disturbed:
            before()
        reply = real(self, script, *rest)
        if is_disturbed:
            after()
        return reply

    monkeypatch.setattr(RedisTable, "evaluate", evaluate)
    return calls


def lost_reply() -> None:
    raise redis.TimeoutError("planned")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", [0, 1])
def test_losing_everything_in_the_middle_of_a_call_goes_unnoticed(
    name: str, number: int, place: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(place.client())
    calls = disturb(monkeypatch, number, before=place.lose)
    assert CALLS[name](client)
    assert number >= len(calls) or "finish" in calls
    assert Client(place.client()).is_newer_than(client)


@pytest.mark.parametrize("number", range(6))
def test_losing_everything_in_the_middle_of_a_rebuild_starts_it_again(
    number: int, place: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(place.client())
    place.lose()
    calls = disturb(monkeypatch, number, before=place.lose)
    assert client.coordinator.register(0) > client.incarnation
    assert calls.count("finish") >= 1
    assert place.client().register(0) > client.incarnation + 1


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_lost_reply_is_asked_for_again(
    name: str, number: int, place: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(place.client())
    calls = disturb(monkeypatch, number, after=lost_reply)
    assert CALLS[name](client)
    assert number >= len(calls) or calls[number] == calls[number + 1]


def test_a_registration_whose_reply_was_lost_is_the_one_that_counts(
    place: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = place.client()
    client.register(0)
    disturb(monkeypatch, 1, after=lost_reply)
    assert [client.register(0), place.client().register(0)] == [2, 3]


def test_a_registration_overtaken_before_its_reply_skips_a_number(
    place: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = place.client(), place.client()
    client.register(0)

    def overtaken() -> None:
        monkeypatch.undo()
        assert other.register(0) == 3
        lost_reply()

    disturb(monkeypatch, 1, after=overtaken)
    assert client.register(0) == 4


def test_a_swap_succeeds_for_its_author_alone(place: InRedis, monkeypatch: Any) -> None:
    """Two clients that derive the same record from the same one write different texts."""
    client, other = place.client(), place.client()
    client.new_epoch("weights")
    disturb(monkeypatch, 1, before=lambda: (monkeypatch.undo(), other.new_epoch("weights")))
    assert client.new_epoch("weights") == 3


@pytest.mark.parametrize("number", range(4))
def test_lost_replies_of_a_rebuild_cost_one_generation(
    number: int, place: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = place.client()
    disturb(monkeypatch, number, after=lost_reply)
    assert client.register(0) == 1
    assert len(list(place.generations.iterdir())) == 1


def test_scripts_are_loaded_again_after_the_server_flushed_them(place: InRedis) -> None:
    client = place.client()
    for number in range(1, 4):
        assert client.register(0) == number
        with place.server.admin() as admin:
            admin.script_flush()


def test_a_server_that_was_killed_and_came_back_empty_loses_nothing(own: InRedis) -> None:
    client = Client(own.client())
    client.coordinator.publish("weights", pointer(client.epoch, 1))
    for _ in range(2):
        own.server.kill()
        own.server.start()
        assert client.coordinator.read("weights") == pointer(client.epoch, 1)
        assert own.client().heartbeat(0, client.incarnation)
    assert own.client().register(0) == (2 << SlotRecord.bits) + 1


def test_a_server_that_is_down_is_a_typed_error_until_it_is_back(own: InRedis) -> None:
    client = own.client(deadline=0.3)
    assert client.register(0) == 1
    own.server.kill()
    for call in (lambda: client.register(0), lambda: client.watch("weights", None, 1)):
        with pytest.raises(CoordinatorUnavailableError) as caught:
            call()
        message = str(caught.value)
        assert f"127.0.0.1:{own.server.port}" in message and "see that the server runs" in message
        assert PASSWORD not in message
        assert caught.value.__cause__ is None
    own.server.start()
    assert client.register(0) == (1 << SlotRecord.bits) + 1


def test_a_call_to_a_server_that_hangs_ends_at_the_deadline(own: InRedis) -> None:
    client = own.client(deadline=0.4)
    client.register(0)
    with own.server.stopped(), pytest.raises(CoordinatorUnavailableError, match="attempts within"):
        client.register(0)
    assert client.register(0) >= 2


def test_a_server_without_memory_is_a_typed_error(own: InRedis) -> None:
    client = own.client(deadline=0.3)
    client.register(0)
    with own.server.admin() as admin:
        admin.config_set("maxmemory", "1")
        with pytest.raises(CoordinatorUnavailableError, match="OutOfMemory"):
            client.register(0)
        admin.config_set("maxmemory", "0")
    assert client.register(0) == 2


def test_a_rebuild_that_another_client_began_is_waited_for(place: InRedis) -> None:
    client = place.client(deadline=0.3)
    with place.server.admin() as admin:
        admin.set(place.key("marker"), "rebuilding somewhere", px=60_000)
        with pytest.raises(CoordinatorUnavailableError, match="another client rebuilds"):
            client.register(0)
        admin.pexpire(place.key("marker"), 1)
        assert place.client().register(0) == 1


def test_a_claim_that_does_not_expire_is_garbage(place: InRedis) -> None:
    with place.server.admin() as admin:
        admin.set(place.key("marker"), "rebuilding without an end")
    assert place.client().register(0) == 1


# The table itself


class LongestPauses:
    def uniform(self, low: float, high: float) -> float:
        return high


@pytest.fixture
def table(place: InRedis) -> Iterator[RedisTable]:
    place.client().register(0)
    table = RedisTable(place.server.address, prefix=place.prefix)
    yield table
    table.close()


def test_nothing_is_written_during_a_rebuild(table: RedisTable, place: InRedis) -> None:
    snapshot = table.snapshot("slots", "0", Deadline(5))
    with place.server.admin() as admin:
        admin.set(place.key("marker"), "rebuilding somewhere", px=60_000)
    for name, old in (("0", snapshot.text), ("1", None)):
        swap: dict[str, Any] = {
            "old": old,
            "new": "new",
            "marker": snapshot.marker,
            "deadline": Deadline(5),
        }
        assert not table.swap("slots", name, **swap)


def test_a_rebuild_of_what_is_already_rebuilt_changes_nothing(table: RedisTable) -> None:
    before = table.snapshot("slots", "0", Deadline(5))
    table.rebuild("", lambda remains, now: pytest.fail("nothing is lost"), Deadline(5))
    after = table.snapshot("slots", "0", Deadline(5))
    assert (after.marker, after.text) == (before.marker, before.text)


def test_a_rebuild_that_took_too_long_changes_nothing(table: RedisTable, place: InRedis) -> None:
    marker = table.snapshot("slots", "0", Deadline(5)).marker

    def slow(remains: TableContents, now: int) -> tuple[str, TableContents]:
        assert list(remains["slots"]) == ["0"]
        with place.server.admin() as admin:
            admin.set(place.key("marker"), "another client's")
        return "mine", {kind: {} for kind in RECORD_TYPES}

    table.rebuild(marker, slow, Deadline(5))
    with place.server.admin() as admin:
        assert admin.get(place.key("marker")) == b"another client's"
        assert admin.hexists(place.key("slots"), "0")


def test_a_clock_that_was_set_back_goes_on_from_where_it_was(
    table: RedisTable, place: InRedis
) -> None:
    future = 10**14  # milliseconds
    with place.server.admin() as admin:
        admin.set(place.key("clock"), f"{future} 0")
        snapshot = table.snapshot("slots", "0", Deadline(5))
        assert snapshot.now == future
        swap: dict[str, Any] = {"new": "new", "marker": snapshot.marker, "deadline": Deadline(5)}
        assert table.swap("slots", "0", old=snapshot.text, **swap)
        last, ahead = (int(part) for part in (admin.get(place.key("clock")) or b"").split())
    assert last == future > ahead > 0


def test_no_attempt_begins_that_the_deadline_does_not_allow(own: InRedis) -> None:
    rng = cast(np.random.Generator, LongestPauses())
    table = RedisTable(own.server.address, prefix="m3pc:a", patience=0.05, rng=rng)
    own.server.kill()
    with pytest.raises(CoordinatorUnavailableError, match=r"in [123] attempts within 0\.3 s"):
        table.snapshot("slots", "0", Deadline(0.3))  # pauses of 0.05, 0.1, 0.2 s
    table.close()


# Credentials


def test_a_wrong_password_is_a_typed_error_without_it(
    place: InRedis, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://{USER}:not-the-one@127.0.0.1:{place.server.port}"
    client = connect(url, run="a", generations=place.generations)
    with pytest.raises(CoordinatorUnavailableError, match=r"refuses us.*check the user") as caught:
        client.register(0)
    assert "not-the-one" not in str(caught.value) + repr(client) + caplog.text


def test_the_password_is_in_no_representation(place: InRedis) -> None:
    client = place.client()
    server = RedisAddress(host="a", port=1, user="b", password=PASSWORD)
    assert PASSWORD not in f"{client!r} {client} {server!r} {server}"


@pytest.mark.parametrize("source", ["variable", "file"])
def test_the_password_may_come_from_outside_the_url(
    source: str, place: InRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "variable":
        monkeypatch.setenv("M3PC_REDIS_PASSWORD", PASSWORD)
    else:
        (tmp_path / "word").write_text(f"{PASSWORD}\n")
        monkeypatch.setenv("M3PC_REDIS_PASSWORD_FILE", str(tmp_path / "word"))
    url = f"redis://{USER}@127.0.0.1:{place.server.port}/0"
    client = connect(url, run=place.run, generations=place.generations)
    assert client.register(0) == 1
    client.close()


DENIED = ("FLUSHALL", "CONFIG GET *", "KEYS *", "GET other", "HSET other a b", "EVAL return 0")


@pytest.mark.parametrize("command", DENIED)
def test_the_user_has_no_right_that_is_not_needed(command: str, place: InRedis) -> None:
    with (
        redis.Redis.from_url(place.server.url, protocol=2) as client,
        pytest.raises(redis.ResponseError, match=r"(?i)permission"),
    ):
        client.execute_command(*command.split())


def test_runs_on_one_server_are_independent(place: InRedis) -> None:
    others = [
        connect(place.address, run=f"{place.run}-{i}", generations=place.generations / str(i))
        for i in range(2)
    ]
    assert [other.register(0) for other in others] == [1, 1]
    assert [other.heartbeat(0, 1) for other in others] == [True, True]
    for other in others:
        other.close()


def test_redis_is_loaded_only_where_it_is_used(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from m3pc.coordinator import connect\n"
        "client = connect('a.sqlite', run='a', generations=Path('g')); client.register(0)\n"
        "sys.exit(bool({'redis', 'torch', 'ray'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 0
    )


# Garbage


def garbage(rng: random.Random, valid: bytes) -> bytes:
    """Noise, or something that looks almost right."""
    changed = bytearray(valid)
    at = rng.randrange(len(valid))
    changed[at] ^= 1 << rng.randrange(8)
    return rng.choice(
        (
            bytes(changed),
            valid[:at],
            valid + rng.randbytes(1),
            rng.randbytes(rng.randrange(1, 200)),
            str(rng.randrange(-5, 1 << 70)).encode(),
            rng.choice((b"", b"null", b"{}", b"[]", b"nan 1", b"1e9 0", b"9" * 400, b"x" * 20_000)),
        )
    )


@pytest.mark.parametrize("kind", KEYS)
def test_garbage_is_noticed_and_no_number_goes_back(
    kind: str, place: InRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, generations = random.Random(kind), itertools.count(1)
    monkeypatch.setattr(coordinator_module, "next_generation", lambda *_: next(generations))
    disk = RecoveredState(incarnations={0: 1}, pointers={"weights": pointer(1, 0)})
    last = Client(place.client(recover=lambda: disk))
    table = RedisTable(place.server.address, prefix=place.prefix)
    key, name = place.key(kind), {"slots": "0", "pointers": "weights"}.get(kind)
    with place.server.admin() as admin:
        for _ in range(GARBAGE):
            valid: Any = admin.hget(key, name) if name else admin.get(key)
            bad = garbage(rng, valid)
            if name:
                admin.hset(key, name, bad)
            else:
                admin.set(key, bad)
            coordinator = TableCoordinator(
                table, generations=place.generations, recover=lambda: disk
            )
            assert coordinator.read("weights") == pointer(1, 0)
            client = Client(coordinator)
            assert client.is_newer_than(last)
            last = client
    table.close()


REPLACEMENTS: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "a list": ("RPUSH", "a"),
    "a text": ("SET", "a"),
    "another hash": ("HSET", "a", "b"),
    "a hash of noise": ("HSET", b"\xff", b"\xfe" * 9000),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
@pytest.mark.parametrize("kind", KEYS)
def test_a_replaced_key_is_noticed(kind: str, name: str, place: InRedis) -> None:
    client = Client(place.client())
    with place.server.admin() as admin:
        admin.delete(place.key(kind))
        if command := REPLACEMENTS[name]:
            admin.execute_command(command[0], place.key(kind), *command[1:])
    assert Client(place.client()).is_newer_than(client)


@pytest.mark.parametrize(("kind", "name"), [("slots", "0"), ("pointers", "weights")])
def test_a_removed_record_is_noticed(kind: str, name: str, place: InRedis) -> None:
    client = Client(place.client())
    with place.server.admin() as admin:
        admin.hdel(place.key(kind), name)
    assert Client(place.client()).is_newer_than(client)


def test_garbage_among_the_records_is_dropped_in_a_rebuild(place: InRedis) -> None:
    client = Client(place.client())
    with place.server.admin() as admin:
        admin.hset(place.key("slots"), b"\xff", b"\xfe" * 9000)
    assert client.coordinator.heartbeat(0, client.incarnation)
    with place.server.admin() as admin:
        assert set(cast(dict[bytes, bytes], admin.hgetall(place.key("slots")))) == {b"", b"0"}


def test_records_that_only_earlier_versions_know_are_kept_and_ignored(place: InRedis) -> None:
    client = Client(place.client())
    with place.server.admin() as admin:
        admin.hset(place.key("leases"), "run", "a lease of an earlier version")
    assert client.coordinator.heartbeat(0, client.incarnation)
    assert Client(place.client()).numbers == (2, 2)
    place.lose()
    assert Client(place.client()).is_newer_than(client)
