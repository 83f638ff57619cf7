"""Reading out of mapped memory: when it is chosen, what is kept, and what a source that lies gets
for it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio.to_thread
import pytest
import torch

import tensorhub
from tensorhub.errors import TensorHubError
from tensorhub.messages import ChunksLie, NotThisWay
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport import connected, segments as shm, unix
from tensorhub.transport.base import Cutter, NotShared, ReadFailure, ReadRight, Unusable
from tensorhub.transport.one_sided import Piece
from tensorhub.transport.segments import MappedSegment, Segment
from tensorhub.transport.shm import DIALECT, SEGMENTS_MAX, Mapped, SegmentsAre, ShmTransport
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, RegistrationId
from tests.rig import cluster, nothing_left
from tests.runtime.data_rig import Nowhere, answers, waited_out_s
from tests.transport.patience import local

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shm.fault_here() is not None, reason=str(shm.fault_here())),
]
RIGHT = ReadRight(LeaseId("l"), Incarnation("source"), RegistrationId("r"), 5, ContentId("c"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def usual(value: float) -> dict[str, torch.Tensor]:
    return {
        "large": torch.full((50_000,), value),
        "small": torch.full((3,), value),
        "none": torch.empty(0),
    }


def shared(value: float) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = tensorhub.shared_empty_like(usual(value))
    for tensor in made.values():
        tensor.fill_(value)
    return made


def holds(tensors: dict[str, torch.Tensor], value: float) -> bool:
    return all(bool(tensor.eq(value).all()) for tensor in tensors.values())


# --------------------------------------------------------------------------------------------------
# when it is chosen


async def test_shared_memory_is_mapped_and_other_memory_is_not() -> None:
    cases = (
        ("shared", shared(1), "shm"),
        ("usual", usual(1), "cma"),
        ("half", usual(1) | {"small": shared(1)["small"]}, "cma"),
    )
    async with cluster("trainer", "reader") as made:
        trainer, reader = made.hubs
        for name, tensors, transport in cases:
            await (await trainer.register(name, tensors)).publish(1)
            memory = usual(0)
            report = await (await reader.register(name, memory)).replicate()
            assert [source.transport for source in report.sources] == [transport]
            assert holds(memory, 1)


async def test_each_version_is_read_out_of_one_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    source, memory = shared(1), usual(0)
    async with cluster("trainer", "reader") as made:
        trainer, reader = made.hubs
        published, weights = await trainer.register("m", source), await reader.register("m", memory)
        await published.publish(1)
        await weights.replicate()
        before = mappings()
        assert before
        for version in (2, 3):
            async with published.mutate(version):
                for tensor in source.values():
                    tensor.fill_(version)
            report = await weights.update()
            assert [each.transport for each in report.sources] == ["shm"]
            assert holds(memory, version)
            assert mappings() == before


async def test_mappings_that_nobody_reads_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected, "KEPT_S", 0.0)
    segment = Segment(4096)
    transport = ShmTransport(local())
    mapped = transport._map(segment.descriptor, 4096)
    assert transport._map(segment.descriptor, 4096) is mapped
    place = mapped.address
    del mapped
    assert f"{place:x}" in "".join(mappings())
    transport.sweep()
    gc.collect()
    assert f"{place:x}" not in "".join(mappings())


def mappings() -> list[str]:
    """Where memfds of this library are mapped only to be read."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [
        line.split()[0] for line in lines if "memfd:tensorhub" in line and line.split()[1] == "r--s"
    ]


async def test_it_may_be_left_out() -> None:
    source = shared(1)
    async with cluster("trainer") as made:
        await (await made.hubs[0].register("m", source)).publish(1)
        address = made.coordinator.address
        for transports, used in (
            (("cma", "tcp"), "cma"),
            (("tcp",), "tcp"),
            (("tcp", "shm"), "tcp"),
        ):
            async with tensorhub.connect(
                address, name="reader", token="", transports=transports
            ) as hub:
                report = await (await hub.register("m", usual(0))).replicate()
                assert [source.transport for source in report.sources] == [used]
        async with tensorhub.connect(address, name="reader", token="", transports=("shm",)) as hub:
            await (await made.hubs[0].register("other", usual(1))).publish(1)
            with pytest.raises(TensorHubError, match="its tensors are not in shared memory"):
                await (await hub.register("other", usual(0))).replicate(timeout=waited_out_s(0.5))


