"""What is made of cupy's answers, with a stand-in for cupy. Whether a GPU understands:
test_on_gpu.py.
"""

from __future__ import annotations

import importlib.util
import mmap
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.cuda import cupy_device, driver
from tensorhub.cuda.cupy_device import cuda_device, failures, fault_here, missing
from tensorhub.errors import StateError


class RuntimeFault(RuntimeError):
    """cupy's CUDARuntimeError."""


class Runtime:
    CUDARuntimeError = RuntimeFault

    def __init__(self) -> None:
        self.devices = 1
        self.current = 3
        self.closed: list[tuple[int, int]] = []
        self.has_nvrtc = True

    def getVersion(self) -> tuple[int, int]:  # noqa: N802 - their name
        if not self.has_nvrtc:
            raise OSError("No such file: libnvrtc.so.13\nor another")
        return 13, 0

    def getDeviceCount(self) -> int:  # noqa: N802 - their name
        if self.devices < 0:
            raise RuntimeFault("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return self.devices

    def getDevice(self) -> int:  # noqa: N802
        return self.current

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.current = index

    def ipcGetMemHandle(self, address: int) -> bytes:  # noqa: N802
        raise RuntimeFault("cudaErrorInvalidValue: invalid argument")

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        self.closed.append((self.current, address))

    def pointerGetAttributes(self, address: int) -> Any:  # noqa: N802
        return SimpleNamespace(device=address % 2)

    def eventQuery(self, event: int) -> int:  # noqa: N802
        return 600 if event else 0  # cudaErrorNotReady


class Library:
    """libcuda.so.1, as far as it is called directly."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.status = 0
        self.sizes = {4096: 1024}  # of allocations, by their address
        self.modes: dict[int, int] = {}  # capture modes, by thread
        self.opened: list[int] = []
        self.attributes = {driver.WRITES_ORDERING: 0, driver.DMA_BUF_SUPPORTED: 1}
        self.ranges: list[tuple[int, int]] = []  # that were asked for as dma-bufs
        self.flushed = 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:  # noqa: N802
        device._obj.value = index.value
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: Any, device: Any) -> int:  # noqa: N802
        found = self.attributes.get(number.value)
        value._obj.value = found or 0
        return 0 if found is not None else 1

    def cuMemGetHandleForAddressRange(  # noqa: N802
        self, found: Any, start: Any, size: Any, kind: Any, flags: Any
    ) -> int:
        assert (kind.value, flags.value) == (1, 0)
        self.ranges.append((start.value, size.value))
        found._obj.value = 77
        return self.status

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> int:  # noqa: N802
        assert (target.value, scope.value) == (0, 100)
        self.flushed += 1
        return self.status

    def cuGetErrorName(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_NUMBER_%d" % status

    def cuMemGetAddressRange_v2(self, base: Any, nbytes: Any, address: Any) -> int:  # noqa: N802
        found = [
            start for start, size in self.sizes.items() if start <= address.value < start + size
        ]
        if found:
            base._obj.value, nbytes._obj.value = found[0], self.sizes[found[0]]
        return 0 if found else 400

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        assert flags.value == 1
        if not self.status:
            address._obj.value = int.from_bytes(handle.reserved, "little")
            self.opened.append(address._obj.value)
        return self.status

    def cuIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        assert self.modes[threading.get_ident()] == driver.RELAXED
        self.opened.remove(address.value)
        self.runtime.closed.append((self.runtime.current, address.value))
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        before = self.modes.get(threading.get_ident(), 0)
        self.modes[threading.get_ident()], mode._obj.value = mode._obj.value, before
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802 - as if each device had its number's context
        context._obj.value = self.runtime.current
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.runtime.current = context.value
        return 0


@pytest.fixture
def library(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library(runtime)
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(cupy_device, "_thread", threading.local())
    return made


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    nvrtc = SimpleNamespace(getVersion=made.getVersion)
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=made, nvrtc=nvrtc))
    )
    caches: tuple[Any, ...] = (fault_here, cuda_device)
    for each in caches:
        each.cache_clear()
    yield made
    for each in caches:
        each.cache_clear()


def test_why_there_is_none(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_here() is None
    for devices, why in (
        (0, "there is no CUDA device; see `nvidia-smi` and CUDA"),
        (-1, "driver version is insufficient"),
    ):
        fault_here.cache_clear()
        runtime.devices = devices
        assert why in str(fault_here())
        with pytest.raises(StateError, match="nvidia-smi"):
            cuda_device(0)
    runtime.devices, runtime.has_nvrtc = 1, False
    fault_here.cache_clear()
    assert str(fault_here()).startswith(
        "NVRTC, by which cupy compiles kernels, is not to be had (OSError: No such file: libnv"
    )
    assert "libnvrtc.so.13): pip install nvidia-cuda-nvrtc" in str(fault_here())
    monkeypatch.setitem(sys.modules, "cupy", None)
    fault_here.cache_clear()
    assert "cupy is not installed" in str(fault_here())
    assert "pip install 'tensorhub-ros[cuda]'" in str(fault_here())


def test_without_importing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert str(missing()).startswith("cupy is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cupy_device, "DRIVERS", ())
    assert "no NVIDIA driver" in str(missing())
    monkeypatch.setattr(cupy_device, "DRIVERS", ("/dev/null",))
    assert missing() is None


def test_failures_are_named_with_what_to_do() -> None:
    with (
        pytest.raises(
            StateError, match=r"packing \(7 bytes\): out of memory: free some.*empty_cache"
        ) as caught,
        failures("packing", 7),
    ):
        raise MemoryError("Out of memory allocating 7 bytes")
    assert caught.value.retryable
    with pytest.raises(StateError, match="out of memory"), failures("copying"):
        raise RuntimeFault("cudaErrorMemoryAllocation: out of memory")
    with (
        pytest.raises(StateError, match=r"copying: cudaErrorIllegalAddress.*start it anew"),
        failures("copying"),
    ):
        raise RuntimeFault("cudaErrorIllegalAddress")
    with pytest.raises(StateError, match=r"^mine$"), failures("copying"):
        raise StateError("mine")


def test_memory_without_a_handle_is_refused_with_advice(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = cuda_device(0)
    with pytest.raises(
        StateError,
        match=r"on cuda:0 cannot be opened by other processes: cudaErrorInv.*Memory of exp",
    ):
        device.export(4100)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, Expandable_Segments: True")
    with pytest.raises(
        StateError, match="leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
    ):
        device.export(4100)
    with pytest.raises(
        StateError,
        match="finding an allocation of cuda:0: cuMemGetAddressRange_v2: CUDA_ERROR_NUMBER_400",
    ):
        device.export(1)


def test_memory_of_a_dead_process_is_refused_with_advice(library: Library) -> None:
    library.status = 205
    with pytest.raises(
        StateError,
        match=r"cannot be opened on cuda:0: .*NUMBER_205: its process "
        r"has ended, or that GPU is not",
    ):
        cuda_device(0).open(bytes(64), 1)


def test_memory_that_is_smaller_than_it_is_said_to_be_is_closed_again(library: Library) -> None:
    device, handle = cuda_device(0), (4096).to_bytes(64, "little")
    assert device.open(handle, 1024) == 4096
    with pytest.raises(StateError, match="said to have 1025 bytes, and has 1024"):
        device.open(handle, 1025)
    assert library.opened == [4096]
    library.sizes.clear()  # the driver does not say
    assert device.open(handle, 1025) == 4096


def test_what_may_run_in_any_thread_leaves_it_as_it_was(library: Library, runtime: Runtime) -> None:
    device, me = cuda_device(0), threading.get_ident()
    assert runtime.current == 3  # making it, too
    library.opened.append(99)
    device.close(99)
    device._unpin(98)
    assert (runtime.closed, runtime.current, library.modes[me]) == ([(0, 99), (0, 98)], 3, 0)
    device.use()
    assert (runtime.current, library.modes[me]) == (0, driver.RELAXED)
    library.opened.append(97)
    device.close(97)
    assert library.modes[me] == driver.RELAXED


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(library: Library) -> None:
    def compiles(name: str) -> None:
        raise PermissionError(13, "Permission denied", "/.cupy")

    device = cuda_device(0)
    device._module = SimpleNamespace(get_function=compiles)
    with pytest.raises(
        StateError, match=r"cannot keep compiled kernels: .*'/.cupy': set CUPY_CACHE_DIR"
    ):
        device.launch("digest_chunks", 1)


def test_a_dma_buf_is_of_whole_pages(library: Library) -> None:
    device, page = cuda_device(0), mmap.PAGESIZE
    assert device.dma_buf(5 * page + 512, page) == (77, 5 * page)
    assert device.dma_buf(5 * page, page) == (77, 5 * page)
    assert library.ranges == [(5 * page, 2 * page), (5 * page, page)]
    library.status = 801
    with pytest.raises(
        StateError, match=r"gives no dma-buf of this memory: cuMemGetHandleForAddressRange: .*_801"
    ):
        device.dma_buf(page, page)
    library.attributes = {}  # an older driver
    with pytest.raises(StateError, match="cuda:0 or its driver knows no dma-buf"):
        device.dma_buf(page, page)


@pytest.mark.parametrize(("ordering", "flushes"), [(0, 1), (100, 0), (200, 0)])
def test_others_writes_are_waited_for_where_the_gpu_does_not_order_them(
    library: Library, ordering: int, flushes: int
) -> None:
    library.attributes[driver.WRITES_ORDERING] = ordering
    cuda_device(0).settle()
    assert library.flushed == flushes
    if flushes:
        library.status = 1
        with pytest.raises(
            StateError, match="waiting for others' writes on cuda:0: cuFlushGPUDirectRDMAWrites"
        ):
            cuda_device(0).settle()
