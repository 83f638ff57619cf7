"""Stamps: what is in a memory at this moment, read from any thread, and verified afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import tensorhub
from tensorhub import sync
from tensorhub.api.weights import Weights
from tensorhub.errors import (
    ArchiveUnavailable,
    CoordinatorUnavailable,
    IntegrityError,
    InvalidType,
    InvalidValue,
    OperationTimeout,
    StateError,
    VersionUnavailable,
)
from tensorhub.model.digests import pack, root_of
from tensorhub.model.stamps import STAMP_CHARS_MAX, Stamp
from tensorhub.types import RegistrationId, VersionInfo
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    Restartable,
    Tensors,
    all_of,
    begin_store,
    cluster,
    connect,
    gated,
    holds,
    nothing_left,
    published,
    ranks_of,
    tensors,
    until,
    worker_of,
    write,
)
from tests.runtime.data_rig import waited_out_s

HOSTED = replace(OPTIONS, host_memory_bytes=3 * CHUNKS * CHUNK_BYTES)
VERSIONS = 12  # that the race below goes through
SOME = Stamp("m", 0, 1, "content", b"")


def refused(weights: Weights, says: str, *, retryable: bool = False) -> None:
    with pytest.raises(StateError, match=says) as caught:
        weights.stamp()
    assert caught.value.retryable is retryable


# --------------------------------------------------------------------------------------------------
# what a stamp names


async def test_a_stamp_names_the_content_that_is_in_place() -> None:
    async with cluster("trainer", "reader") as c:
        source = await c.hubs[0].register("m", tensors(1))
        refused(source, "holds no version: publish or update first")
        info = await source.publish(1)
        # the publisher has verified nothing
        assert source.stamp() == Stamp("m", 0, 1, info.content_id, b"")
        weights = await c.hubs[1].register("m", tensors(), group="r")
        await weights.replicate()
        assert weights.stamp() == Stamp("m", 0, 1, info.content_id, root_of(_digests(weights)))
        async with source.mutate(2):
            refused(source, "holds no version")
        assert source.stamp().version == 2
        assert weights.stamp().version == 1  # it is still there
        await source.close()
        refused(source, "has ended")


def _digests(weights: Weights) -> bytes:
    member = weights._handle.member
    assert member.in_place is not None
    place = RegistrationId(member.shard.registration), member.in_place.generation
    made = worker_of(weights)._owner.digests(*place)
    return pack([each for each in made or () if each is not None], 8)


async def test_while_a_call_changes_the_memory_there_is_no_stamp() -> None:
    with gated(CHUNKS + 3) as gate:
        async with cluster("trainer", "reader") as c:
            source = await published(c.hubs[0])
            weights = await c.hubs[1].register("m", tensors(), group="r")
            await weights.replicate()
            async with source.mutate(2):
                write(_memory(source), 2)
            seen: list[int] = []

            async def pause(_: VersionInfo) -> None:
                seen.append(weights.stamp().version)  # not a byte has changed yet

            async with anyio.create_task_group() as tasks:

                async def update() -> None:
                    await weights.update(before_write=pause)

                tasks.start_soon(update)
                await until(lambda: gate.holds)
                refused(weights, "a call is changing the memory", retryable=True)
                gate.open()
            assert (seen, weights.stamp().version) == ([1], 2)


def _memory(weights: Weights) -> Tensors:
    found: Tensors = weights._handle.memory._given  # type: ignore[attr-defined]
    return found


async def test_a_staged_update_is_stamped_like_any_other() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        source = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors(), group="r")
        plain = await c.hubs[1].register("m", tensors(), group="p")
        await weights.replicate()
        async with source.mutate(2):
            write(_memory(source), 2)
        await weights.update(staged=True)
        await plain.update()
        assert weights.stamp() == plain.stamp()
        assert weights.stamp().root


async def test_published_memory_that_was_written_has_no_stamp() -> None:
    async with cluster("trainer", "reader") as c:
        source = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors(), group="r")
        await weights.replicate()
        _memory(weights)["a"][0] ^= 1
        mine = await c.hubs[0].register("m", tensors(), group="p")
        await source.close()
        with pytest.raises((VersionUnavailable, IntegrityError, OperationTimeout)):
            await mine.update(1, timeout=waited_out_s(2))  # finds it out
        await until(lambda: weights.state in ("empty", "torn"))
        refused(weights, "no version")


async def test_in_doubt_there_is_no_stamp(tmp_path: Path) -> None:
    coordinator = Restartable(tmp_path)
    async with nothing_left():
        await coordinator.start()
        async with (
            connect(coordinator.address, "trainer", HOSTED) as trainer,
            connect(coordinator.address, "reader", HOSTED) as reader,
        ):
            source = await published(trainer)
            weights = await reader.register("m", tensors(), group="r")
            await weights.replicate()
            async with source.mutate(2):
                write(_memory(source), 2)

            async def pause(_: VersionInfo) -> None:
                await coordinator.stop()
                await until(lambda: "offline" in repr(reader))

            with pytest.raises(CoordinatorUnavailable):
                await weights.update(staged=True, before_write=pause, timeout=waited_out_s(2))
            refused(weights, "outcome of the last call is not known", retryable=True)
            await coordinator.start()
            await until(lambda: weights.state == "ready")
            assert weights.stamp().version == 1
        await coordinator.stop()


async def test_each_rank_stamps_its_own_shard() -> None:
    async with cluster("one", "two") as c:
        trained = await ranks_of(c.hubs, [tensors(1), tensors(2)], "trainer")
        await all_of(*(each.publish(1) for each in trained))
        mine = await ranks_of(c.hubs, [tensors(), tensors()], "rollout")
        await all_of(*(each.replicate() for each in mine))
        first, second = (each.stamp() for each in mine)
        assert first.root != second.root
        assert replace(first, root=b"") == replace(second, root=b"") == trained[1].stamp()
        for stamp in (first, second):
            assert (await tensorhub.check_stamp(stamp, c.hubs[0])).world_size == 2


async def test_what_is_read_in_another_layout_has_no_root() -> None:
    async with cluster("trainer", "reader") as c:
        source = await c.hubs[0].register("m", {"w": np.arange(8, dtype=np.float32)})
        await source.publish(1)
        engine = {"half": np.zeros(4, np.float32)}
        places = {"half": [tensorhub.source("w", shape=(8,))[4:8]]}
        weights = await c.hubs[1].register("m", engine, group="r", sources=places, partial=True)
        await weights.replicate()
        assert engine["half"].tolist() == [4, 5, 6, 7]
        assert weights.stamp() == source.stamp()
        assert (await tensorhub.check_stamp(weights.stamp(), c.hubs[1])).version == 1


async def test_the_lineage_outlives_the_coordinator(tmp_path: Path) -> None:
    coordinator = Restartable(tmp_path)
    async with nothing_left():
        await coordinator.start()
        async with connect(coordinator.address, "trainer") as trainer:
            source = await published(trainer)
            await trainer.rollback("m", to=1)
            async with source.mutate(2):
                write(_memory(source), 2)
            stamp = source.stamp()
            assert (stamp.lineage, stamp.version) == (1, 2)
            await coordinator.restart(trainer)
            assert source.stamp() == stamp
            assert (await tensorhub.check_stamp(stamp, trainer)).lineage == 1
            weights = await trainer.register("m", tensors(), group="r")
            await weights.replicate()
            assert replace(weights.stamp(), root=b"") == stamp
        await coordinator.stop()


# --------------------------------------------------------------------------------------------------
# races


@contextmanager
def watched(weights: Weights, memory: Tensors) -> Iterator[list[int]]:
    """A thread that stamps and reads the bytes all the time: between two equal stamps they are
    that version's. Gives the versions that it has seen.
    """
    seen: list[int] = []
    faults: list[str] = []
    over = threading.Event()

    def stamped() -> Stamp | None:
        try:
            return weights.stamp()
        except StateError:
            return None

    def watch() -> None:
        while not over.is_set():
            before = stamped()
            copies = {name: tensor.copy() for name, tensor in memory.items()}
            if before is not None and before == stamped():
                if not holds(copies, before.version):
                    faults.append(f"{before} with other bytes")
                seen.append(before.version)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
    assert not faults


@pytest.mark.parametrize("staged", [False, True])
async def test_no_stamp_names_bytes_that_are_not_all_there(staged: bool) -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        theirs, mine = tensors(1), tensors()
        source = await c.hubs[0].register("m", theirs)
        await source.publish(1)
        weights = await c.hubs[1].register("m", mine, group="r")
        with watched(weights, mine) as read, watched(source, theirs) as made:
            for version in range(1, VERSIONS):
                if version > 1:
                    async with source.mutate(version):
                        write(theirs, version)
                await weights.update(staged=staged)
                await until(lambda: bool(read) and read[-1] == weights.version)
                await until(lambda: bool(made) and made[-1] == source.version)
                if version % 4 == 0:
                    await weights.unpublish()
                    write(mine, 0)  # the caller's again
    assert [*dict.fromkeys(read)] == [*dict.fromkeys(made)] == [*range(1, VERSIONS)]


# --------------------------------------------------------------------------------------------------
# verifying one


async def test_a_coordinator_verifies_stamps() -> None:
    async with cluster("trainer", "reader") as c:
        hub = c.hubs[1]
        with pytest.raises(VersionUnavailable, match="no model 'm'"):
            await tensorhub.check_stamp(SOME, hub)
        source = await c.hubs[0].register("m", tensors(1))
        info = await source.publish(1)
        weights = await hub.register("m", tensors(), group="r")
        await weights.replicate()
        stamp = weights.stamp()
        assert await tensorhub.check_stamp(stamp, hub) == info
        assert await tensorhub.check_stamp(source.stamp(), hub) == info
        with pytest.raises(IntegrityError, match="another content"):
            await tensorhub.check_stamp(replace(stamp, content_id="forged"), hub)
        with pytest.raises(IntegrityError, match="digests of the stamp's root"):
            await tensorhub.check_stamp(replace(stamp, root=bytes(32)), hub)
        with pytest.raises(VersionUnavailable, match="version 7 of 'm' in lineage 0 is not known"):
            await tensorhub.check_stamp(replace(stamp, version=7), hub)
        with pytest.raises(InvalidType, match=r"Stamp\.parse"):
            await tensorhub.check_stamp(str(stamp), hub)  # type: ignore[arg-type]
        async with source.mutate(2):
            write(_memory(source), 2)
        gone = source.stamp()
        assert (await tensorhub.check_stamp(gone, hub)).version == 2
        await source.unpublish()
        assert (await tensorhub.check_stamp(gone, hub)).version == 2  # though no worker holds it
        await hub.rollback("m", to=1)
        with pytest.raises(VersionUnavailable, match="rolled back"):
            await tensorhub.check_stamp(gone, hub)
        await source.publish(2)
        again = source.stamp()
        assert (again.lineage, again.version) == (1, 2)
        with pytest.raises(VersionUnavailable, match="it knows one of lineage 1"):
            await tensorhub.check_stamp(gone, hub)
        assert (await tensorhub.check_stamp(again, hub)).lineage == 1
        assert (await tensorhub.check_stamp(stamp, hub)).lineage == 0


async def test_versions_that_no_worker_holds_any_more_are_remembered() -> None:
    async with cluster("trainer") as c:
        memory, stamps = tensors(0), list[Stamp]()
        source = await c.hubs[0].register("m", memory)
        for version in range(1, 9):
            async with source.mutate(version):
                write(memory, version)
            stamps.append(source.stamp())
        described = [each.version for each in (await c.hubs[0].describe("m")).versions]
        assert 1 not in described
        for stamp in stamps:
            assert (await tensorhub.check_stamp(stamp, c.hubs[0])).content_id == stamp.content_id
        with pytest.raises(IntegrityError, match="another content"):
            await tensorhub.check_stamp(replace(stamps[0], content_id="forged"), c.hubs[0])
        await c.hubs[0].rollback("m", to=2)
        assert (await tensorhub.check_stamp(stamps[0], c.hubs[0])).version == 1
        with pytest.raises(VersionUnavailable):
            await tensorhub.check_stamp(stamps[3], c.hubs[0])


async def test_a_read_only_token_is_enough() -> None:
    secret = "s" * 32
    async with cluster("trainer", token=secret) as c:
        source = await published(c.hubs[0])
        reader = connect(c.address, "looks", OPTIONS, tensorhub.read_only_token(secret))
        async with reader as hub:
            assert (await tensorhub.check_stamp(source.stamp(), hub)).version == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_archive_verifies_stamps(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra archive is not installed")
    begin_store()
    url = f"file://{tmp_path}/archive"
    async with cluster("trainer", "archiver", "reader", options=HOSTED) as c:
        source = await published(c.hubs[0])
        async with tensorhub.archive(c.hubs[1], "m", url) as archive:
            await archive.wait_for(at_least=1)
            weights = await c.hubs[2].register("m", tensors(), group="r")
            await weights.replicate()
            stamp = weights.stamp()
            info = await tensorhub.check_stamp(stamp, c.hubs[2])
            assert await tensorhub.check_stamp(stamp, archive) == info
        await source.close()
    # everything has ended
    assert (await tensorhub.check_stamp(stamp, url)).content_id == stamp.content_id
    assert sync.check_stamp(stamp, url).version == 1
    for wrong, kind in (
        (replace(stamp, content_id="forged"), IntegrityError),
        (replace(stamp, root=bytes(32)), IntegrityError),
        (replace(stamp, version=2), VersionUnavailable),
        (replace(stamp, lineage=1), VersionUnavailable),
        (replace(stamp, model="other"), VersionUnavailable),
    ):
        with pytest.raises(kind):
            await tensorhub.check_stamp(wrong, url)
    with pytest.raises(ArchiveUnavailable):
        await tensorhub.check_stamp(stamp, f"file://{tmp_path}/none/none")
    with pytest.raises(InvalidValue):
        await tensorhub.check_stamp(stamp, "nowhere")
    with pytest.raises(InvalidType, match="give a hub"):
        await tensorhub.check_stamp(stamp, 7)  # type: ignore[arg-type]


def test_without_an_event_loop() -> None:
    with (
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address, name="one", token="", options=OPTIONS) as hub,
    ):
        source = hub.register("m", tensors(1))
        with pytest.raises(StateError):
            source.stamp()
        info = source.publish(1)
        assert sync.check_stamp(source.stamp(), hub) == info
        with pytest.raises(IntegrityError):
            sync.check_stamp(replace(source.stamp(), content_id="forged"), hub)


# --------------------------------------------------------------------------------------------------
# as text

texts = st.text(
    st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=40
).filter(lambda text: bool(text.strip()) and text.isprintable())
numbers = st.integers(0, 2**63 - 1)
stamps = st.builds(
    Stamp, texts, numbers, numbers, texts, st.just(b"") | st.binary(min_size=32, max_size=32)
)


@given(stamps)
@example(Stamp('a:b/c d%, ;"é', 0, 2**63 - 1, "7f", bytes(32)))
@example(Stamp("\N{GRINNING FACE}" * 512, 0, 0, "c", b""))
def test_a_stamp_is_its_text(stamp: Stamp) -> None:
    text = str(stamp)
    assert Stamp.parse(text) == stamp
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set(" ,;\"'\\")
    assert len(text) <= STAMP_CHARS_MAX


@given(
    st.text(max_size=60) | st.from_regex(r"[ab%:0-9]{0,30}:\d+:\d+:\w*:[0-9a-f]*", fullmatch=True)
)
@example("m:00:1:c:")
@example("m:0:9999999999999999999:c:")
@example("%6d:0:1:c:")  # another text for "m"
@example("m:0:1:c:" + "0" * 63)
@example("%ff:0:1:c:")
@example("%0a:0:1:c:")
@example("m:0:1:" + "c" * 65 + ":")
@example("m:0:1:c:\n")
@example("m" * STAMP_CHARS_MAX + ":0:1:c:")
def test_another_text_is_refused(text: str) -> None:
    try:
        found = Stamp.parse(text)
    except InvalidValue:
        return
    assert str(found) == text


@pytest.mark.parametrize("given_", [None, 7, b"m:0:1:c:"])
def test_what_is_no_text_is_refused(given_: object) -> None:
    with pytest.raises(InvalidType, match="is no stamp"):
        Stamp.parse(given_)  # type: ignore[arg-type]
