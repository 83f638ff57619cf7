"""One reader, or several, of one source on one host, by cma, shm, rdma or nixl: the data plane
against a bare copy.

`bare 1` and `bare 2` copy the same bytes into the same memory by one and by two threads, in calls
of 8 MiB, and do nothing else: by process_vm_readv (cma), by memmove out of a mapping (shm), or by
one READ of everything (nixl, where both are the same). By rdma they are plain loops of READs: `bare
1` looks for completions again and again, `bare 2` sleeps until there are some. The better of the
two in a round is what the others are compared with. `first`: digests are made now; `again`: they
are known; `none`: there are none. Memory is touched on both sides. All ways take turns, in another
order each round; a ratio compares neighbours of one round (1 = as fast as the better bare copy).
`CPU` is the same of the readers' CPU seconds, against those of `bare 1`: it says what the data
plane adds to the copy, also where other programs use the machine.

    python -m benches one_sided --transport shm --mib 1024 --tensors 300 --tiny 150 --rounds 7 --readers 1
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from benches.bare_reads import Lie, Reader
from benches.bare_verbs import BareReader, BareSource
from benches.comparison.facts import facts
from benches.pulls import (
    HUB_MODES,
    Puller,
    cpu_s,
    memory_of,
    options_parser,
    serving,
    sizes_of,
    spoil,
)

WAIT_S = 60.0
BARE = ("bare 1", "bare 2")
MODES = (*BARE, *HUB_MODES)


def source(pipe: Connection, args: argparse.Namespace) -> None:
    anyio.run(
        _serve, pipe, args, memory_of(sizes_of(args), fill=True, shared=args.transport == "shm")
    )


async def _serve(pipe: Connection, args: argparse.Namespace, regions: list[memoryview]) -> None:
    bare = BareSource(regions) if args.transport == "rdma" else None
    async with serving(args.transport, args, regions) as offers:
        pipe.send(
            (
                offers.address,
                Lie.of(regions, offers.exposures),
                [bytes(region[-8:]) for region in regions],
            )
        )
        while (order := await anyio.to_thread.run_sync(pipe.recv)) != "stop":
            pipe.send(
                await offers.offer(order)
                if bare is None or isinstance(order, str)
                else bare.pair(order)
            )


def reader(
    pipe: Connection, args: argparse.Namespace, address: str, there: Lie, ends: list[bytes]
) -> None:
    regions = memory_of(sizes_of(args), fill=False)
    puller, read = (
        Puller(args.transport, address, args, regions),
        _bare_read(pipe, args, there, regions),
    )
    while (order := pipe.recv()) != "stop":
        mode, generation = order
        spoil(regions)
        if mode in BARE:
            started, before_s = time.monotonic(), cpu_s()
            read(int(mode[-1]))
            ended, used_s = time.monotonic(), cpu_s() - before_s
        else:
            started, ended, used_s, _ = puller.pull(mode, generation)
        pipe.send((started, ended, used_s, [bytes(region[-8:]) for region in regions] == ends))


def _bare_read(
    pipe: Connection, args: argparse.Namespace, there: Lie, regions: list[memoryview]
) -> Callable[[int], None]:
    """What reads all of it in a bare loop: by so many threads, or (rdma) in that way."""
    if args.transport != "rdma":
        pipe.send(None)
        return Reader(args.transport, there, regions).read
    bare = BareReader(regions)
    pipe.send(bare.card)
    bare.pair(*pipe.recv())
    return lambda way: bare.read(poll=way == 1)


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each way, from the first start to the last end, round by round; and the readers'
    CPU seconds.
    """
    context, (mine, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    processes = [context.Process(target=source, args=(theirs, args), daemon=True)]
    processes[0].start()
    known = mine.recv()
    pipes: list[Connection] = []
    for _ in range(args.readers):
        here, there = multiprocessing.Pipe()
        processes.append(context.Process(target=reader, args=(there, args, *known), daemon=True))
        processes[-1].start()
        if (card := here.recv()) is not None:
            mine.send(card)
            here.send(mine.recv())
        pipes.append(here)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    used_s: dict[str, list[float]] = {mode: [] for mode in MODES}
    turns: list[tuple[str, ...]] = [("first", "again"), ("none",), *[(mode,) for mode in BARE]]
    for number in range(args.rounds + 1):
        random.shuffle(turns)
        # `again` is of the version that `first` was of
        for mode in [mode for turn in turns for mode in turn]:
            generation = 0
            if mode not in BARE:
                mine.send(mode)
                generation = mine.recv()
            for pipe in pipes:
                pipe.send((mode, generation))
            if not all(pipe.poll(WAIT_S) for pipe in pipes):
                raise SystemExit(f"a reader did not answer to {mode!r} in {WAIT_S} s")
            spans = [pipe.recv() for pipe in pipes]
            if not all(ok for *_, ok in spans):
                raise SystemExit(f"{mode}: a reader holds other bytes than the source")
            if number:  # the first round only warms up
                seconds[mode].append(
                    max(end for _, end, _, _ in spans) - min(start for start, _, _, _ in spans)
                )
                used_s[mode].append(sum(used for _, _, used, _ in spans))
    for pipe in [mine, *pipes]:
        pipe.send("stop")
    for process in processes:
        process.join()
    return seconds, used_s


def main(arguments: list[str] | None = None) -> int:
    parser = options_parser("python -m benches one_sided", __doc__)
    parser.add_argument("--transport", choices=("cma", "shm", "rdma", "nixl"), default="cma")
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    random.seed(1)
    seconds, used_s = measure(args)
    bare = [min(both) for both in zip(*(seconds[mode] for mode in BARE), strict=True)]
    rows: dict[str, Any] = {}
    tensors = len(sizes_of(args))
    print(
        f"{args.transport}: {args.mib} MiB, {tensors} tensors, {args.readers} reader(s); "
        f"median [least-largest] of {args.rounds} rounds"
    )
    for mode, found in seconds.items():
        ratios = [base / mine for base, mine in zip(bare, found, strict=True)]
        cpu = [base / mine for base, mine in zip(used_s["bare 1"], used_s[mode], strict=True)]
        rows[mode] = {"seconds": found, "ratios": ratios, "CPU seconds": used_s[mode]}
        mid, low, high = statistics.median(found), min(found), max(found)
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
        text = (
            f"{mode:8} {mid * 1e3:9.2f} ms [{low * 1e3:.2f}-{high * 1e3:.2f}]   of the better "
            f"bare copy: {ratio}"
        )
        print(f"{text}   CPU {statistics.median(cpu):.2f}")
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {"machine": facts(), "transport": args.transport, "mib": args.mib, "rows": rows}
            )
        )
    return 0
