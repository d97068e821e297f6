"""Writers of live stores, to which episodes are sent by number."""

from collections.abc import Callable
from pathlib import Path

from m3pc.types import Ack, AppendKey, Episode
from replay.format.fs import FS, Disk
from replay.format.payload import encode
from replay.store.store import Store
from replay.writing.writer import Writer, WriterOptions
from tests.support.episodes.episodes import header, numbered

HEADER = header(max_episode_steps=100)
ROOMY = WriterOptions(low_space=0, no_space=0)  # whatever room the machine has


class Unlocked(Disk):
    """A writer that uses it holds no lock, as if its process had died."""

    def lock(self, folder: Path, *, shared: bool) -> Callable[[], None]:
        return lambda: None


def episode(number: int) -> Episode:
    return numbered(number, 3 + number % 17, terminated=number % 3 == 0)


def open_writer(path: Path, options: WriterOptions = ROOMY, **more: object) -> Writer:
    return Writer(path, HEADER, options, **more)  # type: ignore[arg-type]


def send(writer: Writer, numbers: range, *, slot: int = 0, incarnation: int = 0) -> list[Ack]:
    """Episodes by number, which is their sequence number too."""
    keys = [AppendKey(slot, incarnation, number) for number in numbers]
    return [writer.append(key, encode(episode(key.sequence))) for key in keys]


def write_live(path: Path, *, fs: FS | None = None, close: bool = True) -> Path:
    """A store with two segments, a log with episodes and a refused one, and all kinds of events."""
    writer = open_writer(path, fs=fs)
    for first in (0, 4, 8):
        send(writer, range(first, first + 4))
        writer.roll()
    writer.drop([0])
    writer.append(AppendKey(1, 5, 0), b"invalid")
    writer.withdraw_producer(1)
    send(writer, range(12, 16))
    if close:
        writer.close()
    return path


def numbers(store: Store) -> list[int]:
    """Which episodes a store holds: `numbered` puts the number into the first state."""
    return [int(e.states[0, 0]) for e in store.episodes()]
