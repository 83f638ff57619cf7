"""State and leadership in real etcd servers: all or nothing, for one leader at a time, and nothing
invented whatever etcd does.
"""

import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest

from tensorhub.coordinator import (
    Decision,
    Described,
    Digested,
    Durable,
    Entry,
    Forgotten,
    Pinned,
    Retention,
    Rollback,
    Unpinned,
)
from tensorhub.errors import StateError
from tensorhub.integrations import one_version_engine
from tensorhub.layouts.published import Published
from tensorhub.model.manifest import id_of
from tensorhub.runtime.control import etcd, etcd_election, etcd_store, lease_election
from tensorhub.runtime.control.election import Deposed
from tensorhub.runtime.control.etcd import Etcd, Found, Place, Refused, Unanswered
from tensorhub.runtime.control.etcd_election import EtcdElection, EtcdTerm
from tensorhub.runtime.control.etcd_store import COLUMNS, Record
from tensorhub.runtime.control.store import SqliteStore
from tensorhub.types import OpKey
from tests.etcd_rig import (
    ADDRESS,
    connected,
    elected,
    etcd_servers,
    kept,
    needs_etcd,
    publication,
    read,
    values,
    write,
)
from tests.rig import until

pytestmark = needs_etcd


@pytest.fixture
def anyio_backend() -> str:
    return "trio"  # asyncio: tests/test_failover.py


# --------------------------------------------------------------------------------------------------
# the state


def batches(chance: random.Random, count: int) -> Iterator[list[Entry]]:
    """Such as a core asks for: numbers only rise within a lineage."""
    lineage, mark = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0)
    for number in range(count):
        batch: list[Entry] = []
        for _ in range(chance.randint(1, 4)):
            model = chance.choice("ab")
            match chance.randrange(9):
                case 0 | 1 | 2:
                    mark[model] += chance.randint(1, 3)
                    made = publication(
                        mark[model], lineage[model], bytes([number % 256]) * 32, model
                    )
                    batch.append(made)
                    about = (model, made.number, made.content_id)
                    if chance.random() < 0.3:
                        batch.append(Digested(*about, chance.randbytes(32)))
                    if chance.random() < 0.3:
                        part = bytes([chance.randrange(4)])
                        layout = Published("xxh3-64", 4096, ((id_of(part),),)).encode()
                        batch.append(Described(*about, layout, (part,)))
                case 3:
                    lineage[model] += 1
                    mark[model] = chance.randint(0, mark[model])
                    batch.append(Rollback(model, lineage[model], mark[model], f"r{number}"))
                case 4:
                    batch.append(Retention(model, chance.randrange(5)))
                case 5:
                    batch.append(Pinned(f"p{chance.randrange(9)}", "life", model, 1, "c-0-1"))
                case 6:
                    batch.append(Unpinned(f"p{chance.randrange(9)}"))
                case 7:
                    key = OpKey(model, f"g{chance.randrange(9)}", 7, number)
                    batch.append(Decision(key, model, 1, "c-0-1", 12, 2))
                case _:
                    batch.append(Forgotten(model, f"g{chance.randrange(9)}"))
        yield batch


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
async def test_it_keeps_what_a_directory_keeps(
    place: Place, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "PAGE_KEYS", 3)
    seed = random.randrange(2**32)
    local = SqliteStore(tmp_path)
    async with elected(place) as term:
        assert await read(term) == local.read() == Durable()
        for batch in batches(random.Random(seed), count):
            await anyio.to_thread.run_sync(local.write, batch)
            await write(term, *batch)
        assert await read(term) == local.read(), seed
        first = term.record
    # else no later release could read the rows
    assert place.key("state/") + COLUMNS in await values(place)
    async with elected(place) as term:
        assert await read(term) == local.read(), seed
        assert (term.record.cluster, term.record.epoch) == (first.cluster, first.epoch + 1)
    local.close()


