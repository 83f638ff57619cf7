"""The owner's side: the fence, cutting readers, and connections that do not behave."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest
import xxhash

from tensorhub.errors import DrainTimeout, StateError
from tensorhub.layouts.reading import Selection
from tensorhub.layouts.shared import Share
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunkFollows, ChunksFollow, Read, ReadRefused, StillWaiting
from tensorhub.model.accesses import Refusal
from tensorhub.model.digests import pack, root_of
from tensorhub.model.strips import straight
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.data import selections
from tensorhub.runtime.data.selections import Selections
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.transport.cma import CmaOwner
from tensorhub.transport.owner import Lane, OpenMemory
from tensorhub.types import ContentId, Incarnation, RegistrationId
from tests.runtime.data_rig import (
    CHUNK_BYTES,
    CHUNKS,
    CONTENT,
    SECRET,
    WAIT_S,
    Node,
    finish,
    manifest_of,
    next_event,
    serving,
    until,
)

pytestmark = pytest.mark.anyio
LARGE = 32 * 2**20  # more than the buffers of two sockets


@asynccontextmanager
async def raw_reader(node: Node) -> AsyncIterator[BlockingConnection]:
    """A proved connection that does only what the test does with it."""
    sock = socket.create_connection(node.listener.getsockname())
    handshake = ClientHandshake("reader", "raw-1", SECRET, os.urandom(NONCE_BYTES))
    with BlockingConnection(sock, stall_timeout_s=WAIT_S) as connection:
        await anyio.to_thread.run_sync(connection.handshake, handshake, WAIT_S)
        yield connection


def read(node: Node, *runs: tuple[int, int], generation: int | None = None) -> Read:
    return Read(0, "lease", node.registration, generation or node.generation, CONTENT, runs)


async def test_a_fence_does_not_wait_for_a_reader_that_stopped_reading() -> None:
    """It is shut out once its grace is over, neither when it counts as stalled nor when the fence
    would be given up.
    """
    large, never_s = manifest_of((LARGE,), chunk_bytes=LARGE), 100 * WAIT_S
    a = Node("a", large, filled=True, stall_timeout_s=never_s).open(complete=True)
    published = bytes(a.arrays[0])

    def stop_reading(connection: BlockingConnection) -> None:
        connection.send(read(a, (0, 1)))
        answer = connection.receive(FROM_OWNER)
        assert isinstance(answer, ChunkFollows)

    async with serving(a), raw_reader(a) as connection:
        await anyio.to_thread.run_sync(stop_reading, connection)
        assert "1 accesses" in repr(a.owner)  # its lane is inside the send, and cannot end it
        fence = threading.Thread(target=a.owner.fence, args=(a.registration, never_s), daemon=True)
        fence.start()
        await until(lambda: not fence.is_alive())
        assert "0 accesses" in repr(a.owner)
        a.arrays[0][:] = bytes(LARGE)  # the next version
        received = bytearray(LARGE)

        def drain() -> None:
            connection.receive_into([memoryview(received)])

        with pytest.raises(ConnectionLost):
            await anyio.to_thread.run_sync(drain)
        end = len(received.rstrip(b"\0"))
        assert end < LARGE
        assert received[:end] == published[:end]  # what did come is of the old version only


async def test_a_fence_waits_for_running_accesses_and_lets_no_new_one_begin() -> None:
    a = Node("a", manifest_of(), filled=True).open(complete=True)
    right = (None, a.registration, a.generation, CONTENT, [0], 1, 0.0)
    async with serving(a):
        with a.owner.access(*right) as held:
            assert isinstance(held, tuple)
            fence = threading.Thread(target=a.owner.fence, args=(a.registration,))
            fence.start()

            def refused() -> bool:
                with a.owner.access(*right) as answer:
                    return isinstance(answer, Refusal)

            await until(refused)
            with pytest.raises(DrainTimeout):  # a local access cannot be ended from outside
                a.owner.fence(a.registration, timeout_s=0.0)
            assert fence.is_alive()
        await anyio.to_thread.run_sync(fence.join)
        await a.owner.fence_async(a.registration)  # once more changes nothing
        a.owner.open(a.registration, 8, ContentId("next"), a.memory, complete=True)


async def test_a_fence_ends_the_waiting_of_readers() -> None:
    manifest = manifest_of()
    a = Node("a", manifest, filled=True).open(complete=False)
    b = Node("b", manifest, filled=False).open(complete=False)
    async with serving(a, b), b.runner() as runner:
        runner.add_source(a.grant())
        await until(lambda: "1 lanes" in repr(a.owner))
        await a.owner.fence_async(a.registration)
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert failed.reason == "refused"


async def test_a_reader_of_the_old_generation_gets_nothing_of_the_new_one() -> None:
    a = Node("a", manifest_of(), filled=True).open(complete=True)
    async with serving(a), raw_reader(a) as connection:

        def ask(generation: int) -> object:
            connection.send(read(a, (0, 1), generation=generation))
            return connection.receive(FROM_OWNER)

        await a.owner.fence_async(a.registration)
        a.owner.open(a.registration, 8, CONTENT, a.memory, complete=True)
        assert isinstance(await anyio.to_thread.run_sync(ask, 7), ReadRefused)
        assert isinstance(await anyio.to_thread.run_sync(ask, 8), ChunksFollow)


async def test_cut_ends_one_readers_connections_and_no_others() -> None:
    manifest = manifest_of()
    a = Node("a", manifest, filled=True).open(complete=False)
    b, c = (Node(name, manifest, filled=False).open(complete=False) for name in "bc")
    async with serving(a, b, c), b.runner() as to_b, c.runner() as to_c:
        to_b.add_source(a.grant())
        to_c.add_source(a.grant())
        a.make_available(0)
        await until(lambda: b.has(0) and c.has(0))
        await anyio.to_thread.run_sync(a.owner.cut, b.incarnation)
        a.owner.cut(Incarnation("unknown"))
        failed = await next_event(to_b)
        assert isinstance(failed, SourceFailed)
        assert failed.reason == "lost"
        a.make_available(*range(CHUNKS))
        await finish(to_c)


async def test_a_request_for_what_is_lacked_ends_in_time_and_tells_what_is_there() -> None:
    a = Node("a", manifest_of(), filled=True).open(complete=False)
    a.make_available(0, 2, 3)
    async with serving(a), raw_reader(a) as connection:

        def ask() -> object:
            connection.send(read(a, (4, 3)))
            return connection.receive(FROM_OWNER)

        assert await anyio.to_thread.run_sync(ask) == StillWaiting(0, ((0, 1), (2, 2)))


async def test_a_chunk_is_withdrawn_from_a_reader_that_takes_it_too_slowly() -> None:
    large = manifest_of((LARGE, CHUNK_BYTES), chunk_bytes=LARGE)
    a = Node("a", large, filled=True, stall_timeout_s=100 * WAIT_S).open(complete=True)

    def withdraw(*chunks: int) -> None:
        a.owner.revoke(a.registration, a.generation, chunks)

    async with serving(a), raw_reader(a) as connection:
        connection.send(read(a, (0, 1)))
        await anyio.to_thread.run_sync(connection.receive, FROM_OWNER)
        await anyio.to_thread.run_sync(withdraw, 1)  # which the reader does not read
        assert "1 accesses" in repr(a.owner)
        await anyio.to_thread.run_sync(withdraw, 0)
        assert "0 accesses" in repr(a.owner)
        assert not a.has(0)

        def drain() -> None:
            connection.receive_into([memoryview(bytearray(LARGE))])

        with pytest.raises(ConnectionLost):
            await anyio.to_thread.run_sync(drain)


class Noted(CmaOwner):
    """What it is told to let go."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[object] = []

    def forget(self, registration: RegistrationId) -> None:
        self.told.append(registration)

    def release(self, memory: ChunkMemory) -> None:
        self.told.append(memory)

    def close(self) -> None:
        self.told.append("all")


