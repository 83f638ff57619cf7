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

NBYTES = CHUNKS * CHUNK_BYTES
PATIENT = replace(OPTIONS, coordinator_wait_s=WAIT_S)
pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def slow(engine: str, *marks: pytest.MarkDecorator) -> ParameterSet:
    return pytest.param(engine, marks=[pytest.mark.slow, *marks])


class Candidates:
    """A leader and a standby, or (`state_dir` alone) a leader that is started again."""

    def __init__(self, processes: ChildProcesses, engine: str, directory: Path) -> None:
        self._processes = processes
        self._settings: dict[str, object] = {"lease_s": 2.0, "ha": engine}
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
            engine = f"etcd://{member.endpoint}/tests?lease_s=2"
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


async def wait_for(hub: Hub, number: int) -> None:
    assert (await hub.wait_for("m", at_least=number)).version == number


@pytest.mark.slow
@needs_etcd
async def test_etcd_goes_away_for_longer_than_a_lease_and_comes_back(tmp_path: Path) -> None:
    """Transfers go on; a call ends at its deadline and names what is away; nothing is invented."""
    with gated(3) as gate:
        async with cluster("etcd", tmp_path, "trainer", "reader") as c:
            hubs, etcd = c.hubs, c.etcd
            assert etcd is not None
            source = await hubs[0].register("m", tensors(1))
            await source.publish(1)
            other = await hubs[0].register("other", tensors(1))
            theirs = tensors()
            reader = await hubs[1].register("m", theirs)
            reports: list[FetchReport] = []

            async def replicate() -> None:
                reports.append(await reader.replicate())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replicate)
                await until(lambda: gate.holds)
                etcd.kill()
                await until(lambda: all("offline" in repr(hub) for hub in hubs))
                gate.open()
                await until(lambda: holds(theirs, 1))
                with pytest.raises(CoordinatorUnavailable, match="no coordinator can be reached"):
                    await other.publish(1, timeout=0.5)
                assert not reports
                etcd.start()
            assert [(each.version, each.bytes_read) for each in reports] == [(1, NBYTES)]
            assert hubs[1].newest("other") is None
            assert (await other.publish(1)).version == 1


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