@pytest.mark.parametrize("how", ["killed", "refused"])
async def test_a_batch_of_any_size_is_durable_as_a_whole_or_not_at_all(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its leader dies before each of its transactions in turn, or etcd refuses that."""
    for limit, value in (("VALUE_BYTES", 512), ("TRANSACTION_BYTES", 1024), ("OPERATIONS", 10)):
        monkeypatch.setattr(etcd_store, f"{limit}_MAX", value)
    before: list[Entry] = [publication(number) for number in range(1, 11)]
    before += [Digested("m", number, f"c-0-{number}", bytes(32)) for number in range(1, 10)]
    before.append(Digested("m", 10, "c-0-10", bytes(2000)))  # in keys, of which all end
    batch: list[Entry] = [Rollback("m", 1, 1, "why"), publication(2, 1)]
    batch.append(Digested("m", 2, "c-1-2", bytes(1024)))
    async with elected(place) as term:
        await read(term)
        await write(term, *before)
    old = await kept(place)
    assert old == Durable.of(before)
    async with connected(place) as client:  # of a larger batch, whose leader died before it counted
        await client.transact(
            (), [etcd.put(place.key(f"staged/{n:06}"), b"left") for n in range(99)]
        )
    commit, left = EtcdTerm.commit, 0

    async def dying(
        term: EtcdTerm, operations: Sequence[Any], record: Record | None = None
    ) -> None:
        nonlocal left
        if not left:
            if how == "killed":
                term.depose("the process was killed")
            raise OSError("the state cannot be written: no room")
        left -= 1
        await commit(term, operations, record)

    refusals, found = 0, old
    while found == old:
        async with elected(place) as term:
            await read(term)
            monkeypatch.setattr(EtcdTerm, "commit", dying)
            left = refusals
            with pytest.raises(OSError, match=r"killed|no room") as caught:
                await write(term, *batch)
        async with elected(place) as term:
            left = 1  # the next leader dies within what it carries out
            with contextlib.suppress(Deposed):
                await read(term)
            monkeypatch.setattr(EtcdTerm, "commit", commit)
        refusals += 1
        found = await kept(place)
        # an error that is none of the term's says that nothing is durable
        assert isinstance(caught.value, Deposed) or found == old
    assert found == Durable.of([*before, *batch])
    assert isinstance(caught.value, Deposed)
    assert refusals > 3
    assert not [key for key in await values(place) if key.startswith(place.key("staged/"))]


async def test_what_cannot_be_written_leaves_no_trace(place: Place) -> None:
    async with elected(place) as term:
        await read(term)
        await write(term, publication(1))
        with pytest.raises(OSError, match="cannot be written: UNIQUE constraint failed") as caught:
            await write(term, publication(2), publication(1))
        assert not isinstance(caught.value, Deposed)
        await write(term, publication(3))
        assert await read(term) == Durable.of([publication(1), publication(3)])
    assert await kept(place) == Durable.of([publication(1), publication(3)])


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("state/models/[", b"\x91\xa1m", "invalid literal"),
        ('state/models/["m"]', b"\xc1", ""),
        ('state/nothing/["m"]', b"\x91\xa1m", "an unknown table"),
        ('state/pins/["p"]', b"\x95\xa1p\xa1i\xa1m\xa1x\xa1c", "number: 'x'"),
    ],
)
async def test_a_damaged_row_is_refused(place: Place, name: str, value: bytes, why: str) -> None:
    async with elected(place):
        pass
    async with connected(place) as client:
        await client.transact((), [etcd.put(place.key(name), value)])
    with pytest.raises(StateError, match=rf"{place.prefix} is damaged \(.*{why}"):
        await kept(place)


# --------------------------------------------------------------------------------------------------
# who leads


async def test_a_state_that_is_outlived_is_kept_by_a_new_cluster(place: Place) -> None:
    election = EtcdElection(place)
    term = await election.campaign(ADDRESS, lambda leader: None)
    await read(term)
    await write(term, publication(1))
    await anyio.to_thread.run_sync(term.store.begin_anew)
    await term.resign()
    again = await election.campaign(ADDRESS, lambda leader: None)
    assert again.store.cluster != term.store.cluster
    assert await read(again) == Durable.of([publication(1)])
    await again.resign()
    with pytest.raises(Deposed):
        await anyio.to_thread.run_sync(term.store.begin_anew)
    await election.aclose()


async def test_one_leads_and_the_next_takes_over_at_once(place: Place) -> None:
    told: list[str] = []
    second = EtcdElection(place)
    found: list[EtcdTerm] = []

    async def campaign() -> None:
        found.append(await second.campaign("tcp://10.0.0.2:7411", told.append))

    async with anyio.create_task_group() as tasks:
        async with elected(place) as first:
            await read(first)
            await write(first, publication(1))
            tasks.start_soon(campaign)
            await until(lambda: told == [ADDRESS])
            assert not found
        with anyio.fail_after(30):
            await until(lambda: bool(found))
        assert found[0].record.epoch == first.record.epoch + 1
        assert await read(found[0]) == Durable.of([publication(1)])
    await found[0].resign()
    await second.aclose()
    # a leader's and a candidate's keys end with their lease
    left = await values(place)
    assert place.key("leader") not in left
    assert not [key for key in left if b"candidates" in key]


async def test_a_lease_ends_by_when_it_was_asked_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the answer comes: etcd may count from the request."""
    asked: list[float] = []

    def now() -> float:
        asked.append(1000.0 + 40 * len(asked))
        return asked[-1]

    monkeypatch.setattr(etcd_election, "now", now)
    async with connected(place) as client:
        lease = etcd_election.Lease(client)
        await lease.grant(place.lease_s)
        assert lease.ends_at < asked[0] + place.lease_s
        asked.clear()
        assert await lease.renew()
        assert lease.ends_at < asked[0] + place.lease_s
        await lease.revoke()


@pytest.mark.parametrize("now", [etcd_election.now, lease_election.now_s, one_version_engine.now_s])
def test_a_lease_ends_while_its_machine_sleeps(
    now: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = {time.CLOCK_BOOTTIME: 5000.0}  # of all clocks, this one goes on
    monkeypatch.setattr(time, "clock_gettime", lambda clock: clocks.get(clock, 0.0))
    assert now() == 5000.0


async def test_of_several_that_begin_at_once_one_leads(place: Place) -> None:
    """Also where there is nothing yet."""
    elections = [EtcdElection(place) for _ in range(4)]
    led: list[EtcdTerm] = []
    told: list[str] = []

    async def campaign(election: EtcdElection) -> None:
        led.append(await election.campaign(ADDRESS, told.append))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for each in elections:
                tasks.start_soon(campaign, each)
            await until(lambda: len(told) == 3)
            assert [term.record.epoch for term in led] == [1]
            tasks.cancel_scope.cancel()
    await led[0].resign()
    for each in elections:
        await each.aclose()


async def test_a_standby_whose_lease_has_ended_is_a_candidate_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no worker would find it by etcd."""
    monkeypatch.setattr(etcd_election, "CALM", 0.001)  # it renews its lease often
    below = place.key("candidates/")
    async with elected(place), connected(place) as client, anyio.create_task_group() as tasks:
        standby = EtcdElection(place)
        stands_by = anyio.Event()
        tasks.start_soon(standby.campaign, "tcp://10.0.0.2:1", lambda leader: stands_by.set())
        await stands_by.wait()

        async def lease() -> int:
            found = await client.values(below)
            return next((each.lease for each in found if each.value == b"tcp://10.0.0.2:1"), 0)

        await client.revoke(first := await lease())
        with anyio.fail_after(30):
            while await lease() in (0, first):  # noqa: ASYNC110 - etcd tells of no event here
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await standby.aclose()


async def test_a_deposed_leader_changes_nothing(place: Place) -> None:
    """Its lease has ended, and it does not know: it was stopped, say."""
    election = EtcdElection(place)
    old = await election.campaign(ADDRESS, lambda leader: None)
    await read(old)
    await write(old, publication(1))
    async with connected(place) as client:
        await client.revoke(old._lease.id)
    with pytest.raises(Deposed, match="another coordinator has written"):
        await write(old, publication(2))  # also before there is another leader
    with pytest.raises(Deposed):
        await write(old, publication(2))
    async with elected(place) as new:
        assert await read(new) == Durable.of([publication(1)])
    await old.resign()
    await election.aclose()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("revoked", "etcd ended its lease"),
        ("replaced", "another coordinator leads"),
        ("asleep", "its lease was not renewed in time: this process was stopped"),
    ],
)
async def test_a_leader_notices_its_end_by_itself(
    place: Place, how: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it has nothing to write."""
    monkeypatch.setattr(etcd_election, "CALM", 0.001)  # it renews its lease often
    election = EtcdElection(place)
    term = await election.campaign(ADDRESS, lambda leader: None)
    async with connected(place) as client:
        if how == "revoked":
            await client.revoke(term._lease.id)
        elif how == "replaced":
            leader = place.key("leader")
            await client.transact((), [etcd.delete(leader)])
            await client.transact((), [etcd.put(leader, b"other")])
        else:
            now = etcd_election.now
            monkeypatch.setattr(etcd_election, "now", lambda: now() + place.lease_s)
        with anyio.fail_after(30):
            assert why in await term.lost()
    with pytest.raises(Deposed):
        await write(term, publication(1))
    await term.resign()
    await election.aclose()


# --------------------------------------------------------------------------------------------------
# what etcd does


Transact = Callable[..., Awaitable[Found]]


async def test_a_transaction_without_an_answer_is_repeated_until_it_is_known(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has come through or not; and if it comes through late, it changes nothing."""
    transact: Transact = Etcd.transact
    faults: list[str] = []
    late: list[tuple[Any, ...]] = []

    async def faulty(client: Etcd, *given: Any, **named: float) -> Found:
        match faults.pop(0) if faults else "":
            case "lost":
                late.append(given)
                raise Unanswered("no answer in time")
            case "unanswered":
                await transact(client, *given, **named)
                raise Unanswered("no answer in time")
            case "refused":
                raise Refused("mvcc: database space exceeded", 8, True)
        return await transact(client, *given, **named)

    async with elected(place) as term, connected(place) as client:
        await read(term)
        monkeypatch.setattr(etcd_election, "AGAIN_S", 0.0)
        monkeypatch.setattr(Etcd, "transact", faulty)
        faults[:] = ["lost", "lost", "unanswered", "refused", "unanswered"]
        await write(term, publication(1))
        assert not faults
        await write(term, Retention("m", 3))
        await write(term, Retention("m", 4))
        sequence = term.record.sequence
        for given in late:
            assert not (await transact(client, *given)).succeeded
        faults[:] = ["refused"]
        with pytest.raises(OSError, match="cannot be written: mvcc: database space") as caught:
            await write(term, publication(2))
        assert not isinstance(caught.value, Deposed)
        assert term.record.sequence == sequence
        await write(term, publication(3))
    assert await kept(place) == Durable.of([publication(1), Retention("m", 4), publication(3)])


async def test_an_etcd_that_goes_away_ends_the_term_and_one_that_comes_back_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "ATTEMPT_S", 0.2)
    with etcd_servers(tmp_path) as (member,):
        place = Place((member.endpoint,), "t", 60)
        election = EtcdElection(place)
        term = await election.campaign(ADDRESS, lambda leader: None)
        await read(term)
        await write(term, publication(1))
        member.signal(signal.SIGSTOP)
        now, most_of_it = etcd_election.now, term.left_s - 1
        monkeypatch.setattr(etcd_election, "now", lambda: now() + most_of_it)
        why: list[str] = []

        async def lead() -> None:
            why.append(await term.lost())

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lead)
                with pytest.raises(Deposed, match=r"has ended"):
                    await write(term, publication(2))
        assert "etcd does not answer" in why[0]
        with anyio.fail_after(60):
            await term.resign()
            with pytest.raises(
                StateError, match=r"etcd does not answer .*no answer in time"
            ) as away:
                await election.campaign(ADDRESS, lambda leader: None)
        assert away.value.retryable
        member.kill()
        member.start()
        member.wait()
        with anyio.fail_after(60):
            term = await election.campaign(ADDRESS, lambda leader: None)
        found = await read(term)
        await term.resign()
        await election.aclose()
    # the second may have come through, or not
    both = [publication(1), publication(2)]
    assert found in (Durable.of(both[:1]), Durable.of(both))


async def test_a_leader_that_is_closed_does_not_wait_for_an_etcd_that_is_away(
    tmp_path: Path,
) -> None:
    with etcd_servers(tmp_path) as (member,):
        async with elected(Place((member.endpoint,), "t", 60)) as term:
            await read(term)
            member.signal(signal.SIGSTOP)
            before = term._under_way
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(term.lost)

                async def lead() -> None:
                    with pytest.raises(Deposed, match="its shell ended the term"):
                        await write(term, publication(1))

                tasks.start_soon(lead)
                await until(lambda: term._under_way is not before)
                tasks.cancel_scope.cancel()
            assert term._lease.left_s > 0


async def test_of_three_members_any_may_go(tmp_path: Path) -> None:
    with etcd_servers(tmp_path, 3) as members:
        place = Place(tuple(each.endpoint for each in members), "t", 60)
        async with elected(place) as term:
            await read(term)
            await write(term, publication(1))
            at = term._etcd._at
            members[at].signal(signal.SIGSTOP)
            await write(term, publication(2))
            members[at].signal(signal.SIGCONT)
            members[term._etcd._at].kill()
            await write(term, publication(3))
            assert term.record.epoch == 1
        assert await kept(place) == Durable.of([publication(n) for n in (1, 2, 3)])
