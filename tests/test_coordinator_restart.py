"""A coordinator that restarts under real workers: with its state everything goes on, without it
everybody is told.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import CoordinatorUnavailable, LeaseLost
from tensorhub.types import FetchReport, Options, VersionInfo
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    Restartable,
    Tensors,
    all_of,
    connect,
    copies_of,
    gated,
    holds,
    nothing_left,
    published,
    tensors,
    until,
    worker_of,
    write,
)
from tests.runtime.data_rig import waited_out_s
from tests.test_errors import accessed

NBYTES = CHUNKS * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=NBYTES)


@contextlib.asynccontextmanager
async def cluster(
    *names: str, state_dir: Path | None = None, options: Options = OPTIONS
) -> AsyncIterator[tuple[Restartable, list[Hub]]]:
    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        coordinator = Restartable(state_dir)
        await coordinator.start()
        stack.push_async_callback(coordinator.stop)
        yield (
            coordinator,
            [
                await stack.enter_async_context(connect(coordinator.address, name, options))
                for name in names
            ],
        )


async def ranks_of(hubs: list[Hub], group: str, content: int | None = None) -> list[Weights]:
    """Ranks spread over the hubs."""
    world_size = 4
    return [
        await hubs[rank % len(hubs)].register(
            "m", tensors(content), group=group, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]


async def reports_of(ranks: list[Weights], started: anyio.Event) -> list[FetchReport]:
    found: list[FetchReport] = []

    async def fill(rank: Weights) -> None:
        found.append(await rank.replicate())

    async with anyio.create_task_group() as tasks:
        for rank in ranks:
            tasks.start_soon(fill, rank)
        started.set()
    return found


@pytest.mark.parametrize("where", ["one rank", "four ranks", "fetch"])
async def test_fills_in_mid_read_go_on(where: str, tmp_path: Path) -> None:
    """Nothing that was verified is read again, and the caller notices nothing."""
    with gated(3) as gate:
        async with cluster("trainer", "one", "two", state_dir=tmp_path) as (coordinator, hubs):
            ranks = await ranks_of(hubs[1:], "readers")
            source = await hubs[0].register("m", tensors(1))
            if where == "four ranks":
                await source.close()
                sources = await ranks_of(hubs[:1], "trainers", 1)
                await all_of(*(each.publish(1) for each in sources))
            else:
                await source.publish(1)
                ranks = [await hubs[1].register("m", tensors())]
            found: list[FetchReport] = []

            async def fill() -> None:
                if where == "fetch":
                    fetched = await hubs[1].fetch("m")
                    assert holds({name: tensor.numpy() for name, tensor in fetched.items()}, 1)
                    found.append(fetched.report)
                else:
                    found.extend(await reports_of(ranks, anyio.Event()))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fill)
                await until(lambda: gate.holds)
                await coordinator.restart(*hubs)
                gate.open()
            assert [(r.version, r.bytes_read, r.reread_bytes) for r in found] == [
                (1, NBYTES, 0)
            ] * len(found)
            assert len(found) == (4 if where == "four ranks" else 1)


async def test_before_write_runs_once_though_its_coordinator_is_another_one_when_it_returns(
    tmp_path: Path,
) -> None:
    async with cluster("trainer", "reader", state_dir=tmp_path) as (coordinator, hubs):
        mine = tensors(1)
        source = await hubs[0].register("m", mine)
        await source.publish(1)
        weights = await hubs[1].register("m", tensors())
        await weights.replicate()
        async with source.mutate(2):
            write(mine, 2)
        told: list[int] = []

        async def pause(info: VersionInfo) -> None:
            told.append(info.version)
            await coordinator.restart(*hubs)

        report = await weights.update(before_write=pause)
        assert (report.version, told, weights.version) == (2, [2], 2)


# --------------------------------------------------------------------------------------------------
# without its state

LOST = "the coordinator has come back without its state, as a new cluster"


async def test_a_trainer_and_its_readers_are_told_once_and_go_on() -> None:
    """The trainer begins at 1 again: nobody takes that for newer than 7."""
    async with cluster("trainer", "reader", "idle") as (coordinator, hubs):
        mine, theirs = tensors(7), tensors()
        source = await hubs[0].register("m", mine)
        await source.publish(7)
        weights = await hubs[1].register("m", theirs)
        idle = await hubs[2].register("m", tensors())
        await weights.replicate()
        await coordinator.restart(*hubs)
        await until(lambda: (source.state, weights.state) == ("empty", "empty"))
        with pytest.raises(LeaseLost, match=LOST) as caught:
            async with source.mutate(1):
                raise AssertionError("the body must not run")
        assert (caught.value.retryable, caught.value.memory) == (True, "intact")
        async with source.mutate(1):
            write(mine, 1)
        for reader in (weights, idle):
            with pytest.raises(LeaseLost, match=LOST):
                await reader.update()
            assert (await reader.update()).version == 1
        assert holds(theirs, 1)


async def test_calls_that_run_end() -> None:
    with gated(3) as gate:
        async with cluster("trainer", "reader", "other") as (coordinator, hubs):
            source = await published(hubs[0], 7, content=7)
            weights = await hubs[1].register("m", tensors())

            async def replicate() -> None:
                with pytest.raises(LeaseLost, match=LOST) as caught:
                    await weights.replicate()
                assert caught.value.memory == "torn"

            async def fetch() -> None:
                with pytest.raises(LeaseLost, match=LOST) as caught:
                    await hubs[1].fetch("m")
                assert caught.value.memory == "intact"

            async def wait_for() -> None:
                with pytest.raises(LeaseLost, match=f"'m': {LOST}"):
                    await hubs[1].wait_for("m", at_least=8)

            async def watch() -> None:
                watcher = hubs[2].watch("m")
                assert (await anext(watcher)).version == 7
                with pytest.raises(LeaseLost, match=f"'m': {LOST}"):
                    await anext(watcher)
                assert (await anext(watcher)).version == 1

            async with anyio.create_task_group() as tasks:
                for call in (replicate, fetch, wait_for, watch):
                    tasks.start_soon(call)
                await until(lambda: gate.holds and hubs[2].newest("m") is not None)
                await until(lambda: hubs[1]._worker.version_watches.listeners("m") == 1)
                await coordinator.restart(*hubs)
                gate.open()
                with pytest.raises(LeaseLost, match=LOST):
                    await source.publish(1)
                await source.publish(1)
            assert (await weights.update()).version == 1


async def test_what_is_newest_never_goes_back_silently() -> None:
    async with cluster("trainer", "reader") as (coordinator, hubs):
        source, reader = await hubs[0].register("m", tensors(7)), hubs[1]
        await source.publish(7)

        async def ask(how: str) -> int:
            match how:
                case "newest":
                    await until(lambda: reader._worker.version_watches.newest("m") is not None)
                    info = reader.newest("m")
                    assert info is not None
                    return info.version
                case "wait_for":
                    return (await reader.wait_for("m", at_least=1)).version
                case "watch":
                    return [info.version async for info in reader.watch("m")].pop()
                case _:
                    return (await reader.fetch("m")).info.version

        assert (await reader.fetch("m")).info.version == 7
        for how in ("fetch", "newest", "wait_for"):
            await coordinator.restart(*hubs)
            with pytest.raises(LeaseLost):
                await source.publish(1)
            await source.publish(1)
            if how != "fetch":
                await until(lambda: reader._worker.version_watches.newest("m") is not None)
            with pytest.raises(LeaseLost, match=f"'m': {LOST}"):
                await ask(how)
            assert await ask(how) == 1
            assert (await reader.wait_for("m", at_least=1)).version == 1
        await coordinator.restart(*hubs)
        with pytest.raises(LeaseLost, match=f"'m': {LOST}"):
            reader.watch("m")
        reader.watch("m").end()


@pytest.mark.parametrize("restarts", [1, 2])
async def test_a_coordinator_whose_state_is_older_than_it_was_is_a_loss_too(
    tmp_path: Path, restarts: int
) -> None:
    """Its directory was restored from a copy: the numbers may go back. After one restart since, its
    epoch is the one that the worker knows.
    """
    async with cluster("trainer", state_dir=tmp_path / "state") as (coordinator, hubs):
        source = await hubs[0].register("m", tensors(7))
        await coordinator.restart(*hubs)
        await coordinator.stop()
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        await until(lambda: "offline" in repr(hubs[0]))
        for _ in range(restarts):
            await coordinator.start()
            await until(lambda: "online" in repr(hubs[0]))
            await coordinator.stop()
            await until(lambda: "offline" in repr(hubs[0]))
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "copy").rename(tmp_path / "state")
        await coordinator.start()
        with pytest.raises(LeaseLost, match=LOST):
            await source.publish(1)
        assert (await source.publish(1)).version == 1


@pytest.mark.parametrize("remembers", ["held", "watched"])
async def test_a_copy_from_before_a_version_is_a_loss_to_all_once_one_worker_remembers(
    tmp_path: Path, remembers: str
) -> None:
    """Its epoch is newer than what the workers know. A reader that remembers nothing hears of it,
    too, before `latest` goes back.
    """
    state, copy = tmp_path / "state", tmp_path / "copy"
    async with cluster("trainer", "watcher", "idle", state_dir=state) as (coordinator, hubs):
        mine = tensors(7)
        source = await hubs[0].register("m", mine)
        await source.publish(7)
        idle = await hubs[2].register("m", tensors())
        shutil.copytree(state, copy)
        async with source.mutate(8):
            write(mine, 8)
        if remembers == "watched":
            assert (await hubs[1].wait_for("m", at_least=8)).version == 8
            await source.close()
        await coordinator.stop()
        shutil.rmtree(state)
        copy.rename(state)
        await coordinator.start()
        with pytest.raises(LeaseLost, match=LOST):
            await idle.update()
        again = await hubs[0].register("m", mine, group="again")
        assert (await again.publish(9)).version == 9
        assert (await idle.update()).version == 9


async def holding_one(hubs: list[Hub]) -> tuple[Weights, Weights, Tensors]:
    """The trainer holds version 2, the reader version 1."""
    mine, theirs = tensors(1), tensors()
    source = await hubs[0].register("m", mine)
    await source.publish(1)
    weights = await hubs[1].register("m", theirs)
    await weights.replicate()
    async with source.mutate(2):
        write(mine, 2)
    return source, weights, theirs


async def test_what_was_staged_and_committed_comes_into_place_before_its_handle_says_so() -> None:
    """The old version's fence waits, so that the commit is older than the loss."""
    async with cluster("trainer", "reader", options=HOSTED) as (coordinator, hubs):
        source, weights, theirs = await holding_one(hubs)
        async with anyio.create_task_group() as tasks:
            with accessed(weights):
                tasks.start_soon(partial(weights.update, staged=True))
                await until(lambda: "applying" in repr(weights._handle.member))
                await coordinator.restart(*hubs)
        await until(lambda: weights.state == "empty")
        assert holds(theirs, 2)
        for handle in (source, weights):
            with pytest.raises(LeaseLost):
                await handle.publish(1)


