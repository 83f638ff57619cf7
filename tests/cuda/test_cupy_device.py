"""What is made of cupy's answers, with a stand-in for cupy. Whether a GPU understands: test_on_gpu.py."""

from __future__ import annotations

import importlib.util
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
