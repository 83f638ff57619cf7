"""Memory that is loaded on demand at its owner: lanes wait for what they ask for, and what is not
there is taken for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import anyio.to_thread
import pytest

from tensorhub.layouts.reading import Selection
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.accesses import Refusal, Wait
from tensorhub.model.strips import Strip, straight
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.transport.base import NotShared
from tensorhub.types import ContentId, RegistrationId
from tests.runtime.data.test_selections import setting
from tests.runtime.data_rig import (
    CHUNK_BYTES,
    CHUNKS,
    CONTENT,
    WAIT_S,
    Node,
    finish,
    manifest_of,
    next_event,
    serving,
    until,
)

pytestmark = pytest.mark.anyio
Runs = Sequence[tuple[int, int]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Archive:
    """The loader of a node, which has all chunks in store; `loads`: as they are asked for."""

    def __init__(self, node: Node, *, loads: bool = True) -> None:
        self.node = node
        self.stored = [bytes(array) for array in node.arrays]
        self.digests = node.memory.digests(range(len(node.memory.sizes)))
        self.asked: list[Runs] = []
        self.refusal: Refusal | None = None
        self.loads = loads
        self._threads: list[threading.Thread] = []
        self.empty()
        node.owner.open(
            node.registration,
            node.generation,
            CONTENT,
            node.memory,
            complete=False,
            digests=self.digests,
            loader=self,
        )

    def want(self, chunks: Runs) -> Refusal | None:
        self.asked.append(list(chunks))
        there = {first for first, _ in self.node.owner._owner.has(*self.of, 1024)}
        if self.loads and not all(first in there for first, _ in chunks):
            thread = threading.Thread(target=self.load, args=(list(chunks),))
            self._threads.append(thread)
            thread.start()
        return self.refusal

    @property
    def of(self) -> tuple[RegistrationId, int]:
        return self.node.registration, self.node.generation

    def load(self, runs: Runs) -> None:
        """Bring these chunks."""
        chunks = [chunk for first, count in runs for chunk in range(first, first + count)]
        for chunk in chunks:
            its = self.node.manifest.chunks[chunk]
            stored = memoryview(self.stored[its.region])[its.offset : its.offset + its.nbytes]
            self.node.memory.buffer(chunk)[:] = stored
        named = [(chunk, self.digests[chunk]) for chunk in chunks]
        self.node.owner.mark_available(*self.of, named)

    def empty(self) -> None:
        for array in self.node.arrays:
            array[:] = bytes(len(array))

    def unload(self) -> None:
        assert self.node.owner.unload(self.node.registration)
        self.empty()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)


async def test_a_reader_has_what_it_asks_for_as_it_is_loaded() -> None:
    a, b = (
        Node("a", manifest_of(), filled=True, patience_s=WAIT_S),
        Node("b", manifest_of(), filled=False),
    )
    archive = Archive(a)
    async with serving(a, b), b.open(complete=False).runner() as runner:
        runner.add_source(a.grant())
        await finish(runner)
        archive.join()  # its threads may still say what they brought
    assert [bytes(array) for array in b.arrays] == archive.stored
    asked = {
        chunk
        for runs in archive.asked
        for first, count in runs
        for chunk in range(first, first + count)
    }
    assert asked == {*range(CHUNKS)}


async def test_a_reader_waits_for_a_complete_source_that_lacks_something_and_blames_nobody() -> (
    None
):
    """Again and again, as long as the archive takes: each wait ends with a word of the source."""
    a, b = (
        Node("a", manifest_of(), filled=True, patience_s=0.02),
        Node("b", manifest_of(), filled=False),
    )
    archive = Archive(a, loads=False)
    async with serving(a, b), b.open(complete=False).runner() as runner:
        runner.add_source(a.grant())
        await until(lambda: len(archive.asked) >= 30)
        assert runner.report().chunks_verified == 0
        archive.load([(0, 1)])
        await until(lambda: runner.report().chunks_verified == 1)
        archive.load([(1, CHUNKS - 1)])
        await finish(runner)
        report = runner.report()
    assert (report.retries, report.reread_bytes, report.bytes_read) == (0, 0, report.bytes_wanted)
    assert [bytes(array) for array in b.arrays] == archive.stored


async def test_a_source_that_gets_nothing_is_given_up_after_a_while_and_another_one_goes_on() -> (
    None
):
    a, b = (
        Node("a", manifest_of(), filled=True, patience_s=0.02),
        Node("b", manifest_of(), filled=False),
    )
    c = Node("c", manifest_of(), filled=True).open(complete=True)
    archive = Archive(a, loads=False)
    async with serving(a, b, c), b.open(complete=False).runner(patience_s=0.2) as runner:
        runner.add_source(a.grant())
        event = await next_event(runner)
        assert isinstance(event, SourceFailed)
        assert (event.reason, event.chunk) == ("starved", None)
        runner.add_source(c.grant())
        await finish(runner)
        assert runner.report().bytes_read == runner.report().bytes_wanted
    assert archive.asked


async def test_a_reader_is_told_why_a_chunk_cannot_be_loaded() -> None:
    a, b = (
        Node("a", manifest_of(), filled=True, patience_s=WAIT_S),
        Node("b", manifest_of(), filled=False),
    )
    archive = Archive(a, loads=False)

    def fail() -> None:
        while not archive.asked:
            pass
        archive.refusal = Refusal("s3://b/frames was damaged", is_damaged=True)
        a.owner.wake()

    async with serving(a, b), b.open(complete=False).runner() as runner:
        runner.add_source(a.grant())
        await anyio.to_thread.run_sync(fail)
        event = await next_event(runner)
    assert isinstance(event, SourceFailed)
    assert (event.reason, event.detail) == ("damaged", "s3://b/frames was damaged")


async def test_a_chunk_that_is_there_is_served_although_another_one_cannot_be_loaded() -> None:
    a = Node("a", manifest_of(), filled=True)
    archive = Archive(a, loads=False)
    archive.load([(3, 1)])
    archive.refusal = Refusal("no bucket")
    with a.owner.access(None, *archive.of, CONTENT, [3, 4], 2**30, 0.0) as answer:
        assert isinstance(answer, tuple)
        assert (answer[0].chunks, answer[0].rest) == ((3,), (4,))
    with a.owner.access(None, *archive.of, CONTENT, [4], 2**30, WAIT_S) as answer:
        assert answer == Refusal("no bucket")
    a.listener.close()


async def test_what_is_unloaded_while_it_is_read_is_given_back_behind_the_read() -> None:
    a = Node("a", manifest_of(), filled=True)
    archive = Archive(a, loads=False)
    archive.load([(0, CHUNKS)])
    unloaded = threading.Thread(target=archive.unload)
    with a.owner.access(None, *archive.of, CONTENT, [3], 2**30, 0.0) as answer:
        assert isinstance(answer, tuple)
        unloaded.start()
        while a.has(3):
            pass
        assert answer[1].digest(3) == archive.digests[3]
    unloaded.join(WAIT_S)
    assert not any(map(any, a.arrays))
    with a.owner.access(None, *archive.of, CONTENT, [3], 2**30, 0.0) as again:
        assert again == Wait()
    assert a.owner.digests(*archive.of) == tuple(archive.digests)
    a.listener.close()


async def test_readers_of_another_layout_wait_for_what_lies_under_their_chunks_only() -> None:
    its = setting(columns=700)
    for node in (its.a, its.b):
        node.settings = replace(node.settings, patience_s=WAIT_S)
    a, b = Archive(its.a), Archive(its.b)
    its.reader.open(complete=False)
    async with serving(its.a, its.b, its.reader), its.runner() as runner:
        runner.add_source(its.grant(its.a))
        runner.add_source(its.grant(its.b))
        await finish(runner)
        for archive in (a, b):
            archive.join()
            assert all(archive.asked)
    its.check()


def test_what_lies_under_strips_is_found() -> None:
    """Regions of 1, 4, 0, 1 and 5 chunks."""
    node = Node("a", manifest_of(), filled=False)
    node.listener.close()
    memory = node.memory
    assert memory.under([straight(0, 0, 10)]) == [(0, 1)]
    assert memory.under([straight(1, CHUNK_BYTES - 1, 2)]) == [(1, 2)]
    assert memory.under([straight(1, CHUNK_BYTES, CHUNK_BYTES)]) == [(2, 1)]
    assert memory.under([straight(4, 0, 1), straight(1, 3 * CHUNK_BYTES, 5)]) == [(4, 1), (6, 1)]
    apart = Strip(4, 100, 0, 0, 1, ((3, CHUNK_BYTES),), 8)
    assert memory.under([apart, straight(3, 0, 1)]) == [(5, 4)]
    cells = Strip(0, 0, 4, 3, 2, (), 5)  # in the regions 0 and 4
    assert memory.under([cells]) == [(0, 1), (6, 1)]


async def test_it_is_not_read_one_sided_nor_by_deltas_nor_a_base_of_them() -> None:
    a, b = Node("a", manifest_of(), filled=True), Node("b", manifest_of(), filled=False)
    archive = Archive(a, loads=False)
    archive.load([(0, CHUNKS)])
    with pytest.raises(NotShared, match="tcp serves it"):
        a.owner.find(*archive.of)
    with a.owner.access(None, *archive.of, CONTENT, [3], 2**30, 0.0) as answer:
        assert isinstance(answer, tuple)
        wanted = list[RegistrationId]()
        a.owner.deltas.on_wanted = wanted.append
        assert a.owner.deltas_of(*answer, ContentId("before")) == {}
        assert wanted == []
        assert a.owner._words is not None
        assert a.owner._words.get(a.registration) == 0  # whoever reads there discards it
    a.owner.open(b.registration, 1, ContentId("another"), b.memory, complete=False)
    assert a.owner.base(b.registration) is None
    for node in (a, b):
        node.listener.close()


async def test_a_chunk_of_a_selection_is_refused_where_it_is_none() -> None:
    a = Node("a", manifest_of(), filled=True)
    archive = Archive(a, loads=False)
    selection = Selection(((straight(1, 0, 5),),))
    memory: ChunkMemory = a.memory
    assert a.owner._owner.select(*archive.of, "s", selection.sizes, lambda _: memory.under(()))
    with a.owner.access(None, *archive.of, CONTENT, [7], 1, 0.0, "s") as answer:
        assert isinstance(answer, Refusal)
    assert archive.asked == []
    a.listener.close()
