"""Bytes on a GPU on their way: with a device whose copies end as late as they may
(tests/cuda/double.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing

import anyio
import pytest
import torch
from hypothesis import given, strategies as st

from tensorhub.api.hub import Hub
from tensorhub.api.tools import register_memory
from tensorhub.api.weights import Weights
from tensorhub.errors import OperationTimeout
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.transport import staging as staging_module
from tensorhub.transport.staging import Staging, cut_up
from tensorhub.types import Options
from tests.cuda.double import Double
from tests.rig import OPTIONS, cluster, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # (the conformance suite runs on both)


# --------------------------------------------------------------------------------------------------
# buffers


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), max_size=8), st.integers(1, 50))
def test_pieces_are_the_same_bytes_in_the_same_order(
    places: list[tuple[int, int]], piece_bytes: int
) -> None:
    pieces = list(cut_up(places, piece_bytes))
    flat = [
        byte
        for piece in pieces
        for address, nbytes in piece
        for byte in range(address, address + nbytes)
    ]
    assert flat == [byte for address, nbytes in places for byte in range(address, address + nbytes)]
    sizes = [sum(nbytes for _, nbytes in piece) for piece in pieces]
    assert all(size == piece_bytes for size in sizes[:-1])
    assert all(0 < size <= piece_bytes for size in sizes)


@given(st.lists(st.integers(0, 70), max_size=12), st.integers(1, 64))
def test_what_goes_out_is_what_comes_in(sizes: list[int], piece_bytes: int) -> None:
    device = Double()
    sources = [device.bytes_of(bytearray(random.Random(size).randbytes(size))) for size in sizes]
    targets = [device.allocate(size) for size in sizes]
    out, into = Staging(device, piece_bytes), Staging(device, piece_bytes)
    with (
        closing(out.outgoing([(each.address, each.nbytes) for each in sources])) as outgoing,
        closing(into.incoming([(each.address, each.nbytes) for each in targets])) as incoming,
    ):
        for room, piece in zip(incoming, outgoing, strict=True):
            room[:] = piece
    assert [bytes(each.storage) for each in targets] == [bytes(each.storage) for each in sources]  # type: ignore[call-overload]
    assert device.pinned_bytes == 4 * piece_bytes


def test_whoever_stops_leaves_no_copy_behind() -> None:
    device = Double()
    source, target = device.bytes_of(bytearray(range(40))), device.allocate(40)
    out, into = Staging(device, 10), Staging(device, 10)
    with closing(out.outgoing([(source.address, 40)])) as outgoing:
        assert bytes(next(outgoing)) == bytes(range(10))
    assert device.copies == 2  # the next piece was on its way
    with closing(into.incoming([(target.address, 40)])) as incoming:
        next(incoming)[:] = b"x" * 10
        next(incoming)
    assert bytes(target.storage) == b"x" * 10 + bytes(30)  # type: ignore[call-overload]


# --------------------------------------------------------------------------------------------------
# whole clusters

Tensors = Mapping[str, torch.Tensor]


def tensors(seed: int | None) -> Tensors:
    """1 MiB and some, in pieces of every kind; zeros, or bytes that depend on the seed."""
    sizes = {"large": 2**20 + 5, "odd": 70_001, "small": 3, "none": 0}
    if seed is None:
        return {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    made = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (size,), generator=made, dtype=torch.uint8)
        for name, size in sizes.items()
    }


def equal(some: Tensors, other: Tensors) -> bool:
    return all(torch.equal(some[name], tensor) for name, tensor in other.items())


async def register(hub: Hub, those: Tensors, device: Double | None) -> Weights:
    memory = RegisteredMemory(those)
    memory.device = device  # the double's memory is this process'
    return await register_memory(hub, "m", memory)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    nbytes = 256 * 1024
    monkeypatch.setattr(staging_module, "PIECE_BYTES", nbytes)
    return nbytes


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        (True, True, OPTIONS),
        (True, False, Options(chunk_bytes=2**20, integrity=False)),
        (True, True, Options(pack_bytes=2**17)),
        (False, True, Options(pack_bytes=2**17)),
    ],
)
async def test_a_version_goes_from_any_memory_to_any_other(
    small_pieces: int, source: bool, target: bool, options: Options
) -> None:
    device, held, memory = Double(), tensors(1), tensors(None)
    async with cluster("trainer", "reader", options=options) as made:
        trainer, reader = made.hubs
        published = await register(trainer, held, device if source else None)
        weights = await register(reader, memory, device if target else None)
        for version in (1, 2):
            await published.publish(version)
            report = await weights.update()
            assert [each.transport for each in report.sources] == ["tcp"]
            assert [report.retries, report.reread_bytes] == [0, 0]
            assert equal(memory, held)
            await published.unpublish()
            for name, tensor in tensors(version + 1).items():
                held[name].copy_(tensor)
        assert device.pinned_bytes <= 2 * 2 * 2 * small_pieces  # of each connection of either side
        if options.integrity:
            assert device.launches


async def test_host_copies_are_page_locked_while_they_live() -> None:
    device, held, memory = Double(), tensors(1), tensors(None)
    options = Options(op_timeout_s=30, host_memory_bytes=2**26)
    async with cluster("trainer", "reader", options=options) as made:
        published = await register(made.hubs[0], held, device)
        weights = await register(made.hubs[1], memory, device)
        await published.publish(1)
        await weights.prefetch()
        assert len(device.pins) == 1
        report = await weights.update()
        assert (report.bytes_read, equal(memory, held)) == (0, True)
        async with published.mutate(2):
            held["large"][7] ^= 1
        report = await weights.update(staged=True)
        assert (report.changed, equal(memory, held)) == (True, True)
        await weights.close()
    assert not device.pins


# --------------------------------------------------------------------------------------------------
# the caller's work


async def test_nothing_is_shown_or_written_before_the_callers_work_is_done() -> None:
    device, theirs, held, memory = Double(), Double(), tensors(1), tensors(None)
    async with cluster("trainer", "reader", options=OPTIONS) as made:
        trainer, reader = made.hubs
        published, weights = (
            await register(trainer, held, device),
            await register(reader, memory, theirs),
        )
        device.is_busy = True
        with pytest.raises(
            OperationTimeout, match=r"queued on double:0 before this call is not done after 0\.1 s"
        ):
            await published.publish(1, timeout=0.1)
        assert trainer.newest("m") is None
        device.is_busy = False
        await published.publish(1)

        async def pause(info: object) -> None:
            theirs.is_busy, theirs.looks = True, 0  # the engine's last step runs on

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: weights.update(before_write=pause))
            await until(lambda: theirs.looks > 2)  # it waits, with all else done
            assert equal(memory, tensors(None))
            theirs.is_busy = False
        assert equal(memory, held)
