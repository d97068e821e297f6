"""A live store on a simulated disk: programs that use it, and what must hold after any crash.

A `Play` runs one program and records what was sent and what was acknowledged. Before every call
that changes the disk the power may be lost: `check` opens what is left as a new process would and
compares it with what had been acknowledged by then.
"""

import errno
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from m3pc.types import AckStatus, AppendKey, InputError
from replay.format import log
from replay.format.payload import encode
from replay.store.store import Store
from replay.writing.writer import Writer, WriterOptions
from tests.support.episodes.episodes import header, numbered
from tests.support.faults.sim_fs import Loss, SimFS, losses

PATH = Path("/disk/store")
HEADER = header(max_episode_steps=60)
OPTIONS = WriterOptions(segment_bytes=4000, low_space=0, no_space=0)
KEEP = 6  # episodes
RETENTION = replace(OPTIONS, keep_episodes=KEEP)
INVALID = b"no episode"
STORED = (AckStatus.DURABLE, AckStatus.DUPLICATE, AckStatus.REJECTED)


@dataclass
class History:
    """What happened so far."""

    sent: dict[AppendKey, bytes] = field(default_factory=dict)
    acked: set[AppendKey] = field(default_factory=set)
    dropped: set[AppendKey] = field(default_factory=set)  # on request

    def copy(self) -> "History":
        return History(dict(self.sent), set(self.acked), set(self.dropped))


