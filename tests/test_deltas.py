"""Versions as deltas between sites: what a caller sees. Every reader's bytes are compared whole."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import StateError
from tensorhub.runtime.data.deltas import UNASKED_MAX
from tensorhub.transport.base import Arrival
from tensorhub.transport.pace import Paces
from tensorhub.transport.tcp import TcpChannel
from tensorhub.types import DeltaUse, FetchReport, Location, Options, Purpose, RegistrationId
from tests.rig import CHUNK_BYTES, OPTIONS, Tensors, equal, nothing_left, until, worker_of

pytestmark = pytest.mark.anyio
pytest.importorskip("zstandard", reason="the extra delta is not installed")

NBYTES = 12 * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=2 * NBYTES)


@dataclass
class Sites:
    """A trainer in one site, and readers in others; all of them hold version 1."""

    hubs: list[Hub]
    source: Weights
    trained: Tensors
    readers: list[Weights]
    read: Sequence[Tensors]

    def step(self, share: float = 0.01, seed: int = 0) -> None:
        """Change that share of the words by one."""
        rng = np.random.default_rng(seed)
        for tensor in self.trained.values():
            words = tensor.view(np.uint16)
            words[rng.random(words.size) < share] += 1

    async def publish(self, version: int, share: float = 0.01) -> None:
        async with self.source.mutate(version):
            self.step(share, version)

    async def update(self, version: int, reader: int = 0) -> FetchReport:
        report = await self.readers[reader].update(version)
        assert equal(self.read[reader], self.trained)
        return report

    async def ready(self) -> None:
        """The trainer has kept what it needs for the next version's deltas."""
        worker, member = worker_of(self.hubs[0]), self.source._handle.member
        registration = RegistrationId(member.shard.registration)
        kept = worker._owner.deltas
        await until(
            lambda: (
                kept.is_begun(registration)
                and member.content is not None
                and not kept.missing(registration, member.content.generation)
            )
        )

    async def first_deltas(self) -> None:
        """Publish versions 2 and 3: readers ask for deltas at 2, and get them at 3."""
        await self.publish(2)
        await self.update(2)
        await self.ready()
        await self.publish(3)


def contents(seed: int = 1) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 256, 4 * CHUNK_BYTES, np.uint8) for name in ("a", "b", "c")}


@contextlib.asynccontextmanager
async def sites(
    trainer: Options = HOSTED, *readers: Options, token: str = ""
) -> AsyncIterator[Sites]:
    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(tensorhub.serve(token=token, options=OPTIONS))
        hubs = []
        for number, options in enumerate((trainer, *(readers or (OPTIONS,)))):
            here = Location(site=f"site-{number}", host=f"host-{number}")
            joined = tensorhub.connect(
                coordinator.address, name=f"w{number}", location=here, options=options, token=token
            )
            hubs.append(await stack.enter_async_context(joined))
        trained = contents()
        source = await hubs[0].register("m", trained)
        await source.publish(1)
        read = [{name: np.zeros_like(each) for name, each in trained.items()} for _ in hubs[1:]]
        holders = [
            await hub.register("m", mine, group=f"r{number}")
            for number, (hub, mine) in enumerate(zip(hubs[1:], read, strict=True))
        ]
        for each in holders:
            await each.replicate(1)
        yield Sites(hubs, source, trained, holders, read)


async def test_a_reader_in_another_site_gets_what_has_changed() -> None:
    async with sites() as s:
        await s.first_deltas()
        report = await s.update(3)
    assert report.bytes_saved + report.bytes_read == NBYTES
    assert report.bytes_read < NBYTES / 10
    assert (report.retries, report.reread_bytes) == (0, 0)
    assert report.codec_s > 0
    assert report.verified_by == "publisher"
    assert report.changed_words == pytest.approx(0.005, rel=0.2)  # one of two bytes of a word
    assert report.bytes_by_kind == {"live": report.bytes_read}
    assert [source.deltas for source in report.sources] == [DeltaUse.USED]


async def test_a_reader_that_is_several_versions_behind_gets_a_chain() -> None:
    async with sites() as s:
        await s.first_deltas()
        await s.ready()
        await s.publish(4)
        await s.ready()
        await s.publish(5)
        report = await s.update(5)
    assert 0 < report.bytes_read < NBYTES / 4
    assert report.retries == 0


async def test_a_version_that_has_changed_everywhere_costs_no_more_than_a_whole_one() -> None:
    async with sites() as s:
        await s.first_deltas()
        await s.update(3)
        await s.ready()
        async with s.source.mutate(4):
            for name, tensor in contents(seed=4).items():
                s.trained[name][:] = tensor
        report = await s.update(4)
    assert report.bytes_read <= NBYTES
    assert report.retries == 0


@pytest.mark.parametrize("off_at", ["source", "reader"])
async def test_deltas_can_be_switched_off_at_either_end(off_at: str) -> None:
    off = replace(HOSTED, deltas="off")
    async with sites(*((off, OPTIONS) if off_at == "source" else (HOSTED, off))) as s:
        for version in (2, 3, 4):
            await s.publish(version)
            report = await s.update(version)
            assert (report.bytes_read, report.changed_words) == (NBYTES, None)
            why = DeltaUse.NONE_SENT if off_at == "source" else DeltaUse.OFF
            assert [source.deltas for source in report.sources] == [why]


async def test_where_whole_chunks_come_sooner_none_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sites() as s:
        await s.first_deltas()
        monkeypatch.setattr(Paces, "prefers_deltas", lambda *_: False)
        (source,) = (await s.update(3)).sources
    assert (source.deltas, source.bytes_read) == (DeltaUse.FAST_LINK, NBYTES)


