"""One reader, one source, two processes, one host: the data plane against a bare blocking socket.

Prints the time of a bare copy (recv_into and sendall of whole tensors, same congestion control, no
digests) and of the lanes, interleaved in one run, and their ratio (1 = as fast as the bare socket).
Memory is touched on both sides. The CPU seconds of "again" and "untimed" are what measuring for
observers costs.

    python -m benches.one_to_one --mib 1024 --tensors 300 --tiny 150 --rounds 7
    python -m benches.one_to_one --mib 256 --model Qwen2.5-7B
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import anyio

from benches.pulls import (
    Puller,
    cpu_s,
    memory_of,
    options_parser,
    serving,
    sizes_of,
    spoil,
    untimed,
)
from benches.size_profiles import SizeProfile
from tensorhub.transport import sockets

UNTIMED = "untimed"  # as again, and nothing is measured for observers
MODES = ("bare", "first", "again", UNTIMED, "none")


def spin(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


# -------------------------------------------------------------------------------------------------
# the source


def source(pipe: Connection, args: argparse.Namespace) -> None:
    regions = memory_of(sizes_of(args), fill=True)
    if args.busy == "source":
        threading.Thread(target=spin, args=(threading.Event(),), daemon=True).start()
    anyio.run(_serve, pipe, args, regions)


async def _serve(pipe: Connection, args: argparse.Namespace, regions: list[memoryview]) -> None:
    bare = socket.create_server(("127.0.0.1", 0))
    async with serving("tcp", args, regions) as offers:
        pipe.send((offers.address, bare.getsockname()))
        while (mode := await anyio.to_thread.run_sync(pipe.recv)) != "stop":
            before = cpu_s()
            if mode == "bare":
                pipe.send(0)
                await anyio.to_thread.run_sync(_bare_send, bare, regions)
            else:
                with untimed() if mode == UNTIMED else contextlib.nullcontext():
                    pipe.send(await offers.offer("again" if mode == UNTIMED else mode))
                    await anyio.to_thread.run_sync(pipe.recv)
            pipe.send(cpu_s() - before)


def _bare_send(server: socket.socket, regions: list[memoryview]) -> None:
    connection, _ = server.accept()
    sockets.tune(connection)
    connection.recv(1)
    for region in regions:
        connection.sendall(region)
    connection.close()


# -------------------------------------------------------------------------------------------------
# the reader


def _bare_receive(address: tuple[str, int], regions: list[memoryview]) -> None:
    with socket.create_connection(address) as connection:
        sockets.tune(connection)
        connection.sendall(b"x")
        for region in regions:
            left = region
            while left:
                left = left[connection.recv_into(left, 0, socket.MSG_WAITALL) :]


def rounds(
    pipe: Connection, args: argparse.Namespace
) -> Iterator[tuple[str, float, float, float, str]]:
    regions = memory_of(sizes_of(args), fill=False)
    if args.busy == "reader":
        threading.Thread(target=spin, args=(threading.Event(),), daemon=True).start()
    address, bare = pipe.recv()
    puller = Puller("tcp", address, args, regions)
    for _ in range(args.rounds):
        for mode in MODES:
            spoil(regions)
            pipe.send(mode)
            generation, phases = pipe.recv(), ""
            before, started = cpu_s(), time.perf_counter()
            if mode == "bare":
                _bare_receive(bare, regions)
                seconds = time.perf_counter() - started
            else:
                with untimed() if mode == UNTIMED else contextlib.nullcontext():
                    pulled = puller.pull("again" if mode == UNTIMED else mode, generation)
                seconds = pulled.ended - pulled.started
                phases = " ".join(f"{name} {value:.3f}" for name, value in pulled.phases.items())
                pipe.send("done")
            yield mode, seconds, cpu_s() - before, pipe.recv(), phases
    pipe.send("stop")


def main() -> None:
    parser = options_parser(None, __doc__)
    parser.add_argument(
        "--busy", choices=("source", "reader"), help="a thread spins in pure Python there"
    )
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=source, args=(there, args))
    process.start()
    results: dict[str, list[tuple[float, float, float, str]]] = {mode: [] for mode in MODES}
    for mode, *result in rounds(here, args):
        results[mode].append(tuple(result))  # type: ignore[arg-type]
    process.join()
    bare = statistics.median(result[0] for result in results["bare"])
    tensors = f"{len(sizes_of(args))} tensors" + (
        f" ({SizeProfile.of(args)})" if args.model else ""
    )
    print(f"{args.mib} MiB, {tensors}, chunks of {args.chunk}, {os.cpu_count()} cores")
    for mode, found in results.items():
        cpu = statistics.median([reads + serves for _, reads, serves, _ in found])
        seconds, reads, serves, phases = sorted(found)[len(found) // 2]
        print(
            f"{mode:6} {seconds:.3f} s ({min(f[0] for f in found):.3f} to "
            f"{max(f[0] for f in found):.3f})  "
            f"ratio {bare / seconds:.2f}  cpu s: reader {reads:.2f} source {serves:.2f} both, median {cpu:.4f}  {phases}"
        )


if __name__ == "__main__":
    main()
