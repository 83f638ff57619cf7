"""What a coordinator must not forget: durable, all or nothing, and never two owners of one
directory.
"""

import contextlib
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tensorhub.coordinator import (
    Decision,
    Described,
    Digested,
    Durable,
    Entry,
    ModelRecord,
    Pinned,
    Publication,
    Restoration,
    Retention,
    Rollback,
    Unpinned,
)
from tensorhub.errors import StateError
from tensorhub.layouts.published import Published
from tensorhub.model.manifest import id_of
from tensorhub.runtime.control import tables
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.store import InUse, MemoryStore, SqliteStore
from tensorhub.runtime.control.tables import PUBLICATIONS_READ_MAX
from tensorhub.types import OpKey


def publication(number: int, model: str = "m", lineage: int = 0) -> Publication:
    content_id = f"content-{number}" if model == "m" else f"{model}-content-{number}"
    return Publication(
        model, lineage, number, content_id, 12, 1, "world/1", OpKey(model, "g", 7, number)
    )


def decision(number: int, group: str = "g") -> Decision:
    return Decision(OpKey("m", group, 7, number), "m", number, f"content-{number}", 12, 2)


def test_what_was_written_is_read_by_the_next(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path)
    assert first.read() == Durable()
    first.write([publication(1), decision(1)])
    first.write([publication(2), decision(2), decision(1, "other")])
    first.close()
    first.close()
    second = SqliteStore(tmp_path)
    assert (second.cluster, second.epoch) == (first.cluster, first.epoch + 1)
    found = second.read()
    second.close()
    assert found.publications == (publication(1), publication(2))
    assert sorted(found.decisions, key=str) == sorted([decision(2), decision(1, "other")], key=str)


def test_what_was_published_is_known_by_its_manifests(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path)
    first.write(
        [replace(publication(number), manifest_ids=bytes([number]) * 32) for number in (1, 2, 5)]
    )
    first.write([Rollback("m", 1, 2, "why"), publication(5, lineage=1)])
    found = first.read().publications
    assert [(each.number, each.manifest_ids) for each in found] == [
        (1, b"\1" * 32),
        (2, b"\2" * 32),
        (5, b""),
    ]
    first.close()