async def test_without_room_whole_versions_are_read_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "tensorhub")
    async with sites(replace(OPTIONS, host_memory_bytes=NBYTES)) as s:
        for version in (2, 3, 4):
            await s.publish(version)
            assert (await s.update(version)).bytes_read == NBYTES
    assert caplog.text.count("deltas_not_kept") == 1
    assert str(NBYTES + NBYTES // 4) in caplog.text


async def test_a_base_that_was_written_costs_a_retry_and_no_wrong_byte() -> None:
    """A caller may write memory that it has promised to leave alone."""
    async with sites() as s:
        await s.first_deltas()
        s.read[0]["b"][5] ^= 1  # numpy counts no writes
        report = await s.update(3)
        assert report.retries == 1
        assert CHUNK_BYTES < report.bytes_read < 2 * CHUNK_BYTES + NBYTES / 10
        assert [each.outcome for each in report.sources] == ["used"]  # no source is blamed


async def test_a_reader_that_asks_while_the_memory_is_written_is_heard_the_next_time() -> None:
    async with sites() as s:
        member = s.source._handle.member
        registration = RegistrationId(member.shard.registration)
        kept, wanted = worker_of(s.hubs[0])._owner.deltas, list[RegistrationId]()
        on_wanted, kept.on_wanted = kept.on_wanted, wanted.append
        await s.publish(2)
        await s.update(2)
        assert wanted == [registration]
        kept.on_wanted = on_wanted
        async with s.source.mutate(3):
            on_wanted(registration)  # the notice comes late
            await until(lambda: not kept._histories[registration].is_asked_for)
            s.step(seed=3)
        await s.update(3)
        await s.ready()
        await s.publish(4)
        assert (await s.update(4)).bytes_saved > 0


async def test_another_copy_takes_the_room_of_deltas() -> None:
    async with sites(replace(OPTIONS, host_memory_bytes=NBYTES + NBYTES // 2)) as s:
        await s.first_deltas()
        await s.update(3)
        trainer = worker_of(s.hubs[0])
        trainer.copies.budget.reserve("copy", Purpose.RETENTION, NBYTES)
        registration = RegistrationId(s.source._handle.member.shard.registration)
        assert not trainer._owner.deltas.is_begun(registration)
        await s.publish(4)
        assert (await s.update(4)).bytes_read == NBYTES
        trainer.copies.budget.free("copy")


async def test_where_no_reader_asks_any_more_none_is_made() -> None:
    async with sites() as s:
        await s.first_deltas()
        await s.update(3)
        trainer = worker_of(s.hubs[0])
        registration = RegistrationId(s.source._handle.member.shard.registration)
        for version in range(4, 5 + UNASKED_MAX):
            await s.publish(version)
        assert not trainer._owner.deltas.is_begun(registration)
        assert trainer.copies.budget.lend("another", HOSTED.host_memory_bytes)
        trainer.copies.budget.take_back("another")
        assert (await s.update(4 + UNASKED_MAX)).bytes_read == NBYTES  # it asks
        await s.ready()
        await s.publish(5 + UNASKED_MAX)
        assert (await s.update(5 + UNASKED_MAX)).bytes_saved > 0


async def test_after_a_rollback_the_next_version_is_right() -> None:
    async with sites() as s:
        await s.first_deltas()
        await s.update(3)
        await s.hubs[0].rollback("m", to=2)
        await s.publish(3, share=0.02)
        await s.update(3)


async def test_a_publisher_that_joins_anew_has_no_base_and_sends_whole_chunks() -> None:
    async with sites() as s:
        await s.first_deltas()
        await s.update(3)
        await s.source.close()
        again = await s.hubs[0].register("m", s.trained)
        s.step(seed=4)
        await again.publish(4)
        assert (await s.update(4)).bytes_read == NBYTES


@pytest.mark.parametrize("is_written", [False, True], ids=["untouched", "written meanwhile"])
async def test_after_a_broken_update_the_rest_still_comes_as_deltas(
    monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """What the broken update has left of either version is digested before it counts."""
    received, arrived = TcpChannel._receive_deltas, list[int]()

    def breaks(channel: TcpChannel, bytes_max: int, wait_s: float) -> Arrival:
        if len(arrived) == 4:
            raise StateError("this process lacks something")
        arrival = received(channel, 1, wait_s)
        arrived.extend(chunk for chunk, _ in arrival.chunks)
        return arrival

    async with sites() as s:
        await s.first_deltas()
        monkeypatch.setattr(TcpChannel, "_receive_deltas", breaks)
        with pytest.raises(StateError) as caught:
            await s.readers[0].update(3)
        assert caught.value.memory == "torn"
        monkeypatch.undo()
        if is_written:
            s.read[0]["a"][5] ^= 1  # of a chunk that has arrived
            s.read[0]["c"][-5] ^= 1  # of one that has not
        report = await s.update(3)
    whole = 2 * CHUNK_BYTES if is_written else 0
    assert whole < report.bytes_read < whole + NBYTES / 10
    assert report.retries == 0


@pytest.mark.parametrize("how", ["staged", "prefetch"])
async def test_a_copy_beside_the_tensors_is_made_of_what_they_hold(how: str) -> None:
    async with sites(HOSTED, HOSTED) as s:
        await s.first_deltas()
        if how == "staged":
            report = await s.readers[0].update(3, staged=True)
        else:
            report = await s.readers[0].prefetch(3)
            assert report is not None
            await s.update(3)
        assert equal(s.read[0], s.trained)
    assert 0 < report.bytes_read < NBYTES / 10
    assert report.retries == 0
