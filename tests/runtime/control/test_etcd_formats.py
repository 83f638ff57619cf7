"""A state in etcd of an older format: the next leader migrates it as a whole or not at all, and what
was there stays as a copy.
"""

import contextlib
import json
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from tensorhub.coordinator import Durable, Pinned
from tensorhub.errors import StateError
from tensorhub.runtime.control import etcd, etcd_store, tables
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.etcd import Place
from tensorhub.runtime.control.etcd_election import EtcdElection, EtcdTerm
from tensorhub.runtime.control.etcd_store import COLUMNS, Record
from tests.etcd_rig import (
    ADDRESS,
    connected,
    elected,
    kept,
    needs_etcd,
    read,
    values,
    write,
)
from tests.runtime.control.test_store import FORMAT_2, MIGRATED

pytestmark = needs_etcd
Commit = Callable[..., Awaitable[None]]


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


async def store(place: Place, format_: int) -> dict[bytes, bytes]:
    """What a coordinator of this format would have written; its rows."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(FORMAT_2)
        for statement in tables.MIGRATIONS[2] if format_ == 3 else ():
            db.execute(statement)
        made, columns = dict[bytes, bytes](), dict[str, list[str]]()
        for table in ("models", "publications", "described"):
            described = db.execute(f"PRAGMA table_info({table})").fetchall()
            if not described:  # it came back in format 4
                continue
            columns[table] = [row[1] for row in described]
            for row in db.execute(f"SELECT * FROM {table}"):
                key = [value for value, column in zip(row, described, strict=True) if column[5]]
                name = f"{table}/{json.dumps(key, separators=(',', ':'))}"
                made[name.encode()] = msgpack.packb(row)
    made[COLUMNS] = json.dumps(columns).encode()
    below = place.key(f"state.{format_}/")
    rows = {below + name: value for name, value in made.items()}
    record = Record("c", 6, format=format_)
    async with connected(place) as client:
        await client.transact((), [etcd.put(*each) for each in rows.items()])
        await client.transact((), [etcd.put(place.key("cluster"), record.encode())])
    return rows


async def format_of(place: Place) -> int:
    return int(json.loads((await values(place))[place.key("cluster")])["format"])


def check(found: Durable) -> None:
    assert found.publications == Durable.of(MIGRATED).publications
    assert found.models == Durable.of(MIGRATED).models


@pytest.mark.parametrize("format_", tables.MIGRATIONS)
async def test_it_is_migrated_once_and_what_was_there_stays(
    place: Place, format_: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = await store(place, format_)
    pins: tuple[Pinned, ...] = ()
    for epoch in (7, 8):
        async with elected(place) as term:
            assert (term.store.cluster, term.store.epoch) == ("c", epoch)
            found = await read(term)
            check(found)
            assert found.pins == pins
            # else a later release could not read the rows
            assert "pins" in json.loads((await values(place))[place.key("state/") + COLUMNS])
            await write(term, *(pins := (Pinned("p", "worker", "m", 1, "content-1"),)))
            assert (await read(term)).pins == pins
    assert await format_of(place) == tables.FORMAT
    left = await values(place)
    assert {key: left.get(key) for key in rows} == rows
    told = [each for each in caplog.messages if "state_migrated" in each]
    assert [f"{place}/state.{format_}/" in each for each in told] == [True]


@pytest.mark.parametrize("how", ["dies", "is refused", "is deposed"])
async def test_a_leader_that_ends_within_a_migration_leaves_it_undone(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Before each of its transactions in turn; the next leader begins anew."""
    monkeypatch.setattr(etcd_store, "OPERATIONS_MAX", 2)
    rows = await store(place, 2)
    stale = place.key("state/publications/[]")
    async with connected(place) as client:
        await client.transact((), [etcd.put(stale, b"of one before")])
    commit, left = EtcdTerm.commit, 0

    async def ending(
        term: EtcdTerm, operations: Sequence[Any], record: Record | None = None
    ) -> None:
        nonlocal left
        left -= 1
        if left < 0 and how == "is refused":
            raise OSError("the state cannot be written: no room")
        if left < 0:
            if how == "dies":
                term.depose("the process was killed")
            async with connected(place) as client:
                await client.revoke(term._lease.id)
        await commit(term, operations, record)

    transactions = 0
    while True:
        monkeypatch.setattr(EtcdTerm, "commit", ending)
        left = transactions
        async with elected(place) as term:
            if how == "is refused":
                with contextlib.suppress(StateError):
                    check(await read(term))
            else:
                with contextlib.suppress(Deposed):
                    check(await read(term))
        if left >= 0:
            break
        assert await format_of(place) == 2
        found = await values(place)
        assert {key: found.get(key) for key in rows} == rows
        transactions += 1
    assert transactions == 4  # the removal, two parts, and the record
    assert stale not in await values(place)
    check(await kept(place))


