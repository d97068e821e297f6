"""Episodes on their way: each is stored once, in order, whatever becomes of the calls."""

import hashlib
import json
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from actors.outbox import AckedEpisode, AckLog, Outbox
from m3pc.core.backoff import Backoff, UniformSource
from m3pc.telemetry.catalogue import ACTOR_BLOCKED, UNACKED
from m3pc.telemetry.recorder import Recorder, value
from m3pc.types import Ack, AckStatus, AppendKey, EpisodeSink
from replay.format.payload import encode
from replay.store.store import Store
from replay.store.verify import verify
from replay.writing.group_commit import GroupCommitter
from tests.support.episodes.episodes import same
from tests.support.fakes.sinks import BlockedSink, InMemorySink, LossySink, ScriptedSink, ack
from tests.support.faults.live_writer import episode, numbers, open_writer
from tests.support.servers.waiting import eventually

LONG = 30.0  # seconds that nothing here takes


def outbox(sink: EpisodeSink, incarnation: int = 0, **options: object) -> Outbox:
    arguments: dict[str, object] = {
        "recorder": Recorder(),
        "backoff": Backoff(first=0.001, longest=0.004),
        **options,
    }
    return Outbox(sink, 3, incarnation, **arguments)  # type: ignore[arg-type]


def fill(box: Outbox, payloads: list[bytes]) -> None:
    for payload in payloads:
        assert box.put(payload, LONG, steps=len(payload))


def test_a_store_has_each_episode_once_though_calls_and_replies_are_lost(tmp_path: Path) -> None:
    path, receipts = tmp_path / "store", tmp_path / "log" / "receipts.jsonl"
    payloads = [encode(episode(n)) for n in range(60)]
    with GroupCommitter(open_writer(path)) as appender:
        for incarnation, part in enumerate((payloads[:40], payloads[40:])):
            sink, log = LossySink(appender, seed=incarnation), AckLog(receipts)
            with closing(log), closing(outbox(sink, incarnation, on_ack=log)) as box:
                for number, payload in enumerate(part):
                    assert box.put(payload, LONG, steps=3 + (40 * incarnation + number) % 17)
                assert box.flush(LONG) == 0
            assert sink.lost_replies > 3 and sink.calls > len(part) + sink.lost_replies
    store = Store(path)
    assert numbers(store) == list(range(60))
    assert all(same(stored, episode(n)) for n, stored in enumerate(store.episodes()))
    assert verify(path) == []
    keys = [tuple(row) for s in store.segments if s.keys is not None for row in s.keys.tolist()]
    rows = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert [(row["slot"], row["incarnation"], row["sequence"]) for row in rows] == keys
    assert [row["steps"] for row in rows] == [len(stored) for stored in store.episodes()]
    assert [row["sha256"] for row in rows] == [hashlib.sha256(p).hexdigest() for p in payloads]


def test_a_full_outbox_waits_for_the_store() -> None:
    recorder, sink = Recorder(), BlockedSink(InMemorySink())
    with closing(outbox(sink, max_episodes=3, recorder=recorder)) as box:
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
    sink = BlockedSink(kept := InMemorySink())
    with closing(outbox(sink, max_bytes=10)) as box:
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
    kept, acked = InMemorySink(), list[AckedEpisode]()
    with closing(outbox(kept, on_ack=acked.append)) as box:
        fill(box, [b"0", b"1", b"2", b"3"])
        assert box.flush(LONG) == 0
        for sequence in (2, 3):
            del kept.payloads[AppendKey(3, 0, sequence)]
        fill(box, [b"4"])
        assert box.flush(LONG) == 0
    assert list(kept.payloads.values()) == [b"0", b"1", b"2", b"3", b"4"]
    assert [key.sequence for key in kept.sent] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert [episode_ack.key.sequence for episode_ack in acked] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("limits", [{"max_episodes": 2}, {"max_bytes": 2}])
def test_a_store_that_lost_more_than_is_held_ends_the_outbox(limits: dict[str, int]) -> None:
    kept = InMemorySink()
    with closing(outbox(kept, **limits)) as box:
        fill(box, [b"0", b"1", b"2", b"3"])
        assert box.flush(LONG) == 0
        kept.payloads.clear()
        box.put(b"4", LONG)
        assert box.flush(LONG) == 1
        assert "expects episode 0" in box.failure and "from 2 on" in box.failure
        assert box.ended and not box.fenced
        assert not box.put(b"5", LONG)


def test_a_fenced_outbox_sends_nothing_more() -> None:
    sink = ScriptedSink(
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


def test_a_rejected_episode_is_logged_and_the_next_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    acked = list[AckedEpisode]()
    sink = ScriptedSink(
        lambda key, _: ack(AckStatus.REJECTED if key.sequence == 1 else AckStatus.DURABLE)
    )
    with closing(outbox(sink, on_ack=acked.append)) as box:
        fill(box, [b"0", b"1", b"2"])
        assert box.flush(LONG) == 0
    assert sink.sent == [0, 1, 2]
    assert [episode_ack.key.sequence for episode_ack in acked] == [0, 2]
    assert caplog.text.count("event=episode-rejected") == 1


def test_pauses_double_up_to_a_limit_and_begin_anew_after_an_answer() -> None:
    class Noted(Backoff):
        """Remembers how long a pause may be, and makes none."""

        def jittered(self, failures: int, rng: UniformSource, *, at_least: float = 0.0) -> float:
            assert at_least == 0
            longest.append(self.pause(failures))
            return 0.0

    def answer(key: AppendKey, times: int) -> Ack:
        return ack(AckStatus.DURABLE if times == 10 else AckStatus.RETRY_LATER)

    longest: list[float] = []
    with closing(outbox(ScriptedSink(answer), backoff=Noted(first=0.05, longest=5.0))) as box:
        for payload in (b"0", b"1"):
            fill(box, [payload])
            assert eventually(lambda: not box.unacked)
    once = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert longest == pytest.approx(once * 2)


def test_a_flush_does_not_wait_for_a_long_pause_to_end() -> None:
    def answer(key: AppendKey, times: int) -> Ack:
        return ack(AckStatus.DURABLE if times == 4 else AckStatus.RETRY_LATER)

    class Longest(np.random.Generator):
        def uniform(self, low: float, high: float) -> float:  # type: ignore[override]
            return high

    rng = Longest(np.random.PCG64(0))
    with closing(
        outbox(ScriptedSink(answer), rng=rng, backoff=Backoff(first=3600.0, longest=3600.0))
    ) as box:
        fill(box, [b"0"])
        assert box.flush(LONG) == 0


def test_an_outbox_that_is_closed_ends_though_the_store_hangs() -> None:
    sink = BlockedSink(InMemorySink())
    box = outbox(sink)
    fill(box, [b"0"])
    assert sink.called.wait(LONG)
    box.close()
    assert box.ended and box.unacked == 1
    assert not box.put(b"1", LONG)
    sink.open.set()
    assert eventually(lambda: "outbox" not in {thread.name for thread in threading.enumerate()})


def test_an_ack_log_that_cannot_be_written_ends_the_outbox() -> None:
    def full(episode_ack: AckedEpisode) -> None:
        raise OSError("no space left")

    with closing(outbox(InMemorySink(), on_ack=full)) as box:
        fill(box, [b"0"])
        assert box.flush(LONG) == 1
        assert "no space left" in box.failure
