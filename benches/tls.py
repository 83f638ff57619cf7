"""A read over tcp with TLS and digests, against a bare `ssl` socket with the same bytes, and against
plain tcp: two processes, one host, interleaved in one run.

A bare socket is the standard library's: `sendall` and `recv_into` of whole tensors, TLS 1.3, no
digests. `first`: the source makes digests while it is read; `again`: it knows them. Prints the median
and the spread of each, in bytes per second of time and of processor time of both processes. Needs
trustme.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.to_thread
import trustme

from benches.pulls import Puller, cpu_s, memory_of, options_parser, serving, sizes_of, spoil
from tensorhub.protocol.certificates import TLS, Certificates
from tensorhub.transport import sockets

WAYS = ("bare", "tls first", "tls again", "plain first", "plain again")


def issued(directory: Path) -> TLS:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    files = TLS(*[str(directory / name) for name in ("cert", "key", "ca")])
    made.cert_chain_pems[0].write_to_path(str(files.cert))
    Path(files.key).touch(0o600)
    made.private_key_pem.write_to_path(str(files.key))
    authority.cert_pem.write_to_path(str(files.ca))
    return files


def _source(pipe: Connection, args: argparse.Namespace, files: TLS) -> None:
    anyio.run(_serve, pipe, args, Certificates(files))


async def _serve(pipe: Connection, args: argparse.Namespace, certificates: Certificates) -> None:
    regions, bare = memory_of(sizes_of(args), fill=True), socket.create_server(("127.0.0.1", 0))
    async with (
        serving("tcp", args, regions, certificates) as sealed,
        serving("tcp", args, regions) as plain,
    ):
        offers = {"tls": sealed, "plain": plain}
        pipe.send((sealed.address, plain.address, bare.getsockname()))
        while (way := await anyio.to_thread.run_sync(pipe.recv)) != "stop":
            before_s = cpu_s()
            if way == "bare":
                pipe.send(0)
                await anyio.to_thread.run_sync(_send, bare, certificates, regions)
            else:
                kind, mode = way.split()
                pipe.send(await offers[kind].offer(mode))
            await anyio.to_thread.run_sync(pipe.recv)
            pipe.send(cpu_s() - before_s)


def _send(server: socket.socket, certificates: Certificates, regions: list[memoryview]) -> None:
    connection, _ = server.accept()
    sockets.tune(connection)
    with certificates.context("server")[0].wrap_socket(connection, server_side=True) as stream:
        for region in regions:
            stream.sendall(region)
        stream.recv(1)


def _receive(address: tuple[str, int], certificates: Certificates, into: list[memoryview]) -> float:
    connection = socket.create_connection(address)
    sockets.tune(connection)
    with certificates.context("reader")[0].wrap_socket(connection) as stream:
        began = time.perf_counter()
        for region in into:
            left = region
            while left:
                left = left[stream.recv_into(left) :]
        seconds = time.perf_counter() - began
        stream.sendall(b"x")
    return seconds


def measured(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """By way: seconds, and processor seconds of both processes, of each round."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        files = issued(Path(directory))
        pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_source, args=(theirs, args, files))
        process.start()
        sealed, plain, bare = pipe.recv()
        certificates, regions = Certificates(files), memory_of(sizes_of(args), fill=False)
        pullers = {
            "tls": Puller("tcp", sealed, args, regions, certificates),
            "plain": Puller("tcp", plain, args, regions),
        }
        for number in range(args.rounds + 1):  # the first one warms up
            for way in WAYS:
                spoil(regions)
                pipe.send(way)
                generation, before_s = pipe.recv(), cpu_s()
                if way == "bare":
                    seconds = _receive(bare, certificates, regions)
                else:
                    kind, mode = way.split()
                    pulled = pullers[kind].pull(mode, generation)
                    seconds = pulled.ended - pulled.started
                used_s = cpu_s() - before_s
                pipe.send("done")
                used_s += pipe.recv()
                if number:
                    found[way].append((seconds, used_s))
        for each in pullers.values():
            each.close()
        pipe.send("stop")
        process.join()
    return found


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    parser = options_parser(prog, __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    args = parser.parse_args(arguments)
    nbytes, found = sum(sizes_of(args)), measured(args)
    bare = [statistics.median(each) for each in zip(*found["bare"], strict=True)]
    for way, each in found.items():
        times, used = zip(*each, strict=True)
        print(
            f"{way:11} {nbytes / statistics.median(times) / 1e9:6.2f} GB/s "
            f"({nbytes / max(times) / 1e9:.2f} to {nbytes / min(times) / 1e9:.2f})  "
            f"{bare[0] / statistics.median(times):5.2f} of bare; "
            f"{nbytes / statistics.median(used) / 1e9:6.2f} GB per processor second "
            f"({nbytes / max(used) / 1e9:.2f} to {nbytes / min(used) / 1e9:.2f}), "
            f"{bare[1] / statistics.median(used):5.2f} of bare"
        )
    if args.json is not None:
        facts = {"nbytes": nbytes, "cores": os.cpu_count(), "load": os.getloadavg()}
        args.json.write_text(json.dumps(facts | {"rows": found}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