def test_a_rollback_deletes_what_is_later_and_begins_a_lineage(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    entries: list[Entry] = [publication(number) for number in (1, 2, 5)]
    entries += [publication(9, "other"), Rollback("m", 1, 3, "why")]
    store.write(entries)
    assert store.read().models == (
        ModelRecord("m", 1, 3, "why\n", bounds=((1, 3),)),
        ModelRecord("other", 0, 9, ""),
    )
    entries.append(publication(5, lineage=1))
    store.write(entries[-1:])
    found = store.read()
    assert [(p.model, p.number, p.lineage) for p in found.publications] == [
        ("m", 1, 0),
        ("m", 2, 0),
        ("m", 5, 1),
        ("other", 9, 0),
    ]
    assert found == Durable.of(entries)
    store.write([Rollback("m", 2, 0, "again")])
    store.close()
    store = SqliteStore(tmp_path)
    found = store.read()
    store.close()
    assert [p.model for p in found.publications] == ["other"]
    # also without any publication
    assert found.models[0] == ModelRecord("m", 2, 0, "again\nwhy\n", bounds=((2, 0),))


def test_retention_and_pins(tmp_path: Path) -> None:
    entries: list[Entry] = [
        Retention("fresh", 3),
        publication(1),
        Retention("m", 2),
        Retention("m", 1),
        *(Pinned(pin, "life", "m", 1, "content-1") for pin in ("a", "b", "c")),
        Pinned("b", "next life", "m", 1, "content-1"),
        Unpinned("c"),
        Unpinned("unknown"),
        Rollback("m", 1, 1, "why"),
    ]
    store = SqliteStore(tmp_path)
    store.write(entries)
    store.close()
    store = SqliteStore(tmp_path)
    found = store.read()
    store.close()
    assert found == Durable.of(entries)
    assert found.models == (
        ModelRecord("fresh", retain=3),
        ModelRecord("m", 1, 1, "why\n", 1, bounds=((1, 1),)),
    )
    assert [(pin.pin, pin.incarnation) for pin in found.pins] == [("a", "life"), ("b", "next life")]


def test_retained_and_pinned_ones_are_read_however_old(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    count = PUBLICATIONS_READ_MAX + 5
    store.write([publication(number, model) for model in ("m", "n") for number in range(count)])
    store.write([Retention("m", count - 2), Pinned("p", "life", "n", 1, "n-content-1")])
    found = store.read().publications
    store.close()
    assert [p.number for p in found if p.model == "m"] == list(range(2, count))
    assert [p.number for p in found if p.model == "n"] == [1, *range(5, count)]


def pruning_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteStore:
    """It has kept 8 to 12 of 100 publications, and number 3, which is pinned."""
    monkeypatch.setattr(tables, "PUBLICATIONS_KEPT_MAX", 8)
    monkeypatch.setattr(tables, "PRUNED_AT", 4)
    store = SqliteStore(path)
    store.write([publication(1, "other"), Retention("much", 50)])
    for number in range(100):
        store.write([publication(number), publication(number, "much")])
        if number == 3:
            store.write([Pinned("p", "life", "m", 3, "content-3")])
    return store


def test_old_publications_are_not_kept_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pruning_store(tmp_path, monkeypatch)
    found = {
        model: [p.number for p in store.read().publications if p.model == model]
        for model in ("m", "other", "much")
    }
    store.close()
    assert found["m"][0] == 3
    assert 8 <= len(found["m"][1:]) <= 12
    assert found["m"][1:] == list(range(100 - len(found["m"][1:]), 100))
    assert found["other"] == [1]
    assert set(found["much"]) >= set(range(50, 100))


def restoration(*numbers: int, lineage: int = 0, mark: int = 0, origin: str = "") -> Restoration:
    versions = tuple([publication(number, lineage=number // 500) for number in numbers])
    roots = tuple([bytes([number % 7]) * 32 if number % 7 else b"" for number in numbers])
    return Restoration("m", lineage, mark, origin, versions, roots)


def test_a_thousand_restored_versions_of_another_cluster(tmp_path: Path) -> None:
    numbers = range(1000, 0, -1)
    pages = [
        restoration(*numbers[at : at + 64], lineage=2, mark=1007, origin="gone")
        for at in range(0, 1000, 64)
    ]
    entries: list[Entry] = [Retention("m", 3), *pages]
    store = SqliteStore(tmp_path)
    for each in entries:
        store.write([each])
    store.close()
    store = SqliteStore(tmp_path)
    found, all_of_them = store.read(), Durable.of(entries)
    assert found.models == all_of_them.models
    bounds = ((2, 1007),)
    assert found.models == (ModelRecord("m", 2, 1007, "", 3, bounds, "gone", 1007),)
    assert found.publications == all_of_them.publications[-PUBLICATIONS_READ_MAX:]
    assert len(all_of_them.publications) == 1000
    newest = {each.number for each in found.publications}
    assert {each.number: each.roots for each in found.digested if each.number in newest} == {
        number: bytes([number % 7]) * 32 for number in newest if number % 7
    }
    more: list[Entry] = [publication(1008, lineage=2), Rollback("m", 3, 400, "why")]
    store.write(more)
    found, all_of_them = store.read(), Durable.of([*entries, *more])
    store.close()
    assert found.models == all_of_them.models
    assert found.publications == all_of_them.publications[-PUBLICATIONS_READ_MAX:]
    assert found.models[0].bounds == ((3, 400),)


def test_restored_versions_change_nothing_that_is_known(tmp_path: Path) -> None:
    stands_in = replace(publication(3), content_id="pruned-1", manifest_ids=b"")
    entries: list[Entry] = [publication(2), stands_in, publication(9), decision(9)]
    other = replace(publication(2), content_id="another")
    entries += [
        restoration(3, 1),
        Restoration("m", 0, 5, "gone", (other, publication(4)), (b"x" * 32, b"y" * 32)),
    ]
    store = SqliteStore(tmp_path)
    store.write(entries)
    found = store.read()
    store.close()
    assert found == Durable.of(entries)
    assert found.publications == tuple(publication(number) for number in (1, 2, 3, 4, 9))
    assert [each.number for each in found.digested] == [1, 3, 4]
    assert found.models == (ModelRecord("m", 0, 9),)
    assert found.decisions == (decision(9),)


def test_restored_versions_that_are_deleted_again_do_not_hide_what_was_deleted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pruning_store(tmp_path, monkeypatch)
    store.write([Rollback("m", 1, 60, "why"), restoration(*range(40, 20, -1), mark=99)])
    store.write([Rollback("m", 2, 50, "again")])
    newest = [each for each in store.read().publications if each.model == "m"][-1]
    store.close()
    assert (newest.number, newest.content_id[:7]) == (50, "pruned-")


@pytest.mark.parametrize(
    "bad",
    [publication(1), Publication("m", 0, 2, "c", 12, 1, "world/1", OpKey("m", "g", 7, 2**64 - 1))],
    ids=["used number", "beyond SQLite's integers"],
)
def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path, bad: Publication) -> None:
    store = SqliteStore(tmp_path)
    store.write([publication(1)])
    with pytest.raises(OSError, match="the state cannot be written"):
        store.write([publication(3), bad])
    store.write([publication(4)])
    found = store.read().publications
    store.close()
    assert found == (publication(1), publication(4))


def test_every_commit_is_synced(tmp_path: Path) -> None:
    """SQLite syncs a write-ahead log at each commit only if it is told to (synchronous = 2,
    FULL).
    """
    store = SqliteStore(tmp_path)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def described(number: int, *parts: bytes) -> Described:
    named = (tuple(map(id_of, parts)),)
    return Described(
        "m", number, f"content-{number}", Published("xxh3-64", 4096, named).encode(), parts
    )


def test_descriptions_of_layouts_are_kept_once_and_as_long_as_a_publication_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PUBLICATIONS_KEPT_MAX", 2)
    monkeypatch.setattr(tables, "PRUNED_AT", 1)
    entries: list[Entry] = [
        publication(1),
        described(1, b"a", b"b", b"c"),
        described(2, b"manifest"),
        publication(2),
    ]
    entries += [publication(3), described(3, b"a", b"b", b"c"), described(3, b"a", b"b", b"c")]
    with contextlib.closing(SqliteStore(tmp_path)) as store:
        store.write(entries[:2])
        assert store.read() == Durable.of(entries[:2])
        store.write(entries[3:])
        assert [each.number for each in store.read().described] == [1, 3]
        assert store._db.execute("SELECT count(*) FROM layouts").fetchone() == (4,)
        store.write([publication(number) for number in (4, 5, 6, 7)])
        assert [each.number for each in store.read().described] == []
        assert store._db.execute("SELECT count(*) FROM layouts").fetchone() == (0,)


def test_nothing_is_kept_of_a_publication_that_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "PUBLICATIONS_KEPT_MAX", 3)
    monkeypatch.setattr(tables, "PRUNED_AT", 1)
    with contextlib.closing(SqliteStore(tmp_path)) as store:

        def kept() -> list[set[int]]:
            tables = ("publications", "digested", "described")
            return [
                {number for (number,) in store._db.execute(f"SELECT number FROM {table}")}
                for table in tables
            ]

        for number in range(1, 9):
            digested = Digested("m", number, f"content-{number}", b"root")
            store.write([publication(number), digested, described(number, b"manifest")])
        assert kept() == [{5, 6, 7, 8}] * 3
        store.write([Rollback("m", 1, 6, "why")])
        assert kept() == [{5, 6}] * 3


def test_a_layout_is_checked_once_for_all_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[bytes]()

    def counted(blob: bytes) -> str:
        checked.append(blob)
        return id_of(blob)

    with contextlib.closing(SqliteStore(tmp_path)) as store:
        for number in range(1, 10):
            store.write([publication(number), described(number, b"a", b"b", b"c")])
        monkeypatch.setattr("tensorhub.runtime.control.tables.id_of", counted)
        assert len(store.read().described) == 9
    assert checked == [described(1, b"a", b"b", b"c").description, b"a", b"b", b"c"]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM layouts WHERE place = 2",
        "DELETE FROM layouts WHERE place = 0",
        "DELETE FROM layouts",
        "UPDATE layouts SET blob = x'00' WHERE place = 1",
        "UPDATE layouts SET blob = 'text' WHERE place = 0",
        "UPDATE described SET layout = 'other'",
    ],
)
def test_a_description_that_is_damaged(tmp_path: Path, damage: str) -> None:
    with contextlib.closing(SqliteStore(tmp_path)) as store:
        store.write([publication(1), described(1, b"a", b"b", b"c")])
        store._db.execute(damage)
        with pytest.raises(StateError, match=r"damaged \(layout"):
            store.read()


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]; from "
        "tests.runtime.control.test_store import *\n"
        "store = SqliteStore(sys.argv[1]); store.write([publication(1), decision(1)])\n"
        "store._db.execute('BEGIN IMMEDIATE'); store._tables.write(publication(2)); os.kill(os.getpid(), "
        "signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), os.getcwd(), *sys.path], timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    store = SqliteStore(tmp_path)
    found = store.read()
    store.close()
    assert found == Durable.of([publication(1), decision(1)])


