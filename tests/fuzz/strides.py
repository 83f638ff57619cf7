"""Target: a reader of another layout, and a source that lies."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import xxhash

from tensorhub.layouts.reading import Part, Reading, ReshardedManifest, Selection, resharded
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunkDigest, ChunkFollows, ChunksFollow, Grant, Origin, StillWaiting
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip, straight
from tensorhub.protocol import codec
from tensorhub.protocol.blocking import FRAME_BYTES_MAX
from tensorhub.protocol.frames import frame
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import Opened, SourceLane
from tensorhub.scheduler.requests import Requests
from tensorhub.transport import tcp as tcp_owner
from tensorhub.transport.base import Cutter, Destination
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.peers import Peer, Peers
from tensorhub.transport.registry import Local
from tensorhub.transport.tcp import TcpChannel
from tensorhub.types import Incarnation, LeaseId, Options
from tests.fuzz.lanes import (
    ANSWERS,
    CONTENT,
    GENERATION,
    GRANT,
    REGISTRATION,
    RIGHT,
    _connected,
    _Nobody,
)
from tests.fuzz.source import Source

ROWS, ROW_BYTES = 12, 1000
SIZES = (ROWS * ROW_BYTES, 7)  # of the source's tensors
SELECTED = Selection(
    (
        (Strip(0, 300, 0, 0, 1, ((ROWS, ROW_BYTES),), 4),),
        (straight(1, 2, 4), straight(0, 3995, 11)),  # of two of the source's own chunks
        (Strip(0, 9000, 0, -2000, 3, ((2, 500),), 2),),
    )
)
GAP, CANARY = 3, 0xA5  # what lies between the runs of the reader's chunks, and is nobody's


def strides(data: bytes) -> None:
    """Whatever a source answers: nothing is written beside the chunks, and only what has its digest
    is offered to others.
    """
    source = Source(data)
    manifest, part = _reading()
    array = bytearray([CANARY]) * manifest.regions[0].nbytes
    memory = ChunkMemory(manifest, [memoryview(array)])
    owner = SharedOwner()
    owner.open(REGISTRATION, GENERATION, CONTENT, memory, complete=False)
    name = part.selection.selection_id
    grant = replace(GRANT, selection=name)
    peers = Peers(Local(Incarnation("reader"), (b"",), Options()), tcp_owner.DIALECT)
    peers.close()
    with _connected() as (connection, theirs):

        def open_channel(
            grant: Grant, destination: Destination, cutter: Cutter, left: int
        ) -> Opened:
            client = ReadClient(
                peers, Peer(connection, "", RIGHT.incarnation, b"", is_local=True), RIGHT, cutter
            )
            return Opened("any", TcpChannel(client, destination), batch_bytes=batch_bytes)

        batch_bytes = source.choice((1, 60, 10**6))
        runner = PullRunner(
            memory, owner, REGISTRATION, GENERATION, open_channel, selections={name: part}
        )
        runner._wakeup = _Nobody()  # type: ignore[assignment]  # no loop waits here
        lease = LeaseId(grant.lease)
        lane = SourceLane(
            grant,
            lease,
            Origin(grant.registration, grant.generation),
            Requests(runner._pull, lease),
            part.chunks,
        )
        runner._pull.add_source(lease, source.flag(), part.chunks)
        runner._lanes[lease] = lane
        theirs.sendall(b"".join(_answers(source)))
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.closing(connection):
            runner._lane_thread(lane)
    _check(runner, owner, memory, array)


def _check(runner: PullRunner, owner: SharedOwner, memory: ChunkMemory, array: bytearray) -> None:
    pull = runner._pull
    pull.check_invariants()
    verified = [chunk for chunk, is_verified in enumerate(pull.verified) if is_verified]
    for chunk in verified:
        held = b"".join([bytes(view) for views in memory.outgoing(chunk) for view in views])
        assert owner._owner.digest(REGISTRATION, GENERATION, chunk) == xxhash.xxh3_64_intdigest(
            held
        )
    available = {
        chunk
        for first, count in owner.has(REGISTRATION, GENERATION, 9)
        for chunk in range(first, first + count)
    }
    assert available == set(verified)
    strips = [strip for strips in _reading()[0].reading.places for strip in strips]
    mine = {at + n for strip in strips for _, at in strip.places() for n in range(strip.run)}
    assert all(byte == CANARY for at, byte in enumerate(array) if at not in mine), (
        "bytes beside the chunks were written"
    )
    owner.check_invariants()


# --------------------------------------------------------------------------------------------------
# what there is


@functools.cache
def _published() -> Manifest:
    tensors = [
        TensorDescription(f"t{n}", "uint8", (size,), n << 40, size) for n, size in enumerate(SIZES)
    ]
    return build_manifest(tensors, 4096, "xxh3-64")


@functools.cache
def _held() -> ChunkMemory:
    regions = [bytearray((31 * n + at) % 251 for at in range(size)) for n, size in enumerate(SIZES)]
    return ChunkMemory(_published(), [memoryview(region) for region in regions])


@functools.cache
def _reading() -> tuple[ReshardedManifest, Part]:
    """The reader's memory: runs of three bytes, with gaps."""
    places, at = [], GAP
    for size in SELECTED.sizes:
        rows, rest = divmod(size, 3)
        strips = [Strip(0, at, 0, 0, 1, ((rows, 3 + GAP),), 3)]
        at += rows * (3 + GAP)
        if rest:
            strips.append(straight(0, at, rest))
            at += rest + GAP
        places.append(tuple(strips))
    own = build_manifest([TensorDescription("w", "uint8", (at,), 0, at)], 4096, "xxh3-64")
    part = Part(0, (0,), SELECTED, tuple(range(len(places))))
    return resharded(
        own, "xxh3-64", 4096, Reading(tuple(places), SELECTED.sizes, (part,)), "grid"
    ), part


