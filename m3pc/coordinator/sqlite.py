"""The embedded table: one SQLite file that the processes of one machine share.

A write is on the disk when its call returns. A file that went away is made again, one that is
damaged is moved aside; either way the records are rebuilt.
"""

import fcntl
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from m3pc.coordinator.records import KINDS
from m3pc.coordinator.table import Deadline, RecordsLostError, TableContents, TableSnapshot, ticked
from m3pc.core.files import sync_directory
from m3pc.types import CoordinatorUnavailableError, InputError

log = logging.getLogger(__name__)

COMPANIONS = ("", "-wal", "-shm")
DAMAGED = {"SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"}  # the last: no such table
MOVED = {"SQLITE_READONLY_DBMOVED", "SQLITE_IOERR_SHORT_READ"}
MARKER, CLOCK, SUM = ("marker", ""), ("clock", ""), ("sum", "")  # rows beside the records
PAUSE = 0.01  # seconds between two tries to lock
SCHEMA = """CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, name TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID"""
WRITE = "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET text = excluded.text"

TableRows = Mapping[tuple[str, str], str]  # texts by kind and name


def milliseconds() -> int:
    """Since the machine started: the same for all its processes, and nobody can set it."""
    return time.monotonic_ns() // 1_000_000


class SqliteTable:
    def __init__(self, path: Path, *, clock: Callable[[], int] = milliseconds) -> None:
        self._path, self._clock = path, clock
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # of the file that is open
        self._threads = threading.Lock()
        self.where = f"sqlite:{path}"

    def snapshot(self, kind: str, name: str | None, deadline: Deadline) -> TableSnapshot:
        with self._transaction("BEGIN", deadline) as connection:
            rows = _rows(connection)
            marker = rows.get(MARKER, "")
            if not marker or not _is_whole(rows):
                raise RecordsLostError(marker)
            return TableSnapshot(
                marker=marker,
                now=ticked(rows.get(CLOCK, ""), self._clock())[0],
                texts={
                    each: text
                    for (of, each), text in rows.items()
                    if of == kind and name in (None, each)
                },
            )

    def swap(
        self, kind: str, name: str, *, old: str | None, new: str, marker: str, deadline: Deadline
    ) -> bool:
        with (
            suppress(RecordsLostError),
            self._transaction("BEGIN IMMEDIATE", deadline) as connection,
        ):
            rows = _rows(connection)
            if (rows.get(MARKER), rows.get((kind, name))) == (marker, old) and _is_whole(rows):
                clock = ticked(rows.get(CLOCK, ""), self._clock())[1]
                _write(connection, {**rows, (kind, name): new, CLOCK: clock}, rows)
                return True
        return False

    def rebuild(
        self,
        marker: str,
        make: Callable[[TableContents, int], tuple[str, TableContents]],
        deadline: Deadline,
    ) -> None:
        with (
            suppress(RecordsLostError),
            self._transaction("BEGIN IMMEDIATE", deadline) as connection,
        ):
            rows = _rows(connection)
            if rows.get(MARKER, "") != marker:
                return  # somebody did it before us
            left: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
            for (kind, name), text in rows.items():
                if kind in KINDS:
                    left[kind][name] = text
            now, clock = ticked(rows.get(CLOCK, ""), self._clock())
            new_marker, contents = make(left, now)
            new = {(kind, name): contents[kind][name] for kind in KINDS for name in contents[kind]}
            connection.execute("DELETE FROM records")
            _write(connection, new | {MARKER: new_marker, CLOCK: clock})

    def close(self) -> None:
        with self._threads:
            self._drop()

    @contextmanager
    def _transaction(self, begin: str, deadline: Deadline) -> Iterator[sqlite3.Connection]:
        """All or nothing, on the file that bears the name now."""
        with self._threads:
            try:
                connection = self._open(deadline)
                connection.execute(f"PRAGMA busy_timeout = {max(1, int(deadline.left * 1000))}")
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
            except sqlite3.Error as error:
                self._give_up(error, deadline)

    def _give_up(self, error: sqlite3.Error, deadline: Deadline) -> NoReturn:
        name, identity = _name(error), self._identity
        self._drop()
        if name in DAMAGED:
            with _locked(self._path, deadline):
                if identity == _identity(self._path):
                    _move_aside(self._path, str(error))
        if name in DAMAGED | MOVED:
            raise RecordsLostError from None
        raise CoordinatorUnavailableError(
            f"{self.where} cannot be used: {error}; see that its disk has space and is writable, "
            f"and that no process keeps it locked for longer than {deadline.seconds:g} s"
        ) from None

    def _open(self, deadline: Deadline) -> sqlite3.Connection:
        if self._connection and self._identity == _identity(self._path):
            return self._connection
        self._drop()
        try:
            with _locked(self._path, deadline):
                self._connection = _connect(self._path, deadline)
                self._identity = _identity(self._path)
        except OSError as error:
            raise CoordinatorUnavailableError(
                f"{self.where} cannot be opened: {error}; give a path in a folder that can be "
                "written to"
            ) from None
        return self._connection

    def _drop(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = self._identity = None


def _connect(path: Path, deadline: Deadline) -> sqlite3.Connection:
    """The file opened and checked; a new one where there is none or where it is damaged."""
    for _ in range(2):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            path, timeout=max(0.001, deadline.left), isolation_level=None, check_same_thread=False
        )
        connection.text_factory = lambda text: text.decode(errors="replace")
        try:
            problem = _prepare(connection)
        except sqlite3.Error as error:
            connection.close()
            if _name(error) not in DAMAGED:
                raise
            problem = str(error)
        except InputError:
            connection.close()
            raise
        if problem == "ok":
            sync_directory(path.parent)
            return connection
        connection.close()
        _move_aside(path, problem)
    raise CoordinatorUnavailableError(
        f"sqlite:{path} is damaged as soon as it is made: {problem}; check its disk"
    )