async def test_what_was_staged_in_an_older_format_is_carried_out_first(place: Place) -> None:
    await store(place, 3)
    model = msgpack.packb(["other", 0, None, "", 5])
    staged = msgpack.packb([(b'models/["other"]', model)])
    record = Record("c", 6, format=3, staged=1)
    async with connected(place) as client:
        await client.transact(
            (),
            [
                etcd.put(place.key("staged/000000"), staged),
                etcd.put(place.key("cluster"), record.encode()),
            ],
        )
    found = await kept(place)
    assert [(each.model, each.retain) for each in found.models] == [("m", 3), ("other", 5)]
    assert place.key('state.3/models/["other"]') in await values(place)


async def test_a_cluster_that_has_written_nothing_is_migrated(place: Place) -> None:
    async with connected(place) as client:
        record = Record("c", 6, format=3)
        await client.transact((), [etcd.put(place.key("cluster"), record.encode())])
    assert await kept(place) == Durable()
    assert await format_of(place) == tables.FORMAT


@pytest.mark.parametrize(
    "columns",
    [b"", b"{", b"[" * 10**5, b"[1]", b'{"models": 1}', b'{"models": [1]}', b'{"m": ["a\\"b"]}'],
)
async def test_columns_that_make_no_sense_are_refused(place: Place, columns: bytes) -> None:
    await store(place, 3)
    async with connected(place) as client:
        key = place.key("state.3/") + COLUMNS
        await client.transact((), [etcd.put(key, columns)])
    with pytest.raises(StateError, match="is damaged"):
        await kept(place)
    assert await format_of(place) == 3


@pytest.mark.parametrize("format_", [1, 5, 99, 4.0, True, "4", None])
async def test_a_format_that_this_release_does_not_know_is_refused(
    place: Place, format_: object
) -> None:
    """Also by a standby that finds it when it is its turn; the state stays as it was."""
    election = EtcdElection(place)
    term = await election.campaign(ADDRESS, lambda leader: None)
    newer = {**json.loads(term.record.encode()), "format": format_}
    await term.resign()
    async with connected(place) as client:
        made = etcd.put(place.key("cluster"), json.dumps(newer).encode())
        await client.transact((), [made])
    before = await values(place)
    with pytest.raises(StateError, match="this version writes 4: run the release that wrote it"):
        await election.campaign(ADDRESS, lambda leader: None)
    await election.aclose()
    assert await values(place) == before


async def test_a_leader_of_the_release_before_writes_nothing_after_a_migration(
    place: Place,
) -> None:
    await store(place, 3)
    election = EtcdElection(place)
    old = await election.campaign(ADDRESS, lambda leader: None)  # and has not read yet
    async with connected(place) as client:
        await client.revoke(old._lease.id)
    check(await kept(place))
    with pytest.raises(Deposed):
        await old.commit([], replace(old.record, staged=0))
    await old.resign()
    await election.aclose()
    assert await format_of(place) == tables.FORMAT
