"""Prefetch over real sockets (R10): a host copy of the next version while the current one is in
use, and what `update` does with it. Retention copies of the same worker, too: they share its host
memory."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import replace
from functools import partial

import anyio
import pytest

import tensorhub
from tensorhub.api import weights as api_weights
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import (
    GroupAborted,
    OperationTimeout,
    RetentionError,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.memory.host import HostMemory
from tensorhub.runtime.worker import prefetcher
from tensorhub.runtime.worker.host_copies import HostCopyRunner
from tensorhub.types import FetchReport, Purpose
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    WAIT_S,
    Cluster,
    all_of,
    cluster,
    connect,
    copies_of,
    gated,
    holds,
    tensors,
    until,
    worker_of,
    write,
)

NBYTES = CHUNKS * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=NBYTES)


def copies(hub: Hub) -> HostCopyRunner:
    return worker_of(hub).copies


def reserved(hub: Hub) -> int:
    return copies(hub).budget.reserved_bytes


def memory_of(weights: Weights):  # type: ignore[no-untyped-def]
    return weights._handle.memory._given  # type: ignore[attr-defined]


async def publish(source: Weights, version: int) -> None:
    async with source.mutate(version):
        write(memory_of(source), version)


async def ready(c: Cluster) -> tuple[Weights, Weights]:
    """The trainer holds version 2, the reader version 1."""
    source = await c.hubs[0].register("m", tensors(1))
    await source.publish(1)
    weights = await c.hubs[1].register("m", tensors(), group="r")
    await weights.replicate()
    await publish(source, 2)
    return source, weights


async def test_update_after_prefetch_reads_nothing_and_frees_the_copy() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        source, weights = await ready(c)
        report = await weights.prefetch()
        assert (report.version, report.changed, report.bytes_read) == (2, True, NBYTES)
        assert (weights.version, weights.state) == (1, "ready")
        assert holds(memory_of(weights), 1)
        assert reserved(c.hubs[1]) == NBYTES
        report = await weights.update()
        assert (report.version, report.changed, report.bytes_read, report.sources) == (
            2,
            True,
            0,
            (),
        )
        assert report.phases["unpack"] > 0
        assert sum(report.phases.values()) == pytest.approx(report.seconds)
        assert holds(memory_of(weights), 2)
        await until(lambda: reserved(c.hubs[1]) == 0)
        await publish(source, 3)
        # and again, into memory that is taken anew
        assert (await weights.prefetch()).bytes_read == NBYTES
        assert (await weights.update()).bytes_read == 0
        assert holds(memory_of(weights), 3)


@pytest.mark.parametrize("what", ["prefetched", "staged"])
async def test_memory_is_given_back_beside_the_loop_and_counts_until_then(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14: the system takes its time for many gigabytes, and the worker is heard of meanwhile."""
    frees, go, closed = threading.Event(), threading.Event(), list[bool]()

    def free(memory: HostMemory) -> None:
        mapping = memory._bytes
        if mapping is not None:
            frees.set()
            assert go.wait(WAIT_S)
        real(memory)
        if mapping is not None:
            closed.append(mapping.closed)

    real = HostMemory.free
    async with cluster("trainer", "reader", options=HOSTED) as c:
        _, weights = await ready(c)
        hub, update = c.hubs[1], partial(weights.update, staged=what == "staged")
        if what == "prefetched":
            await weights.prefetch()
        monkeypatch.setattr(HostMemory, "free", free)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update)
            with anyio.fail_after(WAIT_S / 2):
                await until(frees.is_set)
                try:
                    await hub.describe("m")
                    assert reserved(hub) == NBYTES
                finally:
                    go.set()
        await until(lambda: reserved(hub) == 0)
        assert closed == [True]  # while nobody had a view of it, and so without the GIL


async def test_a_prefetch_that_gets_no_room_ends_at_its_deadline_however_calm_its_worker_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frees, go, real = threading.Event(), threading.Event(), HostMemory.free

    def free(memory: HostMemory) -> None:
        frees.set()
        assert go.wait(WAIT_S)
        real(memory)

    async with cluster("trainer", "reader", options=HOSTED) as c:
        source, weights = await ready(c)
        await weights.prefetch()
        monkeypatch.setattr(HostMemory, "free", free)
        try:
            await weights.update()
            await until(frees.is_set)
            await publish(source, 3)
            with anyio.fail_after(WAIT_S / 2):
                with pytest.raises(OperationTimeout, match="no host memory within") as found:
                    await weights.prefetch(timeout=0.1)
        finally:
            go.set()
        assert found.value.memory == "intact"
        await until(lambda: reserved(c.hubs[1]) == 0)
        assert (await weights.prefetch()).version == 3