@pytest.mark.parametrize(
    ("left", "leader"),
    [(b"tcp://10.0.0.1:7411", "tcp://10.0.0.1:7411"), (b"\x1b[2J", ""), (b"\xff\0", "")],
)
def test_the_leader_of_a_directory_is_known_to_others(
    tmp_path: Path, left: bytes, leader: str
) -> None:
    (tmp_path / "lock").write_text("tcp://a-former-leader:1")
    with contextlib.closing(SqliteStore(tmp_path, address="tcp://10.0.0.1:7411")):
        assert (tmp_path / "lock").read_text() == "tcp://10.0.0.1:7411"
        (tmp_path / "lock").write_bytes(left)
        with pytest.raises(InUse, match=f"by .*{leader}: give each its own") as caught:
            SqliteStore(tmp_path)
        assert caught.value.leader == leader


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path)
    with pytest.raises(StateError, match="is in use by another coordinator: give each its own"):
        SqliteStore(tmp_path)
    first.write([publication(1)])
    first.close()
    SqliteStore(tmp_path).close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "state.sqlite3").write_text(
        "something else, and long enough to be taken for a header" * 100
    )
    for _ in range(2):  # and the lock was let go
        with pytest.raises(StateError, match="cannot be used: 'file is not a database'"):
            SqliteStore(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("CREATE VIEW v AS SELECT * FROM models", "not a coordinator's, 'v'"),  # or without an end
        ("CREATE TRIGGER t AFTER UPDATE ON cluster BEGIN DELETE FROM models; END", "'t'"),
        ("UPDATE cluster SET id = CAST(x'1b5bff' AS TEXT)", r"text '.x1b\["),
    ],
)
def test_a_database_with_something_hostile(tmp_path: Path, change: str, why: str) -> None:
    SqliteStore(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite3")) as db, db:
        db.execute(change)
    with pytest.raises(StateError, match=f"cannot be used: .*{why}") as caught:
        SqliteStore(tmp_path)
    assert str(caught.value).isprintable()


# what coordinators of format 2 had made
FORMAT_2 = """
CREATE TABLE cluster (id TEXT NOT NULL, epoch INTEGER NOT NULL, format INTEGER NOT NULL);
CREATE TABLE publications (
    model TEXT NOT NULL, lineage INTEGER NOT NULL, number INTEGER NOT NULL, content_id TEXT NOT NULL,
    nbytes INTEGER NOT NULL, world_size INTEGER NOT NULL, layout_id TEXT NOT NULL,
    "group" TEXT NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL,
    PRIMARY KEY (model, lineage, number));
CREATE TABLE described (
    model TEXT NOT NULL, number INTEGER NOT NULL, content_id TEXT NOT NULL, manifest_ids BLOB NOT NULL,
    PRIMARY KEY (model, number));
CREATE TABLE decisions (
    model TEXT NOT NULL, "group" TEXT NOT NULL, epoch INTEGER NOT NULL, sequence INTEGER NOT NULL,
    number INTEGER NOT NULL, content_id TEXT NOT NULL, nbytes INTEGER NOT NULL, world_size INTEGER NOT NULL,
    PRIMARY KEY (model, "group"));
CREATE TABLE models (
    model TEXT NOT NULL PRIMARY KEY, lineage INTEGER NOT NULL DEFAULT 0, mark INTEGER,
    rollback TEXT NOT NULL DEFAULT '', retain INTEGER NOT NULL DEFAULT 0);
INSERT INTO cluster VALUES ('c', 6, 2);
INSERT INTO models VALUES ('m', 0, 2, '', 3);
INSERT INTO publications VALUES ('m', 0, 1, 'content-1', 12, 1, 'world/1', 'g', 7, 1);
INSERT INTO publications VALUES ('m', 0, 2, 'content-2', 12, 1, 'world/1', 'g', 7, 2);
INSERT INTO described VALUES ('m', 2, 'content-2', zeroblob(32));
INSERT INTO described VALUES ('m', 1, 'another', x'01');
"""
MIGRATED: list[Entry] = [
    publication(1),
    replace(publication(2), manifest_ids=bytes(32)),
    Retention("m", 3),
]


def of_format(path: Path, found: int) -> None:
    with contextlib.closing(sqlite3.connect(path / "state.sqlite3")) as db:
        db.executescript(FORMAT_2)
        for statement in tables.MIGRATIONS[2] if found == 3 else ():
            db.execute(statement)
        db.execute("UPDATE cluster SET format = ?", (found,))
        db.commit()


@pytest.mark.parametrize("found", tables.MIGRATIONS)
def test_an_older_format_is_migrated_and_a_copy_is_kept(tmp_path: Path, found: int) -> None:
    of_format(tmp_path, found)
    kept = tmp_path / f"state.sqlite3.format{found}"
    kept.write_text("of a migration that crashed before the older release wrote more")
    for epoch in (7, 8):
        with contextlib.closing(SqliteStore(tmp_path)) as store:
            assert (store.cluster, store.epoch) == ("c", epoch)
            known = store.read()
            assert known.publications == Durable.of(MIGRATED).publications
            assert known.models == Durable.of(MIGRATED).models
            store.write([Pinned("p", "worker", "m", 1, "content-1")])
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob("state.sqlite3.format*")] == [kept.name]
    with contextlib.closing(sqlite3.connect(kept)) as db:
        assert db.execute("SELECT * FROM cluster").fetchall() == [("c", 6, found)]
        assert db.execute("SELECT count(*) FROM publications").fetchone() == (2,)


