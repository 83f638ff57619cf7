"""What a lane and a source say that their seconds went to is what was made slow; over real sockets.

Shares of one run are compared: how long it takes, and how busy the machine is, does not matter.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tensorhub.memory.chunks import ChunkMemory
from tensorhub.observed import LinkTiming, ServedTiming
from tensorhub.runtime.data.acceptor import serve_readers
from tensorhub.transport import sockets
from tensorhub.transport.base import Cutter, ReadRight
from tensorhub.transport.registry import Local
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import Endpoint, Incarnation, LeaseId, Options
from tests.runtime.data_rig import (
    CONTENT,
    SECRET,
    WAIT_S,
    Node,
    finish,
    manifest_of,
    serving,
    until,
)

MIB = 2**20
PACING = 47  # SO_MAX_PACING_RATE
SLOW_BYTES_PER_S = 8 * MIB
SourceMain = Callable[[Connection, int, str], None]
SPAWN = multiprocessing.get_context("spawn")

counts_delay = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this kernel counts no waits for cores"
)


def node(name: str, mib: int, *, filled: bool) -> Node:
    return Node(name, manifest_of((mib * MIB,), chunk_bytes=MIB), filled=filled)


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


# (until its parent is gone)
BURN = """import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    sum(range(10000))
"""


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """A thread of this process computes in Python."""
    stop = threading.Event()
    thread = threading.Thread(target=spin, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def crowded() -> Iterator[None]:
    """This thread, and those that it makes, share one core with processes that compute."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    burn = [sys.executable, "-S", "-E", "-c", BURN, str(core), str(os.getpid())]
    others = [subprocess.Popen(burn) for _ in range(4)]
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()


def quiet() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")


@contextlib.contextmanager
def throttled(device: int) -> Iterator[None]:
    """This process reads that device slowly."""
    group = THROTTLE.parent / f"tensorhub-test-{os.getpid()}"
    group.mkdir()
    limit = f"{os.major(device)}:{os.minor(device)} {SLOW_BYTES_PER_S}"
    (group / THROTTLE.name).write_text(limit)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (THROTTLE.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


WAYS = {"quiet": quiet, "spinning": spinning, "crowded": crowded}


# --------------------------------------------------------------------------------------------------
# a source in a process of its own, whose GIL is not the reader's


def source_main(pipe: Connection, mib: int, way: str) -> None:
    with WAYS[way]():
        anyio.run(_serve, pipe, node("source", mib, filled=True).open(complete=True))


def file_main(pipe: Connection, mib: int, path: str) -> None:
    """A source whose memory is a file's, and not in the cache; its digests are known."""
    source = node("source", mib, filled=True)
    digests = [source.memory.digest(chunk) for chunk in range(mib)]
    Path(path).write_bytes(source.arrays[0])
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    source.memory = ChunkMemory(source.manifest, [mapped])
    what = source.registration, source.generation, CONTENT, source.memory
    source.owner.open(*what, complete=True, digests=digests)
    with throttled(os.fstat(descriptor).st_dev):
        anyio.run(_serve, pipe, source)
    os.close(descriptor)


async def _serve(pipe: Connection, source: Node) -> None:
    source.owner.served_times.on_served = pipe.send
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_readers, source.listener, source.owner, source.settings)
        pipe.send(sockets.address_of(source.listener))
        await anyio.to_thread.run_sync(pipe.recv)
        tasks.cancel_scope.cancel()


async def read(address: str, mib: int, batch_mib: int = 16) -> LinkTiming:
    """Read such a source."""
    reader = node("reader", mib, filled=False).open(complete=False)
    source = node("source", mib, filled=False)  # as it is there
    source.listener.close()
    try:
        async with reader.runner(batch_bytes=batch_mib * MIB) as runner:
            runner.add_source(source.grant(address=address))
            await finish(runner)
    finally:
        reader.listener.close()
        for way in reader.ways:
            way.close()
    (timing,) = runner.timings()
    return timing


def hear(pipe: Connection) -> object:
    assert pipe.poll(WAIT_S), "the other process says nothing"
    return pipe.recv()