class Play:
    """One program on one disk."""

    def __init__(self, seed: int, options: WriterOptions = OPTIONS) -> None:
        self.rng = random.Random(seed)
        self.fs = used_disk(self.rng)
        self.history = History()
        self.options = options
        self._next: dict[int, tuple[int, int]] = {}  # slot -> incarnation, sequence
        self.writer: Writer | None = None

    def run(self, operations: Sequence[str]) -> None:
        for name in operations:
            try:
                getattr(self, name)()
            except OSError:
                self.kill()
        self.kill()
        self.fs.fails_at = {}

    # Operations

    def append(self) -> None:
        self._commit([self._episode(0)])

    def other(self) -> None:
        """Another producer, and duplicates of both."""
        self._commit([self._episode(1), *self._again()])

    def group(self) -> None:
        self._commit([self._episode(slot) for slot in (0, 1, 2, 0)])

    def invalid(self) -> None:
        """So many that a frame sometimes crosses a sector boundary."""
        self._commit([(self._key(slot), INVALID) for slot in (0, 1, 2, 3)])

    def gap(self) -> None:
        key, payload = self._episode(0)
        late = AppendKey(key.slot, key.incarnation, key.sequence + 1)
        ack = self._opened().append(late, payload)
        assert ack.status in (AckStatus.GAP, AckStatus.RETRY_LATER), ack

    def restart(self) -> None:
        """A new process in slot 0, which sends its own episodes from 0 on."""
        old = self._key(0)
        self._next[0] = (old.incarnation + 1, 0)
        self.append()
        if self._key(0).sequence:
            ack = self._opened().append(old, self.history.sent.get(old, INVALID))
            assert ack.status in (AckStatus.FENCED, AckStatus.RETRY_LATER), ack

    def roll(self) -> None:
        self._opened().roll()

    def drop(self) -> None:
        """The oldest segment, by an operator."""
        writer = self._opened()
        if writer.index.segments:
            keys = Store(PATH, fs=self.fs).segments[0].keys
            assert keys is not None
            self.history.dropped |= {AppendKey(*row) for row in keys.tolist()}
            writer.drop([writer.index.segments[0].number])

    def reopen(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None
        self._opened()

    def kill(self) -> None:
        """The process dies; the machine goes on."""
        self.writer = None

    def full(self) -> None:
        """The disk is full at the next call: in an append, the write."""
        self.fs.fails_at = {self.fs.calls: errno.ENOSPC}

    def soon_full(self) -> None:
        self.fs.fails_at = {self.fs.calls + self.rng.randrange(30): errno.ENOSPC}

    def broken(self) -> None:
        """The call after the next fails: in an append, the sync."""
        self.fs.fails_at = {self.fs.calls + 1: errno.EIO}

    def soon_broken(self) -> None:
        self.fs.fails_at = {self.fs.calls + self.rng.randrange(30): errno.EIO}

    # Parts

    def _opened(self) -> Writer:
        if self.writer is None:
            self.writer = open_writer(self.fs, self.rng, self.options)
        return self.writer

    def _key(self, slot: int) -> AppendKey:
        return AppendKey(slot, *self._next.get(slot, (0, 0)))

    def _episode(self, slot: int) -> tuple[AppendKey, bytes]:
        """The next one of the slot, from less than a sector to several."""
        key = self._key(slot)
        length = self.rng.choice((1, 2, 7, 30, 59))
        number = self.rng.randrange(1 << 20)
        payload = self.history.sent.get(key) or encode(numbered(number, length))
        return key, payload

    def _again(self) -> list[tuple[AppendKey, bytes]]:
        current = [key for key in self.history.acked if self._key(key.slot)[:2] == key[:2]]
        return [(key, self.history.sent[key]) for key in sorted(current)[-1:]]

    def _commit(self, pairs: Sequence[tuple[AppendKey, bytes]]) -> None:
        """Send and record the replies; a second episode of a slot gets the next number."""
        writer, requests = self._opened(), []
        used: dict[int, int] = {}
        for key, payload in pairs:
            if key not in self.history.acked:
                key = key._replace(sequence=key.sequence + used.get(key.slot, 0))  # noqa: PLW2901
                used[key.slot] = used.get(key.slot, 0) + 1
            payload = self.history.sent.setdefault(key, payload)  # noqa: PLW2901
            requests.append(writer.request(key, payload))
        for (key, *_), ack in zip(requests, writer.commit(requests), strict=True):
            self._note(key, ack.status)

    def _note(self, key: AppendKey, status: AckStatus) -> None:
        if key in self.history.acked:
            assert status in (AckStatus.DUPLICATE, AckStatus.RETRY_LATER), (key, status)
        assert status is not AckStatus.FENCED, key
        if status in STORED:
            self.history.acked.add(key)
            self._next[key.slot] = (key.incarnation, key.sequence + 1)


def used_disk(rng: random.Random) -> SimFS:
    """A disk on which a similar store was deleted, whose blocks may be reused."""
    fs = SimFS(PATH.parent)
    with open_writer(fs, rng, OPTIONS) as writer:
        for sequence, length in enumerate((1, 2, 7, 30, 59, 30, 7)):
            writer.append(AppendKey(0, 0, sequence), encode(numbered(9_000_000, length)))
    for folder in ("log", "segments", "quarantine"):
        for name in fs.names(PATH / folder):
            fs.unlink(PATH / folder / name)
        fs.sync_folder(PATH / folder)
    for name in ("MANIFEST", "MARK"):
        fs.unlink(PATH / name)
    fs.sync_folder(PATH)
    return fs


def open_writer(fs: SimFS, rng: random.Random, options: WriterOptions = OPTIONS) -> Writer:
    return Writer(PATH, HEADER, options, fs=fs, salts=rng.randbytes)


def check(
    fs: SimFS, history: History, rng: random.Random, options: WriterOptions, *, go_on: bool
) -> None:
    """Open what a crash left: what was acknowledged must be there, once, in order, unchanged."""
    writer = open_writer(fs, rng, options)
    _compare(stored(fs), history, writer)
    if go_on:
        _send_again(writer, history)
        writer.close()
        with open_writer(fs, rng, options) as again:
            _compare(stored(fs), history, again)


def stored(fs: SimFS) -> list[tuple[AppendKey, bytes]]:
    """What a reader in another process sees."""
    store = Store(PATH, fs=fs)
    keys = [
        AppendKey(*row) for s in store.segments if s.keys is not None for row in s.keys.tolist()
    ]
    return list(zip(keys, map(encode, store.episodes()), strict=True))


def _compare(
    stored_episodes: list[tuple[AppendKey, bytes]], history: History, writer: Writer
) -> None:
    keys = [key for key, _ in stored_episodes]
    assert len(set(keys)) == len(keys), "an episode is stored twice"
    for key, payload in stored_episodes:
        assert history.sent.get(key) == payload, f"{key} holds what was not sent"
    for slot in {key.slot for key in keys}:
        mine = [key for key in keys if key.slot == slot]
        assert mine == sorted(mine), "an episode came before one that was sent earlier"
    for key in history.acked | set(keys):
        assert key[1:] < writer.producers[key.slot], f"{key} could be stored once more"
    refused = {key for key, payload in history.sent.items() if payload == INVALID}
    lost = history.acked - set(keys) - refused - history.dropped
    if writer.options.keep_episodes is None:
        assert not lost, f"acknowledged and lost: {sorted(lost)}"
    else:
        assert not lost or len(keys) >= KEEP, "more was dropped than there was reason to"
        for key in lost:
            younger = [other for other in keys if other[:2] == key[:2] and other < key]
            assert not younger, f"{key} is gone, but {younger} is not"
    _assert_no_gaps(set(keys) | refused | history.dropped | lost, writer)


def _assert_no_gaps(present: set[AppendKey], writer: Writer) -> None:
    for slot in {key.slot for key in present}:
        state = writer.producers[slot]
        for sequence in range(state.expected):
            key = AppendKey(slot, state.incarnation, sequence)
            assert key in present, f"{key} is missing before {state}"


def _send_again(writer: Writer, history: History) -> None:
    """What producers do after a crash: send everything again."""
    for key in sorted(history.sent):
        state = writer.producers[key.slot]
        ack = writer.append(key, history.sent[key])
        if key.incarnation < state.incarnation:
            assert ack.status is AckStatus.FENCED, (key, ack)
        elif key in history.acked:
            assert ack.status is AckStatus.DUPLICATE, (key, ack)
        else:
            assert ack.status in STORED, (key, ack)
            history.acked.add(key)


class Explorer:
    """Cuts the power at every call of a program, and again while the store recovers."""

    def __init__(self, seed: int, deeper: float) -> None:
        """A share `deeper` of all losses is followed by others while the store recovers."""
        self._rng, self._deeper = random.Random(seed), deeper
        self._losses = losses(seed, 1 << 60)
        self.states = 0

    def explore(self, play: Play, operations: Sequence[str], points: int = 1) -> None:
        """`points` losses a call."""

        def cut() -> None:
            for _ in range(points):
                self._cut(play.fs, play.history, play.options, self._deeper)

        play.fs.watch = cut
        play.run(operations)
        cut()

    def _cut(self, fs: SimFS, history: History, options: WriterOptions, deeper: float) -> None:
        left, known = fs.after(next(self._losses)), history.copy()
        self.states += 1
        if self._rng.random() < deeper:
            left.watch = lambda: self._cut(left, known, options, 0.0)
        check(left, known, self._rng, options, go_on=self._rng.random() < 0.2)


OPERATIONS = (
    *("append", "other", "group", "invalid", "gap", "restart"),
    *("roll", "drop", "reopen", "kill", "full", "broken", "soon_full", "soon_broken"),
)


WEIGHTS = (4, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
CLASSICS = (  # programs that reveal well-known mistakes
    ["append", "full", "append", "reopen"],
    ["append", "broken", "append", "append", "kill"],
    ["append", *["invalid"] * 16],
    ["group", "roll", "drop", "append", "restart", "gap", "append"],
)


def programs(seed: int, length: int) -> Iterator[tuple[int, list[str]]]:
    """The classics, then random programs without end, each with a number."""
    for number in count():
        rng = random.Random(f"{seed} {number}")
        drawn = rng.choices(OPERATIONS, WEIGHTS, k=length)
        yield number, list(CLASSICS[number]) if number < len(CLASSICS) else drawn


def explore_states(seed: int, enough: int, *, length: int = 12, deeper: float = 0.02) -> Explorer:
    """At least `enough` power losses. AssertionError for a violation or any other error."""
    explorer = Explorer(seed, deeper)
    for number, operations in programs(seed, length):
        keeps_all = number % 2 == 0 or "drop" in operations
        play = Play(number, OPTIONS if keeps_all else RETENTION)
        try:
            explorer.explore(play, operations, points=8 if number < len(CLASSICS) else 1)
        except (AssertionError, InputError, OSError) as error:
            raise AssertionError(f"program {number}, {operations}: {error!r}") from error
        if explorer.states >= enough:
            return explorer
    raise AssertionError("unreachable")


def explore_rot(seed: int, flips: int) -> None:
    """Single bits that change in a closed log: opening it is refused, or nothing is different."""
    rng = random.Random(seed)
    play = Play(seed)
    play.run(["group", "invalid", "append"])
    path = PATH / log.FOLDER / log.file_name(0)
    good = play.fs.read(path)
    for _ in range(flips):
        fs = play.fs.after(Loss(rng, names=True, sectors="new"))
        bit = rng.randrange(8 * len(good))
        fs.append(path).write_at(bit // 8, bytes([good[bit // 8] ^ 1 << bit % 8]))
        try:
            writer = open_writer(fs, rng)
        except InputError:
            continue
        _compare(stored(fs), play.history, writer)