@pytest.mark.parametrize("step", range(6))
def test_a_crash_within_a_migration_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """At any statement, and at the copy; what was there stays as it was."""
    of_format(tmp_path, 2)
    with monkeypatch.context() as patched:
        if step:
            steps = {**tables.MIGRATIONS, 3: ("SELECT 1 FROM never",)}
            steps[2] = (*steps[2][: step - 1], "SELECT 1 FROM never")
            patched.setattr(tables, "MIGRATIONS", steps)
        else:
            patched.setattr(Path, "replace", lambda self, target: os.close(-1))
        with pytest.raises(StateError, match="cannot be used"):
            SqliteStore(tmp_path)
    with contextlib.closing(SqliteStore(tmp_path)) as store:
        assert store.epoch == 7
        assert store.read().publications == Durable.of(MIGRATED).publications


def test_another_format(tmp_path: Path) -> None:
    SqliteStore(tmp_path).close()
    db = sqlite3.connect(tmp_path / "state.sqlite3")
    db.execute("UPDATE cluster SET format = 99")
    db.commit()
    db.close()
    with pytest.raises(StateError, match="its format is 99, this version writes 4"):
        SqliteStore(tmp_path)


def test_without_a_directory_each_coordinator_is_a_new_cluster() -> None:
    one, other = MemoryStore(), MemoryStore()
    assert one.cluster != other.cluster
    # so that no key of the one's operations means something to the other
    assert one.epoch != other.epoch
    one.write([publication(1)])
    assert one.read() == Durable()


