"""CUDA devices, through cupy. See `device` for what each call means.

The current device is a thread's own, so each call sets it: a fraction of a microsecond. What may run in a caller's thread
leaves it as it was. The caller's streams are torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensorhub.cuda.device import Allocation, DeviceBytes, Mark
from tensorhub.cuda.kernels import SOURCE, THREADS, cut_rows
from tensorhub.errors import StateError, TensorHubError

INSTALL = "pip install 'tensorhub[cuda]' (cupy-cuda13x; with a driver for CUDA 12 only: cupy-cuda12x)"
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_TO_WHEREVER = 4  # cudaMemcpyDefault: both addresses say where they are
_OUT_OF_MEMORY = ("MemoryAllocation", "OUT_OF_MEMORY", "out of memory")
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
# Of cuda.h (13.0): CU_DEVICE_ATTRIBUTE_..., CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
_RDMA_WRITES_ORDERING, _DMA_BUF_SUPPORTED = 118, 124
_DMA_BUF_FD = 1
_TO_OWNER = 100


@lru_cache(maxsize=1)
def fault_here() -> str | None:
    """Why GPUs cannot be used here, and what to do; None if they can."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return f"cupy is not installed ({error}): {INSTALL}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # cupy's own kinds, and what a missing library raises
        return f"no CUDA device can be used: {error}; see `nvidia-smi`, and in a container its --gpus"
    return None if count else "there is no CUDA device; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"


