"""The product's own store beside the simulated one, on files that a crash cuts.

What it reads at the beginning of each term must be what the simulated store has. In a crash, of a
write that was not synchronised there may be all bytes up to any one, or any sectors.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from random import Random

from tensorhub.coordinator import Durable, Entry
from tensorhub.runtime.control import election
from tensorhub.runtime.control.store import SqliteStore
from tensorhub.testing.sim.judges import durable
from tensorhub.testing.sim.terms import FencedStore

MEMORY = Path("/dev/shm")
DATABASE, WAL = "state.sqlite3", "state.sqlite3-wal"
WAL_HEADER = 32  # bytes, which are synchronised before what comes after them
SECTOR = 512


class DiskStore(FencedStore):
    """`shared`: a former term may have it open, too. Then SQLite has no WAL, and its files are not
    cut: a journal that is gone after the write cannot be seen from outside.
    """

    def __init__(self, random: Random, *, shared: bool) -> None:
        super().__init__()
        self._random = random
        self._shared = shared
        self._root = Path(
            tempfile.mkdtemp(prefix="tensorhub-simulated-", dir=MEMORY if MEMORY.is_dir() else None)
        )
        self._open: dict[int, SqliteStore] = {}  # by the epoch of its term
        self._states = 1  # directories: each loss of the state makes another one
        weakref.finalize(self, _remove, self._open, self._root)

    @property
    def _path(self) -> Path:
        return self._root / f"{self._states}"

    def begin(self) -> tuple[int, list[Entry]]:
        if not self._shared:
            self.crash()
        epoch, found = super().begin()
        self._open[epoch] = store = SqliteStore(self._path, shared=self._shared)
        durable.began(store.read(), Durable.of(found))
        return epoch, found

    def write(self, epoch: int, entry: Entry) -> None:
        store = self._open.get(epoch)
        if store is not None:
            refused = ""
            try:
                store.write([entry])
            except election.Deposed as error:
                refused = str(error)
            durable.wrote(epoch, self.epoch, refused)
        super().write(epoch, entry)

    def clear(self) -> None:
        self.crash()
        super().clear()
        self._states += 1

    def go_back(self, entries: int) -> None:
        self.crash()
        while self._open:  # of former terms, which are over: their epochs may come again
            self._open.popitem()[1].close()
        super().go_back(entries)
        self._states += 1
        copy = SqliteStore(self._path, shared=self._shared)
        copy.write(self)
        copy.close()

    def crash(self, writing: Entry | None = None) -> bool:
        """Its process dies while it writes that, or at rest. Whether that is durable."""
        store = self._open.pop(self.epoch, None)
        if store is None:
            return False
        before = self._files()
        if writing is not None and not self._shared:
            store.write([writing])
        after = self._files()
        store.close()
        if self._shared:
            return False
        if writing is not None:
            after = self._cut(before, after)
        for name in (DATABASE, WAL):  # closing has changed them
            (self._path / name).write_bytes(after[name])
        return writing is not None and self._is_durable(writing)

    def _files(self) -> dict[str, bytes]:
        names = (DATABASE, WAL) if not self._shared else ()
        return {name: (self._path / name).read_bytes() for name in names}

    def _cut(self, before: dict[str, bytes], after: dict[str, bytes]) -> dict[str, bytes]:
        """SQLite synchronises the WAL, then copies it into the database at times."""
        if before[DATABASE] != after[DATABASE] and self._random.random() < 0.5:
            return {**after, DATABASE: self._some_of(before[DATABASE], after[DATABASE])}
        head, tail = after[WAL][:WAL_HEADER], before[WAL][WAL_HEADER:]
        return {DATABASE: before[DATABASE], WAL: self._some_of(head + tail, after[WAL])}

    def _some_of(self, old: bytes, new: bytes) -> bytes:
        random, places = self._random, range(0, len(new), SECTOR)
        changed = [n for n in places if new[n : n + SECTOR] != old[n : n + SECTOR]]
        if not changed:
            return new  # such an entry deletes what was not there
        if random.random() < 0.5:
            end = random.randint(changed[0], len(new))
            return new[:end] + old[end:]
        share, some = random.random(), bytearray(old.ljust(len(new), b"\0"))
        for place in changed:
            if random.random() < share:
                some[place : place + SECTOR] = new[place : place + SECTOR]
        return bytes(some)

    def _is_durable(self, entry: Entry) -> bool:
        """Another one looks, and dies at once."""
        store = SqliteStore(self._path)
        try:
            read = store.read()
        finally:
            store.close()
        return durable.was_cut(read, Durable.of(self), Durable.of([*self, entry]))


def _remove(stores: dict[int, SqliteStore], root: Path) -> None:
    for store in stores.values():
        store.close()
    shutil.rmtree(root, ignore_errors=True)