def test_a_deposed_one_writes_nothing(tmp_path: Path) -> None:
    """A volume that two machines share has no lock for both: the epoch in it is the fence."""
    first = SqliteStore(tmp_path)
    first.write([publication(1)])
    first._lock.close()
    with contextlib.closing(SqliteStore(tmp_path)) as second:
        with pytest.raises(Deposed, match="has another leader since"):
            first.write([publication(2)])
        with pytest.raises(Deposed, match="has another leader since"):
            first.begin_anew()
        second.write([publication(3)])
        assert second.read() == Durable.of([publication(1), publication(3)])
    first._db.close()


def test_a_full_disk_loses_nothing_and_a_failing_one_ends_the_term(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    store.write([publication(1)])
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match="cannot be written: database or disk is full") as full:
        store.write([replace(publication(2), manifest_ids=bytes(2**20))])
    assert not isinstance(full.value, Deposed)
    store._db.execute("PRAGMA max_page_count = 1000000")
    store.write([publication(3)])  # goes on when there is room
    assert store.read() == Durable.of([publication(1), publication(3)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # the file system refuses the write itself
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(Deposed, match="has the last write is unknown"):
            store.write([publication(4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    store.close()
    with contextlib.closing(SqliteStore(tmp_path)) as store:
        assert store.read() == Durable.of([publication(1), publication(3)])


# -------------------------------------------------------------------------------------------------
# who else may write


def modes(place: Path) -> set[tuple[str, int]]:
    return {(file.name, stat.S_IMODE(file.stat().st_mode)) for file in place.iterdir()}


def test_the_files_are_their_owners_only(tmp_path: Path) -> None:
    place, before = tmp_path / "new" / "state", os.umask(0)
    try:
        store = SqliteStore(place)
        store.write([publication(1)])
        private = {
            (name, 0o600)
            for name in ("lock", "state.sqlite3", "state.sqlite3-wal", "state.sqlite3-shm")
        }
        assert modes(place) == private
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        store.close()
        for file in place.iterdir():
            file.chmod(0o666)  # as an older version left them
        store = SqliteStore(place)
        assert modes(place) == private
        store.close()
    finally:
        os.umask(before)


def test_a_directory_that_all_may_write_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o1777, 0o702):
        tmp_path.chmod(mode)
        with pytest.raises(
            StateError, match="can be written by everybody on this machine: chmod o-w it"
        ):
            SqliteStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 12_345, -1)
    else:
        another = os.geteuid() + 1
        monkeypatch.setattr("os.geteuid", lambda: another)
    with pytest.raises(
        StateError,
        match=r"belongs to user \d+, not to this process' user \d+: give a directory of its own",
    ):
        SqliteStore(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", [".", "there", "nowhere"])
def test_a_symbolic_link_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(
        StateError, match=r"cannot be used|is a symbolic link: give the directory itself"
    ):
        SqliteStore(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()
    assert list((tmp_path / "there").iterdir()) == []
    (tmp_path / "above").symlink_to(".")
    # only the last component says whose state it is
    SqliteStore(tmp_path / "above" / "there").close()


@pytest.mark.parametrize("name", ["lock", "state.sqlite3", "state.sqlite3-wal"])
def test_a_file_that_is_a_symbolic_link_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(StateError, match=r"cannot be used: .*symbolic links"):
        SqliteStore(tmp_path / "state")
    assert not (tmp_path / "victim").exists()


def test_a_directory_that_a_group_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubernetes' fsGroup makes a volume so, and nobody can change it."""
    tmp_path.chmod(0o2770)
    SqliteStore(tmp_path).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "state_dir_writable_by_group" in caplog.text
    caplog.clear()
    tmp_path.chmod(0o755)
    SqliteStore(tmp_path).close()
    assert caplog.records == []


def test_a_shared_state_needs_no_wal_and_fences_by_its_epoch(tmp_path: Path) -> None:
    alone = SqliteStore(tmp_path)
    alone.write([publication(1)])
    alone.close()
    first = SqliteStore(tmp_path, shared=True)
    first.write([publication(2)])
    assert not list(tmp_path.glob("*-wal"))
    second = SqliteStore(tmp_path, shared=True)
    with pytest.raises(Deposed):
        first.write([publication(3)])
    assert [each.number for each in second.read().publications] == [1, 2]
    with pytest.raises(InUse):
        SqliteStore(tmp_path)
    first.close()
    second.close()
    SqliteStore(tmp_path).close()
