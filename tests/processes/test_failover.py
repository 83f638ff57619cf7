"""Coordinators that are killed, stopped or cut off from etcd, while workers read, write and wait.
The coordinators are real processes, and so is etcd; the workers are hubs of this process.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from _pytest.mark import ParameterSet

from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import CoordinatorUnavailable
from tensorhub.types import FetchReport
from tests.etcd_rig import Member, etcd_servers, needs_etcd
from tests.processes.child_processes import ChildProcesses, Process, child_processes
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    WAIT_S,
    Tensors,
    all_of,
    connect,
    gated,
    holds,
    nothing_left,
    tensors,
    until,
    write,
)

LEASE_S = 2.0  # of a worker, and of a leader
NBYTES = CHUNKS * CHUNK_BYTES
PATIENT = replace(OPTIONS, coordinator_wait_s=WAIT_S)
pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def slow(engine: str, *marks: pytest.MarkDecorator) -> ParameterSet:
    return pytest.param(engine, marks=[pytest.mark.slow, *marks])


class Candidates:
    """A leader and a standby, or (`state_dir` alone) a leader that is started again."""

    def __init__(self, processes: ChildProcesses, engine: str, directory: Path) -> None:
        self._processes = processes
        self._settings: dict[str, object] = {"lease_s": LEASE_S, "ha": engine}
        if not engine.startswith("etcd://"):
            self._settings |= {
                "state_dir": str(directory / "state"),
                "ha": engine if engine == "lock" else None,
            }
        self._stands_by = engine != "state_dir"
        self.leader, address = self.start()
        self._port = int(address.rpartition(":")[2])
        self.addresses = [address]
        if self._stands_by:
            self.standby, standby_address = self.start()
            self.addresses.append(standby_address)

    def start(self, port: int = 0) -> tuple[Process, str]:
        process = self._processes.process("coordinator")
        return process, process.do("serve", port=port, **self._settings)

    def kill_leader(self) -> None:
        self.leader.kill()
        if not self._stands_by:
            self.leader, _ = self.start(self._port)


@dataclass
class Cluster:
    given: Candidates
    hubs: list[Hub]
    etcd: Member | None = None


@contextlib.asynccontextmanager
async def cluster(engine: str, directory: Path, *names: str) -> AsyncIterator[Cluster]:
    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        member, processes = None, stack.enter_context(child_processes("asyncio"))
        if engine == "etcd":
            (member,) = stack.enter_context(etcd_servers(directory))
            engine = f"etcd://{member.endpoint}/tests?lease_s={LEASE_S:.0f}"
        given = Candidates(processes, engine, directory)
        connecting = [connect(given.addresses, name, PATIENT) for name in names]
        yield Cluster(given, [await stack.enter_async_context(each) for each in connecting], member)


async def mutate(weights: Weights, mine: Tensors, version: int) -> None:
    async with weights.mutate(version):
        write(mine, version)


@pytest.mark.parametrize("engine", ["lock", slow("state_dir"), slow("etcd", needs_etcd)])
async def test_a_leader_is_killed_while_workers_read_and_no_call_fails(
    engine: str, tmp_path: Path
) -> None:
    """Nothing is read twice; a wait, a pin and a retention outlive it."""
    reports: list[FetchReport] = []
    with gated(3) as gate:
        async with cluster(engine, tmp_path, "trainer", *map(str, range(8))) as c:
            hubs = c.hubs
            mine, theirs = tensors(1), [tensors() for _ in hubs[1:]]
            source = await hubs[0].register("m", mine)
            await source.publish(1)
            await hubs[0].retain("m", latest=2)
            readers = [
                await hub.register("m", its) for hub, its in zip(hubs[1:], theirs, strict=True)
            ]

            async def replicate(weights: Weights) -> None:
                reports.append(await weights.replicate())

            async with hubs[0].pin("m", 1):
                async with anyio.create_task_group() as tasks:
                    for each in readers:
                        tasks.start_soon(replicate, each)
                    await until(lambda: gate.holds)
                    await anyio.to_thread.run_sync(c.given.kill_leader)
                    gate.open()
                told = [(each.version, each.bytes_read, each.reread_bytes) for each in reports]
                assert told == [(1, NBYTES, 0)] * 8
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(wait_for, hubs[1], 2)
                    await mutate(source, mine, 2)
                await all_of(*(each.update() for each in readers[:4]))
                assert all(holds(its, 2) for its in theirs[:4])
                described = await hubs[0].describe("m")
                assert (described.mark, described.retain) == (2, 2)


@pytest.mark.parametrize("engine", ["lock", slow("state_dir"), slow("etcd", needs_etcd)])
async def test_a_group_publishes_while_its_leader_is_killed_and_no_call_fails(
    engine: str, tmp_path: Path
) -> None:
    """One rank has called before, and the other one calls afterwards; then both publish on."""
    names = [f"{group}{rank}" for group in ("trainer", "reader") for rank in range(2)]
    async with cluster(engine, tmp_path, *names) as c:
        memory = [tensors(1) for _ in names]
        registering = [
            hub.register("m", mine, group=name[:-1], rank=int(name[-1]), world_size=2)
            for hub, name, mine in zip(c.hubs, names, memory, strict=True)
        ]
        first, second, *readers = await all_of(*registering)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.publish, 1)
            await until(lambda: first._handle.member.group_calls > 0)
            await anyio.to_thread.run_sync(c.given.kill_leader)
            await second.publish(1)
        if engine == "state_dir":  # no standby is left of the other ones
            await publish_on(c, [first, second], readers, memory)
        await all_of(*(reader.update() for reader in readers))
        assert all(holds(its, first.version) for its in memory)


async def publish_on(
    c: Cluster, trainers: list[Weights], readers: list[Weights], memory: list[Tensors]
) -> None:
    """Publish and read until some versions after the leader was killed."""
    last = 2**31

    async def train(weights: Weights, mine: Tensors) -> None:
        version = 1
        while version < last:
            version += 1
            await mutate(weights, mine, version)

    async def follow(weights: Weights) -> None:
        held = 0
        while held < last:
            held = (await weights.update(at_least=held + 1)).version

    async with anyio.create_task_group() as tasks:
        for weights, mine in zip(trainers, memory, strict=False):
            tasks.start_soon(train, weights, mine)
        for weights in readers:
            tasks.start_soon(follow, weights)
        await c.hubs[0].wait_for("m", at_least=3)
        await anyio.to_thread.run_sync(c.given.kill_leader)
        last = (await c.hubs[0].wait_for("m", at_least=3)).version + 5


async def wait_for(hub: Hub, number: int) -> None:
    assert (await hub.wait_for("m", at_least=number)).version == number


@pytest.mark.slow
@needs_etcd
async def test_etcd_goes_away_for_longer_than_any_lease_and_comes_back(tmp_path: Path) -> None:
    """A reader reads all the time. A publish fails by its deadline and names what is away, or waits
    until etcd is back. Nothing is invented.
    """
    with gated(1) as gate:
        async with cluster("etcd", tmp_path, "trainer", "reader") as c:
            hubs, etcd = c.hubs, c.etcd
            assert etcd is not None
            source, hasty, patient = [
                await hubs[0].register(model, tensors(1)) for model in ("m", "hasty", "patient")
            ]
            await source.publish(1)
            theirs = tensors()
            reader, late = [await hubs[1].register("m", its) for its in (theirs, tensors())]
            reports: list[FetchReport] = []
            published: list[int] = []

            def chunks() -> int:
                parts = (each.reshape(-1, CHUNK_BYTES) for each in theirs.values())
                return sum(int(part.any(axis=1).sum()) for part in parts)

            async def replicate() -> None:
                reports.append(await reader.replicate())

            async def publish() -> None:
                published.append((await patient.publish(1)).version)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replicate)
                await until(lambda: gate.holds)
                etcd.kill()
                await until(lambda: all("offline" in repr(hub) for hub in hubs))
                tasks.start_soon(publish)
                for chunk in range(2, CHUNKS + 1):
                    await anyio.sleep(5 * LEASE_S / CHUNKS)
                    gate.give_back()
                    await until(lambda chunk=chunk: chunks() >= chunk)  # type: ignore[misc]
                    for call in (hasty.publish(1, timeout=0.1), late.replicate(timeout=0.1)):
                        with pytest.raises(
                            CoordinatorUnavailable, match="no coordinator can be reached"
                        ):
                            await call
                assert holds(theirs, 1)
                assert not reports
                assert not published
                gate.open()
                etcd.start()
            assert [(each.version, each.bytes_read) for each in reports] == [(1, NBYTES)]
            assert published == [1]
            for hub in hubs:
                marks = {
                    model: (await hub.describe(model)).mark for model in ("m", "patient", "hasty")
                }
                assert marks == {"m": 1, "patient": 1, "hasty": None}
                assert hub.newest("hasty") is None
            assert (await hasty.publish(1)).version == 1
            assert (await late.replicate()).version == 1


@pytest.mark.slow
@needs_etcd
async def test_a_leader_that_was_stopped_wakes_up_and_changes_nothing(tmp_path: Path) -> None:
    async with cluster("etcd", tmp_path, "trainer", "reader") as c:
        hubs, given = c.hubs, c.given
        mine, theirs = tensors(1), tensors()
        source = await hubs[0].register("m", mine)
        await source.publish(1)
        reader = await hubs[1].register("m", theirs)
        await reader.replicate()
        given.leader.stop()
        await mutate(source, mine, 2)  # by the other one
        given.leader.go_on()
        await reader.update(at_least=2)
        await anyio.to_thread.run_sync(given.standby.kill)
        await mutate(source, mine, 3)  # the first one leads again, and knows what it has missed
        assert (await reader.update(at_least=3)).version == 3
        assert holds(theirs, 3)