async def test_a_prefetched_copy_serves_others() -> None:
    async with cluster("trainer", "reader", "other", options=HOSTED) as c:
        source, weights = await ready(c)
        await weights.prefetch()
        await source.unpublish()
        write(memory_of(source), 9)
        mine = tensors()
        other = await c.hubs[2].register("m", mine)
        report = await other.replicate()
        assert (report.version, [s.name for s in report.sources]) == (2, ["reader"])
        assert report.bytes_by_kind == {"host copy": report.bytes_read}
        assert holds(mine, 2)
        model = await c.hubs[2].describe("m")
        assert {
            (r.group, r.medium, r.purpose, r.version)
            for r in model.replicas
            if r.group.startswith("r")
        } == {
            ("r", "device", "use", 1),
            ("r/host", "host", "prefetch", 2),
        }
        assert (await weights.update()).bytes_read == 0  # the copy was a live source for it, too


async def test_a_half_done_prefetch_is_used_as_far_as_it_got() -> None:
    errors: list[TensorHubError] = []

    async def prefetch() -> None:
        with pytest.raises(TensorHubError) as caught:
            await weights.prefetch()
        errors.append(caught.value)

    with gated(CHUNKS + 5) as gate:
        async with (
            cluster("trainer", "reader", options=HOSTED) as c,
            anyio.create_task_group() as tasks,
        ):
            _, weights = await ready(c)
            tasks.start_soon(prefetch)
            await until(lambda: gate.holds)
            reports: list[FetchReport] = []

            async def update() -> None:
                reports.append(await weights.update())

            tasks.start_soon(update)
            await until(lambda: bool(errors))
            gate.open()
            await until(lambda: bool(reports))
            assert (reports[0].version, reports[0].bytes_read) == (2, NBYTES - 5 * CHUNK_BYTES)
            assert isinstance(errors[0], StateError)
            assert "an update has taken what was prefetched" in str(errors[0])
            assert holds(memory_of(weights), 2)
            await until(lambda: reserved(c.hubs[1]) == 0)


async def test_a_cancelled_prefetch_is_used_as_far_as_it_got() -> None:
    with gated(CHUNKS + 7) as gate:
        async with cluster("trainer", "reader", options=HOSTED) as c:
            _, weights = await ready(c)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(weights.prefetch)
                await until(lambda: gate.holds)
                tasks.cancel_scope.cancel()
            gate.open()
            report = await weights.update()
            assert report.version == 2
            # what was on its way when it was cut off counts, too
            assert report.bytes_read <= NBYTES - 7 * CHUNK_BYTES
            assert holds(memory_of(weights), 2)


async def test_a_second_prefetch_replaces_the_first() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        source, weights = await ready(c)
        await weights.prefetch()
        await publish(source, 3)
        assert (await weights.prefetch()).version == 3
        assert not (await weights.prefetch()).changed
        assert reserved(c.hubs[1]) == NBYTES
        report = await weights.update()
        assert (report.version, report.bytes_read) == (3, 0)
        assert not (await weights.prefetch()).changed  # the handle itself holds that version
        await until(lambda: reserved(c.hubs[1]) == 0)


async def test_all_ranks_prefetch_the_same_version() -> None:
    options = replace(HOSTED, host_memory_bytes=2 * NBYTES)
    async with cluster("trainer", "reader", options=options) as c:
        outs, ins = [tensors(10), tensors(11)], [tensors(), tensors()]
        sources = [
            await c.hubs[0].register("m", outs[r], group="p", rank=r, world_size=2)
            for r in range(2)
        ]
        ranks = [
            await c.hubs[1].register("m", ins[r], group="r", rank=r, world_size=2) for r in range(2)
        ]
        reports: list[FetchReport] = []

        async def prefetch_and_update(weights: Weights) -> None:
            await weights.prefetch()
            reports.append(await weights.update())

        async with anyio.create_task_group() as tasks:
            for source in sources:
                tasks.start_soon(source.publish, 1)
            for rank in ranks:
                tasks.start_soon(prefetch_and_update, rank)
        assert [(r.version, r.bytes_read) for r in reports] == [(1, 0), (1, 0)]
        assert holds(ins[0], 10)
        assert holds(ins[1], 11)


