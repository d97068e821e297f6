"""The embedded table: a SQLite file that the processes of one machine share.

A write is on the disk when its call returns. A removed file is created again and a damaged file is
moved aside; in both cases the records are rebuilt.
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

from m3pc.coordinator.records import RECORD_TYPES
from m3pc.coordinator.table import (
    Deadline,
    RecordsLostError,
    TableContents,
    TableSnapshot,
    advance_clock,
)
from m3pc.core.files import sync_directory
from m3pc.types import CoordinatorUnavailableError, InputError

log = logging.getLogger(__name__)

SUFFIXES = ("", "-wal", "-shm")  # each database consists of these files
DAMAGED = {"SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR"}  # SQLITE_ERROR: no such table
MOVED = {"SQLITE_READONLY_DBMOVED", "SQLITE_IOERR_SHORT_READ"}
MARKER, CLOCK, SUM = ("marker", ""), ("clock", ""), ("sum", "")  # rows beside the records
LOCK_INTERVAL = 0.01  # seconds between two attempts to lock
SCHEMA = """CREATE TABLE IF NOT EXISTS records (
    kind TEXT NOT NULL, name TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID"""
WRITE = "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET text = excluded.text"

TableRows = Mapping[tuple[str, str], str]  # texts by kind and name


def monotonic_milliseconds() -> int:
    """Time since boot; all processes of the machine share this clock and no one can set it."""
    return time.monotonic_ns() // 1_000_000


class SqliteTable:
    """A `Table` in a file. All threads share one connection."""

    def __init__(self, path: Path, *, clock: Callable[[], int] = monotonic_milliseconds) -> None:
        self._path, self._clock = path, clock
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None  # device and inode of the open file
        self._lock = threading.Lock()
        self.where = f"sqlite:{path}"

    def snapshot(self, kind: str, name: str, deadline: Deadline) -> TableSnapshot:
        with self._transaction("BEGIN", deadline) as connection:
            rows = _rows(connection)
            marker = rows.get(MARKER, "")
            if not marker or not _is_intact(rows):
                raise RecordsLostError(marker)
            now, _ = advance_clock(rows.get(CLOCK, ""), self._clock())
            return TableSnapshot(marker=marker, now=now, text=rows.get((kind, name)))

    def swap(
        self, kind: str, name: str, *, old: str | None, new: str, marker: str, deadline: Deadline
    ) -> bool:
        with (
            suppress(RecordsLostError),
            self._transaction("BEGIN IMMEDIATE", deadline) as connection,
        ):
            rows = _rows(connection)
            if (rows.get(MARKER), rows.get((kind, name))) == (marker, old) and _is_intact(rows):
                _, clock = advance_clock(rows.get(CLOCK, ""), self._clock())
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
                return  # another client has rebuilt the table
            remains = {
                kind: {name: text for (its_kind, name), text in rows.items() if its_kind == kind}
                for kind in RECORD_TYPES
            }
            now, clock = advance_clock(rows.get(CLOCK, ""), self._clock())
            new_marker, contents = make(remains, now)
            new = {(kind, name): text for kind in contents for name, text in contents[kind].items()}
            connection.execute("DELETE FROM records")
            _write(connection, new | {MARKER: new_marker, CLOCK: clock})

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    @contextmanager
    def _transaction(self, begin: str, deadline: Deadline) -> Iterator[sqlite3.Connection]:
        """Run the block as a transaction on the file that is at the path now."""
        with self._lock:
            try:
                connection = self._open(deadline)
                connection.execute(
                    f"PRAGMA busy_timeout = {max(1, int(deadline.remaining * 1000))}"
                )
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
        code, identity = _error_code(error), self._identity
        self._disconnect()
        if code in DAMAGED:
            with _locked(self._path, deadline):
                if identity == _identity(self._path):
                    _move_aside(self._path, str(error))
        if code in DAMAGED | MOVED:
            raise RecordsLostError from None
        raise CoordinatorUnavailableError(
            f"{self.where} cannot be used: {error}; see that its disk has space and is writable, "
            f"and that no process keeps it locked for longer than {deadline.seconds:g} s"
        ) from None

    def _open(self, deadline: Deadline) -> sqlite3.Connection:
        if self._connection and self._identity == _identity(self._path):
            return self._connection
        self._disconnect()
        try:
            with _locked(self._path, deadline):
                self._connection = open_database(self._path, deadline)
                self._identity = _identity(self._path)
        except OSError as error:
            raise CoordinatorUnavailableError(
                f"{self.where} cannot be opened: {error}; give a path in a writable folder"
            ) from None
        return self._connection

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = self._identity = None


def open_database(path: Path, deadline: Deadline) -> sqlite3.Connection:
    """Open and check the file; create it if it is missing, replace it if it is damaged."""
    for _ in range(2):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            path,
            timeout=max(0.001, deadline.remaining),
            isolation_level=None,
            check_same_thread=False,
        )
        connection.text_factory = lambda text: text.decode(errors="replace")
        try:
            problem = _prepare(connection)
        except sqlite3.Error as error:
            connection.close()
            if _error_code(error) not in DAMAGED:
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
        f"sqlite:{path} is damaged right after it was created: {problem}; check its disk"
    )


def _prepare(connection: sqlite3.Connection) -> str:
    """Check the file and set an intact one up; return "ok" or the damage."""
    problem = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    tables = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    if tables and "records" not in tables:
        raise InputError(
            f"the coordinator's file is another program's database with {sorted(tables)[:3]}; "
            "give another path"
        )
    if problem == "ok":
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(SCHEMA)
    return problem


def _move_aside(path: Path, problem: str) -> None:
    number = 1 + len(list(path.parent.glob(f"{path.name}.damaged-*")))
    for suffix in SUFFIXES:
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(path.with_name(f"{path.name}.damaged-{number}{suffix}"))
    log.error(
        "event=coordinator-file-damaged path=%s moved_to=damaged-%d reason=%r",
        path,
        number,
        problem,
    )


@contextmanager
def _locked(path: Path, deadline: Deadline) -> Iterator[None]:
    """Keep other processes from opening or moving the file during the block."""
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                where, advice = f"sqlite:{path}", "see which one hangs"
                deadline.check(where, "another process is opening it", advice)
                time.sleep(LOCK_INTERVAL)
        yield
    finally:
        os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, which distinguish a file from its replacement at the same path."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _error_code(error: sqlite3.Error) -> str:
    """SQLite's name of the error; an extended code of damage becomes its basic code."""
    name = str(getattr(error, "sqlite_errorname", ""))
    return next((code for code in DAMAGED if name.startswith(f"{code}_")), name)


def _rows(connection: sqlite3.Connection) -> TableRows:
    rows = connection.execute("SELECT kind, name, text FROM records")
    return {(str(kind), str(name)): str(text) for kind, name, text in rows}


def _write(
    connection: sqlite3.Connection, rows: TableRows, before: TableRows = MappingProxyType({})
) -> None:
    """Write `rows` and their checksum; rows that are the same in `before` are skipped."""
    summed = {**rows, SUM: _sum(rows)}
    changed = [(*key, text) for key, text in summed.items() if before.get(key) != text]
    connection.executemany(WRITE, changed)


def _is_intact(rows: TableRows) -> bool:
    return rows.get(SUM) == _sum(rows)


def _sum(rows: TableRows) -> str:
    """A checksum over all rows, which detects a renamed or missing row."""
    return hashlib.sha256(repr(sorted({**rows, SUM: ""}.items())).encode()).hexdigest()
