"""Deltas of tensors on a device: the kernels' own source, run on the CPU, and what is made of what a
device finds, against the codec.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import tensorhub
from tensorhub import deltas
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.cuda import driver
from tensorhub.cuda.cupy_device import CudaDevice
from tensorhub.cuda.kernels import TILE_BYTES
from tensorhub.deltas import Listed
from tensorhub.errors import StateError
from tensorhub.memory import chunks
from tensorhub.memory.addresses import copy_bytes
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.testing.strided_target import bytes_of
from tensorhub.types import DeltaUse, FetchReport, Location, RegistrationId
from tests.cuda.double import Double
from tests.cuda.on_cpu import COMPILER, WHY_NOT, KernelsOnCpu
from tests.cuda.own import Own
from tests.deltas.pairs import WIDTHS, changed, pairs
from tests.rig import OPTIONS, until, worker_of
from tests.runtime.data_rig import manifest_of

pytest.importorskip("zstandard", reason="the extra delta is not installed")

compiled = pytest.mark.skipif(COMPILER is None, reason=WHY_NOT)
NBYTES = 4096


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelsOnCpu:
    return KernelsOnCpu(tmp_path_factory.mktemp("kernels"))


def whole_pairs() -> st.SearchStrategy[tuple[bytes, bytes, int]]:
    """Of whole 8 bytes."""

    def cut(pair: tuple[bytes, bytes, int]) -> tuple[bytes, bytes, int]:
        nbytes = len(pair[0]) // 8 * 8
        return pair[0][:nbytes], pair[1][:nbytes], pair[2]

    return pairs().map(cut).filter(lambda pair: bool(pair[0]))


def listed_on_cpu(
    kernels: KernelsOnCpu, base: bytes, new: bytes, width: int, threads: int = 256, order: int = 0
) -> Listed:
    places, differences = kernels.changes(base, new, width, threads, order)
    return Listed(memoryview(places), memoryview(differences))


@compiled
@given(pair=whole_pairs(), threads=st.sampled_from([32, 64, 256]), order=st.sampled_from([0, 1]))
def test_the_kernels_list_makes_the_codecs_frame(
    kernels: KernelsOnCpu, pair: tuple[bytes, bytes, int], threads: int, order: int
) -> None:
    base, new, width = pair
    found = listed_on_cpu(kernels, base, new, width, threads, order)
    if 2 * found.differences.nbytes > len(base):
        return  # then a device says None
    shadow = bytearray(base)
    frame = deltas.advance(memoryview(shadow), found, width)
    assert frame == deltas.encode(memoryview(base), memoryview(new), width)
    assert shadow == new


@compiled
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("nbytes", [TILE_BYTES - 8, TILE_BYTES, 3 * TILE_BYTES + 8])
@pytest.mark.parametrize("share", [0, 0.01, 0.4])
def test_lists_go_on_from_tile_to_tile(
    kernels: KernelsOnCpu, width: int, nbytes: int, share: float
) -> None:
    random = Random(3)
    base = random.randbytes(nbytes)
    new = changed(base, width, share, 2, random)
    for order in 0, 1:
        shadow, found = bytearray(base), listed_on_cpu(kernels, base, new, width, order=order)
        frame = deltas.advance(memoryview(shadow), found, width)
        assert frame == deltas.encode(memoryview(base), memoryview(new), width)
        assert shadow == new


@compiled
@given(pair=whole_pairs())
def test_the_kernel_adds_what_a_frame_lists(
    kernels: KernelsOnCpu, pair: tuple[bytes, bytes, int]
) -> None:
    base, new, width = pair
    frame = deltas.encode(memoryview(base), memoryview(new), width)
    found = None if frame is None else deltas.listed(frame, len(base))
    if frame is None or found is None:
        return
    (places, differences), its_width, counts = found
    target = ctypes.create_string_buffer(base + b"!", len(base) + 1)
    kernels.add(ctypes.addressof(target), its_width, places.tobytes(), differences.tobytes())
    assert target.raw == new + b"!"
    assert (its_width, counts) == (width, deltas.apply([frame], memoryview(bytearray(base))))


def test_a_frame_of_all_words_or_with_a_tail_is_not_listed() -> None:
    random = Random(5)
    base = random.randbytes(NBYTES)
    dense = deltas.encode(memoryview(base), memoryview(changed(base, 4, 1, 3, random)), 4)
    tailed = deltas.encode(memoryview(base + b"1"), memoryview(base + b"2"), 2)
    assert dense is not None
    assert tailed is not None
    assert deltas.listed(dense, NBYTES) is None
    assert deltas.listed(tailed, NBYTES + 1) is None


# --------------------------------------------------------------------------------------------------
# what `CudaDevice` makes of them


class OnHost:
    """An array of cupy's, in host memory."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.data = SimpleNamespace(ptr=array.ctypes.data)

    def get(self) -> np.ndarray[Any, Any]:
        return self._array