@pytest.mark.parametrize("room", ["none", "in use"])
async def test_a_rank_without_host_memory_ends_its_groups_prefetch(room: str) -> None:
    """The others hear why, at once; and the group goes on with its next call."""
    options = replace(OPTIONS, host_memory_bytes={"none": 0, "in use": NBYTES}[room])
    async with (
        cluster("trainer", "one", options=HOSTED) as c,
        connect(c.address, "two", options) as hub,
    ):
        sources = [
            await c.hubs[0].register("m", tensors(r), group="p", rank=r, world_size=2)
            for r in range(2)
        ]
        async with anyio.create_task_group() as tasks:
            for source in sources:
                tasks.start_soon(source.publish, 1)
        occupier = await hub.register("other", tensors())
        if room == "in use":
            trainer = await c.hubs[0].register("other", tensors(1))
            await trainer.publish(1)
            await occupier.prefetch()
        ranks = [
            await h.register("m", tensors(), group="r", rank=r, world_size=2)
            for r, h in enumerate((c.hubs[1], hub))
        ]

        async def refused() -> None:
            with pytest.raises(StateError, match="host memory") as caught:
                await ranks[1].prefetch()
            assert caught.value.retryable is (room == "in use")

        async def aborted() -> None:
            with pytest.raises(
                GroupAborted, match=r"prefetch of group 'r/host' ended on all ranks: rank 1"
            ) as caught:
                await ranks[0].prefetch()
            assert "host_memory_bytes" in caught.value.causes[1]
            assert caught.value.retryable is (room == "in use")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(aborted)
            await until(lambda: bool(copies_of(c.hubs[1])))
            (copy,) = copies_of(c.hubs[1])
            await until(
                lambda: copy.member.running is not None and copy.member.running.key is not None
            )
            tasks.start_soon(refused)
        await refused()  # and where it is the first
        await aborted()
        if room == "in use":
            await occupier.close()
            async with anyio.create_task_group() as tasks:
                for rank in ranks:
                    tasks.start_soon(rank.prefetch)


async def test_a_rank_that_refuses_its_prefetch_by_itself_ends_its_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_weights, "REFUSAL_S", WAIT_S)
    async with cluster("trainer", "one", "two", options=HOSTED) as c:
        sources = [
            await c.hubs[0].register("m", tensors(r), group="p", rank=r, world_size=2)
            for r in range(2)
        ]
        ranks = [
            await hub.register("m", tensors(), group="r", rank=r, world_size=2)
            for r, hub in enumerate(c.hubs[1:])
        ]
        await all_of(*[source.publish(1) for source in sources])
        await all_of(*[rank.prefetch() for rank in ranks])

        async def refused() -> None:
            with pytest.raises(StateError, match="newest"):
                await ranks[1].prefetch("newest")

        async def aborted() -> None:
            with pytest.raises(GroupAborted, match=r"prefetch.* rank 1") as caught:
                await ranks[0].prefetch(timeout=math.inf)
            assert "prefetch('newest') raised" in caught.value.causes[1]

        await all_of(aborted(), refused())
        await all_of(*[rank.prefetch() for rank in ranks])


async def test_a_close_that_fails_costs_what_was_prefetched_and_nothing_else() -> None:
    hasty = replace(HOSTED, op_timeout_s=0.5)
    async with (
        cluster("trainer") as c,
        connect(c.address, "reader", hasty) as hub,
        connect(c.address, "other") as third,
    ):
        source = await c.hubs[0].register("m", tensors(1))
        await source.publish(1)
        weights = await hub.register("m", tensors(), group="r")
        # it could take over what is retained, and has not
        other = await third.register("m", tensors(), group="o")
        await weights.replicate()
        await publish(source, 2)
        await weights.prefetch()
        await hub.retain("m", latest=2)
        with pytest.raises(RetentionError, match="version 1 of 'm' must stay"):
            await weights.close()
        assert (weights.version, reserved(hub)) == (1, 0)
        await other.replicate(1)
        await third.retain("m", latest=0)
        assert (await weights.update()).bytes_read == NBYTES