def test_what_is_let_go_is_let_go_by_each_transport() -> None:
    sides = [Noted(), Noted()]
    a = Node("a", manifest_of(), filled=True, owner=SharedOwner(sides)).open(complete=True)
    a.owner.fence(a.registration)
    a.owner.forget(a.registration)
    assert a.owner.memory_of(a.registration) is None
    assert a.owner.digests(a.registration, a.generation) is None
    a.owner.end_reading()
    assert a.owner.header is None
    assert [side.told for side in sides] == 2 * [[a.registration, a.memory, "all"]]
    a.listener.close()


class Promised:
    """See `Promise`."""

    is_whole = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def is_there(self, regions: Iterable[int] | None) -> bool:
        return True

    def is_kept(self, regions: Iterable[int] | None) -> bool:
        self.asked.append([*(regions or ())])
        return self.is_whole


def test_memory_that_was_written_is_not_read_until_it_is_opened_anew() -> None:
    a, promise = Node("a", manifest_of(), filled=True), Promised()
    told: list[object] = []
    a.owner.on_suspicion = lambda *what: told.append(what)

    def reads(generation: int, *, also_written: bool = False) -> bool:
        right = None, a.registration, generation, CONTENT, [5], CHUNK_BYTES, 0.0
        with a.owner.access(*right, also_written=also_written) as answer:
            return isinstance(answer, tuple)

    a.owner.open(a.registration, 7, CONTENT, a.memory, complete=True, promise=promise)
    assert reads(7)
    assert promise.asked == [[*a.memory.regions_of([5])]]
    promise.is_whole = False
    assert not reads(7)
    promise.is_whole = True
    assert not reads(7)
    assert not reads(7)
    assert reads(7, also_written=True)
    assert told == [(a.registration, 7, 5)]
    a.owner.fence(a.registration)
    a.owner.open(a.registration, 8, CONTENT, a.memory, complete=True)
    promise.is_whole = False  # of the old content
    assert reads(8)
    a.owner.fence(a.registration)
    a.owner.open(a.registration, 9, CONTENT, a.memory, complete=True, promise=promise)
    assert not reads(9)
    assert told[1:] == [(a.registration, 9, 5)]
    a.listener.close()


