"""A coordinator's state in etcd: the tables are in this process' memory, and each row is a key.

Responsible for rows as keys, and for batches of any size, all or nothing. Not responsible for
leadership: an `EtcdTerm` commits each transaction, and refuses it once it is deposed.

A format has rows of its own: `state/` those of FIRST_FORMAT, `state.N/` those of format N. The
cluster's record says which of them count, and `columns` there says what a row consists of. A
leader that finds an older format writes the rows of the present one beside, then the record, which
is the moment of the migration. The older rows stay, as a copy.

A batch that is larger than one transaction is staged: its changes are written under `staged/`, then
one transaction names them in the cluster's record, which is the moment that makes them durable;
then they are carried out. `read` carries out what a leader before has named and not finished.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, Protocol

import anyio.from_thread
import msgpack

from tensorhub.coordinator import Durable, Entry
from tensorhub.errors import StateError, shown
from tensorhub.logs import get_logger
from tensorhub.runtime.control import etcd
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.etcd import KeyValue, Place
from tensorhub.runtime.control.tables import FORMAT, SCHEMA, UNREADABLE, Tables, identity

VALUE_BYTES_MAX = 2**19  # of one key
OPERATIONS_MAX = 120  # of one transaction, besides the fence's; etcd's default is 128
# of one transaction's values; etcd's default is 1.5 MiB for a request
TRANSACTION_BYTES_MAX = 2**20
FIRST_FORMAT = 4  # of a state in etcd
COLUMNS = b"columns"  # among the rows: the columns' names by table, as JSON

log = get_logger("tensorhub.coordinator")
Operation = tuple[bytes, bytes | None]  # a key below `state/`, and its value; None: it is deleted


@dataclass(frozen=True, slots=True)
class Record:
    """The value of `PREFIX/cluster`."""

    cluster: str
    epoch: int
    format: int = FORMAT
    sequence: int = 0  # of transactions in this epoch
    staged: int = 0  # keys below `staged/` that are to be carried out

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes, place: Place) -> Record:
        try:
            found = json.loads(value)
            record = cls(**found)
            identity(record.cluster, record.epoch, record.format)
            if type(record.sequence) is not int or type(record.staged) is not int:
                raise TypeError("a number is none")
        except StateError as error:
            raise StateError(f"{place}: {error}; or give another prefix") from error
        except (ValueError, TypeError, RecursionError) as error:
            text = f"{shown(value)} is no record of a cluster ({error}): give another prefix"
            raise StateError(f"{place}: {text}") from error
        return record


class Fence(Protocol):
    """What makes transactions durable, for as long as this coordinator leads."""

    @property
    def record(self) -> Record:
        """As of the last transaction."""
        ...

    async def commit(
        self, operations: Sequence[dict[str, Any]], record: Record | None = None
    ) -> None:
        """One transaction. `record`: from now on, but for its sequence; None: the present one.
        Raises OSError: nothing of it is durable; Deposed: that is unknown.
        """
        ...

    async def values(self, name: str) -> list[KeyValue]:
        """All below a key. Raises StateError; Deposed, as soon as the term has ended."""
        ...

    def depose(self, why: str) -> NoReturn:
        """End the term. Raises Deposed."""
        ...


class EtcdStore:
    """See `Store`. Its calls are made in a thread of the loop's."""

    blocks = True

    def __init__(self, place: Place, fence: Fence) -> None:
        self.cluster, self.epoch = fence.record.cluster, fence.record.epoch
        self._place = place
        self._fence = fence
        # what a batch changes: table and primary key, in the order of the first change
        self._changed: dict[tuple[str, tuple[object, ...]], None] = {}
        self._pieces: dict[bytes, int] = {}  # of rows that have been of more than one key
        self._is_loaded = False
        self._db, self._tables = self._in_memory()
        self._db.executescript(SCHEMA)
        found = "SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'cluster'"
        columns = {
            table: self._db.execute(f"PRAGMA table_info({table})").fetchall()
            for (table,) in self._db.execute(found).fetchall()
        }
        self._columns = {table: [row[1] for row in rows] for table, rows in columns.items()}
        self._keys = {table: [row[1] for row in rows if row[5]] for table, rows in columns.items()}
        self._has_columns = False  # in etcd

    def _in_memory(self) -> tuple[sqlite3.Connection, Tables]:
        db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        return db, Tables(db, f"the state at {self._place}")

    def read(self) -> Durable:
        if not self._is_loaded:
            self._begin()
            self._is_loaded = True
        return self._tables.read()

    def _begin(self) -> None:
        record = self._fence.record
        try:
            if record.staged:
                staged = anyio.from_thread.run(self._fence.values, "staged/")
                whole = b"".join(each.value for each in staged[: record.staged])
                self._carry_out([(key, value) for key, value in msgpack.unpackb(whole)])
            columns, rows = self._stored(record.format)
            if record.format != FORMAT:
                self._migrate(record.format, columns, rows)
            else:
                self._has_columns = bool(columns)
                with self._tables.transaction():
                    _insert(self._db, self._columns, rows)
        except (
            *UNREADABLE,
            AttributeError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
            msgpack.UnpackException,
        ) as error:
            raise self._tables.damaged(shown(str(error), 200)) from error
        self._follow()

    def _migrate(self, was: int, columns: dict[str, list[str]], rows: dict[bytes, bytes]) -> None:
        """Rows of an older format: in memory, then in etcd."""
        old, tables = self._in_memory()
        with contextlib.closing(old), self._tables.transaction():
            for table, names in columns.items():
                old.execute(f"CREATE TABLE {_quoted(table)} ({', '.join(map(_quoted, names))})")
            _insert(old, columns, rows)
            tables.make(was if columns else FORMAT)  # of nothing, nothing is to be changed
            for table, names in self._columns.items():
                listed, marks = ", ".join(map(_quoted, names)), ",".join("?" * len(names))
                made = old.execute(f"SELECT {listed} FROM {table}")
                self._db.executemany(f"INSERT INTO {table} ({listed}) VALUES ({marks})", made)
        for table, key in self._keys.items():
            for row in self._db.execute(f"SELECT {', '.join(map(_quoted, key))} FROM {table}"):
                self._note(table, *row)
        self._pieces.clear()
        first = self._place.key(_rows_of(FORMAT))
        try:
            # what a leader wrote that died at this
            anyio.from_thread.run(self._fence.commit, [etcd.delete(first, etcd.after(first))])
            for part in _parts([self._described(), *self._operations()]):
                self._transact(part)
            now = replace(self._fence.record, format=FORMAT)
            anyio.from_thread.run(self._fence.commit, [], now)
        except Deposed:
            raise
        except OSError as error:
            raise StateError(f"{self._place}: format {was} stays as it was: {error}") from error
        self._has_columns = True
        copy = f"{self._place}/{_rows_of(was)}"
        log.warning("state_migrated", copy=copy, was=was, now=FORMAT)

    def write(self, entries: Sequence[Entry]) -> None:
        self._changed.clear()
        try:
            with self._tables.transaction():
                for entry in entries:
                    self._tables.write(entry)
                operations = list(self._operations())
                self._commit(operations if self._has_columns else [self._described(), *operations])
                self._has_columns = True
        except (sqlite3.Error, OverflowError) as error:  # OverflowError: a number beyond 2**63 - 1
            raise OSError(f"the state cannot be written: {error}") from error

    def begin_anew(self) -> None:
        record = replace(self._fence.record, cluster=secrets.token_hex(8))
        anyio.from_thread.run(self._fence.commit, (), record)

    def close(self) -> None:
        self._db.close()

    # -- rows and keys

    def _stored(self, format_: int) -> tuple[dict[str, list[str]], dict[bytes, bytes]]:
        """The columns by table, and the rows by their keys."""
        found = anyio.from_thread.run(self._fence.values, _rows_of(format_))
        start = len(self._place.key(_rows_of(format_)))
        columns: dict[str, list[str]] = {}
        rows: dict[bytes, bytes] = {}
        for each in found:
            if each.key[start:] == COLUMNS:
                columns = json.loads(each.value)
                continue
            row, _, piece = each.key[start:].rpartition(b"]")
            rows[row] = rows.get(row, b"") + each.value
            if piece:
                self._pieces[row + b"]"] = int(piece[1:]) + 1
        return columns, rows

    def _described(self) -> Operation:
        return COLUMNS, json.dumps(self._columns).encode()

    def _follow(self) -> None:
        """From now on, note which rows change."""
        self._db.create_function("changed", -1, self._note)
        for table, columns in self._keys.items():
            for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                names = ", ".join(f'{row}."{column}"' for column in columns)
                self._db.execute(
                    f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON {table} "
                    f"BEGIN SELECT changed('{table}', {names}); END"
                )

    def _note(self, table: str, *key: object) -> None:
        self._changed[table, key] = None

    def _operations(self) -> Iterator[Operation]:
        """What the noted changes are in etcd."""
        for table, key in self._changed:
            name = f"{table}/{json.dumps(key, separators=(',', ':'))}".encode()
            where = " AND ".join(f'"{column}" = ?' for column in self._keys[table])
            row = self._db.execute(f"SELECT * FROM {table} WHERE {where}", key).fetchone()
            value = b"" if row is None else msgpack.packb(row)
            count = -(-len(value) // VALUE_BYTES_MAX)
            # at least what there is: a batch that fails leaves fewer, and to delete more is no harm
            most = max(count, self._pieces.get(name, 1))
            if most > 1:
                self._pieces[name] = most
            for piece in range(most):
                begin = piece * VALUE_BYTES_MAX
                part = value[begin : begin + VALUE_BYTES_MAX] if piece < count else None
                yield name + (f"/{piece:06}".encode() if piece else b""), part

    # -- transactions

    def _commit(self, operations: list[Operation]) -> None:
        parts = list(_parts(operations))
        if len(parts) <= 1:
            self._transact(operations)
            return
        whole = msgpack.packb(operations)
        pieces = [whole[at : at + VALUE_BYTES_MAX] for at in range(0, len(whole), VALUE_BYTES_MAX)]
        for number, piece in enumerate(pieces):
            anyio.from_thread.run(self._fence.commit, [etcd.put(self._staged(number), piece)])
        staged = replace(self._fence.record, staged=len(pieces))
        anyio.from_thread.run(self._fence.commit, [], staged)
        self._carry_out(operations)

    def _carry_out(self, operations: list[Operation]) -> None:
        """What is staged, and durable by that."""
        try:
            for part in _parts(operations):
                self._transact(part, self._fence.record.format)
            first, done = self._place.key("staged/"), replace(self._fence.record, staged=0)
            anyio.from_thread.run(self._fence.commit, [etcd.delete(first, etcd.after(first))], done)
        except OSError as error:  # it is durable, so it must not count as failed
            self._fence.depose(f"the last write is staged, and not carried out yet: {error}")

    def _transact(self, operations: Sequence[Operation], format_: int = FORMAT) -> None:
        below = self._place.key(_rows_of(format_))
        made = [
            etcd.delete(below + key) if value is None else etcd.put(below + key, value)
            for key, value in operations
        ]
        anyio.from_thread.run(self._fence.commit, made)

    def _staged(self, number: int) -> bytes:
        return self._place.key(f"staged/{number:06}")


def _rows_of(format_: int) -> str:
    return "state/" if format_ == FIRST_FORMAT else f"state.{format_}/"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _insert(
    db: sqlite3.Connection, columns: Mapping[str, Sequence[str]], rows: Mapping[bytes, bytes]
) -> None:
    for name, value in rows.items():
        table = name.partition(b"/")[0].decode()
        if table not in columns:
            raise ValueError(f"an unknown table, {table!r}")
        row = msgpack.unpackb(value)
        marks = ",".join("?" * len(row))
        db.execute(f"INSERT INTO {_quoted(table)} VALUES ({marks})", row)


def _parts(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Such as fit into a transaction each."""
    part: list[Operation] = []
    size = 0
    for key, value in operations:
        more = len(key) + len(value or b"")
        if part and (len(part) == OPERATIONS_MAX or size + more > TRANSACTION_BYTES_MAX):
            yield part
            part, size = [], 0
        part.append((key, value))
        size += more
    if part:
        yield part