async def test_a_prefetch_that_is_given_up_at_once_leaves_no_second_copy() -> None:
    """Its host copy may be dropped before the loop has come to it."""
    async with cluster("trainer", "reader", options=HOSTED) as c:
        _, weights = await ready(c)
        hub = c.hubs[1]
        for _ in range(30):
            with anyio.move_on_after(0):
                await weights.prefetch()
            with contextlib.suppress(TensorHubError):
                await weights.prefetch(timeout=0)
        assert (await weights.prefetch()).version == 2
        await until(lambda: len(copies_of(hub)) == 1)
        assert reserved(hub) == NBYTES


async def test_prefetch_of_what_is_not_there() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        _, weights = await ready(c)
        with pytest.raises(VersionUnavailable) as caught:
            await weights.prefetch(7)
        assert caught.value.memory == "intact"
        assert (weights.state, weights.version, reserved(c.hubs[1])) == ("ready", 1, 0)
        await weights.close()
        with pytest.raises(StateError, match="is closed; register again"):
            await weights.prefetch()


# ------------------------------------------------------------------------------------------
# connect(prefetch=True)


def following(address: str):  # type: ignore[no-untyped-def]
    return tensorhub.connect(address, name="follower", token="", prefetch=True, options=HOSTED)


async def test_new_versions_are_prefetched_for_handles_that_follow() -> None:
    async with cluster("trainer") as c, following(c.address) as hub:
        source = await c.hubs[0].register("m", tensors(1))
        await source.publish(1)
        weights = await hub.register("m", tensors())
        # nothing was prefetched for a handle that was never filled
        assert (await weights.update()).bytes_read == NBYTES
        for version in (2, 3):
            await publish(source, version)
            await until(lambda v=version: prefetched(hub) == v)  # type: ignore[misc]
            report = await weights.update()
            assert (report.version, report.bytes_read) == (version, 0)
            assert holds(memory_of(weights), version)
        await until(lambda: reserved(hub) == 0)


def prefetched(hub: Hub) -> int | None:
    return next((copy.member.version for copy in copies_of(hub)), None)


async def test_nothing_is_prefetched_for_a_publisher() -> None:
    async with cluster("trainer") as c, following(c.address) as hub:
        source = await c.hubs[0].register("m", tensors(1))
        mine = await hub.register("m", tensors(5))
        await mine.publish(5)
        await publish(source, 6)
        assert (await hub.wait_for("m", at_least=6)).version == 6
        weights = await hub.register("m", tensors())
        await weights.replicate()
        await publish(source, 7)
        await until(lambda: prefetched(hub) == 7)
        assert len(copies_of(hub)) == 1  # the follower's


async def test_a_prefetch_that_fails_is_followed_by_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(prefetcher.log, "warning", lambda event, **fields: told.append(event))
    async with cluster("trainer") as c, following(c.address) as hub:
        source = await c.hubs[0].register("m", tensors(1))
        await source.publish(1)
        weights = await hub.register("m", tensors())
        await weights.replicate()
        blocker = hub._worker.copies.budget
        hub._thread.post(lambda: blocker.reserve("other", Purpose.RETENTION, 1))
        await publish(source, 2)
        await until(lambda: "prefetch_failed" in told)
        hub._thread.post(lambda: blocker.free("other"))
        await publish(source, 3)
        await until(lambda: prefetched(hub) == 3)
        assert (await weights.update()).bytes_read == 0


async def test_prefetch_true_needs_host_memory() -> None:
    async with cluster() as c:
        with pytest.raises(
            StateError, match=r"prefetch=True needs host memory: set Options.host_memory_bytes"
        ):
            async with tensorhub.connect(c.address, token="", prefetch=True, options=OPTIONS):
                raise AssertionError("it is refused")
        with pytest.raises(StateError, match="prefetch=1: give True or False"):
            async with tensorhub.connect(c.address, token="", prefetch=1, options=HOSTED):  # type: ignore[arg-type]
                raise AssertionError("it is refused")
