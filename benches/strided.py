"""One reader of another layout on one host: chunks of many runs against contiguous chunks of as
many bytes.

The source holds rows of twice a run, and the reader takes half of each, as tensor-parallel readers
take columns: side by side, or (`--gap`) into rows that have a pitch as well. `first`: digests are
made now; `again`: they are known. All ways take turns, in another order each round; a ratio
compares with the contiguous read of the same round (1 = as fast). `CPU` is the same of the CPU
seconds of both processes. Memory is touched on both sides.

    python -m benches strided --transport tcp --mib 256 --runs 4096 65536 --rounds 9
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import anyio

from benches.comparison.facts import facts
from benches.pulls import SECRET, TRANSPORTS, cpu_s, memory_of
from tensorhub.layouts.reading import Part, Reading, Selection, resharded
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import Grant
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip, shortest
from tensorhub.runtime.data.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.data.lanes import AllVerified, PullRunner
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import Opened
from tensorhub.transport import built_in, sockets, unix
from tensorhub.transport.base import Cutter, Destination, ReadRight
from tensorhub.transport.generation_words import GenerationWords
from tensorhub.transport.registry import Local
from tensorhub.types import (
    ContentId,
    Endpoint,
    Incarnation,
    LeaseId,
    Location,
    Options,
    RegistrationId,
)

REGISTRATION = RegistrationId("registration")
WAIT_S = 120.0
CHUNK = Options().chunk_bytes


def manifest_of(nbytes: int) -> Manifest:
    return build_manifest(
        [TensorDescription("t", "uint8", (nbytes,), 1 << 40, nbytes)], CHUNK, "xxh3-64"
    )


def reading_of(nbytes: int, run: int, gap: int) -> Reading:
    """Every second run of twice as many bytes."""
    rows, at_once = nbytes // run, max(1, CHUNK // run)
    counts = [(first, min(at_once, rows - first)) for first in range(0, rows, at_once)]
    taken = [
        (Strip(0, first * 2 * run, 0, 0, 1, ((count, 2 * run),), run),) for first, count in counts
    ]
    pitch = run + gap
    places = [
        (shortest(Strip(0, first * pitch, 0, 0, 1, ((count, pitch),), run)),)
        for first, count in counts
    ]
    part = Part(0, (0,), Selection(tuple(taken)), tuple(range(len(taken))))
    return Reading(tuple(places), part.selection.sizes, (part,))


def source(pipe: Connection, args: argparse.Namespace) -> None:
    anyio.run(_serve, pipe, args)


async def _serve(pipe: Connection, args: argparse.Namespace) -> None:
    nbytes = args.mib * 2**20
    side = built_in.TRANSPORTS.make(
        Local(Incarnation("source"), [SECRET], Options()), [args.transport]
    )[0].serve()
    assert side is not None
    regions = memory_of([2 * nbytes, nbytes], fill=True, shared=args.transport == "shm")
    owner = SharedOwner([side])
    listener = unix.listen() if side.shares_memory else sockets.listen("127.0.0.1")
    pipe.send(unix.address_of(listener) if side.shares_memory else sockets.address_of(listener))
    memories = {
        "strided": ChunkMemory(manifest_of(2 * nbytes), regions[:1]),
        "contiguous": ChunkMemory(manifest_of(nbytes), regions[1:]),
    }
    generation = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            serve_readers, listener, owner, ServeSettings(Incarnation("source"), [SECRET])
        )
        while (order := await anyio.to_thread.run_sync(pipe.recv)) != "stop":
            if order in memories:
                generation += 1
                await owner.fence_async(REGISTRATION)
                owner.open(
                    REGISTRATION,
                    generation,
                    ContentId(f"c{generation}"),
                    memories[order],
                    complete=True,
                )
                pipe.send(generation)
            else:
                pipe.send(cpu_s())
        tasks.cancel_scope.cancel()
    listener.close()
    owner.end_reading()


class _Way:
    """One way of reading: `run` 0 is the contiguous one."""

    def __init__(self, nbytes: int, run: int, gap: int) -> None:
        self.name = f"runs of {run}" if run else "contiguous"
        self.parts: dict[str, Part] = {}
        if run:
            reading = reading_of(nbytes, run, gap)
            self.parts = {part.selection.selection_id: part for part in reading.parts}
            own = manifest_of(nbytes // run * (run + gap))
            (region,) = memory_of([own.nbytes], fill=False)
            self.memory = ChunkMemory(resharded(own, "xxh3-64", CHUNK, reading, "grid"), [region])
        else:
            (region,) = memory_of([nbytes], fill=False)
            self.memory = ChunkMemory(manifest_of(nbytes), [region])


def reader(
    args: argparse.Namespace, address: str, pipe: Connection
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """(wall seconds, CPU seconds of both) by way and mode."""
    transport = TRANSPORTS[args.transport](Local(Incarnation("reader"), (SECRET,), Options()))
    endpoint = Endpoint(args.transport, address)
    ways = [_Way(args.mib * 2**20, run, args.gap) for run in (0, *args.runs)]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {
        way.name: {"first": [], "again": []} for way in ways
    }

    def ask(order: str) -> float:
        pipe.send(order)
        if not pipe.poll(WAIT_S):
            raise SystemExit(f"the source did not answer in {WAIT_S} s")
        answer: float = pipe.recv()
        return answer

    async def pull(way: _Way, generation: int) -> None:
        owner, content = SharedOwner(words=GenerationWords()), ContentId(f"c{generation}")
        owner.open(REGISTRATION, 1, content, way.memory, complete=False)

        def open_channel(
            grant: Grant, destination: Destination, cutter: Cutter, left: int
        ) -> Opened:
            selection = way.parts[grant.selection].selection if grant.selection else None
            right = ReadRight(
                LeaseId("l"), Incarnation("source"), REGISTRATION, generation, content, selection
            )
            channel = transport.open(grant.endpoints[0], right, destination, cutter)
            return Opened(transport.name, channel, transport.lanes)

        name = next(iter(way.parts), "")
        grant = Grant(
            "l", "s", "source", REGISTRATION, generation, (endpoint,), Location(), True, name
        )
        async with PullRunner(
            way.memory, owner, REGISTRATION, 1, open_channel, selections=way.parts
        ) as runner:
            runner.add_source(grant)
            event = await runner.next_event()
            if not isinstance(event, AllVerified):
                raise SystemExit(f"the pull failed: {event}")

    for number in range(args.rounds + 1):
        random.shuffle(ways)
        for way in ways:
            generation = int(ask("strided" if way.parts else "contiguous"))
            for mode in ("first", "again"):
                before, started = cpu_s() + ask("cpu"), time.monotonic()
                anyio.run(pull, way, generation)
                wall = time.monotonic() - started
                if number:  # the first round only warms up
                    found[way.name][mode].append((wall, cpu_s() + ask("cpu") - before))
    pipe.send("stop")
    transport.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benches strided",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--transport", choices=("tcp", "cma", "shm"), default="tcp")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, nargs="+", default=[4096, 65536], metavar="BYTES")
    parser.add_argument(
        "--gap", type=int, default=0, metavar="BYTES", help="between two runs at the reader"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    random.seed(1)
    context, (mine, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    process = context.Process(target=source, args=(theirs, args), daemon=True)
    process.start()
    found = reader(args, mine.recv(), mine)
    process.join()
    mine.close()
    theirs.close()
    print(
        f"{args.transport}: {args.mib} MiB; gap {args.gap}; median [least-largest] of "
        f"{args.rounds} rounds"
    )
    for name in ("contiguous", *[f"runs of {run}" for run in args.runs]):
        for mode, taken in found[name].items():
            walls = [wall * 1e3 for wall, _ in taken]
            line = (
                f"{name:14} {mode:6} {statistics.median(walls):8.1f} ms "
                f"[{min(walls):.1f}-{max(walls):.1f}]"
            )
            base = found["contiguous"][mode]
            ratios = [plain[0] / mine[0] for plain, mine in zip(base, taken, strict=True)]
            cpus = [plain[1] / mine[1] for plain, mine in zip(base, taken, strict=True)]
            print(
                f"{line}   of contiguous: {statistics.median(ratios):.2f} "
                f"[{min(ratios):.2f}-{max(ratios):.2f}]   "
                f"CPU {statistics.median(cpus):.2f}"
            )
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {"machine": facts(), "transport": args.transport, "mib": args.mib, "seconds": found}
            )
        )
    return 0