@pytest.mark.parametrize("lost", [False, True])
async def test_what_was_staged_and_is_in_doubt_is_dropped(lost: bool, tmp_path: Path) -> None:
    """Nobody has recorded it, or nobody knows any more; nothing was overwritten."""
    state_dir = None if lost else tmp_path
    async with cluster("trainer", "reader", state_dir=state_dir, options=HOSTED) as (
        coordinator,
        hubs,
    ):
        source, weights, theirs = await holding_one(hubs)

        async def pause(_: VersionInfo) -> None:
            await coordinator.stop()
            await until(lambda: "offline" in repr(hubs[1]))

        with pytest.raises(CoordinatorUnavailable) as caught:
            await weights.update(staged=True, before_write=pause, timeout=waited_out_s(2))
        assert (caught.value.memory, weights.state) == ("in_doubt", "in_doubt")
        await coordinator.start()
        await until(lambda: weights.state == ("empty" if lost else "ready"))
        assert holds(theirs, 1)
        await until(lambda: worker_of(weights).copies.budget.reserved_bytes == 0)
        if lost:
            await until(lambda: source.state == "empty")
            with pytest.raises(LeaseLost, match=LOST):
                await source.publish(1)
            await source.publish(3)
            with pytest.raises(LeaseLost, match=LOST):
                await weights.update()
        assert (await weights.update()).version == (3 if lost else 2)