def seconds_of(
    mib: int,
    *,
    source: str = "quiet",
    reader: str = "quiet",
    main: SourceMain = source_main,
    batch_mib: int = 16,
) -> tuple[LinkTiming, ServedTiming]:
    """What both ends say of one read."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=main, args=(there, mib, source))
    process.start()
    try:
        address = hear(here)
        assert isinstance(address, str)
        with WAYS[reader]():
            link = anyio.run(read, address, mib, batch_mib)
        served = hear(here)
        here.send("stop")
        process.join(WAIT_S)
    finally:
        process.kill()
        process.join()
    assert isinstance(served, ServedTiming)
    assert link.nbytes == served.nbytes == mib * MIB
    check(link, served)
    return link, served


def check(link: LinkTiming, served: ServedTiming) -> None:
    """No part is negative, and the parts of one thread are no more than its time."""
    assert link.lease == served.lease
    for parts, seconds in ((parts_of(link), link.seconds), (parts_of(served), served.seconds)):
        assert all(part >= 0 for part in parts.values()), parts
        assert sum(parts.values()) <= seconds * 1.05 + 0.05, (parts, seconds)


def parts_of(timing: LinkTiming | ServedTiming) -> dict[str, float]:
    others = ("seconds", "window_s")  # the network's time
    return {
        name: getattr(timing, name)
        for name in timing.__dataclass_fields__
        if name.endswith("_s") and name not in others
    }


def longest_at_work(timing: LinkTiming | ServedTiming) -> str:
    """Without the waits for a core, which other processes of this machine cause."""
    parts = {**parts_of(timing), "delay_s": 0.0}
    return max(parts, key=parts.__getitem__)


WAITS_FOR_PEER = ("link_s", "empty_s", "blocked_s", "window_s")


def longest_of_own(timing: LinkTiming | ServedTiming) -> str:
    """Without the waits for the other end, which other processes of this machine slow, too."""
    parts = {name: each for name, each in parts_of(timing).items() if name not in WAITS_FOR_PEER}
    return max(parts, key=parts.__getitem__)


# --------------------------------------------------------------------------------------------------


async def both(source: Node, reader: Node, **grant: object) -> tuple[LinkTiming, ServedTiming]:
    """What both ends say of one read in this process."""
    found: list[ServedTiming] = []
    source.owner.served_times.on_served = found.append
    async with reader.runner(batch_bytes=16 * MIB) as runner:
        runner.add_source(source.grant(**grant))  # type: ignore[arg-type]
        await finish(runner)
    await until(lambda: bool(found))
    ((link,), (served,)) = runner.timings(), found
    check(link, served)
    return link, served


async def test_behind_a_slow_link_bytes_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = sockets.tune

    def slow(connection: socket.socket) -> None:
        tune(connection)
        connection.setsockopt(socket.SOL_SOCKET, PACING, SLOW_BYTES_PER_S)

    monkeypatch.setattr(sockets, "tune", slow)
    source, reader = node("source", 16, filled=True), node("reader", 16, filled=False)
    async with serving(source.open(complete=True), reader.open(complete=False)):
        link, served = await both(source, reader)
    assert (longest_at_work(link), longest_at_work(served)) == ("link_s", "blocked_s")
    assert served.window_s < served.blocked_s / 2, "the reader took all that came"


async def test_a_reader_that_takes_nothing_blocks_its_source_by_the_window() -> None:
    source, found = node("source", 48, filled=True).open(complete=True), list[ServedTiming]()
    source.owner.served_times.on_served = found.append
    target = node("target", 48, filled=False)

    def take_slowly() -> None:
        local = Local(Incarnation("slow-1"), (SECRET,), Options(connect_timeout_s=WAIT_S))
        right = ReadRight(
            LeaseId("l"), source.incarnation, source.registration, source.generation, CONTENT
        )
        way = TcpTransport(local)
        endpoint = Endpoint("tcp", sockets.address_of(source.listener))
        channel = way.open(endpoint, right, target.memory, Cutter())
        channel.submit(range(48))
        for _ in range(48):
            time.sleep(0.02)
            channel.receive(1)
        channel.close()
        way.close()

    async with serving(source):
        await anyio.to_thread.run_sync(take_slowly)
        await until(lambda: bool(found))
    (served,) = found
    assert longest_at_work(served) == "blocked_s"
    assert served.window_s > served.blocked_s / 2
    assert (served.lease, served.nbytes, served.readers) == ("l", 48 * MIB, 0.0)
    target.listener.close()


async def test_a_source_that_has_nothing_yet_says_so_and_its_reader_too() -> None:
    source, reader = node("source", 8, filled=True), node("reader", 8, filled=False)
    async with serving(source.open(complete=False), reader.open(complete=False)):

        async def fill() -> None:
            for chunk in range(8):
                await anyio.sleep(0.1)
                source.make_available(chunk)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fill)
            link, served = await both(source, reader, complete=False)
    assert longest_at_work(link) == "empty_s"
    assert served.empty_s > served.seconds / 3, "the rest it waited for its reader's next request"


@pytest.mark.root
@pytest.mark.skipif(not THROTTLE.exists(), reason="no disk can be throttled here (cgroup v1)")
def test_a_slow_disk_of_the_source_is_told_from_the_link(tmp_path: Path) -> None:
    link, served = seconds_of(32, source=str(tmp_path / "file"), main=file_main, batch_mib=2)
    assert (longest_at_work(link), longest_at_work(served)) == ("link_s", "disk_s")


# where cores are short, too, a thread waits for a core and seldom for the GIL: then a read shows
# little, and the next one may show it
READS = 8
# each of four batches waits once. (The link may take longer than that: where the kernel leaves
# packets to a thread of its own, that thread waits for the core of the one that computes.)
GIL_S = 4 * sys.getswitchinterval()


@pytest.mark.heavy
def test_a_thread_that_keeps_the_gil_is_told_from_the_link() -> None:
    reads = (seconds_of(64, reader="spinning") for _ in range(READS))
    assert any(link.gil_s > GIL_S for link, _ in reads)


@pytest.mark.heavy
def test_a_thread_that_keeps_the_gil_at_the_source_is_told_from_the_reader() -> None:
    reads = (seconds_of(64, source="spinning") for _ in range(READS))
    assert any(served.gil_s > GIL_S for _, served in reads)


@pytest.mark.heavy
def test_no_thread_keeps_the_gil_of_a_quiet_process() -> None:
    link, served = seconds_of(64)
    assert link.gil_s < link.seconds / 10
    assert served.gil_s < served.seconds / 10


@pytest.mark.heavy
@counts_delay
def test_a_crowded_core_is_delay() -> None:
    reads = (seconds_of(64, reader="crowded") for _ in range(READS))
    assert any(longest_of_own(link) == "delay_s" for link, _ in reads)


@pytest.mark.heavy
@counts_delay
def test_a_crowded_core_of_the_source_is_delay() -> None:
    reads = (seconds_of(64, source="crowded") for _ in range(READS))
    assert any(longest_of_own(served) == "delay_s" for _, served in reads)


# --------------------------------------------------------------------------------------------------
# for each lease once, when its reader is done


async def test_a_source_tells_of_each_lease_once_also_if_its_reader_keeps_the_connection() -> None:
    source, reader = node("source", 4, filled=True), node("reader", 4, filled=False)
    found: list[ServedTiming] = []
    source.owner.served_times.on_served = found.append
    async with serving(source.open(complete=True), reader):
        for number in range(1, 4):
            reader.generation = number
            reader.open(complete=False)
            async with reader.runner(batch_bytes=MIB) as runner:
                runner.add_source(source.grant(f"lease-{number}"))
                await finish(runner)
            await until(lambda number=number: len(found) == number)  # type: ignore[misc]
            await anyio.to_thread.run_sync(reader.owner.fence, reader.registration)
    assert [(each.lease, each.nbytes) for each in found] == [
        (f"lease-{number}", 4 * MIB) for number in range(1, 4)
    ]


async def test_several_connections_of_one_lease_are_told_together() -> None:
    source, reader = node("source", 32, filled=True), node("reader", 32, filled=False)
    found: list[ServedTiming] = []
    source.owner.served_times.on_served = found.append
    async with serving(source.open(complete=True), reader.open(complete=False)):
        async with reader.runner(batch_bytes=4 * MIB, connections=3) as runner:
            runner.add_source(source.grant())
            await finish(runner)
        await until(lambda: "0 leases" in repr(source.owner.served_times))
    assert [each.nbytes for each in found] == [32 * MIB]


async def test_two_readers_are_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    source = node("source", 8, filled=True).open(complete=False)
    readers = [node(f"reader-{n}", 8, filled=False).open(complete=False) for n in range(2)]
    found: list[ServedTiming] = []
    source.owner.served_times.on_served = found.append
    async with serving(source, *readers), contextlib.AsyncExitStack() as stack:
        for reader in readers:
            runner = await stack.enter_async_context(reader.runner(batch_bytes=MIB))
            runner.add_source(source.grant(f"for-{reader.name}", complete=False))
            stack.push_async_callback(finish, runner)
        await until(lambda: "2 leases" in repr(source.owner.served_times))
        await anyio.sleep(0.2)
        source.make_available(*range(8))
        await until(lambda: len(found) == 2)
    assert all(0.5 < each.readers <= 1.0 for each in found), found


async def test_a_reader_that_gets_nothing_is_not_told_of() -> None:
    source, reader = node("source", 2, filled=True), node("reader", 2, filled=False)
    found: list[ServedTiming] = []
    source.owner.served_times.on_served = found.append
    async with serving(source.open(complete=True), reader.open(complete=False)):
        async with reader.runner() as runner:
            runner.add_source(source.grant(generation=99))
            with anyio.fail_after(WAIT_S):
                await runner.next_event()
        await until(lambda: "0 lanes" in repr(source.owner))
    assert found == []
