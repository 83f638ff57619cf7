"""One source and its readers on one host, below the public API: the data plane alone, for
`one_to_one` and `one_sided`.
"""

from __future__ import annotations

import argparse
import random
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import anyio

from benches.size_profiles import SizeProfile
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import Grant
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.protocol.certificates import Certificates
from tensorhub.runtime.data.acceptor import ServeSettings, serve_readers
from tensorhub.runtime.data.lanes import AllVerified, PullRunner
from tensorhub.runtime.data.served_times import LaneTimes
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import Opened
from tensorhub.runtime.data.thread_time import Spent
from tensorhub.transport import built_in, sockets, unix
from tensorhub.transport.base import Cutter, Destination, ReadRight, Transport
from tensorhub.transport.cma import CmaTransport
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.generation_words import GenerationWords
from tensorhub.transport.nixl.transport import NixlOwner, NixlTransport
from tensorhub.transport.rdma.reader import RdmaTransport
from tensorhub.transport.registry import Local
from tensorhub.transport.segments import Segment
from tensorhub.transport.shm import ShmTransport
from tensorhub.transport.tcp import TcpTransport
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
# first: digests made now; again: digests known; none: no digests
HUB_MODES = ("first", "again", "none")
TRANSPORTS: dict[str, Callable[[Local], Transport]] = {
    "tcp": TcpTransport,
    "cma": CmaTransport,
    "shm": ShmTransport,
    "rdma": RdmaTransport,
    "nixl": NixlTransport,
}


