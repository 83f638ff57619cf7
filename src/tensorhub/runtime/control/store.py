"""What a coordinator must not forget (R2) on this machine: in memory only, or in a directory.

Responsible for durability: an entry that `write` returned for survives a crash of process and
machine. Not responsible for what the entries mean (`tables`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorhub.coordinator import Durable, Entry
from tensorhub.errors import StateError, shown
from tensorhub.logs import get_logger
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.tables import FORMAT, MIGRATIONS, UNREADABLE, Tables, identity
from tensorhub.transport.forks import close_in_children

ADDRESS_BYTES_MAX = 256  # of a leader's address, in the file that it locks
_DATABASE = "state.sqlite3"
_IDENTITY = "SELECT id, epoch, format FROM cluster"

log = get_logger("tensorhub.coordinator")


class InUse(StateError):
    """Another coordinator has the directory open. `leader`: its address, if that is known."""

    def __init__(self, path: Path, leader: str) -> None:
        whose = f"the coordinator at {leader}" if leader else "another coordinator"
        text = f"the state_dir {path} is in use by {whose}: give each its own"
        super().__init__(text, retryable=True)
        self.leader = leader


class MemoryStore:
    """No durability: after a restart it is a new cluster, and old handles fail loudly (R2)."""

    blocks = False

    def __init__(self) -> None:
        self.cluster = secrets.token_hex(8)
        # what belongs to a former one's operations does not fit this one's (G9)
        self.epoch = 1 + secrets.randbelow(2**30)

    def read(self) -> Durable:
        return Durable()

    def write(self, entries: Sequence[Entry]) -> None:
        pass

    def begin_anew(self) -> None:
        """The next term has a store of its own anyway."""

    def close(self) -> None:
        pass


class SqliteStore:
    """Entries in `state_dir`, each transaction synced to the disk. One coordinator at a time may
    have it open.
    """

    blocks = True

    def __init__(
        self, state_dir: str | os.PathLike[str], *, shared: bool = False, address: str = ""
    ) -> None:
        """Raises StateError if the directory cannot be used; InUse if another coordinator has it
        open. `address`: of this coordinator, which the others' InUse names.

        `shared`: on a volume of several machines. Others that share it may have it open; the epoch
        says which may write. A dead machine's lock on a file must not keep a successor out, and no
        memory is shared, as SQLite's WAL needs it.

        A user that can write to the directory decides what `latest` means. So the directory must
        not belong to another user, be writable by all, or be a symbolic link, whose target could
        change. The files are this user's only.
        """
        path = self._path = Path(state_dir)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_directory(path)
            self._lock = close_in_children(os.fdopen(_private(path / "lock"), "r+b", buffering=0))
        except OSError as error:
            raise StateError(f"the state_dir {path} cannot be used: {error.strerror}") from error
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except OSError as error:
            leader = self._lock.read(ADDRESS_BYTES_MAX).decode(errors="replace")
            self._lock.close()
            raise InUse(path, leader if leader.isprintable() else "") from error
        try:
            if not shared:
                self._lock.truncate(0)  # a former leader's
                self._lock.write(address.encode()[:ADDRESS_BYTES_MAX])
            _warn_of_group(path)
            # SQLite gives new ones the mode of the first
            for name in [_DATABASE, *(f"{_DATABASE}-{each}" for each in ("wal", "shm", "journal"))]:
                if name == _DATABASE or os.path.lexists(path / name):
                    os.close(_private(path / name))
            self._open(path, *(("DELETE", "EXTRA") if shared else ("WAL", "FULL")))
        except (*UNREADABLE, StateError, OSError) as error:
            self._lock.close()
            why = str(error) if isinstance(error, StateError) else shown(str(error), 200)
            raise StateError(f"the state_dir {path} cannot be used: {why}") from error

    def _open(self, path: Path, journal: str, synchronous: str) -> None:
        self._db = sqlite3.connect(path / _DATABASE, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute(f"PRAGMA journal_mode={journal}")
            self._db.execute(f"PRAGMA synchronous={synchronous}")
            self._tables = Tables(self._db, f"the state_dir {path}")
            with self._tables.transaction():
                found = self._format()
                copy = path / f"{_DATABASE}.format{found}"
                if found in MIGRATIONS:
                    self._keep_copy(copy)
                if found in (FORMAT, *MIGRATIONS):
                    self._tables.make(found)
                row = self._db.execute(_IDENTITY).fetchone()
                if row is None:
                    row = (secrets.token_hex(8), 0, FORMAT)
                    self._db.execute("INSERT INTO cluster VALUES (?, ?, ?)", row)
                self.cluster, last = identity(*row)
                self.epoch = last + 1
                self._db.execute("UPDATE cluster SET epoch = ?", (self.epoch,))
            if found in MIGRATIONS:
                log.warning("state_migrated", copy=str(copy), was=found, now=FORMAT)
        except BaseException:
            self._db.close()
            raise

    def _format(self) -> int:
        """The format of what is there, if that is a number; of nothing, the present one.
        StateError: there is something besides tables, such as a view, whose rows may have no end.
        """
        others = "SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index')"
        if (row := self._db.execute(others).fetchone()) is not None:
            raise StateError(f"it has something that is not a coordinator's, {shown(row[0])}")
        named = "SELECT 1 FROM sqlite_master WHERE name = 'cluster'"
        row = self._db.execute(named).fetchone() and self._db.execute(_IDENTITY).fetchone()
        return FORMAT if row is None else row[2] if type(row[2]) is int else -1

    def _keep_copy(self, path: Path) -> None:
        """Keep what is there, whole, before it is changed. After a crash it is made again."""
        part = path.with_name(f"{path.name}.part")
        part.unlink(missing_ok=True)
        os.close(_private(part))
        try:
            # by a connection of its own: one that writes cannot be copied from
            with (
                contextlib.closing(sqlite3.connect(self._path / _DATABASE)) as whole,
                contextlib.closing(sqlite3.connect(part)) as copy,
            ):
                copy.execute("PRAGMA synchronous=FULL")
                whole.backup(copy)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def read(self) -> Durable:
        return self._tables.read()

    def write(self, entries: Sequence[Entry]) -> None:
        with self._fenced():
            for entry in entries:
                self._tables.write(entry)

    def begin_anew(self) -> None:
        with self._fenced():
            self._db.execute("UPDATE cluster SET id = ?", (secrets.token_hex(8),))

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[None]:
        """A transaction of this term."""
        try:
            with self._tables.transaction():
                now = self._db.execute(_IDENTITY).fetchone()
                if now != (self.cluster, self.epoch, FORMAT):
                    raise Deposed(f"the state_dir {self._path} has another leader since: {now}")
                yield
        except (sqlite3.Error, OverflowError) as error:  # OverflowError: a number beyond 2**63 - 1
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
                # what was written before a failed sync may be found after a crash
                text = f"whether the state_dir {self._path} has the last write is unknown: {error}"
                raise Deposed(text) from error
            raise OSError(f"the state cannot be written: {error}") from error

    def close(self) -> None:
        """Let go of the directory; a second call does nothing."""
        if not self._lock.closed:
            self._db.close()
            self._lock.close()


def _check_directory(path: Path) -> None:
    """Raise StateError if other users may write the state, OSError if the path is no directory."""
    if path.is_symlink():
        raise StateError(
            f"the state_dir {path} is a symbolic link: give the directory itself, "
            f"{os.path.realpath(path)!r}"
        )
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if status.st_uid not in (0, os.geteuid()):
        whose = f"belongs to user {status.st_uid}, not to this process' user {os.geteuid()}"
        raise StateError(
            f"the state_dir {path} {whose}: give a directory of its own (chown it, or another one)"
        )
    if status.st_mode & stat.S_IWOTH:
        raise StateError(
            f"the state_dir {path} can be written by everybody on this machine: chmod o-w it, or "
            f"give another one"
        )


def _warn_of_group(path: Path) -> None:
    status = path.stat()
    if status.st_mode & stat.S_IWGRP:  # as Kubernetes' fsGroup makes its volumes
        why = (
            "who is in the group may change what is the newest version; chmod g-w it, unless it "
            "has to be so"
        )
        log.warning(
            "state_dir_writable_by_group", state_dir=str(path), group=status.st_gid, hint=why
        )


def _private(path: Path) -> int:
    """A file of the state, made if it is not there, that this user only may read and write."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # an older version, or fsGroup, has let other users read it
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