# --------------------------------------------------------------------------------------------------
# what is said


def _answers(source: Source) -> Iterator[bytes]:
    """Chunks with their bytes: those that were asked for, or others; whole, longer or shorter; with
    any digest.
    """
    memory = _held().selected(SELECTED)
    count, request, said = len(memory.sizes), 0, 0
    pools: dict[str, list[Any]] = {"request": [0, 1, 2, 3], "reason": ["gone"]}
    while source and said < 2**16:
        kind = source.byte()
        chunk = request % count if kind < 200 else source.below(count + 2)
        payload = bytearray(_payload(memory, chunk % count))
        digest = memory.digest(chunk % count)
        if 150 < kind < 165:
            payload[source.below(len(payload))] ^= 1 + source.byte() % 255
            digest = xxhash.xxh3_64_intdigest(payload) if source.flag() else digest
        elif 165 <= kind < 175:
            payload = payload[: source.below(len(payload))] if source.flag() else payload + b"more"
        elif 175 <= kind < 185:
            digest = source.below(2**16)
        if kind < 230:
            numbers = (chunk,) if source.flag() else tuple(range(count))
            if len(numbers) > 1:
                payload = bytearray(b"".join([_payload(memory, each) for each in numbers]))
            if kind % 2 and len(numbers) == 1:
                part = (
                    _frame(ChunkFollows(request, chunk))
                    + payload
                    + _frame(ChunkDigest(request, digest))
                )
            else:
                named = [
                    (each, digest if each == chunk else memory.digest(each)) for each in numbers
                ]
                part = _frame(ChunksFollow(request, tuple(named))) + payload
            request += 1
        elif kind < 240:
            part = _frame(StillWaiting(source.below(4), ((0, source.below(5)),)))
        elif kind < 250:
            part = _frame(source.value(source.choice(ANSWERS), pools))
        else:
            part = source.blob(60)
        said += len(part)
        yield bytes(part)


def _payload(memory: ChunkMemory, chunk: int) -> bytes:
    if not memory.is_strided:
        return bytes(memory.buffer(chunk))
    return b"".join([bytes(view) for views in memory.outgoing(chunk) for view in views])


def _frame(message: Any) -> bytes:
    return bytes(frame(codec.encode(message), FRAME_BYTES_MAX))
