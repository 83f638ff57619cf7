"""Reading one-sidedly: by several threads, from sources that lie or change, and what happens where
it cannot be done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import anyio
import anyio.to_thread
import pytest

from tensorhub.api.hub import Hub
from tensorhub.messages import ChunksFollow, ChunksLie, TransportReply
from tensorhub.runtime.data import lanes as lanes_module, source_lane as lane_module
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.transport import cma, generation_words
from tensorhub.transport.cma import DIALECT, MemoryIs
from tensorhub.transport.generation_words import GenerationWords, Header
from tests.rig import cluster, holds, tensors, worker_of
from tests.runtime.data_rig import SIZES, Node, answers, finish, manifest_of, next_event, serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(cma.fault_here() is not None, reason=str(cma.fault_here())),
]
TOTAL = sum(SIZES)
MANY = (10, 300 * 4096 + 5, 1, 100 * 4096)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small fills are helped, and each thread takes a little at a time."""
    monkeypatch.setattr(lanes_module, "HELP_BYTES", 1)
    for most in ("FIRST_BYTES", "CACHED_BYTES", "LARGE_BYTES"):
        monkeypatch.setattr(lane_module, most, 8192)


# -------------------------------------------------------------------------------------------------
# several threads


@pytest.mark.parametrize("digest", ["xxh3-64", "none"])
@pytest.mark.parametrize("batch_bytes", [1, 40_000, 2**20])
async def test_several_threads_read_from_one_source(
    helped: None, digest: str, batch_bytes: int
) -> None:
    manifest = manifest_of(MANY, digest)  # type: ignore[arg-type]
    a, b = Node("a", manifest, filled=True).open(complete=True), Node("b", manifest, filled=False)
    async with (
        serving(a, b.open(complete=False)),
        b.runner(transport="cma", lanes=4, batch_bytes=batch_bytes) as runner,
    ):
        runner.add_source(a.grant())
        await finish(runner)
    report = runner.report()
    assert b.arrays == a.arrays
    assert (report.bytes_read, report.reread_bytes, report.retries) == (sum(MANY), 0, 0)
    assert [(source.bytes_read, source.outcome) for source in report.sources] == [
        (sum(MANY), "used")
    ]


async def test_a_source_with_several_threads_fails_once(helped: None) -> None:
    manifest = manifest_of(MANY)
    a, b = Node("a", manifest, filled=True).open(complete=False), Node("b", manifest, filled=False)
    a.make_available(*range(len(manifest.chunks)))
    a.memory.buffer(200)[0] ^= 1
    async with serving(a, b.open(complete=False)), b.runner(transport="cma", lanes=4) as runner:
        runner.add_source(a.grant())
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert (failed.reason, failed.chunk) == ("corrupt", 200)
        assert runner.report().sources[0].outcome == "corrupt"
        a.memory.buffer(200)[0] ^= 1
        runner.add_source(a.grant("again"))
        await finish(runner)  # the next event: of the first source there is no other one
        assert runner.report().reread_bytes == 0
    assert b.arrays == a.arrays


# -------------------------------------------------------------------------------------------------
# sources that lie


def lying(
    a: Node, *said: Callable[[GenerationWords], TransportReply | ChunksLie | ChunksFollow]
) -> threading.Thread:
    """A source that says this, one after the other, to whatever it is asked."""
    words = GenerationWords()
    words.set(a.registration, a.generation)
    says = [lambda connection, make=make: connection.send(make(words)) for make in said]
    return answers(a.listener, *says, incarnation=a.incarnation)


def header(words: GenerationWords) -> TransportReply:
    return DIALECT.reply(0, MemoryIs(*words.header))


def lie(
    a: Node, *chunks: int, request: int = 0, address: int | None = None, word: int | None = None
) -> Callable[[GenerationWords], ChunksLie]:
    def make(words: GenerationWords) -> ChunksLie:
        places = tuple(
            [
                (chunk, 0, a.memory.address(chunk) if address is None else address)
                for chunk in chunks
            ]
        )
        return ChunksLie(request, places, words.address(a.registration) if word is None else word)

    return make


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (lambda a: [lie(a, 5)], "lost"),
        (lambda a: [lie(a, 0, 0)], "lost"),
        (lambda a: [lie(a)], "lost"),
        (lambda a: [lie(a, 0, request=9)], "lost"),
        (lambda a: [lambda words: ChunksFollow(0, ((0, 0),))], "lost"),
        (lambda a: [header], "lost"),
        (lambda a: [lie(a, 0, address=1)], "lost"),
        (lambda a: [lie(a, 0, address=2**62)], "lost"),
        (lambda a: [lie(a, 0, word=1)], "lost"),
        (lambda a: [lie(a, 0, word=a.memory.address(4))], "refused"),
    ],
)
async def test_a_source_that_lies_is_left(
    said: Callable[[Node], list[Callable[[GenerationWords], ChunksLie]]], reason: str
) -> None:
    """Nothing that it says makes a byte count, or be written where it was not asked for."""
    manifest = manifest_of(digest="none")
    a, b = Node("a", manifest, filled=True), Node("b", manifest, filled=False)
    source = lying(a, header, *said(a))
    async with b.runner(transport="cma", batch_bytes=1) as runner:
        runner.add_source(a.grant())
        failed = await next_event(runner)
        assert isinstance(failed, SourceFailed)
        assert failed.reason == reason
        assert runner.report().bytes_verified == 0
    await anyio.to_thread.run_sync(source.join)
    a.listener.close()
    b.listener.close()
    assert not any(map(any, b.arrays[1:]))


# -------------------------------------------------------------------------------------------- where
# it cannot be done


def wrong_nonce(header: Header) -> Header:
    return header._replace(nonce=os.urandom(generation_words.NONCE_BYTES))


def wrong_process(header: Header) -> Header:
    return header._replace(pid=2**22 + 1)  # above every pid_max


def wrong_address(header: Header) -> Header:
    return header._replace(address=4096)


def owner_of(hub: Hub) -> GenerationWords:
    words = worker_of(hub)._owner._words
    assert words is not None
    return words


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (wrong_nonce, "another one here"),
        (wrong_process, "no such process"),
        (wrong_address, "Bad address"),
    ],
)
async def test_another_way_is_taken_and_the_reason_logged_once(
    spoil: Callable[[Header], Header], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster("trainer", "reader") as c:
        trainer, reader = c.hubs
        source, mine = await trainer.register("m", tensors(1)), tensors()
        owner_of(trainer).header = spoil(owner_of(trainer).header)
        weights = await reader.register("m", mine)
        for version in (1, 2):
            await source.publish(version)
            report = await weights.update()
            assert [(source.transport, source.outcome) for source in report.sources] == [
                ("tcp", "used")
            ]
            assert holds(mine, 1)
            await source.unpublish()
    said = [record for record in caplog.records if "transport_unusable" in record.getMessage()]
    assert [
        (record.levelname, "transport='cma' source='trainer'" in record.getMessage())
        for record in said
    ] == [("WARNING", True)]
    assert says in said[0].getMessage()


async def test_nobody_is_told_addresses_over_another_hosts_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tensorhub.runtime.data.acceptor.sockets.is_local", lambda connection: False
    )
    async with cluster("trainer", "reader") as c:
        trainer, reader = c.hubs
        source = await trainer.register("m", tensors(1))
        await source.publish(1)
        weights = await reader.register("m", tensors())
        assert [source.transport for source in (await weights.replicate()).sources] == ["tcp"]