def options_parser(prog: str | None, text: str | None) -> argparse.ArgumentParser:
    """Of what both subjects have."""
    parser = argparse.ArgumentParser(
        prog=prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--tiny", type=int, default=150)
    SizeProfile.add_options(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=Options().chunk_bytes)
    parser.add_argument("--batch", type=int, default=64 * 2**20)
    parser.add_argument(
        "--lanes", type=int, default=0, help="threads of each reader; 0: as the transport says"
    )
    return parser


def sizes_of(args: argparse.Namespace) -> list[int]:
    if args.model:
        return SizeProfile.of(args).sizes()
    large = args.tensors - args.tiny
    each = (args.mib * 2**20 - args.tiny * TINY_BYTES) // large // 4096 * 4096
    return [TINY_BYTES] * args.tiny + [each] * large


def memory_of(sizes: Sequence[int], fill: bool, shared: bool = False) -> list[memoryview]:
    """Touched memory of these sizes, each a tensor's."""
    pattern = random.Random(1).randbytes(2**20)
    segment = Segment(sum(sizes)) if shared else None
    made: list[memoryview] = []
    for number, size in enumerate(sizes):
        view = (
            segment.bytes_at(sum(sizes[:number]), size)
            if segment is not None
            else memoryview(bytearray(size))
        )
        view[:] = (pattern * (size // len(pattern) + 1))[:size] if fill else b"\1" * size
        made.append(view)
    return made


class _Untimed:
    """In place of a `ThreadTime`."""

    def __init__(self) -> None:
        self.calls, self.idle_s, self.empty_s = 0, 0.0, 0.0

    def probe(self, now: float) -> None:
        """It costs nothing."""

    def spent(self) -> Spent:
        """Nothing is known."""
        return Spent()


@contextmanager
def untimed() -> Iterator[None]:
    """Nothing is measured for observers in this process."""
    with ExitStack() as stack:
        stack.enter_context(patch("tensorhub.runtime.data.lanes.ThreadTime", _Untimed))
        for kind, names in (
            (LaneTimes, ("asked", "answered", "done")),
            (ReadClient, ("_say_done",)),
        ):
            for name in names:
                stack.enter_context(patch.object(kind, name, lambda *given: None))
        yield


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spoil(regions: Sequence[memoryview]) -> None:
    """What comes next can be told from what is there."""
    for region in regions:
        region[:8] = region[-8:] = bytes(8)


def _content_of(generation: int) -> ContentId:
    """Each is another one, or the digests of the last would be known."""
    return ContentId(f"content {generation}")


def _manifest_of(mode: str, args: argparse.Namespace) -> Manifest:
    sizes = enumerate(sizes_of(args))
    tensors = [TensorDescription(f"t{i}", "uint8", (n,), (i + 1) << 40, n) for i, n in sizes]
    return build_manifest(tensors, args.chunk, "none" if mode == "none" else "xxh3-64")


class Memories:
    """These regions, as each mode's manifest cuts them: the same from one pull to the next, as a
    registration's are.
    """

    def __init__(self, args: argparse.Namespace, regions: list[memoryview]) -> None:
        self._args = args
        self._regions = regions
        self._made: dict[bool, ChunkMemory] = {}

    def of(self, mode: str) -> ChunkMemory:
        has_digests = mode != "none"
        if has_digests not in self._made:
            self._made[has_digests] = ChunkMemory(_manifest_of(mode, self._args), self._regions)
        return self._made[has_digests]


def _shared(nbytes: int) -> memoryview:
    return Segment(nbytes).bytes_at(0, nbytes)


class Offers:
    """What a source serves, to whoever connects to `address`."""

    def __init__(self, transport: str, args: argparse.Namespace, regions: list[memoryview]) -> None:
        side = built_in.TRANSPORTS.make(
            Local(Incarnation("source"), [SECRET], Options()), [transport]
        )[0].serve()
        assert side is not None
        self.exposures = side.exposures if isinstance(side, NixlOwner) else None
        self.owner = SharedOwner([side])
        self.listener: socket.socket = (
            unix.listen() if side.shares_memory else sockets.listen("127.0.0.1")
        )
        self.address = (
            unix.address_of(self.listener)
            if side.shares_memory
            else sockets.address_of(self.listener)
        )
        self._args = args
        self._memories = Memories(args, regions)
        self._generation = 0

    async def offer(self, mode: str) -> int:
        """The generation to read under: a new one, unless it is read `again`."""
        if mode != "again":
            self._generation += 1
            await self.owner.fence_async(REGISTRATION)
            memory, content = self._memories.of(mode), _content_of(self._generation)
            self.owner.open(REGISTRATION, self._generation, content, memory, complete=True)
        return self._generation


@asynccontextmanager
async def serving(
    transport: str,
    args: argparse.Namespace,
    regions: list[memoryview],
    certificates: Certificates | None = None,
) -> AsyncIterator[Offers]:
    """A source of these regions, for the length of the block."""
    offers = Offers(transport, args, regions)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            serve_readers,
            offers.listener,
            offers.owner,
            ServeSettings(Incarnation("source"), [SECRET], certificates=certificates),
        )
        yield offers
        tasks.cancel_scope.cancel()
    offers.listener.close()
    offers.owner.end_reading()


class Pulled(NamedTuple):
    """`started`, `ended`: in a running loop, from the grant until nothing of it runs."""

    started: float
    ended: float
    cpu_s: float
    phases: dict[str, float]


class Puller:
    """Reads that source into these regions, by one transport, which keeps what it keeps from one
    pull to the next.
    """

    def __init__(
        self,
        transport: str,
        address: str,
        args: argparse.Namespace,
        regions: list[memoryview],
        certificates: Certificates | None = None,
    ) -> None:
        local = Local(Incarnation("reader"), (SECRET,), Options(), certificates=certificates)
        self._transport = TRANSPORTS[transport](local)
        self._endpoint = Endpoint(transport, address)
        self._args = args
        self._memories = Memories(args, regions)

    def close(self) -> None:
        """End the connections that are kept."""
        self._transport.close()

    def pull(self, mode: str, generation: int) -> Pulled:
        """One pull. SystemExit if it fails."""
        return anyio.run(self._pull, mode, generation)

    async def _pull(self, mode: str, generation: int) -> Pulled:
        memory = self._memories.of(mode)
        owner, content = SharedOwner(words=GenerationWords()), _content_of(generation)
        owner.open(REGISTRATION, 1, content, memory, complete=False)

        def open_channel(
            grant: Grant, destination: Destination, cutter: Cutter, left: int
        ) -> Opened:
            right = ReadRight(
                LeaseId("l"), Incarnation("source"), REGISTRATION, generation, content
            )
            channel = self._transport.open(grant.endpoints[0], right, destination, cutter)
            return Opened(
                self._transport.name,
                channel,
                self._args.lanes or self._transport.lanes,
                self._args.batch,
            )

        grant = Grant(
            "l", "s", "source", REGISTRATION, generation, (self._endpoint,), Location(), True
        )
        started, before_s = time.monotonic(), cpu_s()
        async with PullRunner(memory, owner, REGISTRATION, 1, open_channel) as runner:
            runner.add_source(grant)
            event = await runner.next_event()
            if not isinstance(event, AllVerified):
                raise SystemExit(f"the pull failed: {event}")
            phases = runner.report().phases
        return Pulled(started, time.monotonic(), cpu_s() - before_s, phases)
