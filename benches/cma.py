"""One reader, or several, of one source on one host, by cma: the data plane against bare process_vm_readv.

`bare 1` and `bare 2` copy the same bytes into the same memory by one and by two threads, in calls of 8 MiB, and do nothing
else; the better of the two in a round is what the others are compared with. `first`: digests are made now; `again`: they are
known; `none`: there are none. Memory is touched on both sides. All ways take turns, in another order each round; a ratio
compares neighbours of one round (1 = as fast as the better bare copy). `CPU` is the same of the readers' CPU
seconds, against those of `bare 1`: it says what the data plane adds to the copy, also where other programs use the machine.

    python -m benches cma --mib 1024 --tensors 300 --tiny 150 --rounds 7 --readers 1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from benches.one_to_one import REGISTRATION, SECRET, content_of, cpu_s, manifest_of, memory_of, sizes_of
from tensorhub.cli.bench.facts import facts
from tensorhub.messages import Grant
from tensorhub.runtime.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.chunks import ChunkMemory
from tensorhub.runtime.cma_channel import CmaTransport
from tensorhub.runtime.lanes import AllVerified, Opened, PullRunner
from tensorhub.runtime.serving import SharedOwner
from tensorhub.transport import cma, tcp
from tensorhub.transport.base import Cutter, Destination, ReadRight
from tensorhub.transport.cma import Piece, Words
from tensorhub.transport.memory import address_of
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Incarnation, LeaseId, Location, Options

WAIT_S = 60.0
BARE = ("bare 1", "bare 2")
MODES = (*BARE, "first", "again", "none")


# ------------------------------------------------------------------------------------------------- the source


def source(pipe: Connection, args: argparse.Namespace) -> None:
    anyio.run(_serve, pipe, args, memory_of(sizes_of(args), fill=True))


async def _serve(pipe: Connection, args: argparse.Namespace, regions: list[memoryview]) -> None:
    listener, owner, generation = tcp.listen("127.0.0.1"), SharedOwner(words=Words()), 0
    assert owner.header is not None
    pipe.send((tcp.address_of(listener), owner.header.pid, [address_of(region) for region in regions]))
    settings = ServeSettings(Incarnation("source"), [SECRET])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_readers, listener, owner, settings)
        while (mode := await anyio.to_thread.run_sync(pipe.recv)) != "stop":
            if mode != "again":
                generation += 1
                await owner.fence_async(REGISTRATION)
                memory = ChunkMemory(manifest_of(sizes_of(args), mode, args.chunk), regions)
                owner.open(REGISTRATION, generation, content_of(generation), memory, complete=True)
            pipe.send(generation)
        tasks.cancel_scope.cancel()
    listener.close()


# ------------------------------------------------------------------------------------------------- the readers


def reader(pipe: Connection, args: argparse.Namespace, address: str, pid: int, places: list[int]) -> None:
    regions = memory_of(sizes_of(args), fill=False)
    pipe.send(None)
    while (order := pipe.recv()) != "stop":
        mode, generation = order
        if mode in BARE:
            started, before_s = time.monotonic(), cpu_s()
            _copy(pid, places, regions, int(mode[-1]))
            ended, used_s = time.monotonic(), cpu_s() - before_s
        else:
            started, ended, used_s = anyio.run(_pull, address, generation, mode, args, regions)
        ok = all(region[-8:] == regions[-1][-8:] for region in regions[-3:])
        for region in regions:
            region[:8] = bytes(8)
        pipe.send((started, ended, used_s, ok))


def _copy(pid: int, places: Sequence[int], regions: Sequence[memoryview], threads: int) -> None:
    """All of it, cut into as many equal parts as there are threads."""
    pieces = [Piece(address_of(region), there, region.nbytes) for region, there in zip(regions, places, strict=True)]
    calls = list(cma.cut_up(pieces))

    def work(part: int) -> None:
        for call in calls[part::threads]:
            cma.copy(pid, call)

    if threads == 1:
        work(0)
        return
    workers = [threading.Thread(target=work, args=(part,)) for part in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


async def _pull(
    address: str, generation: int, mode: str, args: argparse.Namespace, regions: list[memoryview]
) -> tuple[float, float, float]:
    """When it began and ended, in a running loop, from the grant until nothing of it runs; and CPU seconds."""
    memory = ChunkMemory(manifest_of(sizes_of(args), mode, args.chunk), regions)
    owner = SharedOwner(words=Words())
    owner.open(REGISTRATION, 1, content_of(generation), memory, complete=False)
    transport = CmaTransport(Local(Incarnation("reader"), (SECRET,), Options()))

    def open_channel(grant: Grant, destination: Destination, cutter: Cutter) -> Opened:
        right = ReadRight(LeaseId("l"), Incarnation("source"), REGISTRATION, generation, content_of(generation))
        channel = transport.open(grant.endpoints[0], right, destination, cutter)
        return Opened("cma", channel, args.lanes or transport.lanes)

    grant = Grant("l", "s", "source", REGISTRATION, generation, (Endpoint("cma", address),), Location(), True)
    started, before_s = time.monotonic(), cpu_s()
    async with PullRunner(memory, owner, REGISTRATION, 1, open_channel, batch_bytes=args.batch) as runner:
        runner.add_source(grant)
        event = await runner.next_event()
        if not isinstance(event, AllVerified):
            raise SystemExit(f"the pull failed: {event}")
    return started, time.monotonic(), cpu_s() - before_s


# ------------------------------------------------------------------------------------------------------- rounds


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each way, from the first start to the last end, round by round; and the readers' CPU seconds."""
    context, (mine, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    processes = [context.Process(target=source, args=(theirs, args), daemon=True)]
    processes[0].start()
    known = mine.recv()
    pipes: list[Connection] = []
    for _ in range(args.readers):
        here, there = multiprocessing.Pipe()
        processes.append(context.Process(target=reader, args=(there, args, *known), daemon=True))
        processes[-1].start()
        here.recv()
        pipes.append(here)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    used_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(args.rounds + 1):
        order = ["first", "again", "none", *BARE] if number % 2 else ["none", *BARE, "first", "again"]
        for mode in order:
            generation = 0
            if mode not in BARE:
                mine.send(mode)
                generation = mine.recv()
            for pipe in pipes:
                pipe.send((mode, generation))
            if not all(pipe.poll(WAIT_S) for pipe in pipes):
                raise SystemExit(f"a reader did not answer to {mode!r} in {WAIT_S} s")
            spans = [pipe.recv() for pipe in pipes]
            assert all(ok for *_, ok in spans), mode
            if number:  # the first round only warms up
                seconds[mode].append(max(end for _, end, _, _ in spans) - min(start for start, _, _, _ in spans))
                used_s[mode].append(sum(used for _, _, used, _ in spans))
    for pipe in [mine, *pipes]:
        pipe.send("stop")
    for process in processes:
        process.join()
    return seconds, used_s


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches cma", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--tiny", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=0, help="threads of each reader; 0: as the transport says")
    parser.add_argument("--chunk", type=int, default=Options().chunk_bytes)
    parser.add_argument("--batch", type=int, default=64 * 2**20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    random.seed(1)
    seconds, used_s = measure(args)
    bare = [min(both) for both in zip(*(seconds[mode] for mode in BARE), strict=True)]
    rows: dict[str, Any] = {}
    print(
        f"{args.mib} MiB, {args.tensors} tensors, {args.readers} reader(s); median [least-largest] of {args.rounds} rounds"
    )
    for mode, found in seconds.items():
        ratios = [base / mine for base, mine in zip(bare, found, strict=True)]
        cpu = [base / mine for base, mine in zip(used_s["bare 1"], used_s[mode], strict=True)]
        rows[mode] = {"seconds": found, "ratios": ratios, "CPU seconds": used_s[mode]}
        mid, low, high = statistics.median(found), min(found), max(found)
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
        text = f"{mode:8} {mid * 1e3:9.2f} ms [{low * 1e3:.2f}-{high * 1e3:.2f}]   of the better bare copy: {ratio}"
        print(f"{text}   CPU {statistics.median(cpu):.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": facts(), "rows": rows}))
    return 0