def _prepare(connection: sqlite3.Connection) -> str:
    """What SQLite thinks of the file: "ok" or what is wrong with it."""
    problem = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    tables = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    if tables and "records" not in tables:
        raise InputError(
            f"the coordinator's file is a database of another program with {sorted(tables)[:3]}; "
            "give another path"
        )
    if problem == "ok":
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(SCHEMA)
    return problem


def _move_aside(path: Path, problem: str) -> None:
    number = 1 + len(list(path.parent.glob(f"{path.name}.damaged-*")))
    for companion in COMPANIONS:
        part = path.with_name(path.name + companion)
        if part.exists():
            part.rename(path.with_name(f"{path.name}.damaged-{number}{companion}"))
    log.error(
        "event=coordinator-file-damaged path=%s moved_to=damaged-%d reason=%r",
        path,
        number,
        problem,
    )


@contextmanager
def _locked(path: Path, deadline: Deadline) -> Iterator[None]:
    """Nobody else opens the file or moves it away."""
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        while not _try_lock(descriptor):
            deadline.check(f"sqlite:{path}", "another process is opening it", "see which one hangs")
            time.sleep(PAUSE)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _name(error: sqlite3.Error) -> str:
    """SQLite's own word; extended codes of damage count as damage."""
    name = str(getattr(error, "sqlite_errorname", ""))
    return next((code for code in DAMAGED if name.startswith(f"{code}_")), name)


def _rows(connection: sqlite3.Connection) -> TableRows:
    rows = connection.execute("SELECT kind, name, text FROM records")
    return {(str(kind), str(name)): str(text) for kind, name, text in rows}


def _write(
    connection: sqlite3.Connection, rows: TableRows, before: TableRows = MappingProxyType({})
) -> None:
    whole = {**rows, SUM: _sum(rows)}
    changed = [(*key, text) for key, text in whole.items() if before.get(key) != text]
    connection.executemany(WRITE, changed)


def _is_whole(rows: TableRows) -> bool:
    return rows.get(SUM) == _sum(rows)


def _sum(rows: TableRows) -> str:
    """Over all rows, so that one whose name was changed is missed."""
    return hashlib.sha256(repr(sorted({**rows, SUM: ""}.items())).encode()).hexdigest()
