"""One reader, one source, two processes, one host: the data plane against a bare blocking socket.

Prints the time of a bare copy (recv_into and sendall of whole tensors, same congestion control, no digests)
and of the lanes, interleaved in one run, and their ratio (1 = as fast as the bare socket). Memory is touched
on both sides.

    python -m benches.one_to_one --mib 1024 --tensors 300 --tiny 150 --rounds 7
    python -m benches.one_to_one --mib 256 --model Qwen2.5-7B
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import anyio

from benches.mixes import Mix
from tensorhub.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.messages import Grant
from tensorhub.runtime.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.chunks import ChunkMemory
from tensorhub.runtime.lanes import AllVerified, Opened, PullRunner
from tensorhub.runtime.serving import SharedOwner
from tensorhub.runtime.tcp_channel import TcpTransport
from tensorhub.transport import tcp
from tensorhub.transport.base import Cutter, Destination, ReadRight
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

REGISTRATION, SECRET = RegistrationId("registration"), b"bench"
TINY_BYTES = 4096
MODES = ("bare", "first", "again", "none")  # first: digests made now; again: digests known; none: no digests


def content_of(generation: int) -> ContentId:
    """Each is another one, or the digests of the last would be known."""
    return ContentId(f"content {generation}")


def sizes_of(args: argparse.Namespace) -> list[int]:
    if args.model:
        return Mix.of(args).sizes()
    large = args.tensors - args.tiny
    each = (args.mib * 2**20 - args.tiny * TINY_BYTES) // large // 4096 * 4096
    return [TINY_BYTES] * args.tiny + [each] * large


def manifest_of(sizes: list[int], mode: str, chunk_bytes: int) -> Manifest:
    tensors = [TensorDescription(f"t{i}", "uint8", (n,), (i + 1) << 40, n) for i, n in enumerate(sizes)]
    return build_manifest(tensors, chunk_bytes, "none" if mode == "none" else "xxh3-64")


def memory_of(sizes: list[int], fill: bool) -> list[memoryview]:
    pattern = random.Random(1).randbytes(2**20)
    made = []
    for size in sizes:
        array = bytearray(size)
        array[:] = (pattern * (size // len(pattern) + 1))[:size] if fill else b"\1" * size
        made.append(memoryview(array))
    return made


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


# ------------------------------------------------------------------------------------------------- the source


def source(pipe: Connection, args: argparse.Namespace) -> None:
    regions = memory_of(sizes_of(args), fill=True)
    if args.busy == "source":
        threading.Thread(target=spin, args=(threading.Event(),), daemon=True).start()
    anyio.run(_serve, pipe, args, regions)


async def _serve(pipe: Connection, args: argparse.Namespace, regions: list[memoryview]) -> None:
    listener, owner, generation = tcp.listen("127.0.0.1"), SharedOwner(), 0
    bare = socket.create_server(("127.0.0.1", 0))
    pipe.send((tcp.address_of(listener), bare.getsockname()))
    settings = ServeSettings(Incarnation("source"), [SECRET])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_readers, listener, owner, settings)
        while (mode := await anyio.to_thread.run_sync(pipe.recv)) != "stop":
            before = cpu_s()
            if mode == "bare":
                pipe.send(0)
                await anyio.to_thread.run_sync(_bare_send, bare, regions)
            else:
                if mode != "again":
                    generation += 1
                    await owner.fence_async(REGISTRATION)
                    memory = ChunkMemory(manifest_of(sizes_of(args), mode, args.chunk), regions)
                    owner.open(REGISTRATION, generation, content_of(generation), memory, complete=True)
                pipe.send(generation)
                await anyio.to_thread.run_sync(pipe.recv)
            pipe.send(cpu_s() - before)
        tasks.cancel_scope.cancel()


def _bare_send(server: socket.socket, regions: list[memoryview]) -> None:
    connection, _ = server.accept()
    tcp.tune(connection)
    connection.recv(1)
    for region in regions:
        connection.sendall(region)
    connection.close()


# ------------------------------------------------------------------------------------------------- the reader


def _bare_receive(address: tuple[str, int], regions: list[memoryview]) -> None:
    with socket.create_connection(address) as connection:
        tcp.tune(connection)
        connection.sendall(b"x")
        for region in regions:
            left = region
            while left:
                left = left[connection.recv_into(left, 0, socket.MSG_WAITALL) :]


async def _pull(
    address: str, generation: int, mode: str, args: argparse.Namespace, regions: list[memoryview]
) -> tuple[float, str]:
    """Seconds of one pull in a running loop, from the grant to the last event; and its phases."""
    memory = ChunkMemory(manifest_of(sizes_of(args), mode, args.chunk), regions)
    owner = SharedOwner()
    owner.open(REGISTRATION, 1, content_of(generation), memory, complete=False)
    transport = TcpTransport(Local(Incarnation("reader"), (SECRET,), Options()))

    def open_channel(grant: Grant, destination: Destination, cutter: Cutter) -> Opened:
        right = ReadRight(LeaseId("l"), Incarnation("source"), REGISTRATION, generation, content_of(generation))
        return Opened("tcp", transport.open(grant.endpoints[0], right, destination, cutter))

    endpoint = Endpoint("tcp", address)
    grant = Grant("l", "s", "source", REGISTRATION, generation, (endpoint,), Location(), True)
    started = time.perf_counter()
    async with PullRunner(memory, owner, REGISTRATION, 1, open_channel, batch_bytes=args.batch) as runner:
        runner.add_source(grant)
        event = await runner.next_event()
        if not isinstance(event, AllVerified):
            raise SystemExit(f"the pull failed: {event}")
        phases = runner.report().phases
    elapsed = time.perf_counter() - started
    return elapsed, " ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())


def rounds(pipe: Connection, args: argparse.Namespace) -> Iterator[tuple[str, float, float, float, str]]:
    regions = memory_of(sizes_of(args), fill=False)
    if args.busy == "reader":
        threading.Thread(target=spin, args=(threading.Event(),), daemon=True).start()
    address, bare = pipe.recv()
    for _ in range(args.rounds):
        for mode in MODES:
            for region in regions:
                region[:8] = bytes(8)
            pipe.send(mode)
            generation, phases = pipe.recv(), ""
            before, started = cpu_s(), time.perf_counter()
            if mode == "bare":
                _bare_receive(bare, regions)
                seconds = time.perf_counter() - started
            else:
                seconds, phases = anyio.run(_pull, address, generation, mode, args, regions)
            if mode != "bare":
                pipe.send("done")
            yield mode, seconds, cpu_s() - before, pipe.recv(), phases
    pipe.send("stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--tiny", type=int, default=150)
    Mix.add_options(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=Options().chunk_bytes)
    parser.add_argument("--batch", type=int, default=64 * 2**20)
    parser.add_argument("--busy", choices=("source", "reader"), help="a thread spins in pure Python there")
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=source, args=(there, args))
    process.start()
    results: dict[str, list[tuple[float, float, float, str]]] = {mode: [] for mode in MODES}
    for mode, *result in rounds(here, args):
        results[mode].append(tuple(result))  # type: ignore[arg-type]
    process.join()
    bare = statistics.median(result[0] for result in results["bare"])
    tensors = f"{len(sizes_of(args))} tensors" + (f" ({Mix.of(args)})" if args.model else "")
    print(f"{args.mib} MiB, {tensors}, chunks of {args.chunk}, {os.cpu_count()} cores")
    for mode, found in results.items():
        seconds, reads, serves, phases = sorted(found)[len(found) // 2]
        print(
            f"{mode:6} {seconds:.3f} s ({min(f[0] for f in found):.3f} to {max(f[0] for f in found):.3f})  "
            f"ratio {bare / seconds:.2f}  cpu s: reader {reads:.2f} source {serves:.2f}  {phases}"
        )


if __name__ == "__main__":
    main()
