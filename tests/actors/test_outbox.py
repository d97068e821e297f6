"""Episodes on their way: each is stored once, in order, whatever becomes of the calls."""

import hashlib
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from actors.ack_log import AckLog
from actors.outbox import OnAck, Outbox
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, UNACKED
from m3pc.telemetry.recorder import Recorder, value
from m3pc.types import Ack, AckStatus, AppendKey, EpisodeSink
from replay.format.payload import encode
from replay.store.store import Store
from replay.store.verify import verify
from replay.writing.group_commit import GroupCommitter
from tests.support.episodes.episodes import same
from tests.support.fakes.sinks import Kept, Lossy, Scripted, Shut, ack
from tests.support.faults.live_writer import episode, numbers, open_writer
from tests.support.servers.waiting import eventually

LONG = 30.0  # seconds that nothing here takes


def outbox(sink: EpisodeSink, incarnation: int = 0, **options: object) -> Outbox:
    given: dict[str, object] = {"recorder": Recorder(), "pauses": (0.001, 0.004), **options}
    return Outbox(sink, 3, incarnation, **given)  # type: ignore[arg-type]


def fill(box: Outbox, payloads: list[bytes]) -> None:
    for payload in payloads:
        assert box.put(payload, LONG, steps=len(payload))


def test_a_store_has_each_episode_once_though_calls_and_replies_are_lost(tmp_path: Path) -> None:
    path, receipts = tmp_path / "store", tmp_path / "log" / "receipts.jsonl"
    payloads = [encode(episode(n)) for n in range(60)]
    with GroupCommitter(open_writer(path)) as appender:
        for incarnation, part in enumerate((payloads[:40], payloads[40:])):
            sink, log = Lossy(appender, seed=incarnation), AckLog(receipts)
            with closing(log), closing(outbox(sink, incarnation, on_ack=log)) as box:
                for number, payload in enumerate(part):
                    assert box.put(payload, LONG, steps=3 + (40 * incarnation + number) % 17)
                assert box.flush(LONG) == 0
            assert sink.lost_replies > 3 and sink.calls > len(part) + sink.lost_replies
    store = Store(path)
    assert numbers(store) == list(range(60))
    assert all(same(found, episode(n)) for n, found in enumerate(store.episodes()))
    assert verify(path) == []
    keys = [tuple(row) for s in store.segments if s.keys is not None for row in s.keys.tolist()]
    rows = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert [(row["slot"], row["incarnation"], row["sequence"]) for row in rows] == keys
    assert [row["steps"] for row in rows] == [len(found) for found in store.episodes()]
    assert [row["sha256"] for row in rows] == [hashlib.sha256(p).hexdigest() for p in payloads]


def test_a_full_outbox_waits_for_the_store() -> None:
    recorder, sink = Recorder(), Shut(Kept())
    with closing(outbox(sink, most=3, recorder=recorder)) as box:
        fill(box, [b"0", b"1", b"2"])
        assert box.unacked == 3
        assert value(recorder.snapshot(), UNACKED) == 3
        assert value(recorder.snapshot(), ACTOR_BLOCKED, "replay") == 0
        assert not box.put(b"3", 0.01)
        assert value(recorder.snapshot(), ACTOR_BLOCKED, "replay") > 0
        sink.open.set()
        assert box.put(b"3", LONG)
        assert box.flush(LONG) == 0
        assert value(recorder.snapshot(), UNACKED) == 0


def test_bytes_fill_an_outbox_too_but_a_large_episode_goes_alone() -> None:
    sink = Shut(kept := Kept())
    with closing(outbox(sink, most_bytes=10)) as box:
        fill(box, [bytes(11)])
        assert not box.put(b"1", 0.01)
        sink.open.set()
        assert box.flush(LONG) == 0
        sink.open.clear()
        fill(box, [bytes(6), bytes(4)])
        assert not box.put(b"1", 0.01)
        sink.open.set()
        assert box.flush(LONG) == 0
    assert [len(payload) for payload in kept.payloads.values()] == [11, 6, 4]