class DeviceOnCpu(CudaDevice):
    """With the kernels on the CPU, and numpy for cupy."""

    def __init__(self, kernels: KernelsOnCpu) -> None:
        self._kernels, self.copied, self.name = kernels, 0, "cuda:0"
        runtime = SimpleNamespace(memcpyAsync=self._copy)
        stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
        self._stream: Any = lambda: contextlib.nullcontext(stream)
        self._cupy = SimpleNamespace(
            cuda=SimpleNamespace(runtime=runtime),
            empty=lambda count, kind: OnHost(np.empty(count, kind)),
            asarray=lambda array: OnHost(array.copy()),
            **{each: getattr(np, each) for each in ("uint8", "uint32", "uint64")},
        )

    def use(self) -> None:
        pass

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        ctypes.memmove(to, source, nbytes)
        self.copied += nbytes

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        flat = [each.data.ptr if isinstance(each, OnHost) else int(each) for each in arguments]
        if kernel == "list_changes":
            older, newer, units, width, counts, *to = flat
            row, result = [older, newer, units, *to], counts
        else:
            result, width, *row = flat
        self._kernels.launch(kernel, row, result, blocks, 256, 0, width)


@compiled
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0, 0.01, 0.4, 0.6])
def test_a_device_lists_and_adds_what_the_codec_would(
    kernels: KernelsOnCpu, width: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceOnCpu(kernels)
    monkeypatch.setitem(sys.modules, "cupy", device._cupy)
    monkeypatch.setattr(driver, "range_of", lambda address: (address, 10_000))  # then another one
    random, shadow = Random(3), bytearray(Random(2).randbytes(2 * TILE_BYTES + 8))
    new = bytearray(changed(bytes(shadow), width, share, 1 << 8 * width - 1, random))
    target, base = bytearray(shadow), bytes(shadow)
    at, to = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (new, target))
    found = device.changes(memoryview(shadow), at, width)
    assert (found is None) == (share > 0.5)
    if found is not None:
        device.add(to, width, *found)
        assert target == new
        frame = deltas.advance(memoryview(shadow), Listed(*found), width)
        assert frame == deltas.encode(memoryview(base), memoryview(new), width)
    assert device.copied == 2 * len(base)


# --------------------------------------------------------------------------------------------------
# which path


class OnDevice:
    """A chunk in memory of a device, and its shadow."""

    def __init__(self, *, nbytes: int = NBYTES, shift: int = 0) -> None:
        self.device, self.random = Double(), Random(7)
        self.room = bytearray(self.random.randbytes(nbytes + shift))
        self.nbytes, self.shift = nbytes, shift
        region = self.device.bytes_of(self.room)[shift:]
        self.memory = ChunkMemory(manifest_of((nbytes,), chunk_bytes=nbytes), [region])
        self.shadow = bytearray(self.holds)

    @property
    def holds(self) -> bytes:
        return bytes(self.room[self.shift :])

    def change(self, share: float) -> None:
        self.room[self.shift :] = changed(self.holds, 2, share, 2, self.random)

    def advance(self) -> bytes | None:
        """And what the codec makes."""
        expected = deltas.encode(memoryview(bytes(self.shadow)), memoryview(self.holds), 2)
        made = self.memory.advance(0, memoryview(self.shadow), 2)
        assert made == expected
        assert self.shadow == self.holds
        return made


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(
        chunks.log, "warning", lambda event, **fields: found.append(f"{event} {fields['device']}")
    )
    chunks._say_on_host.cache_clear()
    return found


