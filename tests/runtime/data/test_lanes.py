"""Reading over real sockets: equal bytes, resume, refusal, corruption, and lanes that end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import anyio
import anyio.to_thread
import pytest

from tensorhub.model.manifest import Digest
from tensorhub.runtime.data import lanes
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.runtime.data.source_lane import SourceFailed, SourceLane
from tensorhub.transport.base import Arrival, Channel, Lacking, ReadFailure
from tensorhub.types import Incarnation, LeaseId, RegistrationId
from tests.runtime.data.test_selections import setting
from tests.runtime.data_rig import (
    CHUNKS,
    KINDS,
    SIZES,
    WAIT_S,
    Node,
    Proxy,
    finish,
    manifest_of,
    next_event,
    serving,
    until,
)

pytestmark = pytest.mark.anyio
TOTAL = sum(SIZES)


@pytest.fixture(params=list(KINDS))
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("digest", ["xxh3-64", "none"])
@pytest.mark.parametrize("batch_bytes", [1, 10_000, 2**20])
async def test_every_byte_arrives(digest: Digest, batch_bytes: int, transport: str) -> None:
    manifest = manifest_of(digest=digest)
    a, b = Node("a", manifest, filled=True).open(complete=True), Node("b", manifest, filled=False)
    b.open(complete=False)
    async with serving(a, b), b.runner(transport=transport, batch_bytes=batch_bytes) as runner:
        runner.add_source(a.grant())
        await finish(runner)
        report = runner.report()
    assert b.arrays == a.arrays
    assert b.owner.digests(b.registration, 7) == a.owner.digests(a.registration, 7)
    assert (report.bytes_read, report.reread_bytes, report.retries) == (TOTAL, 0, 0)
    assert report.chunks_verified == CHUNKS
    assert set(report.phases) == {"wait", "transfer", "verify"}
    assert [source.bytes_read for source in report.sources] == [TOTAL]


async def test_a_reader_serves_what_it_has_while_it_still_fills(transport: str) -> None:
    manifest = manifest_of()
    a = Node("a", manifest, filled=True).open(complete=False)
    b = Node("b", manifest, filled=False).open(complete=False)
    c = Node("c", manifest, filled=False).open(complete=False)
    async with (
        serving(a, b, c),
        b.runner(transport=transport) as to_b,
        c.runner(transport=transport) as to_c,
    ):
        to_b.add_source(a.grant(complete=False))
        to_c.add_source(b.grant(complete=False))
        for chunk in range(CHUNKS):
            assert not c.has(chunk)
            a.make_available(chunk)
            await until(partial(c.has, chunk))  # through b, which lacks all later chunks
        await finish(to_b)
        await finish(to_c)
    assert c.arrays == a.arrays


@pytest.mark.parametrize("digest", ["xxh3-64", "none"])
@pytest.mark.parametrize("broken_after", range(0, TOTAL, 3001))
async def test_a_reader_goes_on_elsewhere_from_what_it_has_verified(
    broken_after: int, digest: Digest
) -> None:
    manifest = manifest_of(digest=digest)
    a, b, c = (Node(name, manifest, filled=name != "c") for name in "abc")
    proxy = Proxy(a.open(complete=True), broken_after, flip=False)
    async with serving(a, b.open(complete=True), c.open(complete=False)):
        async with c.runner() as runner:
            runner.add_source(a.grant(address=proxy.address))
            failed = await next_event(runner)
            assert isinstance(failed, SourceFailed)
            assert failed.reason in ("lost", "unreachable")
            kept = runner.report()
            runner.add_source(b.grant())
            await finish(runner)
            report = runner.report()
        await anyio.to_thread.run_sync(proxy.close)
    assert c.arrays == a.arrays
    assert report.reread_bytes == 0
    # what a verified is not read from b
    assert report.sources[1].bytes_read == TOTAL - kept.bytes_verified
    assert report.bytes_read == sum(source.bytes_read for source in report.sources) >= TOTAL


async def test_chunks_that_were_verified_before_are_not_read(transport: str) -> None:
    manifest = manifest_of()
    a, b = Node("a", manifest, filled=True).open(complete=True), Node("b", manifest, filled=True)
    verified = [0, 3, 4]
    async with serving(a, b.open(complete=False)):
        async with b.runner(transport=transport, verified=verified) as runner:
            runner.add_source(a.grant())
            await finish(runner)
            assert runner.report().bytes_read == TOTAL - sum(
                a.memory.sizes[chunk] for chunk in verified
            )
        async with b.runner(transport=transport, verified=range(CHUNKS)) as runner:
            await finish(runner)


@pytest.mark.parametrize("at", [600, 5000, 20_000])
async def test_a_flipped_bit_on_the_way_is_never_accepted(at: int) -> None:
    manifest = manifest_of()
    a, b, c = (Node(name, manifest, filled=name != "c") for name in "abc")
    proxy = Proxy(a.open(complete=True), at, flip=True)
    async with serving(a, b.open(complete=True), c.open(complete=False)):
        async with c.runner() as runner:
            runner.add_source(a.grant(address=proxy.address))
            failed = await next_event(runner)
            assert isinstance(failed, SourceFailed)
            assert failed.reason in ("corrupt", "lost")  # lost: it hit a frame
            runner.add_source(b.grant())
            await finish(runner)
        await anyio.to_thread.run_sync(proxy.close)
    assert c.arrays == a.arrays


async def test_a_source_whose_memory_changed_is_named_corrupt_with_the_chunk(
    transport: str,
) -> None:
    manifest = manifest_of()
    a, b = Node("a", manifest, filled=True).open(complete=False), Node("b", manifest, filled=False)
    a.make_available(*range(CHUNKS))
    a.memory.buffer(5)[0] ^= 1
    async with serving(a, b.open(complete=False)), b.runner(transport=transport) as runner:
        runner.add_source(a.grant())
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert (failed.reason, failed.chunk) == ("corrupt", 5)
        a.memory.buffer(5)[0] ^= 1
        runner.add_source(a.grant("again"))
        await finish(runner)
        report = runner.report()
    assert b.arrays == a.arrays
    assert report.reread_bytes == 0
    assert report.bytes_read == TOTAL + a.memory.sizes[5]  # the bad one counts as read


class Failing:
    """A channel that fails all of its threads once so many are inside."""

    def __init__(self, threads: int) -> None:
        self._all_are_inside = threading.Barrier(threads)
        self.inside: list[int] = []
        self.closed = 0

    def submit(self, chunks: Sequence[int]) -> None:
        """Nothing of it will come."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        self.inside.append(threading.get_ident())
        self._all_are_inside.wait(WAIT_S)
        raise ReadFailure("lost", "it is gone")

    def close(self) -> None:
        self.closed += 1


