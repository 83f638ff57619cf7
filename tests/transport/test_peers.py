"""Connections that a reader keeps: used again, and given up by either side, by age, by number and
by what was revoked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import anyio.to_thread
import pytest

from tensorhub.messages import ChunksFollow, Read
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.runtime.data import served_lanes as lanes_module
from tensorhub.transport import peers as peers_module, sockets
from tensorhub.transport.base import Cutter, ReadFailure, ReadRight
from tensorhub.transport.peers import Peer, Peers
from tensorhub.transport.registry import Local
from tensorhub.transport.tcp import DIALECT
from tensorhub.types import Incarnation, LeaseId, Options
from tests.rig import cluster, holds, tensors, worker_of, write
from tests.runtime.data_rig import (
    CONTENT,
    SECRET,
    WAIT_S,
    Node,
    finish,
    manifest_of,
    open_sockets,
    serving,
    until,
)

pytestmark = pytest.mark.anyio
READER = Incarnation("reader-1")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def reading(*nodes: Node, secrets: list[bytes] | None = None) -> AsyncIterator[Peers]:
    peers = Peers(
        Local(
            READER, secrets or [SECRET], Options(connect_timeout_s=WAIT_S, stall_timeout_s=WAIT_S)
        ),
        DIALECT,
    )
    async with serving(*nodes):
        yield peers
        peers.close()


def source(name: str = "a") -> Node:
    return Node(name, manifest_of(), filled=True).open(complete=True)


def right_to(node: Node) -> ReadRight:
    return ReadRight(
        LeaseId("lease"), node.incarnation, node.registration, node.generation, CONTENT
    )


async def opened(
    peers: Peers, node: Node, cutter: Cutter | None = None, right: ReadRight | None = None
) -> Peer:
    address = sockets.address_of(node.listener)
    return await anyio.to_thread.run_sync(
        peers.open, address, right or right_to(node), cutter or Cutter()
    )


async def used(peers: Peers, node: Node) -> Peer:
    """A connection over which a chunk was read, and that was given back since."""
    cutter = Cutter()
    peer = await opened(peers, node, cutter)
    await anyio.to_thread.run_sync(read_one, peer, node)
    peers.give_back(peer, cutter, is_answered=True)
    return peer


def read_one(peer: Peer, node: Node) -> None:
    peer.connection.send(Read(0, "lease", node.registration, node.generation, CONTENT, ((0, 1),)))
    answer = peer.connection.receive(FROM_OWNER)
    assert isinstance(answer, ChunksFollow)
    received = bytearray(node.memory.sizes[0])
    peer.connection.receive_into([memoryview(received)])
    assert received == bytes(node.memory.buffer(0))


async def test_two_reads_at_a_time_have_two_connections() -> None:
    a = source()
    async with reading(a) as peers:
        one, other = await opened(peers, a), await opened(peers, a)
        assert one is not other
        for peer in (one, other):
            peers.give_back(peer, Cutter(), is_answered=True)
        assert {id(await opened(peers, a)) for _ in range(2)} == {id(one), id(other)}
        for peer in (one, other):
            peers.give_back(peer, Cutter(), is_answered=True)


@pytest.mark.parametrize("why", ["a call failed", "something is expected", "it was cut"])
async def test_what_may_hold_an_old_answer_is_not_used_again(why: str) -> None:
    a = source()
    async with reading(a) as peers:
        before, cutter = open_sockets(), Cutter()
        peer = await opened(peers, a, cutter)
        peer.is_sound = why != "a call failed"
        if why == "it was cut":
            cutter.cut()
        peers.give_back(peer, cutter, is_answered=why != "something is expected")
        await until(lambda: open_sockets() == before)
        assert await used(peers, a) is not peer


async def test_a_source_that_has_closed_it_is_connected_to_anew() -> None:
    a = source()
    async with reading(a) as peers:
        first = await used(peers, a)
        await anyio.to_thread.run_sync(a.owner.cut, READER)
        assert await used(peers, a) is not first
        assert "1 kept" in repr(peers)


async def test_what_a_source_says_unasked_is_never_an_answer() -> None:
    a = source()
    async with reading(a) as peers:
        first = await used(peers, a)
        first.connection.send(Read(0, "lease", a.registration, a.generation, CONTENT, ((0, 1),)))
        await until(lambda: not first.connection.is_quiet)
        assert await used(peers, a) is not first


async def test_another_incarnation_at_the_address_is_not_taken_for_the_one_before() -> None:
    a = source()
    async with reading(a) as peers:
        await used(peers, a)
        with pytest.raises(ReadFailure, match="unreachable"):
            await opened(peers, a, right=replace(right_to(a), incarnation=Incarnation("a-2")))


async def test_what_was_proved_under_a_secret_that_is_no_longer_presented_is_proved_anew() -> None:
    a, secrets = source(), [SECRET]
    a.settings.secrets.append(b"the next one")  # type: ignore[attr-defined]
    async with reading(a, secrets=secrets) as peers:
        first = await used(peers, a)
        secrets[0] = b"the next one"
        second = await used(peers, a)
        assert second is not first
        assert second.secret == b"the next one"


async def test_it_is_given_up_by_age_by_number_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "KEPT_MAX", 2)
    a, b, c = source("a"), source("b"), source("c")
    async with reading(a, b, c) as peers:
        first, second, third = await used(peers, a), await used(peers, b), await used(peers, c)
        await until(lambda: "0 lanes" in repr(a.owner))
        assert (await used(peers, b), await used(peers, c)) == (second, third)
        peers.sweep()
        assert "2 kept" in repr(peers)
        monkeypatch.setattr(peers_module, "KEPT_S", -1.0)
        peers.sweep()
        await until(lambda: "0 lanes" in repr(b.owner) and "0 lanes" in repr(c.owner))
        assert await used(peers, a) is not first
        late = await opened(peers, a)
        peers.close()
        peers.give_back(late, Cutter(), is_answered=True)
        await until(lambda: "0 lanes" in repr(a.owner))
        assert "0 kept" in repr(peers)


@pytest.mark.parametrize(("rest_s", "is_used"), [(0.0, True), (0.0, False), (1000.0, True)])
async def test_an_owner_whose_places_are_taken_by_connections_that_rest(
    monkeypatch: pytest.MonkeyPatch, rest_s: float, is_used: bool
) -> None:
    monkeypatch.setattr(lanes_module, "REST_S", rest_s)
    a = Node("a", manifest_of(), filled=True, readers_max=1).open(complete=True)
    b = Node("b", manifest_of(), filled=False).open(complete=False)
    async with reading(a, b) as peers:
        if is_used:
            await used(peers, a)
        else:
            peers.give_back(await opened(peers, a), Cutter(), is_answered=True)
        # after the answer has come here
        await until(lambda: all(lane.rests_from is not None for lane in a.owner._lanes))
        async with b.runner() as runner:
            runner.add_source(a.grant())
            if rest_s:
                assert "served here already" in repr(await runner.next_event())
            else:
                await finish(runner)


async def test_versions_come_over_one_connection_until_the_reader_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Peer] = []
    connect = Peers._connect

    def counted(peers: Peers, address: str, right: ReadRight, cutter: Cutter) -> Peer:
        made.append(connect(peers, address, right, cutter))
        return made[-1]

    monkeypatch.setattr(Peers, "_connect", counted)
    async with cluster("trainer", "reader") as c:
        memory, mine = tensors(0), tensors()
        trainer, weights = (
            await c.hubs[0].register("m", memory),
            await c.hubs[1].register("m", mine),
        )
        for version in range(1, 5):
            async with trainer.mutate(version):
                write(memory, version)
            await weights.update()
            assert holds(mine, version)
        # shm was tried once, with an address of its own
        assert len(made) == len({peer.address for peer in made})
        assert made[-1].connection._socket.fileno() >= 0
        worker_of(c.hubs[1]).channels.become(READER)
        assert made[-1].connection._socket.fileno() < 0