async def test_a_prefetch_says_so_too_and_what_was_prefetched_is_freed() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as (coordinator, hubs):
        source, weights, _ = await holding_one(hubs)
        assert (await weights.prefetch()).version == 2
        await coordinator.restart(*hubs)
        await until(lambda: worker_of(weights).copies.budget.reserved_bytes == 0)
        with pytest.raises(LeaseLost, match=LOST):
            await source.publish(1)
        await source.publish(1)
        with pytest.raises(LeaseLost, match=LOST):
            await weights.prefetch()
        assert (await weights.prefetch()).version == 1
        assert (await weights.update()).bytes_read == 0


async def test_a_prefetch_in_the_background_leaves_the_loss_to_be_told_to_the_caller() -> None:
    async with cluster("trainer") as (coordinator, (trainer,)):
        following = tensorhub.connect(
            coordinator.address, name="follower", token="", prefetch=True, options=HOSTED
        )
        async with following as hub:
            source = await published(trainer)
            memory = tensors()
            weights = await hub.register("m", memory)
            await weights.update()
            await coordinator.restart(trainer, hub)
            with pytest.raises(LeaseLost):
                await source.unpublish()
            await source.publish(1)
            await until(lambda: hub._worker.version_watches.newest("m") is not None)
            # whatever would have been prefetched for that news has been begun
            await hub.describe("m")
            with pytest.raises(LeaseLost):
                await weights.update()
            await until(lambda: any(h.member.version == 1 for h in copies_of(hub)))
            assert (await weights.update()).bytes_read == 0
            assert holds(memory, 1)