def test_digests_that_are_missing_are_made_until_the_call_is_over() -> None:
    a = Node("a", manifest_of(), filled=True).open(complete=True)
    made = [a.memory.digest(chunk) for chunk in range(CHUNKS)]
    what, calls = (a.registration, a.generation), itertools.count()
    assert a.owner.digests(*what) == (None,) * CHUNKS
    a.owner.make_digests(*what, CONTENT, bytes_max=1, is_over=lambda: next(calls) >= 3)
    assert a.owner.digests(*what) == (*[None] * (CHUNKS - 3), *made[-3:])
    a.owner.make_digests(a.registration, 8, CONTENT)  # another generation than is there
    a.owner.make_digests(*what, ContentId("other"))
    assert a.owner.digests(*what) == (*[None] * (CHUNKS - 3), *made[-3:])
    a.owner.make_digests(*what, CONTENT)
    assert a.owner.digests(*what) == tuple(made)
    a.listener.close()


def test_a_selection_that_gives_way_is_forgotten_and_looked_at_anew_if_it_is_said_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selections, "KEPT_MAX", 1)
    looked = list[str]()
    monkeypatch.setattr(Selections, "spend", lambda _, reader, name: looked.append(name))
    a, reader = Node("a", manifest_of(), filled=True), Lane(cast(Any, None))
    chosen = [Selection(((straight(0, first, 1),),)) for first in range(2)]
    names = [each.selection_id for each in chosen]

    def say(selection: Selection) -> object:
        blob = selection.encode()
        name = selection.selection_id
        return a.owner.upload(reader, a.registration, name, len(blob), 0, blob)

    assert isinstance(say(chosen[0]), Refusal)  # nothing is open
    a.open(complete=True)
    for number, each in enumerate(chosen):
        assert say(each) == len(each.encode())
        assert a.owner.select(reader, a.registration, a.generation, names[number]) is True
        a.owner.make_digests(a.registration, a.generation, CONTENT, names[number])
        known = a.owner.digests(a.registration, a.generation, names[number])
        assert known == (xxhash.xxh3_64_intdigest(a.arrays[0][number : number + 1]),)
    assert a.owner.digests(a.registration, a.generation, names[0]) is None
    assert a.owner.select(reader, a.registration, a.generation, names[0]) is False
    say(chosen[0])
    for _ in range(2):
        assert a.owner.select(reader, a.registration, a.generation, names[0]) is True
    assert looked == [*names, names[0]]
    a.listener.close()


