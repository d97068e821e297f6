"""A disk in memory that can lose power: what was not synced may survive, be lost or be garbled.

Every file knows its durable content and the changes since; so do the names. A loss keeps or drops
each name change independently, and each 512-byte sector of each write becomes the old one, the new
one, zeros, noise, or what a deleted file had at this offset.
"""

import errno
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

SECTOR = 512
Outcome = Literal["old", "new", "zeros", "noise", "stale"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class PowerLossError(BaseException):
    """The machine stops here. Not an Exception: no handler of a program runs without power."""


@dataclass
class Loss:
    """What a power loss leaves of changes that were not synced; None: each at random."""

    rng: random.Random
    names: bool | None = None
    sectors: Outcome | None = None
    donor: bytes = b""  # a deleted file whose blocks are reused

    def keeps_name(self) -> bool:
        return self.rng.random() < 0.5 if self.names is None else self.names

    def outcome(self) -> Outcome:
        return self.rng.choice(OUTCOMES) if self.sectors is None else self.sectors

    def stale(self, offset: int, size: int) -> bytes:
        """All from the same file, so that its complete frames are complete again."""
        return self.donor[offset : offset + size].ljust(size, b"\0")


def losses(seed: int, count: int) -> Iterator[Loss]:
    """`count` losses: first all or nothing of names and data, then random mixtures."""
    corners = [(names, sectors) for names in (True, False) for sectors in OUTCOMES]
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        names, sectors = corners[number] if number < len(corners) else (None, None)
        yield Loss(rng, names, sectors)


@dataclass
class Write:
    offset: int
    content: bytes


@dataclass
class Cut:
    size: int


@dataclass
class Node:
    content: bytearray = field(default_factory=bytearray)  # what the program sees
    durable: bytes = b""
    pending: list[Write | Cut] = field(default_factory=list)

    def after(self, loss: Loss) -> bytes:
        content = bytearray(self.durable)
        for change in self.pending:
            if isinstance(change, Write):
                for part in _sectors(change):
                    _put(content, part.offset, _survivor(content, part, loss))
            elif loss.outcome() == "new":
                _cut(content, change.size)
        return bytes(content)


@dataclass
class NameChange:
    """Names that appear, with their content, and names that disappear: an atomic change."""

    added: dict[Path, Node | None]  # None: a folder
    removed: list[Path]
    unsynced: set[Path]  # folders that must be synced before it is durable

    def apply(self, names: dict[Path, Node | None]) -> None:
        for path in self.removed:
            names.pop(path, None)
        names.update(self.added)


class SimFS:
    """An FS. `calls` counts the calls that change the disk; a test plans which of them fail."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names: dict[Path, Node | None] = {root: None}
        self._durable: dict[Path, Node | None] = {root: None}
        self._pending: list[NameChange] = []
        self.calls = 0
        self.off = False
        self.stops_at: int | None = None  # power is lost before this call
        self.fails_at: dict[int, int] = {}  # call -> errno
        self.free = 1 << 40
        self.gone: list[tuple[str, bytes]] = []  # name and content of deleted files
        self.watch: Callable[[], object] = lambda: None  # is called before each counted call

    def create(self, path: Path) -> "SimFile":
        self.begin()
        self._require_folder(path.parent)
        if path in self._names:
            raise FileExistsError(errno.EEXIST, "file exists", str(path))
        node = Node()
        self._change(NameChange(added={path: node}, removed=[], unsynced={path.parent}))
        return SimFile(self, node)

    def append(self, path: Path) -> "SimFile":
        return SimFile(self, self._node(path))

    def read(self, path: Path) -> bytes:
        return bytes(self._node(path).content)

    def names(self, folder: Path) -> list[str]:
        self._require_power()
        return sorted(path.name for path in self._names if path.parent == folder != path)

    def make_folder(self, path: Path) -> None:
        self.begin()
        self._require_folder(path.parent)
        if path in self._names:
            raise FileExistsError(errno.EEXIST, "file exists", str(path))
        self._change(NameChange(added={path: None}, removed=[], unsynced={path.parent}))

    def rename(self, old: Path, new: Path) -> None:
        self.begin()
        node = self._node(old)
        self._require_folder(new.parent)
        if (before := self._names.get(new)) is not None:
            self.gone.append((new.name, bytes(before.content)))
        self._change(
            NameChange(added={new: node}, removed=[old], unsynced={old.parent, new.parent})
        )

    def unlink(self, path: Path) -> None:
        self.begin()
        self.gone.append((path.name, bytes(self._node(path).content)))
        self._change(NameChange(added={}, removed=[path], unsynced={path.parent}))

    def sync_folder(self, path: Path) -> None:
        self.begin()
        self._require_folder(path)
        for change in self._pending:
            change.unsynced.discard(path)
            if not change.unsynced:
                change.apply(self._durable)
        self._pending = [change for change in self._pending if change.unsynced]

    def map(self, path: Path) -> bytes:
        return self.read(path)

    def lock(self, folder: Path, *, shared: bool) -> Callable[[], None]:
        self._require_folder(folder)
        return lambda: None

    def free_bytes(self, path: Path) -> int:
        self._require_folder(path)
        return self.free

    def after(self, loss: Loss) -> "SimFS":
        """The disk after a restart of the machine."""
        names = dict(self._durable)
        for change in self._pending:
            if loss.keeps_name():
                change.apply(names)
        disk = SimFS(self.root)
        disk.gone = list(self.gone)
        for path in sorted(names):
            if path.parent in disk._names or path == self.root:
                node = names[path]
                loss.donor = self._donor(path, loss)
                content = None if node is None else node.after(loss)
                disk._names[path] = disk._durable[path] = (
                    None if content is None else Node(bytearray(content), content)
                )
        return disk

    def _donor(self, path: Path, loss: Loss) -> bytes:
        """A deleted file of the same name, the worst case."""
        former = [content for name, content in self.gone if name == path.name]
        return loss.rng.choice(former) if former else b""

    def begin(self) -> None:
        """A call that changes the disk: the plans may stop or fail it."""
        self._require_power()
        self.watch()
        if self.calls == self.stops_at:
            self.off = True
        self._require_power()
        number = self.calls
        self.calls += 1
        if number in self.fails_at:
            raise OSError(self.fails_at[number], "planned failure")

    def _change(self, change: NameChange) -> None:
        change.apply(self._names)
        self._pending.append(change)

    def _node(self, path: Path) -> Node:
        self._require_power()
        node = self._names.get(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return node

    def _require_folder(self, path: Path) -> None:
        self._require_power()
        if self._names.get(path, path) is not None:
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))

    def _require_power(self) -> None:
        if self.off:
            raise PowerLossError


class SimFile:
    def __init__(self, fs: SimFS, node: Node) -> None:
        self._fs, self._node = fs, node

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        self._write(len(self._node.content), b"".join(parts))

    def write_at(self, offset: int, content: bytes) -> None:
        self._write(offset, content)

    def truncate(self, size: int) -> None:
        self._fs.begin()
        _cut(self._node.content, size)
        self._node.pending.append(Cut(size))

    def sync(self) -> None:
        try:
            self._fs.begin()
        except OSError:
            self._node.pending = []  # as on Linux: clean pages, nothing on the disk
            raise
        for change in self._node.pending:
            content = bytearray(self._node.durable)
            if isinstance(change, Write):
                _put(content, change.offset, change.content)
            else:
                _cut(content, change.size)
            self._node.durable = bytes(content)
        self._node.pending = []

    def close(self) -> None:
        pass

    def _write(self, offset: int, content: bytes) -> None:
        try:
            self._fs.begin()
        except OSError:
            self._put(offset, content[: len(content) // 2])  # the part that fitted
            raise
        self._put(offset, content)

    def _put(self, offset: int, content: bytes) -> None:
        _put(self._node.content, offset, content)
        self._node.pending.append(Write(offset, content))


def _sectors(write: Write) -> Iterator[Write]:
    start, end = write.offset, write.offset + len(write.content)
    while start < end:
        stop = min(end, start - start % SECTOR + SECTOR)
        yield Write(start, write.content[start - write.offset : stop - write.offset])
        start = stop


def _survivor(content: bytearray, part: Write, loss: Loss) -> bytes:
    size = len(part.content)
    match loss.outcome():
        case "old":
            return bytes(content[part.offset : part.offset + size])
        case "new":
            return part.content
        case "zeros":
            return bytes(size)
        case "noise":
            return loss.rng.randbytes(size)
        case "stale":
            return loss.stale(part.offset, size)


def _put(content: bytearray, offset: int, new: bytes) -> None:
    if new:
        content.extend(bytes(max(offset - len(content), 0)))
        content[offset : offset + len(new)] = new


def _cut(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))