def missing() -> str | None:
    """What of it can be told without importing anything: None, there may be a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return f"cupy is not installed: {INSTALL}"
    if not any(Path(device).exists() for device in DRIVERS):
        return "there is no NVIDIA driver here (/dev/nvidiactl); in a container, see its --gpus"
    return None


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _why_not(error: Exception) -> str:
    """What stands behind an allocation that has no handle."""
    settings = " ".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:true" in settings.replace(" ", "").lower():
        return "it is in an expandable segment of torch: leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
    return (
        f"{error}. Memory of expandable segments, of cudaMallocAsync and managed memory has no handle: allocate these "
        "tensors by torch's usual allocator"
    )


@lru_cache(maxsize=64)
def cuda_device(index: int) -> CudaDevice:
    """The one of that number, as torch and CUDA_VISIBLE_DEVICES number them. StateError: there is none."""
    if (fault := fault_here()) is not None:
        raise StateError(fault)
    return CudaDevice(index)


@contextlib.contextmanager
def failures(what: str, nbytes: int = 0) -> Iterator[None]:
    """Names what a CUDA call failed at."""
    try:
        yield
    except TensorHubError:
        raise
    except Exception as error:  # cupy's and torch's own kinds: of the runtime, the driver, the compiler
        if isinstance(error, MemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY):
            needed = f" ({nbytes} bytes)" if nbytes else ""
            advice = "free some: torch.cuda.empty_cache(), a smaller Options.host_memory_bytes or pack_bytes"
            raise StateError(f"{what}{needed}: out of memory: {advice} [{error}]", retryable=True) from error
        after = "most CUDA errors leave a process of no use for its GPU: start it anew"
        raise StateError(f"{what}: {error} ({after})") from error


class CudaDevice:
    """See `Device`."""

    def __init__(self, index: int) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._runtime = self._cupy.cuda.runtime
        self._attributes: dict[int, int] = {}
        self._lock = threading.Lock()  # guards both below
        self._module: Any = None
        self._idle: list[Any] = []  # streams: cupy keeps memory for each, so they are used again
        self.index = index
        self.name = f"cuda:{index}"

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name}>"

    def use(self) -> None:
        """Have the calling thread's CUDA calls be about this device. (Of the library's threads: a caller's is torch's.)"""
        with failures(f"using {self.name}"):
            self._runtime.setDevice(self.index)

    def queue(self, *, spins: bool = False) -> CudaQueue:
        self.use()
        with failures(f"making a stream on {self.name}"):
            return CudaQueue(self, self._cupy.cuda.Stream(non_blocking=True), spins)

    def pinned(self, nbytes: int) -> memoryview:
        self.use()
        with failures("taking page-locked host memory", nbytes):
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)  # of a pool: giving it back to the driver waits for the GPU
        buffer = (ctypes.c_char * nbytes).from_address(memory.ptr)
        buffer.memory = memory  # type: ignore[attr-defined]
        return memoryview(buffer).cast("B")

    def pin(self, view: memoryview) -> Callable[[], None]:
        self.use()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        with failures("page-locking host memory", view.nbytes):
            self._runtime.hostRegister(address, view.nbytes, _PORTABLE)
        return lambda: self._unpin(address)

    def _unpin(self, address: int) -> None:
        with failures("giving page-locked host memory back"):
            self._runtime.hostUnregister(address)

    def allocate(self, nbytes: int) -> DeviceBytes:
        self.use()
        with failures(f"taking memory on {self.name}", nbytes):
            memory = self._cupy.zeros(nbytes, self._cupy.uint8)
            self._cupy.cuda.get_current_stream().synchronize()  # the zeros are there, whichever queue comes next
        return DeviceBytes(self, memory.data.ptr, nbytes, memory)

    def digests(self, places: Sequence[tuple[int, int]]) -> list[int]:
        if not places:
            return []
        self.use()
        with failures(f"making digests on {self.name}"), self._stream():
            table = self.table(places)
            made = self._cupy.empty(len(places), self._cupy.uint64)
            self.launch("digest_chunks", len(places), table, made)
            found: list[int] = made.get().tolist()  # waits for it
        return found

    def packing(self, region: DeviceBytes, pieces: Sequence[tuple[int, int, int]]) -> CudaPacking:
        self.use()
        with failures(f"packing on {self.name}"):
            return CudaPacking(self, region, list(cut_rows(pieces)))

    def export(self, address: int) -> Allocation:
        self.use()
        with failures(f"finding an allocation of {self.name}"):
            base, nbytes = self._range(address)
        try:
            handle: bytes = self._runtime.ipcGetMemHandle(base)
        except self._runtime.CUDARuntimeError as error:
            raise StateError(f"its memory on {self.name} cannot be opened by other processes: {_why_not(error)}") from error
        return Allocation(base, nbytes, handle)

    def _range(self, address: int) -> tuple[int, int]:
        """The allocation there: torch hands out parts of it, and a handle is of all of it."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        found = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address))
        if found:
            raise StateError(f"there is no allocation of {self.name} at {address:#x} (CUDA driver error {found})")
        return base.value, nbytes.value

    def open(self, handle: bytes) -> int:
        self.use()
        try:
            address: int = self._runtime.ipcOpenMemHandle(handle)  # with access to a peer's memory, where that is needed
        except self._runtime.CUDARuntimeError as error:
            advice = "its process has ended, or that GPU is not visible here (CUDA_VISIBLE_DEVICES), or has no peer access"
            raise StateError(f"its memory cannot be opened on {self.name}: {error}: {advice}") from error
        return address

    def close(self, address: int) -> None:
        with failures("closing another process' memory"):
            before = self._runtime.getDevice()  # this may be any thread, in the midst of anything: it was the last reference
            self._runtime.setDevice(self.index)
            try:
                self._runtime.ipcCloseMemHandle(address)
            finally:
                self._runtime.setDevice(before)

    def dma_buf(self, address: int, nbytes: int) -> tuple[int, int]:
        self.use()
        if not self._attribute(_DMA_BUF_SUPPORTED):
            raise StateError(f"{self.name} or its driver knows no dma-buf")
        start = address - address % mmap.PAGESIZE  # whole pages of the host: an allocation begins and ends with one
        size = -(-(address + nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = ctypes.c_int(-1)
        failed = _driver().cuMemGetHandleForAddressRange(
            ctypes.byref(descriptor), ctypes.c_uint64(start), ctypes.c_size_t(size), _DMA_BUF_FD, ctypes.c_uint64(0)
        )
        if failed:
            raise StateError(f"{self.name} gives no dma-buf of this memory (CUDA driver error {failed})")
        return descriptor.value, start

    def settle(self) -> None:
        self.use()
        if self._attribute(_RDMA_WRITES_ORDERING) >= _TO_OWNER:
            return
        if failed := _driver().cuFlushGPUDirectRDMAWrites(0, _TO_OWNER):
            raise StateError(f"{self.name} does not say when others' writes are there (CUDA driver error {failed})")

    def _attribute(self, number: int) -> int:
        if number not in self._attributes:
            with failures(f"asking what {self.name} can do"):
                value, device = ctypes.c_int(), ctypes.c_int()
                driver = _driver()
                failed = driver.cuDeviceGet(ctypes.byref(device), self.index)
                failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
            self._attributes[number] = 0 if failed else value.value  # (a driver that does not know it)
        return self._attributes[number]

    def callers_work(self) -> CudaMark:
        torch = sys.modules["torch"]
        with failures(f"marking the caller's stream on {self.name}"):
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self.index))
        return CudaMark(event)

    # ------------------------------------------------------------------------------------------------- for queues, too

    @contextlib.contextmanager
    def _stream(self) -> Iterator[Any]:
        """One for the block, which is cupy's current stream there."""
        with self._lock:
            stream = self._idle.pop() if self._idle else self._cupy.cuda.Stream(non_blocking=True)
        try:
            with stream:
                yield stream
        finally:
            with self._lock:
                self._idle.append(stream)

    def table(self, rows: Sequence[Sequence[int]]) -> Any:
        """These numbers on the device, in the order of the current stream."""
        numpy = importlib.import_module("numpy")
        return self._cupy.asarray(numpy.asarray(rows, numpy.uint64).reshape(-1))

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        """On the current stream."""
        with self._lock:
            if self._module is None:
                self._module = self._cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=("-std=c++17",))
            function = self._module.get_function(kernel)
        function((blocks,), (THREADS,), arguments)


