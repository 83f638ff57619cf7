"""A coordinator that is looked up by name, anew at each connection."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import anyio
import pytest

import tensorhub
from tensorhub import CoordinatorUnavailable, InvalidValue
from tensorhub.runtime.control import addresses
from tests.etcd_rig import etcd_servers, needs_etcd
from tests.rig import OPTIONS, WAIT_S, connect, holds, nothing_left, tensors, until
from tests.runtime.control.test_fake_etcd import fake_etcd


class Book(ModuleType):
    """Knows one coordinator, at times."""

    def __init__(self) -> None:
        super().__init__("book")
        self.address = ""
        self.asked: list[str] = []

    def look_up(self, name: str) -> str:
        self.asked.append(name)
        if not self.address:
            raise CoordinatorUnavailable(f"nobody knows {name!r}")
        return self.address


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Iterator[Book]:
    made = Book()
    monkeypatch.setitem(sys.modules, "book", made)
    monkeypatch.setattr(addresses, "LOOKED_UP", {"book": "book", "lost": "no.such.module"})
    return made


async def test_a_coordinator_that_comes_back_elsewhere_is_found_and_calls_go_on(
    book: Book, tmp_path: Path
) -> None:
    async with nothing_left():
        coordinator = await tensorhub.serve(token="", state_dir=tmp_path, options=OPTIONS)
        book.address = coordinator.address
        async with (
            connect("book://the hub", "trainer") as trainer,
            connect("book://the hub", "reader") as reader,
        ):
            published = await trainer.register("actor", tensors(1))
            read = tensors()
            held = await reader.register("actor", read)
            await published.publish(1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_wait_for, reader, 2)
                book.address, asked = "", len(book.asked)
                await coordinator.close()
                # nobody is found, and it is asked again
                await until(lambda: len(book.asked) > asked + 1)
                coordinator = await tensorhub.serve(token="", state_dir=tmp_path, options=OPTIONS)
                book.address = coordinator.address
                await until(lambda: all("online" in repr(hub) for hub in (trainer, reader)))
                report = await held.replicate(1)
                assert (report.version, holds(read, 1)) == (1, True)
                await published.unpublish()
                await published.publish(2)
        await coordinator.close()
    assert set(book.asked) == {"the hub"}


async def _wait_for(hub: tensorhub.Hub, number: int) -> None:
    assert (await hub.wait_for("actor", at_least=number, timeout=WAIT_S)).version == number


@pytest.mark.usefixtures("book")
async def test_a_name_that_leads_nowhere_is_told() -> None:
    with pytest.raises(CoordinatorUnavailable, match=r"nobody knows 'x'\)$"):
        await tensorhub.connect("book://x", options=tensorhub.Options(coordinator_wait_s=0))
    with pytest.raises(
        CoordinatorUnavailable, match="lost://x cannot be looked up here: No module named 'no'"
    ):
        await tensorhub.connect("lost://x")
    with pytest.raises(InvalidValue, match="cannot name a coordinator"):
        tensorhub.connect("book://")
    with pytest.raises(InvalidValue, match="is not a TensorHub address"):
        tensorhub.connect("page://x")


async def test_ray_is_not_needed_to_be_told_that_it_is() -> None:
    with pytest.raises(
        CoordinatorUnavailable,
        match="ray-actor://x cannot be looked up here: No module named 'ray'",
    ):
        await tensorhub.connect("ray-actor://x")


@needs_etcd
async def test_etcd_names_the_leader_and_the_next_one_is_found_without_it(tmp_path: Path) -> None:
    """What etcd has said is remembered: it need not answer while the leader changes."""
    with etcd_servers(tmp_path) as (member,):
        url = f"etcd://{member.endpoint}/a/cluster"
        async with nothing_left():
            with pytest.raises(CoordinatorUnavailable, match=f"{url}: no coordinator leads there"):
                await tensorhub.connect(url, token="", options=OPTIONS)
            first = await tensorhub.serve(token="", ha=url, options=OPTIONS)
            second = await tensorhub.serve(token="", ha=url, options=OPTIONS)
            assert (first.leading, second.leading) == (True, False)
            found = addresses.Addresses([url])
            assert await found.look_up(url) == [first.address, second.address]
            found.reached(second.address)
            assert found.known() == [second.address, first.address]
            async with connect(url, "worker") as hub:
                weights = await hub.register("m", tensors(1))
                await weights.publish(1)
                await first.close()
                await until(lambda: second.leading)
                await weights.unpublish()
                await weights.publish(2)
                member.kill()
                with pytest.raises(CoordinatorUnavailable, match=f"{url}: etcd does not answer"):
                    await tensorhub.connect(url, token="", options=OPTIONS)
            await second.close()


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([b"tcp://a:1", b"\x1b[2J", b"tcp://b:1"], ["tcp://a:1", "tcp://b:1"]),
        ([b"tcp://10.0.%d.%d:1" % divmod(n, 250) for n in range(10**4)], 64),
    ],
    ids=["one is no address", "very many"],
)
async def test_of_what_etcd_tells_addresses_count_and_so_many_at_most(
    told: list[bytes], found: list[str] | int
) -> None:
    kvs = [{"key": "cA==", "value": base64.b64encode(each).decode()} for each in told]
    ranges = [{"response_range": {"kvs": some}} for some in ([], kvs)]
    answer = json.dumps({"succeeded": True, "responses": ranges}).encode()
    async with fake_etcd(lambda path, body: answer) as place:
        looked_up = await addresses.Addresses([str(place)]).look_up(str(place))
    assert found in (looked_up, len(looked_up))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("etcd://user:secret@h:1/p", "credentials do not belong in a URL"),
        ("tcp://h:1,etcd://h:2", "give etcd://HOST:PORT"),
        ("tcp://h:1,h:2", "is not a TensorHub address"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(address: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        tensorhub.connect(address)
