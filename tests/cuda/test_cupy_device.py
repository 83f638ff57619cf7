"""What is made of cupy's answers, with a stand-in for cupy. Whether a GPU understands: test_on_gpu.py."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.cuda import cupy_device
from tensorhub.cuda.cupy_device import CudaDevice, CudaMark, cuda_device, failures, fault_here, missing
from tensorhub.errors import StateError


class RuntimeFault(RuntimeError):
    """cupy's CUDARuntimeError."""


class Runtime:
    CUDARuntimeError = RuntimeFault

    def __init__(self) -> None:
        self.devices = 1
        self.current = 3
        self.closed: list[tuple[int, int]] = []

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

    def ipcOpenMemHandle(self, handle: bytes) -> int:  # noqa: N802
        raise RuntimeFault("cudaErrorMapBufferObjectFailed")

    def ipcCloseMemHandle(self, address: int) -> None:  # noqa: N802
        self.closed.append((self.current, address))

    def eventQuery(self, event: int) -> int:  # noqa: N802
        return 600 if event else 0  # cudaErrorNotReady


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=made)))
    caches: tuple[Any, ...] = (fault_here, cuda_device)
    for each in caches:
        each.cache_clear()
    yield made
    for each in caches:
        each.cache_clear()


def test_why_there_is_none(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_here() is None
    for devices, why in ((0, "there is no CUDA device; see `nvidia-smi` and CUDA"), (-1, "driver version is insufficient")):
        fault_here.cache_clear()
        runtime.devices = devices
        assert why in str(fault_here())
        with pytest.raises(StateError, match="nvidia-smi"):
            cuda_device(0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    fault_here.cache_clear()
    assert "cupy is not installed" in str(fault_here())
    assert "pip install 'tensorhub[cuda]'" in str(fault_here())


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
        pytest.raises(StateError, match=r"packing \(7 bytes\): out of memory: free some.*empty_cache") as caught,
        failures("packing", 7),
    ):
        raise MemoryError("Out of memory allocating 7 bytes")
    assert caught.value.retryable
    with pytest.raises(StateError, match="out of memory"), failures("copying"):
        raise RuntimeFault("cudaErrorMemoryAllocation: out of memory")
    with pytest.raises(StateError, match=r"copying: cudaErrorIllegalAddress.*start it anew"), failures("copying"):
        raise RuntimeFault("cudaErrorIllegalAddress")
    with pytest.raises(StateError, match=r"^mine$"), failures("copying"):
        raise StateError("mine")


def test_memory_without_a_handle_is_refused_with_advice(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    device = cuda_device(0)
    monkeypatch.setattr(CudaDevice, "_range", lambda self, address: (address - 512, 1024))
    with pytest.raises(StateError, match=r"on cuda:0 cannot be opened by other processes: cudaErrorInv.*Memory of exp"):
        device.export(4096)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, Expandable_Segments: True")
    with pytest.raises(StateError, match="leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"):
        device.export(4096)


def test_memory_of_a_dead_process_is_refused_with_advice(runtime: Runtime) -> None:
    with pytest.raises(StateError, match=r"cannot be opened on cuda:0: .*its process has ended, or that GPU is not visible"):
        cuda_device(0).open(bytes(64))


def test_closing_leaves_the_threads_device_as_it_was(runtime: Runtime) -> None:
    device = cuda_device(0)
    assert runtime.current == 3  # making it, too
    device.close(99)
    assert (runtime.closed, runtime.current) == ([(0, 99)], 3)


def test_a_mark_is_reached_when_its_event_is(runtime: Runtime) -> None:
    assert CudaMark(SimpleNamespace(ptr=0)).is_reached
    assert not CudaMark(SimpleNamespace(ptr=1)).is_reached
    assert CudaMark(SimpleNamespace(query=lambda: True)).is_reached

    def fail() -> bool:
        raise RuntimeFault("cudaErrorLaunchFailure")

    with pytest.raises(StateError, match="cudaErrorLaunchFailure"):
        assert CudaMark(SimpleNamespace(query=fail)).is_reached


class Driver:
    """libcuda, as far as other devices reach a GPU's memory through it."""

    def __init__(self, **attributes: int) -> None:
        self.attributes = {118: 0, 124: 1} | {int(name[1:]): value for name, value in attributes.items()}
        self.ranges: list[tuple[int, int]] = []
        self.flushed = 0
        self.refusal = 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = index
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:  # noqa: N802
        if number not in self.attributes:
            return 1
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.attributes[number]
        return 0

    def cuMemGetHandleForAddressRange(self, found: Any, start: Any, size: Any, kind: int, flags: Any) -> int:  # noqa: N802
        assert (kind, flags.value) == (1, 0)
        self.ranges.append((start.value, size.value))
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 77
        return self.refusal

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:  # noqa: N802
        assert (target, scope) == (0, 100)
        self.flushed += 1
        return self.refusal


def test_a_dma_buf_is_of_whole_pages(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, page = Driver(), mmap.PAGESIZE
    monkeypatch.setattr(cupy_device, "_driver", lambda: driver)
    device = cuda_device(0)
    assert device.dma_buf(5 * page + 512, page) == (77, 5 * page)
    assert device.dma_buf(5 * page, page) == (77, 5 * page)
    assert driver.ranges == [(5 * page, 2 * page), (5 * page, page)]
    driver.refusal = 801
    with pytest.raises(StateError, match=r"cuda:0 gives no dma-buf of this memory \(CUDA driver error 801\)"):
        device.dma_buf(page, page)
    del driver.attributes[124]  # an older driver
    cuda_device.cache_clear()
    with pytest.raises(StateError, match="cuda:0 or its driver knows no dma-buf"):
        cuda_device(0).dma_buf(page, page)


@pytest.mark.parametrize(("ordering", "flushes"), [(0, 1), (100, 0), (200, 0)])
def test_others_writes_are_waited_for_where_the_gpu_does_not_order_them(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, ordering: int, flushes: int
) -> None:
    driver = Driver(_118=ordering)
    monkeypatch.setattr(cupy_device, "_driver", lambda: driver)
    cuda_device(0).settle()
    assert driver.flushed == flushes
    if flushes:
        driver.refusal = 1
        with pytest.raises(StateError, match="does not say when others' writes are there"):
            cuda_device(0).settle()
