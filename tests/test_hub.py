"""The public API over real sockets, in one process: what each call does, and what a cancelled or
concurrent one leaves.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import (
    GroupAborted,
    RegistrationError,
    StateError,
    TensorHubError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.messages import FromCoordinator, Registered
from tensorhub.runtime.loop_thread import running_backend
from tensorhub.types import ModelInfo, VersionInfo
from tests.rig import (
    BEST,
    CHUNK_BYTES,
    CHUNKS,
    WAIT_S,
    cluster,
    connect,
    gated,
    handle_of,
    holds,
    published,
    ranks_of,
    tensors,
    thread_of,
    until,
    worker_of,
    write,
)

NBYTES = CHUNKS * CHUNK_BYTES


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


async def cancel_too_late(hub: Hub, call: Callable[[], Awaitable[object]]) -> None:
    """Cancel it when it has ended in the library's thread, before its caller's loop, which is busy,
    hears of that.
    """
    cancels, caller_waits = list[Callable[[], object]](), threading.Event()

    async def run() -> None:
        if running_backend() == "asyncio":
            task = asyncio.current_task()
            assert task is not None
            cancels.append(task.cancel)
        await call()
        raise AssertionError("it was cancelled")

    async with anyio.create_task_group() as tasks:
        cancels.append(tasks.cancel_scope.cancel)
        hub._thread.post(partial(wait_for, caller_waits))
        tasks.start_soon(run)
        while not thread_of(hub)._jobs:
            await anyio.lowlevel.checkpoint()
        caller_waits.set()
        (job,) = thread_of(hub)._jobs
        while not job.finished:
            time.sleep(0.001)  # noqa: ASYNC251 - its loop is to be busy
        cancels[-1]()


async def ready_to_update(trainer: Hub, reader: Hub) -> tuple[Weights, Weights]:
    """The reader holds version 1, and version 2 is published."""
    source = await published(trainer)
    weights = await reader.register("m", tensors())
    await weights.replicate()
    async with source.mutate(2):
        write(memory_of(source), 2)
    return source, weights


def memory_of(weights: Weights):  # type: ignore[no-untyped-def]
    """The very tensors that were registered."""
    memory = handle_of(weights).memory
    assert isinstance(memory, RegisteredMemory)
    return memory._given


# --------------------------------------------------------------------------------------------------
# the happy path


async def test_publish_replicate_update_and_what_the_reports_say() -> None:
    async with cluster("trainer", "reader") as c:
        trainer, reader = c.hubs
        source, mine = await trainer.register("m", tensors(1)), tensors()
        weights = await reader.register("m", mine)
        assert (source.state, source.version) == ("empty", None)
        info = await source.publish(1)
        assert info == VersionInfo("m", 1, info.content_id, NBYTES, 1)
        assert (source.state, source.version) == ("ready", 1)
        report = await weights.replicate()
        assert (report.version, report.changed, report.bytes_read, report.reread_bytes) == (
            1,
            True,
            NBYTES,
            0,
        )
        assert [(s.name, s.transport, s.bytes_read, s.outcome) for s in report.sources] == [
            ("trainer", BEST, NBYTES, "used")
        ]
        assert set(report.phases) == {"resolve", "wait", "transfer", "verify", "unpack", "commit"}
        assert sum(report.phases.values()) == pytest.approx(report.seconds)
        assert holds(mine, 1)
        again = await weights.update()
        assert (again.version, again.changed, again.bytes_read) == (1, False, 0)
        async with source.mutate(5):
            assert source.state == "empty"
            write(memory_of(source), 5)
        report = await weights.update()
        assert (report.version, report.changed) == (5, True)
        assert holds(mine, 5)


async def test_latest_waits_for_the_first_publication_and_at_least_for_its_number() -> None:
    async with cluster("trainer", "reader") as c, anyio.create_task_group() as tasks:
        source = await c.hubs[0].register("m", tensors(1))
        weights = await c.hubs[1].register("m", tensors())
        done: list[int] = []

        async def follow() -> None:
            done.append((await weights.replicate()).version)
            done.append((await weights.update(at_least=3)).version)

        tasks.start_soon(follow)
        await source.publish(1)
        await until(lambda: done == [1])
        async with source.mutate(2):
            pass
        async with source.mutate(3):
            pass
        await until(lambda: done == [1, 3])


async def test_newest_wait_for_and_describe() -> None:
    async with cluster("trainer", "reader") as c:
        trainer, reader = c.hubs
        assert reader.newest("m") is None
        source = await trainer.register("m", tensors(1), group="g")
        info = await source.publish(4)
        assert await reader.wait_for("m", at_least=3) == info
        assert await reader.wait_for("m", at_least=4) == info
        assert reader.newest("m") == info
        model = await reader.describe("m")
        assert (model.model, model.mark, [v.version for v in model.versions]) == ("m", 4, [4])
        assert [(r.group, r.state, [s.worker for s in r.shards]) for r in model.replicas] == [
            ("g", "ready", ["trainer"])
        ]
        assert await reader.describe() == (model,)
        assert [worker.name for worker in model.workers] == ["trainer"]


def uncounted(model: ModelInfo) -> ModelInfo:
    """As a page shows it."""
    versions = tuple(replace(view, summary=None) for view in model.versions)
    return replace(model, versions=versions, summary=None)


async def test_parts_of_a_model_and_its_summary() -> None:
    async with cluster("trainer", "reader-0", "reader-1") as c:
        trainer, *readers = c.hubs
        await published(trainer)
        await (await readers[0].register("m", tensors())).replicate()
        whole = await trainer.describe("m")
        assert await trainer.describe("m", version=1, limit=5) == uncounted(whole)
        page = await trainer.describe("m", limit=1)
        assert [worker.name for worker in page.workers] == ["reader-0"]
        page = await trainer.describe("m", after=page.workers[-1].name, limit=1)
        assert [worker.name for worker in page.workers] == ["trainer"]
        assert [shard.worker for replica in page.replicas for shard in replica.shards] == [
            "trainer"
        ]
        with pytest.raises(
            VersionUnavailable,
            match=r"version 2 of 'm' is not known here; held now: version 1 by 2 replicas",
        ):
            await trainer.describe("m", version=2)
        model = await trainer.describe("m", limit=0)
        assert (model.summary, model.versions) == (whole.summary, whole.versions)
        assert (model.replicas, model.leases, model.workers) == ((), (), ())
        assert model.summary is not None
        assert (model.summary.workers, model.summary.shards, model.summary.calls) == (2, 2, ())
        assert [view.summary.copies for view in model.versions if view.summary is not None] == [2]
        assert await trainer.describe(limit=0) == (model,)
        assert page.summary is None
        with pytest.raises(VersionUnavailable, match="no model 'n' is known here; known models: m"):
            await trainer.describe("n", limit=0)


async def test_closing_a_handle() -> None:
    async with cluster("trainer", "reader") as c:
        source = await published(c.hubs[0], group="g")
        await source.close()
        assert (source.state, source.version) == ("closed", None)
        await source.close()
        with pytest.raises(StateError, match="is closed; register again"):
            await source.publish(2)
        assert (await c.hubs[1].describe("m")).replicas == ()
        await published(c.hubs[0], 2, content=2, group="g")


async def test_the_memory_of_closed_handles_is_free_without_a_garbage_collection() -> None:
    async with cluster("trainer", "reader") as c:
        given = [tensors(1), tensors()]
        source, reader = [
            await hub.register("m", mine) for hub, mine in zip(c.hubs, given, strict=True)
        ]
        await source.publish(1)
        await reader.replicate(timeout=WAIT_S)
        held = [weakref.ref(each) for mine in given for each in mine.values()]
        gc.collect()
        gc.disable()
        try:
            await reader.close()
            await source.close()
            del source, reader, given
            await until(lambda: not any(each() is not None for each in held))
        finally:
            gc.enable()


# --------------------------------------------------------------------------------------------------
# mutate


async def test_mutate_checks_the_number_before_anything_else() -> None:
    async with cluster("trainer") as c:
        source = await published(c.hubs[0], 3)
        with pytest.raises(VersionConflict):
            async with source.mutate(3):
                raise AssertionError("the body must not run")
        assert (source.state, source.version) == ("ready", 3)


async def test_mutate_whose_body_raises_publishes_nothing() -> None:
    async with cluster("trainer") as c:
        source = await published(c.hubs[0])
        with pytest.raises(ValueError, match="mine") as raised:
            async with source.mutate(2):
                raise ValueError("mine")
        assert [note.endswith("has published nothing") for note in raised.value.__notes__] == [True]
        assert (source.state, source.version) == ("empty", None)
        async with source.mutate(2):  # the number stayed unused
            pass
        assert source.version == 2


async def test_mutate_of_a_rank_whose_group_publishes_that_number_already() -> None:
    async with cluster("one", "two") as c:
        ranks = await ranks_of(c.hubs, [tensors(1), tensors(1)], "g")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks[0].publish, 1)
            await until(lambda: ranks[0]._handle.member.running is not None)
            await c.hubs[0].describe("m")  # so that the coordinator has heard of it
            async with ranks[1].mutate(1):
                pass
        assert [rank.version for rank in ranks] == [1, 1]


async def test_mutate_of_a_handle_that_is_in_use() -> None:
    """The body would write where the library writes."""
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c:
            await published(c.hubs[0])
            mine = tensors()
            weights = await c.hubs[1].register("m", mine)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(weights.replicate)
                await until(lambda: gate.holds)
                with pytest.raises(StateError, match="one call at a time"):
                    async with weights.mutate(2):
                        raise AssertionError("the body must not run")
                gate.open()
            assert holds(mine, 1)
            await weights.close()
            with pytest.raises(StateError, match="is closed; register again"):
                async with weights.mutate(2):
                    raise AssertionError("the body must not run")


# --------------------------------------------------------------------------------------------------
# before_write


async def test_before_write_runs_in_the_callers_task_before_the_first_byte() -> None:
    async with cluster("trainer", "reader") as c:
        _, weights = await ready_to_update(*c.hubs)
        seen = []

        async def pause(info: VersionInfo) -> None:
            seen.append(
                (
                    info.version,
                    threading.current_thread(),
                    weights.state,
                    holds(memory_of(weights), 1),
                )
            )
            await anyio.lowlevel.checkpoint()

        report = await weights.update(before_write=pause)
        assert (report.version, report.changed) == (2, True)
        assert seen == [(2, threading.current_thread(), "ready", True)]
        assert holds(memory_of(weights), 2)
        await weights.update(before_write=pause)
        assert len(seen) == 1  # nothing is to be written


async def test_before_write_that_raises_leaves_the_old_version_published() -> None:
    async with cluster("trainer", "reader", "third") as c:
        source, weights = await ready_to_update(*c.hubs[:2])

        async def refuse(info: VersionInfo) -> None:
            raise LookupError("the engine is busy")

        with pytest.raises(LookupError, match="the engine is busy"):
            await weights.update(before_write=refuse)
        assert (weights.state, weights.version) == ("ready", 1)
        assert holds(memory_of(weights), 1)
        mine = tensors()
        third = await c.hubs[2].register("m", mine)
        await third.replicate(1)
        assert holds(mine, 1)
        assert (await weights.update()).version == 2
        assert source.version == 2


async def test_cancelled_in_before_write_leaves_the_old_version_published() -> None:
    async with cluster("trainer", "reader") as c:
        _, weights = await ready_to_update(*c.hubs)
        async with anyio.create_task_group() as tasks:

            async def hang(info: VersionInfo) -> None:
                tasks.cancel_scope.cancel()
                await anyio.sleep_forever()

            async def update() -> None:
                await weights.update(before_write=hang)

            tasks.start_soon(update)
        assert (weights.state, weights.version) == ("ready", 1)
        assert holds(memory_of(weights), 1)
        assert (await weights.update()).version == 2


async def test_storage_replaced_in_before_write_is_noticed() -> None:
    """R15: what the hook moved elsewhere would otherwise be filled where it was."""
    async with cluster("trainer", "reader") as c:
        _, weights = await ready_to_update(*c.hubs)
        registered = memory_of(weights)

        async def move(info: VersionInfo) -> None:
            registered["b"] = registered["b"].copy()

        with pytest.raises(RegistrationError, match="'b': its storage is another one"):
            await weights.update(before_write=move)


# --------------------------------------------------------------------------------------------------
# cancelling


async def test_replicate_cancelled_in_mid_transfer() -> None:
    with gated(2) as gate:
        async with cluster("trainer", "reader") as c:
            source = await published(c.hubs[0])
            weights = await c.hubs[1].register("m", tensors())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(weights.replicate)
                await until(lambda: gate.holds)
                assert weights.state == "filling"
                tasks.cancel_scope.cancel()
            assert (weights.state, weights.version) == ("torn", None)
            assert not gate.holds
            await source.unpublish()
            write(memory_of(source), 2)
            await source.publish(2)
            gate.open()
            assert (await weights.replicate()).version == 2
            assert holds(memory_of(weights), 2)


async def test_publish_cancelled_while_it_waits_for_its_group() -> None:
    async with cluster("one", "two") as c:
        ranks = await ranks_of(c.hubs, [tensors(1), tensors(1)], "g")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks[0].publish, 1)
            await until(lambda: ranks[0]._handle.member.running is not None)
            tasks.cancel_scope.cancel()
        assert ranks[0].state == "empty"
        with pytest.raises(
            GroupAborted, match="rank 0: the call was cancelled by its caller"
        ) as caught:
            await ranks[1].publish(1)
        assert (caught.value.retryable, caught.value.memory, set(caught.value.causes)) == (
            True,
            "intact",
            {0},
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks[0].publish, 1)
            tasks.start_soon(ranks[1].publish, 1)
        assert [rank.version for rank in ranks] == [1, 1]


async def test_a_registration_or_pin_that_is_cancelled_too_late_is_given_up() -> None:
    async with cluster("trainer") as c:
        (hub,) = c.hubs

        async def pin() -> None:
            async with hub.pin("m", 1):
                raise AssertionError("it was cancelled")

        await cancel_too_late(hub, lambda: hub.register("m", tensors(1), group="g"))
        weights = await published(hub, group="g")
        await cancel_too_late(hub, pin)
        await until(lambda: "0" in repr(hub._worker.pins))
        await weights.unpublish()


async def test_a_registration_that_was_cancelled_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster("trainer") as c:
        hub = c.hubs[0]
        receive, came = worker_of(hub).received, threading.Event()

        def lose_the_answer(message: FromCoordinator) -> None:
            if isinstance(message, Registered):
                came.set()
            else:
                receive(message)

        monkeypatch.setattr(hub._worker, "received", lose_the_answer)
        async with anyio.create_task_group() as tasks:

            async def register_m() -> None:
                await hub.register("m", tensors(1), group="g")

            tasks.start_soon(register_m)
            await until(came.is_set)  # the coordinator knows it
            tasks.cancel_scope.cancel()
        monkeypatch.undo()
        await published(hub, group="g")


# --------------------------------------------------------------------------------------------------
# watching


async def test_watch_gives_the_known_version_first_and_conflates() -> None:
    async with cluster("trainer", "watcher") as c:
        source = await published(c.hubs[0])
        watcher = c.hubs[1].watch("m")
        seen = [await anext(watcher)]
        for number in range(2, 6):
            async with source.mutate(number):
                pass
        await c.hubs[1].wait_for("m", at_least=5)
        seen.append(await anext(watcher))
        assert [info.version for info in seen] == [1, 5]


async def test_watching_ends_when_the_hub_closes() -> None:
    async with cluster() as c, anyio.create_task_group() as tasks:
        ended = anyio.Event()

        async def follow(hub: Hub) -> None:
            async for _ in hub.watch("m"):
                pass
            ended.set()

        async with connect(c.address) as hub:
            tasks.start_soon(follow, hub)
            await until(lambda: hub._worker.version_watches.watches("m"))
        await ended.wait()


async def test_a_watcher_that_nobody_iterates_goes_away() -> None:
    async with cluster("watcher") as c:
        hub = c.hubs[0]
        watcher = hub.watch("m")
        await until(lambda: hub._worker.version_watches.listeners("m") > 0)
        gone = weakref.ref(watcher)
        del watcher
        gc.collect()
        assert gone() is None
        await until(lambda: not hub._worker.version_watches.listeners("m"))


# --------------------------------------------------------------------------------------------------
# loops and threads


async def test_after_a_fork_a_hub_says_so() -> None:
    async with cluster("trainer") as c:
        hub = c.hubs[0]
        source = await hub.register("m", tensors(1))
        own = thread_of(hub)._pid
        thread_of(hub)._pid = os.getpid() + 1  # as in a child
        try:
            for call in (source.publish(1), hub.describe(), hub.wait_for("m", at_least=1)):
                with pytest.raises(
                    StateError, match="before this process was forked: connect in the child"
                ):
                    await call
            with pytest.raises(
                StateError, match="before this process was forked: connect in the child"
            ):
                hub.watch("m")
        finally:
            thread_of(hub)._pid = own


async def test_closing_a_hub_ends_the_calls_that_run() -> None:
    with gated(2) as gate:
        async with cluster("trainer") as c, anyio.create_task_group() as tasks:
            await published(c.hubs[0])
            errors: list[TensorHubError] = []

            async def replicate(weights: Weights) -> None:
                with pytest.raises(
                    StateError, match="the hub was closed while the call was running"
                ) as caught:
                    await weights.replicate()
                errors.append(caught.value)

            async with connect(c.address, "reader") as reader:
                weights = await reader.register("m", tensors())
                waiting = await reader.register("other", tensors())
                tasks.start_soon(replicate, weights)
                tasks.start_soon(replicate, waiting)
                await until(lambda: gate.holds and waiting._handle.member.running is not None)
            await until(lambda: len(errors) == 2)
            assert sorted(error.memory for error in errors) == ["intact", "torn"]
            assert [weights.state, waiting.state] == ["closed", "closed"]
            with pytest.raises(StateError, match="is closed"):
                await weights.replicate()