@pytest.mark.parametrize(
    ("share", "nbytes", "copies"),
    [(0.02, NBYTES, 0), (0, NBYTES, 0), (0.9, NBYTES, 1), (0.02, NBYTES + 2, 1)],
)
def test_a_chunk_is_copied_to_the_host_only_where_a_list_does_not_do(
    share: float, nbytes: int, copies: int, said: list[str]
) -> None:
    """0.9: differs in more than half of its words. NBYTES + 2: it has bytes behind the last whole 8."""
    source = OnDevice(nbytes=nbytes)
    source.change(share)
    source.advance()
    assert source.device.copies == copies
    assert not said


def test_a_list_that_looks_dense_to_the_codec_makes_its_frame() -> None:
    """The words that the codec looks at first all differ, and they are a third of all."""
    source = OnDevice()
    source.room[::6] = bytes(byte ^ 1 for byte in source.room[::6])
    frame = source.advance()
    assert frame is not None
    assert deltas.listed(frame, NBYTES) is None
    assert source.device.copies == 0


def test_a_device_without_room_leaves_it_to_the_host_and_says_so_once(said: list[str]) -> None:
    source = OnDevice()
    source.device.lacks_room = True
    for _ in range(3):
        source.change(0.02)
        assert source.advance() is not None
    assert source.device.copies == 3
    assert said == ["deltas_on_host double:0"]
    source.device.lacks_room = False
    source.change(0.02)
    source.advance()
    assert source.device.copies == 3


def test_a_device_that_has_failed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source = OnDevice()

    def fail(*_: object) -> None:
        raise StateError("an illegal address")

    monkeypatch.setattr(source.device, "changes", fail)
    monkeypatch.setattr(source.device, "add", fail)
    with pytest.raises(StateError, match="illegal"):
        source.memory.advance(0, memoryview(source.shadow), 2)


@pytest.mark.parametrize(
    ("shares", "shift", "lacks_room", "lists"),
    [
        ((0.02, 0.02), 0, False, 2),
        ((0.02, 0.02), 1, False, 0),
        ((0.02, 0.02), 0, True, 0),
        ((1, 0.02), 0, False, 0),
        ((0.02, 1, 0.02), 0, False, 1),
    ],
)
def test_a_reader_applies_lists_where_the_chunk_is(
    shares: tuple[float, ...], shift: int, lacks_room: bool, lists: int
) -> None:
    """Else (an odd address, no room, more than half of the words), that delta and those after it by
    copies there and back.
    """
    reader = OnDevice(shift=shift)
    contents = [reader.holds]
    for share in shares:
        contents.append(changed(contents[-1], 2, share, 1, reader.random))
    steps = [
        deltas.encode(memoryview(older), memoryview(newer), 2) or b""
        for older, newer in pairwise(contents)
    ]
    reader.device.lacks_room = lacks_room
    counts = reader.memory.apply(0, steps)
    assert reader.holds == contents[-1]
    assert reader.device.lists == lists
    assert reader.device.copies == (0 if lists == len(steps) else 2)
    assert counts.words == len(steps) * NBYTES // 2
    copied = bytearray(contents[0])
    changes = [deltas.apply([each], memoryview(copied)).changed for each in steps]
    assert counts.changed == sum(changes)


# --------------------------------------------------------------------------------------------------
# a cluster