async def test_a_source_that_fails_several_threads_fails_once_and_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "HELP_BYTES", 1)
    manifest = manifest_of()
    a, b = Node("a", manifest, filled=True).open(complete=True), Node("b", manifest, filled=False)
    runner, channel = b.runner(lanes=3), Failing(3)
    (way,) = b.ways
    with monkeypatch.context() as patch:
        patch.setattr(way, "open", lambda *what: channel)
        async with serving(a, b.open(complete=False)), runner:
            runner.add_source(a.grant())
            failed = await next_event(runner)
            assert isinstance(failed, SourceFailed)
            assert (failed.reason, failed.detail) == ("lost", "it is gone")
            assert (len(set(channel.inside)), channel.closed) == (3, 1)
            patch.undo()
            runner.add_source(a.grant("again"))
            await finish(runner)
    assert b.arrays == a.arrays


class Watched:
    """A channel that is used until it is closed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.is_closed = False
        self.submit = channel.submit

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        assert not self.is_closed
        return self._channel.receive(bytes_max)

    def close(self) -> None:
        self.is_closed = True
        self._channel.close()


async def test_a_thread_that_comes_too_late_to_help_leaves_its_lane_as_it_ended(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "HELP_BYTES", 1)
    manifest = manifest_of()
    a, b = Node("a", manifest, filled=True).open(complete=False), Node("b", manifest, filled=False)
    a.make_available(*range(CHUNKS))
    a.memory.buffer(0)[0] ^= 1
    helped: list[SourceLane] = []
    help_lane = PullRunner._help_lane

    async def noting(runner: PullRunner, lane: SourceLane) -> None:
        await help_lane(runner, lane)
        helped.append(lane)

    monkeypatch.setattr(PullRunner, "_help_lane", noting)
    runner = b.runner(transport=transport, lanes=3)
    (way,) = b.ways
    opens = way.open
    monkeypatch.setattr(way, "open", lambda *what: Watched(opens(*what)))
    async with serving(a, b.open(complete=False)), runner:
        runner.add_source(a.grant())
        await until(lambda: runner.report().sources[0].outcome == "corrupt")
        failed = await next_event(runner)  # which has threads begin to help
        await until(lambda: len(helped) == 2)
        assert isinstance(failed, SourceFailed)
        assert runner.report().sources[0].outcome == "corrupt"
        a.memory.buffer(0)[0] ^= 1
        runner.add_source(a.grant("again"))
        await finish(runner)
    assert b.arrays == a.arrays
    assert [each.outcome for each in runner.report().sources] == ["corrupt", "used"]


async def test_what_is_read_again_must_be_what_was_published_whatever_its_source_says(
    transport: str,
) -> None:
    """A source that vouches for other bytes would be believed a second time, and a third (R8)."""
    manifest = manifest_of()
    liar, honest, b = (Node(name, manifest, filled=name != "b") for name in ("liar", "honest", "b"))
    published = {5: honest.memory.digest(5)}
    liar.memory.buffer(5)[0] ^= 1
    there = set(range(CHUNKS)) - {5}
    runner = b.open(complete=False).runner(transport=transport, verified=there, published=published)
    async with serving(liar.open(complete=True), honest.open(complete=True), b), runner:
        runner.add_source(liar.grant())
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert (failed.reason, failed.chunk) == ("corrupt", 5)
        assert not b.has(5)
        runner.add_source(honest.grant())
        await finish(runner)
    assert b.memory.digest(5) == published[5]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"generation": 8}, "refused"),
        ({"registration": RegistrationId("other")}, "refused"),
        ({"incarnation": Incarnation("another")}, "unreachable"),
        ({"address": "tcp://127.0.0.1:1"}, "unreachable"),
        ({"address": "nonsense"}, "unreachable"),
    ],
)
async def test_a_read_under_another_right_fails_with_the_reason(
    changes: dict[str, object], reason: str, transport: str
) -> None:
    manifest = manifest_of()
    a, b = Node("a", manifest, filled=True).open(complete=True), Node("b", manifest, filled=False)
    async with serving(a, b.open(complete=False)), b.runner(transport=transport) as runner:
        runner.add_source(a.grant(**changes))  # type: ignore[arg-type]
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert (failed.lease, failed.reason) == ("from-a", reason)
        assert not runner.report().bytes_read


async def test_a_source_that_never_gets_what_it_lacks_is_given_up(transport: str) -> None:
    """It says that it is being filled, and is not. Another source has everything; nobody would look
    there.
    """
    manifest = manifest_of()
    a, b, c = (Node(name, manifest, filled=name != "c") for name in "abc")
    async with (
        serving(a.open(complete=False), b.open(complete=True), c.open(complete=False)),
        c.runner(transport=transport, patience_s=0.3) as runner,
    ):
        a.make_available(0, 1)
        runner.add_source(a.grant(complete=False))
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert (failed.reason, runner.report().chunks_verified) == ("starved", 2)
        runner.add_source(b.grant())
        await finish(runner)
    assert c.arrays == a.arrays


class Late:
    """A channel of a source that lacks something, and says so only once others have nothing to do
    and it may (`may_say`); or fails then.
    """

    others_rest = threading.Event()
    may_say = threading.Event()
    fails = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.submit, self.close = channel.submit, channel.close

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        answer = self._channel.receive(bytes_max)
        if isinstance(answer, Lacking):
            assert self.others_rest.wait(WAIT_S)
            assert self.may_say.wait(WAIT_S)
            if self.fails:
                raise ReadFailure("lost", "it is gone")
        return answer


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    class Its(Late):
        others_rest, may_say = threading.Event(), threading.Event()

    waits = PullRunner._wait

    def waiting(runner: PullRunner) -> float:
        Its.others_rest.set()  # under the lock, which is free once this lane is to be woken
        return waits(runner)

    monkeypatch.setattr(PullRunner, "_wait", waiting)
    return Its


def reading_late(
    transport: str, late: type[Late], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Node], PullRunner]:
    """Nodes a, which lacks the last chunk, b and c; and what reads into c."""
    manifest = manifest_of()
    a, b, c = (Node(name, manifest, filled=name != "c") for name in "abc")
    a.open(complete=False).make_available(*range(CHUNKS - 1))
    b.open(complete=True)
    runner = c.open(complete=False).runner(transport=transport, batch_bytes=TOTAL)
    (way,) = c.ways
    opens = way.open
    monkeypatch.setattr(way, "open", lambda *what: late(opens(*what)))
    return [a, b, c], runner


@pytest.mark.parametrize("fails", [False, True])
async def test_a_source_with_nothing_to_do_brings_what_another_turns_out_not_to_bring(
    transport: str, late: type[Late], monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    late.fails = fails
    late.may_say.set()
    (a, b, c), runner = reading_late(transport, late, monkeypatch)
    async with serving(a, b, c), runner:
        runner.add_source(a.grant(complete=False))
        await until(lambda: runner.report().chunks_verified == CHUNKS - 1)
        runner.add_source(b.grant())  # the last chunk is asked for at the first source
        if fails:
            assert isinstance(await next_event(runner), SourceFailed)
        await finish(runner)
        last = a.memory.sizes[-1]
        assert [each.bytes_read for each in runner.report().sources] == [TOTAL - last, last]
    assert c.arrays == a.arrays


async def test_a_source_that_is_dropped_while_it_has_nothing_to_do_is_left_at_once(
    transport: str, late: type[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b, c), runner = reading_late(transport, late, monkeypatch)
    async with serving(a, b, c), runner:
        runner.add_source(a.grant(complete=False))
        await until(lambda: runner.report().chunks_verified == CHUNKS - 1)
        runner.add_source(b.grant())
        await until(late.others_rest.is_set)
        runner.drop_source(LeaseId("from-b"))
        await until(lambda: runner.report().sources[1].outcome != "reading")
        a.make_available(CHUNKS - 1)
        late.may_say.set()
        await finish(runner)
    assert c.arrays == a.arrays


async def test_readers_that_together_hold_everything_complete_one_another(transport: str) -> None:
    """A wait cycle of three, and no chunk that waits for itself (R9)."""
    manifest = manifest_of()
    nodes = [Node(name, manifest, filled=True).open(complete=False) for name in "abc"]
    whole = [bytes(array) for array in nodes[0].arrays]
    held = [(0, 3, 6), (1, 4, 7, 9), (2, 5, 8, 10)]
    for node, chunks in zip(nodes, held, strict=True):
        node.make_available(*chunks)
        for chunk in set(range(CHUNKS)) - set(chunks):
            node.memory.buffer(chunk)[:] = bytes(node.memory.sizes[chunk])
    async with serving(*nodes), AsyncExitStack() as stack:
        runners = [
            await stack.enter_async_context(node.runner(transport=transport, verified=chunks))
            for node, chunks in zip(nodes, held, strict=True)
        ]
        for me, runner in enumerate(runners):
            runner.add_source(nodes[(me + 1) % 3].grant(complete=False))
        for runner in runners:
            await finish(runner)
        assert [runner.report().reread_bytes for runner in runners] == [0, 0, 0]
        assert all([bytes(array) for array in node.arrays] == whole for node in nodes)


@pytest.mark.parametrize("when", ["connecting", "reading"])
async def test_cancelling_ends_all_lanes(when: str, transport: str) -> None:
    manifest = manifest_of()
    a = Node("a", manifest, filled=True).open(complete=False)
    b = Node("b", manifest, filled=False).open(complete=False)
    async with serving(a, b):
        with anyio.CancelScope() as scope:
            async with b.runner(transport=transport) as runner:
                runner.add_source(a.grant())
                if when == "reading":
                    a.make_available(0)
                    await until(lambda: b.has(0))
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        before = [bytes(array) for array in b.arrays]
        a.make_available(*range(CHUNKS))
        await until(lambda: "0 lanes" in repr(a.owner))
        assert [bytes(array) for array in b.arrays] == before


async def test_a_report_says_how_many_parts_of_tensors_each_source_of_another_layout_gave() -> None:
    its = setting()
    counts = [(chunk + 1, 100 * chunk) for chunk in range(its.reader.manifest.chunk_count)]
    for node in (its.a, its.b):
        node.open(complete=True)
    its.reader.open(complete=False)
    runner = its.reader.runner(selections=its.parts, counts=counts)
    async with serving(its.a, its.b, its.reader), runner:
        runner.add_source(its.grant(its.a))
        runner.add_source(its.grant(its.b))
        await finish(runner)
        told = {each.name: (each.cells, each.runs) for each in runner.report().sources}
    wanted = [[counts[chunk] for chunk in part.chunks] for part in its.parts.values()]
    assert told == {
        name: (sum(cells for cells, _ in each), sum(runs for _, runs in each))
        for name, each in zip("ab", wanted, strict=True)
    }