def test_memory_that_is_filled_beside_older_content_has_that_as_its_base() -> None:
    a, b = Node("a", manifest_of(), filled=True), Node("b", manifest_of(), filled=False)
    old = ContentId("old")
    digests = a.memory.digests(range(CHUNKS))
    a.owner.open(a.registration, 7, old, a.memory, complete=True, digests=digests)
    a.owner.open(b.registration, 1, CONTENT, b.memory, complete=False)
    base = a.owner.base(b.registration)
    assert base is not None
    assert (base.content_id, [*base.digests]) == (old, digests)
    base.apply(1, [])
    assert b.memory.buffer(1) == a.memory.buffer(1)
    for node in (a, b):
        node.listener.close()


def test_a_share_of_a_rank_has_one_digest_of_its_bytes_wherever_they_lie() -> None:
    """Of ranks that publish the same bytes, in memory of their own."""
    manifest, other = manifest_of((100, 200)), manifest_of((200, 100))
    a, b = Node("a", manifest, filled=True), Node("b", other, filled=True)
    b.arrays[0][:], b.arrays[1][:] = a.arrays[1], a.arrays[0]

    def digests(node: Node, *shares: Share) -> list[bytes]:
        return node.owner.digests_of_shares(node.registration, node.generation, shares)

    def share(*parts: tuple[int, int, int]) -> Share:
        return Share(1, "'w'", tuple([straight(*part) for part in parts]))

    for node in (a, b):
        node.owner.open(
            node.registration, node.generation, ContentId(""), node.memory, complete=True
        )
    one, two = share((0, 10, 20), (1, 50, 30)), share((0, 11, 20), (1, 50, 30))
    found = digests(a, one, two)
    assert found == [
        root_of(pack([xxhash.xxh3_64_intdigest(each) for each in pieces], 8))
        for pieces in (
            (a.arrays[0][10:30], a.arrays[1][50:80]),
            (a.arrays[0][11:31], a.arrays[1][50:80]),
        )
    ]
    assert digests(b, share((1, 10, 20), (0, 50, 30))) == found[:1]
    assert digests(a) == []
    a.owner.fence(a.registration)
    with pytest.raises(StateError, match="taken back before what it shares"):
        digests(a, one)
    for node in (a, b):
        node.listener.close()


def test_content_goes_on_under_another_generation_with_its_digests_and_deltas() -> None:
    a, old, delta = Node("a", manifest_of(), filled=True), ContentId("old"), (b"delta",)
    a.owner.open(a.registration, 7, old, a.memory, complete=True)
    a.owner.fence(a.registration)
    digests = [a.memory.digest(chunk) for chunk in range(CHUNKS)]
    a.owner.open(a.registration, 8, CONTENT, a.memory, complete=True, digests=digests)
    a.owner.deltas.begin(a.registration, a.memory, has_shadow=False)
    a.owner.deltas.keep(a.registration, 8, old, {1: delta})
    a.owner.fence(a.registration)
    a.owner.reopen(a.registration, 9)
    assert a.owner.digests(a.registration, 8) is None
    assert a.owner.digests(a.registration, 9) == tuple(digests)
    assert isinstance(a.owner.find(a.registration, 8), Refusal)
    assert isinstance(a.owner.find(a.registration, 9), OpenMemory)
    right = a.registration, 9, CONTENT, [1], CHUNK_BYTES, 0.0
    with a.owner.access(None, *right) as held:
        assert isinstance(held, tuple)
        assert a.owner.deltas_of(*held, old) == {1: delta}
    a.listener.close()