def test_a_store_that_lost_what_it_acknowledged_gets_it_again() -> None:
    kept, told = Kept(), list[OnAck]()
    with closing(outbox(kept, on_ack=told.append)) as box:
        fill(box, [b"0", b"1", b"2", b"3"])
        assert box.flush(LONG) == 0
        for sequence in (2, 3):
            del kept.payloads[AppendKey(3, 0, sequence)]
        fill(box, [b"4"])
        assert box.flush(LONG) == 0
    assert list(kept.payloads.values()) == [b"0", b"1", b"2", b"3", b"4"]
    assert [key.sequence for key in kept.sent] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert [receipt.key.sequence for receipt in told] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("limits", [{"most": 2}, {"most_bytes": 2}])
def test_a_store_that_lost_more_than_is_held_ends_the_outbox(limits: dict[str, int]) -> None:
    kept = Kept()
    with closing(outbox(kept, **limits)) as box:
        fill(box, [b"0", b"1", b"2", b"3"])
        assert box.flush(LONG) == 0
        kept.payloads.clear()
        box.put(b"4", LONG)
        assert box.flush(LONG) == 1
        assert "expects episode 0" in box.failure and "from 2 on" in box.failure
        assert box.ended and not box.fenced
        assert not box.put(b"5", LONG)


def test_an_outbox_that_is_shut_out_sends_nothing_more() -> None:
    sink = Scripted(
        lambda key, _: ack(AckStatus.FENCED if key.sequence == 1 else AckStatus.DURABLE)
    )
    with closing(outbox(sink)) as box:
        fill(box, [b"0"])
        assert box.flush(LONG) == 0
        fill(box, [b"1"])
        assert box.flush(LONG) == 1
        assert box.fenced and not box.failure
        assert not box.put(b"2", LONG)
    assert sink.sent == [0, 1]


def test_a_rejected_episode_is_logged_and_does_not_hold_up_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = list[OnAck]()
    sink = Scripted(
        lambda key, _: ack(AckStatus.REJECTED if key.sequence == 1 else AckStatus.DURABLE)
    )
    with closing(outbox(sink, on_ack=told.append)) as box:
        fill(box, [b"0", b"1", b"2"])
        assert box.flush(LONG) == 0
    assert sink.sent == [0, 1, 2]
    assert [receipt.key.sequence for receipt in told] == [0, 2]
    assert caplog.text.count("event=episode-rejected") == 1


def test_pauses_double_up_to_a_limit_and_begin_anew_after_an_answer() -> None:
    class Highest(np.random.Generator):
        """Remembers how long a pause may be, and makes none."""

        def uniform(self, low: float, high: float) -> float:  # type: ignore[override]
            longest.append(high)
            return 0.0

    def answer(key: AppendKey, times: int) -> Ack:
        return ack(AckStatus.DURABLE if times == 10 else AckStatus.RETRY_LATER)

    longest: list[float] = []
    rng = Highest(np.random.PCG64(0))
    with closing(outbox(Scripted(answer), rng=rng, pauses=(0.05, 5.0))) as box:
        for payload in (b"0", b"1"):
            fill(box, [payload])
            assert eventually(lambda: not box.unacked)
    once = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert longest == pytest.approx(once * 2)


def test_whoever_flushes_does_not_sit_out_a_long_pause() -> None:
    def answer(key: AppendKey, times: int) -> Ack:
        return ack(AckStatus.DURABLE if times == 4 else AckStatus.RETRY_LATER)

    class Longest(np.random.Generator):
        def uniform(self, low: float, high: float) -> float:  # type: ignore[override]
            return high

    rng = Longest(np.random.PCG64(0))
    with closing(outbox(Scripted(answer), rng=rng, pauses=(3600.0, 3600.0))) as box:
        fill(box, [b"0"])
        assert box.flush(LONG) == 0


def test_an_outbox_that_is_closed_ends_though_the_store_hangs() -> None:
    sink = Shut(Kept())
    box = outbox(sink)
    fill(box, [b"0"])
    assert sink.called.wait(LONG)
    box.close()
    assert box.ended and box.unacked == 1
    assert not box.put(b"1", LONG)
    sink.open.set()
    box._thread.join(LONG)
    assert not box._thread.is_alive()


def test_a_log_that_cannot_be_written_is_a_failure_not_silence() -> None:
    def full(receipt: OnAck) -> None:
        raise OSError("no space left")

    with closing(outbox(Kept(), on_ack=full)) as box:
        fill(box, [b"0"])
        assert box.flush(LONG) == 1
        assert "no space left" in box.failure