# --------------------------------------------------------------------------------------------------
# the mapping itself


def test_only_what_is_in_a_segment_is_read() -> None:
    segment, target = Segment(8192), bytearray(16)
    here = ctypes.addressof((ctypes.c_char * 16).from_buffer(target))
    there = 2**40  # where the source has it
    source = Mapped([(there, MappedSegment(segment.descriptor, 8192))])
    segment.bytes_at(100, 4)[:] = b"abcd"
    source.copy([Piece(here, there + 100, 2), Piece(here + 2, there + 102, 2)])
    assert target[:4] == b"abcd"
    for wrong in (there - 1, there + 8192 - 3, there + 8192, 0, 2**63):
        with pytest.raises(OSError, match="in nothing that was shared"):
            source.copy([Piece(here, wrong, 4)])
        with pytest.raises(OSError, match="in nothing that was shared"):
            source.is_unchanged(wrong, 5)
    assert not source.is_unchanged(there, 0)
    segment.bytes_at(0, 8)[:] = (5).to_bytes(8, "little")
    assert source.is_unchanged(there, 5)
    assert not source.is_unchanged(there, 6)


# --------------------------------------------------------------------------------------------------
# sources that lie


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    made = unix.listen()
    made.setblocking(True)
    yield made
    made.close()


def hands_over(
    said: tuple[tuple[int, int], ...], descriptors: int, *, is_sealed: bool = True
) -> Callable[[BlockingConnection], object]:
    """Says this of its segments, and hands over so many descriptors of one page."""

    def say(connection: BlockingConnection) -> None:
        segment = Segment(4096)
        descriptor = (
            segment.descriptor if is_sealed else os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
        )
        os.ftruncate(descriptor, 4096)
        connection.send(DIALECT.reply(0, SegmentsAre(said)))
        if descriptors:
            connection.send_descriptors([descriptor] * descriptors)
        else:
            connection.shutdown()
        if not is_sealed:
            os.close(descriptor)

    return say


PAGE = ((4096, 4096),)
LIES: dict[str, tuple[Callable[[BlockingConnection], object], type[Exception], str]] = {
    "unsealed": (hands_over(PAGE, 1, is_sealed=False), Unusable, "not sealed"),
    "another size": (hands_over(((4096, 8192),), 1), Unusable, "said to have 8192 bytes"),
    "too many": (hands_over(PAGE, 3), ReadFailure, "descriptors are said to follow"),
    "too few": (hands_over(PAGE * SEGMENTS_MAX, 1), ReadFailure, "descriptors are said to follow"),
    "none": (hands_over(PAGE, 0), ReadFailure, "descriptors are said to follow"),
    "withheld": (lambda c: c.send(NotThisWay(0, "user 7", False)), Unusable, "user 7"),
    "withheld as usual": (
        lambda c: c.send(NotThisWay(0, "read-only", True)),
        NotShared,
        "read-only",
    ),
    "something else": (
        lambda c: c.send(ChunksLie(0, ((0, 0, 0),), 0)),
        ReadFailure,
        "a ChunksLie is no message of shm",
    ),
    "the end": (lambda c: c.shutdown(), ReadFailure, "closed"),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_source_that_lies_is_left_and_nothing_stays(
    listener: socket.socket, name: str
) -> None:
    say, kind, text = LIES[name]
    async with nothing_left():
        thread = answers(listener, say)
        transport, endpoint = ShmTransport(local()), Endpoint("shm", unix.address_of(listener))
        with pytest.raises(kind, match=text):
            await anyio.to_thread.run_sync(transport.open, endpoint, RIGHT, Nowhere(), Cutter())
        # it has answered what it was asked
        assert f"{int(kind is NotShared)} kept" in repr(transport._peers)
        transport.close()
        await anyio.to_thread.run_sync(thread.join)


def test_who_does_not_listen_here_is_not_reached_this_way() -> None:
    for address in ("unix:tensorhub-nobody", "unix:" + "x" * 500, "unix:a\0b"):
        with pytest.raises(Unusable, match="different hosts"):
            unix.connect(address, 5, Cutter())


def test_a_read_that_was_given_up_does_not_connect(listener: socket.socket) -> None:
    cutter = Cutter()
    cutter.cut()
    with pytest.raises((Unusable, ReadFailure)):
        unix.connect(unix.address_of(listener), 5, cutter)