@contextlib.asynccontextmanager
async def two_sites() -> AsyncIterator[list[Hub]]:
    options = replace(OPTIONS, host_memory_bytes=8 * 2**20)
    async with contextlib.AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(tensorhub.serve(options=OPTIONS))
        yield [
            await stack.enter_async_context(
                tensorhub.connect(
                    coordinator.address,
                    name=site,
                    location=Location(site=site, host=site),
                    options=options,
                    transports=("tcp",),
                )
            )
            for site in ("here", "there")
        ]


async def last_report(
    hub: Hub, source: Weights, reader: Weights, mine: torch.Tensor, theirs: torch.Tensor
) -> FetchReport:
    """Of a third version, which comes as deltas: some words of `mine` change each time."""
    await source.publish(1)
    report = await reader.replicate(1)
    for version in 2, 3:
        async with source.mutate(version):
            mine[::97] += 1
        report = await reader.update(version)
        assert torch.equal(theirs, mine)
        await has_its_shadow(hub, source)
    assert [each.deltas for each in report.sources] == [DeltaUse.USED]
    assert report.bytes_read < report.bytes_saved
    return report


async def has_its_shadow(hub: Hub, source: Weights) -> None:
    kept, member = worker_of(hub)._owner.deltas, source._handle.member
    here = RegistrationId(member.shard.registration)
    await until(
        lambda: (
            kept.is_begun(here)
            and member.content is not None
            and not kept.missing(here, member.content.generation)
        )
    )


@pytest.mark.anyio
async def test_a_version_goes_as_deltas_from_device_to_device() -> None:
    mine, theirs = Own(Double(), 1), Own(Double(), 0)
    async with two_sites() as hubs:
        source, reader = await mine.register(hubs[0]), await theirs.register(hubs[1])
        await last_report(hubs[0], source, reader, mine.tensors["large"], theirs.tensors["large"])
    assert mine.device.lists > 0
    assert theirs.device.lists > 0


# --------------------------------------------------------------------------------------------------
# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0, 0.0001, 0.016, 0.19, 0.45, 0.6])
@pytest.mark.parametrize("nbytes", [8, TILE_BYTES, 2**20 + 8])
def test_a_gpu_lists_and_adds_what_the_codec_would(
    device: CudaDevice, width: int, share: float, nbytes: int
) -> None:
    """From whatever address the trainer's words begin at; the reader's are aligned."""
    base = Random(2).randbytes(nbytes)
    new = changed(base, width, share, 1 << 8 * width - 1, Random(3))
    for shift in 0, 1, 2, 4:
        room, shadow = device.allocate(nbytes + shift)[shift:], bytearray(base)
        copy_bytes(memoryview(bytearray(new)), room)
        found = device.changes(memoryview(shadow), room.address, width)
        words = range(0, nbytes, width)
        differing = sum(base[at : at + width] != new[at : at + width] for at in words)
        assert (found is None) == (2 * differing > len(words))
        if found is None:
            continue
        frame = deltas.advance(memoryview(shadow), Listed(*found), width)
        assert shadow == new
        assert frame == deltas.encode(memoryview(base), memoryview(new), width)
        if shift % width == 0:
            copy_bytes(memoryview(bytearray(base)), room)
            device.add(room.address, width, *found)
            assert bytes_of(room) == new


@pytest.mark.gpu
@pytest.mark.anyio
async def test_a_version_goes_as_deltas_from_gpu_to_gpu(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set[str]()
    for name in "changes", "add":
        monkeypatch.setattr(CudaDevice, name, _noting(getattr(CudaDevice, name), called))
    mine = torch.arange(2**20, device="cuda").to(torch.bfloat16)
    theirs = torch.zeros_like(mine)
    async with two_sites() as hubs:
        source = await hubs[0].register("m", {"w": mine})
        reader = await hubs[1].register("m", {"w": theirs})
        words = [each.view(torch.int16) for each in (mine, theirs)]
        await last_report(hubs[0], source, reader, *words)
    assert called == {"changes", "add"}


def _noting(call: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        called.add(call.__name__)
        return call(*arguments)

    return noted
