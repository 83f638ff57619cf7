"""A coordinator's state in etcd: the tables are in this process' memory, and each row is a key.

Responsible for rows as keys, and for batches of any size, all or nothing. Not responsible for
leadership: an `EtcdTerm` commits each transaction, and refuses it once it is deposed.

A batch that is larger than one transaction is staged: its changes are written under `staged/`, then
one transaction names them in the cluster's record, which is the moment that makes them durable;
then they are carried out. `read` carries out what a leader before has named and not finished.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol

import anyio.from_thread
import msgpack

from tensorhub.coordinator import Durable, Entry
from tensorhub.errors import StateError, shown
from tensorhub.runtime.control import etcd
from tensorhub.runtime.control.etcd import KeyValue, Place
from tensorhub.runtime.control.tables import FORMAT, SCHEMA, UNREADABLE, Tables, identity

VALUE_BYTES_MAX = 2**19  # of one key
OPERATIONS_MAX = 120  # of one transaction, besides the fence's; etcd's default is 128
# of one transaction's values; etcd's default is 1.5 MiB for a request
TRANSACTION_BYTES_MAX = 2**20

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
        except (ValueError, TypeError, RecursionError, StateError) as error:
            text = f"{shown(value)} is no record of a cluster that this release can use ({error})"
            raise StateError(f"{place}: {text}: give another prefix") from error
        return record


class Fence(Protocol):
    """What makes transactions durable, for as long as this coordinator leads."""

    @property
    def record(self) -> Record:
        """As of the last transaction."""
        ...

    async def commit(
        self, operations: Sequence[dict[str, Any]], staged: int = 0, cluster: str = ""
    ) -> None:
        """One transaction. `cluster`: the id of a new cluster, from now on. Raises OSError: nothing
        of it is durable; Deposed: that is unknown.
        """
        ...

    async def values(self, name: str) -> list[KeyValue]:
        """All below a key. Raises StateError."""
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
        self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._db.executescript(SCHEMA)
        self._tables = Tables(self._db, f"the state at {place}")
        self._keys = {
            table: [row[1] for row in self._db.execute(f"PRAGMA table_info({table})") if row[5]]
            for (table,) in self._db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'cluster'"
            ).fetchall()
        }

    def read(self) -> Durable:
        if not self._is_loaded:
            self._begin()
            self._is_loaded = True
        return self._tables.read()

    def _begin(self) -> None:
        try:
            if count := self._fence.record.staged:
                staged = anyio.from_thread.run(self._fence.values, "staged/")
                whole = b"".join(each.value for each in staged[:count])
                self._carry_out([(key, value) for key, value in msgpack.unpackb(whole)])
            self._load(anyio.from_thread.run(self._fence.values, "state/"))
        except (*UNREADABLE, ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise self._tables.damaged(shown(str(error), 200)) from error
        self._follow()

    def write(self, entries: Sequence[Entry]) -> None:
        self._changed.clear()
        try:
            with self._tables.transaction():
                for entry in entries:
                    self._tables.write(entry)
                self._commit(list(self._operations()))
        except (sqlite3.Error, OverflowError) as error:  # OverflowError: a number beyond 2**63 - 1
            raise OSError(f"the state cannot be written: {error}") from error

    def begin_anew(self) -> None:
        anyio.from_thread.run(self._fence.commit, (), 0, secrets.token_hex(8))

    def close(self) -> None:
        self._db.close()

    # -- rows and keys

    def _load(self, found: Sequence[KeyValue]) -> None:
        rows: dict[bytes, bytes] = {}
        start = len(self._place.key("state/"))
        for each in found:
            row, _, piece = each.key[start:].rpartition(b"]")
            rows[row] = rows.get(row, b"") + each.value
            if piece:
                self._pieces[row + b"]"] = int(piece[1:]) + 1
        with self._tables.transaction():
            for name, value in rows.items():
                table = name.partition(b"/")[0].decode()
                columns = msgpack.unpackb(value)
                marks = ",".join("?" * len(columns))
                if table not in self._keys:
                    raise ValueError(f"an unknown table, {table!r}")
                self._db.execute(f"INSERT INTO {table} VALUES ({marks})", columns)

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
        anyio.from_thread.run(self._fence.commit, [], len(pieces))
        self._carry_out(operations)

    def _carry_out(self, operations: list[Operation]) -> None:
        """What is staged, and durable by that."""
        try:
            for part in _parts(operations):
                self._transact(part, self._fence.record.staged)
            first = self._place.key("staged/")
            anyio.from_thread.run(self._fence.commit, [etcd.delete(first, etcd.after(first))])
        except OSError as error:  # it is durable, so it must not count as failed
            self._fence.depose(f"the last write is staged, and not carried out yet: {error}")

    def _transact(self, operations: Sequence[Operation], staged: int = 0) -> None:
        below = self._place.key("state/")
        made = [
            etcd.delete(below + key) if value is None else etcd.put(below + key, value)
            for key, value in operations
        ]
        anyio.from_thread.run(self._fence.commit, made, staged)

    def _staged(self, number: int) -> bytes:
        return self._place.key(f"staged/{number:06}")


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