class CudaMark:
    """See `Mark`. `event`: torch's, or cupy's."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def is_reached(self) -> bool:
        with failures("looking at the GPU's work"):
            if hasattr(self._event, "query"):
                return bool(self._event.query())
            status: int = sys.modules["cupy"].cuda.runtime.eventQuery(self._event.ptr)
            return status == 0  # else it is not reached, or `wait` says what is wrong

    def wait(self) -> None:
        with failures("waiting for the GPU"):
            self._event.synchronize()


class CudaQueue:
    """See `Queue`."""

    def __init__(self, device: CudaDevice, stream: Any, spins: bool) -> None:
        self._device = device
        self._spins = spins
        self._stream = stream
        self._cupy: Any = sys.modules["cupy"]

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._device.use()
        with failures(f"copying {nbytes} bytes"):
            self._cupy.cuda.runtime.memcpyAsync(to, source, nbytes, _TO_WHEREVER, self._stream.ptr)

    def copy_many(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        rows = list(cut_rows([(source, to, nbytes) for to, source, nbytes in pieces]))
        if not rows:
            return
        self._device.use()
        with failures(f"copying {len(rows)} pieces"), self._stream:
            table = self._device.table(rows)
            # Offsets from address 0 are addresses.
            # (The table's memory may go at once: cupy gives it out again in the order of this stream.)
            self._device.launch("pack_pieces", len(rows), table, self._cupy.uint64(0))

    def mark(self) -> Mark:
        self._device.use()
        with failures("marking a stream"):
            event = self._cupy.cuda.Event(block=not self._spins, disable_timing=True)
            event.record(self._stream)
        return CudaMark(event)


class CudaPacking:
    """See `Kernels`. The table stays on the device."""

    def __init__(self, device: CudaDevice, region: DeviceBytes, rows: Sequence[tuple[int, int, int]]) -> None:
        self._device = device
        self._region = region
        self._count = len(rows)
        self._cupy: Any = sys.modules["cupy"]
        self.stream = self._cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self._table = device.table(rows) if rows else None

    def pack(self) -> None:
        self.queue("pack_pieces")
        self._wait()

    def unpack(self) -> None:
        self.queue("unpack_pieces")
        self._wait()

    def queue(self, kernel: str) -> None:
        """Have it done, on a stream of its own."""
        if self._table is None:
            return
        self._device.use()
        with failures(f"{kernel} on {self._device.name}"), self.stream:
            self._device.launch(kernel, self._count, self._table, self._cupy.uint64(self._region.address))

    def _wait(self) -> None:
        with failures(f"packing on {self._device.name}"):
            self.stream.synchronize()
