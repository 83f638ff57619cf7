"""Archived versions that readers read out of the bucket by themselves."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

import anyio
import pytest

from tensorhub import deltas
from tensorhub.api.hub import Hub
from tensorhub.archives.catalogue import Key
from tensorhub.archives.store import Store
from tensorhub.archives.writing import Archive
from tensorhub.errors import ArchiveUnavailable, StateError
from tensorhub.runtime.worker.archived_copies import ArchivedShard
from tensorhub.transport import archive
from tensorhub.transport.archive import ArchivedPlace, ArchiveTransport
from tensorhub.transport.base import Cutter, NotShared, ReadFailure
from tensorhub.transport.registry import Local
from tensorhub.types import FetchReport, Incarnation, Options, archive_place
from tests import rig
from tests.archives.conftest import s3
from tests.archives.servers import S3
from tests.rig import OPTIONS, Tensors, cluster, connect, equal, tensors, until, worker_of
from tests.test_archived_copies import HOSTED, Bucket, add, archived_of, content_of, loaded

pytest.importorskip("obstore", reason="obstore is not installed")
pytestmark = pytest.mark.anyio
__all__ = ["s3"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def url(tmp_path: Path) -> str:
    Store(f"file://{tmp_path}/archives", writable=True)
    return f"file://{tmp_path}/archives"


@pytest.fixture(params=["file", "s3"])
def any_url(request: pytest.FixtureRequest, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return url
    server: S3 = request.getfixturevalue("s3")
    # the client closes its idle connections when it is dropped, in a thread of its own
    monkeypatch.setattr(rig, "open_files", dict)
    for name, value in server.options.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    return f"{server.url}/{token_hex(4)}"


@dataclass
class Archived:
    """Versions 1 (an anchor) and 2 (a delta), in a bucket. The archive's worker sends them out of
    `buckets`.
    """

    hub: Hub
    reader: Hub
    contents: list[Tensors]
    buckets: list[Bucket]

    async def read(self, version: int = 1) -> FetchReport:
        mine = tensors()
        weights = await self.reader.register("m", mine, spot=True)
        report = await weights.replicate(version)
        assert equal(mine, self.contents[version - 1])
        await weights.close(abandon=True)
        return report


def ways(report: FetchReport) -> list[tuple[str, str, str]]:
    return [(each.name, each.transport, each.outcome) for each in report.sources]


@asynccontextmanager
async def archived(
    url: str,
    direct: tuple[str, ...],
    placed: Callable[[ArchivedPlace], ArchivedPlace] = lambda place: place,
    **options: float,
) -> AsyncIterator[Archived]:
    """`placed`: what the worker says of a version's place."""
    reads = replace(OPTIONS, direct=direct, **options)  # type: ignore[arg-type]
    writer, memory = Archive(Store(url, writable=True), "m", "cluster", "host"), tensors(7)
    contents, buckets, shards = list[Tensors](), list[Bucket](), list[ArchivedShard]()

    def view(rank: int, region: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        yield [*memory.values()][region].data[offset : offset + nbytes]

    async with (
        cluster("trainer") as c,
        connect(c.address, "archive", HOSTED) as hub,
        connect(c.address, "reader", reads) as reader,
    ):
        source = await c.hubs[0].register("m", memory)
        for number in (1, 2):
            async with source.mutate(number):
                memory["b"][5] += number
            contents.append({name: each.copy() for name, each in memory.items()})
            shard, bucket = archived_of(source)
            buckets.append(bucket)
            if number == 1:
                writer.add_anchor(content_of(shard, None), view)
            else:
                pairs = zip(buckets[0].chunks, bucket.chunks, strict=True)
                frames = [_frame(*pair) for pair in pairs]
                writer.add_delta(content_of(shard, Key(0, 1)), Key(0, 1), [iter(frames)])
            place = ArchivedPlace(url, "m", 0, number, 0)
            shards.append(replace(shard, place=placed(place)))
        await add(hub, *shards)
        await source.close(abandon=True)
        yield Archived(hub, reader, contents, buckets)


def _frame(old: bytes, new: bytes) -> bytes | None:
    if old == new:
        return None
    return deltas.encode(memoryview(old), memoryview(new), 1) or new


class Hooked(Store):
    """The reader's."""

    hook: Callable[[str], None]

    def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        type(self).hook(path)
        return super().ranges(path, ranges)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> type[Hooked]:
    monkeypatch.setattr(archive, "Store", Hooked)
    return Hooked


async def test_a_reader_reads_anchor_and_delta_out_of_the_bucket(any_url: str) -> None:
    async with archived(any_url, (any_url,)) as at:
        for version in (1, 2, 1):
            report = await at.read(version)
            assert ways(report) == [("archive", "archive", "used")]
            assert report.sources[0].kind == "archive"
            assert report.bytes_read == sum(map(len, at.buckets[0].chunks))
        assert [bucket.reads for bucket in at.buckets] == [[], []]
        assert loaded(at.hub) == 0


@pytest.mark.parametrize("direct", [(), ("s3://another",), ("{url}/deeper",), ("{url}-2",)])
async def test_a_reader_goes_to_no_place_that_it_was_not_given(
    url: str, direct: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Store:
        raise AssertionError("it was opened")

    monkeypatch.setattr(archive, "Store", refused)
    async with archived(url, tuple(each.format(url=url) for each in direct)) as at:
        assert ways(await at.read()) == [("archive", "tcp", "used")]


@pytest.mark.parametrize(
    ("direct", "url", "may"),
    [
        ("s3://runs", "s3://runs", True),
        ("s3://runs/", "s3://runs/a/b", True),
        ("s3://runs/a", "s3://runs/a/", True),
        ("s3://runs/a%20b", "s3://runs/a b/c", True),
        ("file:///", "file:///etc", True),
        ("s3://runs/a", "s3://runs/ab", False),
        ("s3://runs/a", "s3://runs", False),
        ("s3://runs", "s3://runs2", False),
        ("s3://runs", "s3://runs@other", False),
        ("s3://runs", "s3://runs:80@other/x", False),
        ("s3://runs", "s3://other/runs", False),
        ("s3://runs", "gs://runs", False),
        ("s3://runs/a", "s3://runs/a/../b", False),
        ("s3://runs/a", "s3://runs/a/%2e%2e/b", False),
        ("s3://runs/a", "s3://runs/a/%2E./b", False),
        ("s3://runs/a", "s3://runs/a//b", False),
        ("s3://runs/a", "s3://runs/a?versionId=1", False),
        ("s3://runs/a", "s3://runs/a#b", False),
        ("s3://runs/a", "s3://runs/a\\..\\b", False),
        ("s3://runs/a", "s3://ru\nns/a", False),
        ("file:///data", "file:///data/..%2fetc", False),
        ("file:///data", "file:///database", False),
        ("file:///data", "file://host/data", False),
        ("file:///data", "FILE:///data", False),
        ("s3://runs", "http://169.254.169.254/latest/meta-data", False),
        ("s3://runs", "", False),
    ],
)
def test_a_place_is_given_by_whole_names(direct: str, url: str, may: bool) -> None:
    transport = ArchiveTransport(
        Local(Incarnation("reader"), (b"",), Options(direct=(direct, "az://unlike")))
    )
    place = ArchivedPlace(url, "m", 0, 1, 0)
    if may:
        transport._check_allowed(place)
    else:
        with pytest.raises(NotShared, match=r"none of Options\.direct"):
            transport._check_allowed(place)
    transport.close()


@pytest.mark.parametrize("wrong", ["s3://runs", ["s3://runs"], ("runs",), ("s3://a/../b",), (3,)])
def test_what_is_no_place_is_refused(wrong: object) -> None:
    with pytest.raises(StateError, match=r"Options\.direct: give a tuple"):
        Options(direct=wrong)  # type: ignore[arg-type]
    assert archive_place("file:///a/b/") == ("file", "", "a", "b")


@pytest.mark.parametrize(
    "placed",
    [
        lambda place: replace(place, number=3 - place.number),
        lambda place: replace(place, number=9),
        lambda place: replace(place, model="another"),
        lambda place: replace(place, shard=1),
        lambda place: replace(place, url=place.url + "/deeper"),
    ],
    ids=["number", "unknown", "model", "shard", "directory"],
)
async def test_what_is_not_that_version_is_not_read(
    url: str, placed: Callable[[ArchivedPlace], ArchivedPlace], hooked: type[Hooked]
) -> None:
    hooked.hook = lambda path: None
    async with archived(url, (url,), placed) as at:
        for version in (1, 2):
            assert ways(await at.read(version)) == [("archive", "tcp", "used")]


def damage(url: str) -> str:
    """A byte of the anchor; returns its name."""
    (file,) = Path(url.removeprefix("file://")).rglob("*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    return file.name


async def test_a_damaged_object_is_named_and_the_call_goes_on_by_tcp(
    url: str, hooked: type[Hooked], monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked.hook = lambda path: None
    told = list[str]()
    taken = ArchiveTransport._failed

    def failed(self: ArchiveTransport, right: object, why: Exception) -> None:
        told.append(str(why))
        taken(self, right, why)  # type: ignore[arg-type]

    monkeypatch.setattr(ArchiveTransport, "_failed", failed)
    async with archived(url, (url,)) as at:
        name = damage(url)
        report = await at.read(2)
        assert ways(report) == [("archive", "archive", "lost"), ("archive", "tcp", "used")]
        assert [name in each.fault for each in report.sources] == [True, False]
        assert name in told[0]
        assert "was damaged" in told[0]
        assert ways(await at.read(2)) == [("archive", "tcp", "used")]


async def test_a_bucket_that_fails_is_left_within_the_call(url: str, hooked: type[Hooked]) -> None:
    """While chunks are read; for some time no version is looked for there, then."""
    fails = list[bool]()

    def fail(path: str) -> None:
        if fails:
            raise ArchiveUnavailable("the bucket is closed", retryable=True)

    hooked.hook = fail
    async with archived(url, (url,)) as at:
        assert ways(await at.read(2)) == [("archive", "archive", "used")]
        fails.append(True)
        report = await at.read(2)
        assert ways(report) == [("archive", "archive", "lost"), ("archive", "tcp", "used")]
        assert ways(await at.read(1)) == [("archive", "tcp", "used")]


async def test_a_bucket_that_cannot_be_opened_costs_no_try(url: str, hooked: type[Hooked]) -> None:
    def fail(path: str) -> None:
        raise ArchiveUnavailable("the bucket is closed", retryable=True)

    hooked.hook = fail
    async with archived(url, (url,)) as at:
        assert ways(await at.read(2)) == [("archive", "tcp", "used")]


def awaited(reader: Hub) -> list[object]:
    """What the bucket has not answered: requests, and threads that open versions."""
    (transport,) = [
        each
        for each in worker_of(reader).channels._transports
        if isinstance(each, ArchiveTransport)
    ]
    opened = [each.readers._open for each in transport._archives.values() if each.readers]
    readers = [each for found in opened for each in found.values()]
    opening = [each for each in threading.enumerate() if "archive-opening" in each.name]
    return [*opening, *(job for each in readers for job in each._asked)]


async def test_a_silent_bucket_is_left_within_the_call(url: str, hooked: type[Hooked]) -> None:
    answers, asked = threading.Event(), list[str]()

    def hang(path: str) -> None:
        if loads:
            asked.append(path)
            assert answers.wait(60)

    hooked.hook = hang
    loads = list[bool]()
    async with archived(url, (url,), stall_timeout_s=0.5) as at:
        assert ways(await at.read(2)) == [("archive", "archive", "used")]
        loads.append(True)
        report = await at.read(2)
        assert ways(report) == [("archive", "archive", "stalled"), ("archive", "tcp", "used")]
        assert asked
        answers.set()
        await until(lambda: not awaited(at.reader))


async def test_a_read_that_is_given_up_ends_while_the_bucket_is_silent(
    url: str, hooked: type[Hooked]
) -> None:
    answers, asked = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        asked.set()
        assert answers.wait(60)

    hooked.hook = hang
    async with archived(url, (url,), stall_timeout_s=60) as at:
        mine = tensors()
        weights = await at.reader.register("m", mine, spot=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(weights.replicate, 1)
            await anyio.to_thread.run_sync(asked.wait)
            tasks.cancel_scope.cancel()
        assert equal(mine, tensors())
        await weights.close(abandon=True)
        answers.set()
        await until(lambda: not awaited(at.reader))


def test_waiting_ends_with_the_first_of_three() -> None:
    from concurrent.futures import Future

    job, cutter = Future[int](), Cutter()
    waiting = archive._Waiting(cutter, 0.01)
    with pytest.raises(ReadFailure, match=r"stalled: the bucket was silent for 0\.01 s"):
        waiting.result(job)
    timer = threading.Timer(0.05, cutter.cut)
    timer.start()
    with pytest.raises(ReadFailure, match="lost: the read was given up"):
        archive._Waiting(cutter, 60).result(job)
    timer.join()
    job.set_result(3)
    assert waiting.result(job) == 3
