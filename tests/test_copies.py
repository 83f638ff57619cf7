"""Copies in host memory that the coordinator orders from a worker (R5): made, refused, ended, and restated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import anyio

from tensorhub.hub import Hub
from tensorhub.messages import CopyRefused, DropCopy, FromWorker, MakeCopy
from tensorhub.runtime.host_copies import HostCopies
from tensorhub.types import ModelInfo, ReplicaView, VersionInfo
from tensorhub.weights import Weights
from tests.rig import CHUNK_BYTES, CHUNKS, OPTIONS, cluster, gated, holds, tensors, until, write

NBYTES = CHUNKS * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=NBYTES)


def copies(hub: Hub) -> HostCopies:
    return hub._worker.copies


def order(hub: Hub, copy: str, info: VersionInfo, source: Weights | None = None, shard: int = 0) -> None:
    """What the coordinator would say."""
    registration = source._handle.member.shard.registration if source is not None else ""
    make = MakeCopy(copy, info, shard, registration)
    hub._thread.post(partial(hub._worker.received, make))


def listen(hub: Hub) -> list[FromWorker]:
    """What this hub says from now on."""
    said: list[FromWorker] = []
    say: Callable[[FromWorker], None] = hub._worker.say

    def overhear(message: FromWorker) -> None:
        said.append(message)
        say(message)

    hub._worker.say = overhear  # type: ignore[method-assign]
    return said


async def replicas(hub: Hub, group: str) -> list[ReplicaView]:
    model: ModelInfo = await hub.describe("m")
    return [replica for replica in model.replicas if replica.group == group]


async def made(hub: Hub, copy: str) -> ReplicaView:
    with anyio.fail_after(30):
        while True:
            found = [r for r in await replicas(hub, f"copy/{copy}") if r.state == "ready"]
            if found:
                return found[0]
            await anyio.sleep(0.005)


async def test_a_copy_of_what_the_worker_holds_itself_is_local_and_serves() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        out = tensors(1)
        source = await c.hubs[0].register("m", out)
        info = await source.publish(1)
        order(c.hubs[0], "c1", info, source)
        replica = await made(c.hubs[0], "c1")
        assert (replica.medium, replica.purpose, replica.version) == ("host", "retention", 1)
        await source.unpublish()
        write(out, 9)
        mine = tensors()
        weights = await c.hubs[1].register("m", mine)
        report = await weights.replicate()
        assert (report.version, [s.name for s in report.sources]) == (1, ["trainer"])
        assert holds(mine, 1)
        c.hubs[0]._thread.post(partial(c.hubs[0]._worker.received, DropCopy("c1")))
        await until(lambda: copies(c.hubs[0]).budget.reserved_bytes == 0)
        assert await replicas(c.hubs[0], "copy/c1") == []
        assert not copies(c.hubs[0])._copies


async def test_a_copy_of_what_others_hold_is_read_over_the_network() -> None:
    async with cluster("trainer", "keeper", options=HOSTED) as c:
        sources = [await c.hubs[0].register("m", tensors(r), group="p", rank=r, world_size=2) for r in range(2)]
        infos: list[VersionInfo] = []
        async with anyio.create_task_group() as tasks:

            async def publish(weights: Weights) -> None:
                infos.append(await weights.publish(1))

            for source in sources:
                tasks.start_soon(publish, source)
        order(c.hubs[1], "c1", infos[0], shard=1)
        replica = await made(c.hubs[1], "c1")
        assert [shard.rank for shard in replica.shards] == [1]
        assert copies(c.hubs[1]).budget.reserved_bytes == NBYTES


async def test_a_copy_that_has_no_room_is_refused() -> None:
    async with cluster("trainer", options=replace(OPTIONS, host_memory_bytes=NBYTES - 1)) as c:
        source = await c.hubs[0].register("m", tensors(1))
        said = listen(c.hubs[0])
        order(c.hubs[0], "c1", await source.publish(1), source)
        await until(lambda: any(isinstance(message, CopyRefused) for message in said))
        (refused,) = [message for message in said if isinstance(message, CopyRefused)]
        assert refused.copy == "c1"
        assert f"retention needs {NBYTES} bytes" in refused.reason
        assert copies(c.hubs[0]).budget.reserved_bytes == 0


async def test_a_retention_copy_takes_the_room_of_a_prefetched_one_and_never_the_other_way() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        source = await c.hubs[0].register("m", tensors(1))
        info = await source.publish(1)
        weights = await c.hubs[1].register("m", tensors(), group="r")
        await weights.prefetch()
        order(c.hubs[1], "c1", info)
        await made(c.hubs[1], "c1")
        assert [r.group for r in (await c.hubs[0].describe("m")).replicas if r.medium == "host"] == ["copy/c1"]
        assert copies(c.hubs[1]).budget.reserved_bytes == NBYTES
        try:
            await weights.prefetch()
        except tensors_error() as error:
            assert "does not outrank" in str(error)
        else:
            raise AssertionError("there was no room")


def tensors_error() -> type[Exception]:
    from tensorhub.errors import StateError

    return StateError


async def test_a_copy_that_is_dropped_while_it_is_made() -> None:
    with gated(3) as gate:
        async with cluster("trainer", "keeper", options=HOSTED) as c:
            source = await c.hubs[0].register("m", tensors(1))
            said = listen(c.hubs[1])
            order(c.hubs[1], "c1", await source.publish(1))
            await until(lambda: gate.holds)
            c.hubs[1]._thread.post(partial(c.hubs[1]._worker.received, DropCopy("c1")))
            await until(lambda: any(isinstance(message, CopyRefused) for message in said))
            gate.open()
            await until(lambda: copies(c.hubs[1]).budget.reserved_bytes == 0)
            assert await replicas(c.hubs[1], "copy/c1") == []


async def test_a_rolled_back_copy_goes() -> None:
    async with cluster("trainer", "keeper", options=HOSTED) as c:
        out = tensors(1)
        source = await c.hubs[0].register("m", out)
        await source.publish(1)
        async with source.mutate(2):
            write(out, 2)
        info = c.hubs[0].newest("m") or await c.hubs[0].wait_for("m", at_least=2)
        order(c.hubs[1], "c1", info)
        await made(c.hubs[1], "c1")
        await c.hubs[1].rollback("m", to=1)
        await until(lambda: copies(c.hubs[1]).budget.reserved_bytes == 0)
        await until(lambda: not copies(c.hubs[1])._copies)


async def test_a_copy_survives_a_lost_connection_and_a_new_incarnation() -> None:
    async with cluster("trainer", "keeper", options=HOSTED) as c:
        source = await c.hubs[0].register("m", tensors(1))
        order(c.hubs[1], "c1", await source.publish(1))
        await made(c.hubs[1], "c1")
        await source.close()
        worker = c.hubs[1]._worker
        before = worker.incarnation
        c.hubs[1]._thread.post(worker.dismissed)
        await until(lambda: worker.incarnation != before)
        c.hubs[1]._thread.post(cut(worker))
        mine = tensors()
        weights = await c.hubs[0].register("m", mine)
        assert (await weights.replicate()).version == 1
        assert holds(mine, 1)


def cut(worker: object) -> Callable[[], None]:
    """Take its connection to the coordinator away."""

    def now() -> None:
        worker._link._session.cancel()  # type: ignore[attr-defined]

    return now
