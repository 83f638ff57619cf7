"""CUDA devices, through cupy. See `device` for what each call means.

The current device is a thread's own, so each call sets it: a fraction of a microsecond. (In a
thread without a current device it is device 0, and a call would make a context there, of half a
GB.) The library's threads are in relaxed capture mode: while a caller captures a CUDA graph, the
usual mode forbids all threads to look at events or to allocate, and breaks the capture where one
does. Calls that may run in a caller's thread restore device and mode. The caller's streams are
torch's.
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
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from tensorhub.cuda import driver
from tensorhub.cuda.copies import copy
from tensorhub.cuda.device import Allocation, DeviceBytes, Mark, Spread
from tensorhub.cuda.kernels import SOURCE, THREADS, TILE_BYTES, cut_rows, parts_of, straight_rows
from tensorhub.errors import StateError, TensorHubError, install, text_of

INSTALL = f"{install('cuda')} (cupy-cuda13x; with a driver for CUDA 12 only: cupy-cuda12x)"
INSTALL_NVRTC = (
    "pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for cupy-cuda12x), or set "
    "CUDA_PATH to a CUDA toolkit"
)
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_TO_WHEREVER = 4  # cudaMemcpyDefault: both addresses say where they are
_OUT_OF_MEMORY = ("MemoryAllocation", "OUT_OF_MEMORY", "out of memory")
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


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
        return (
            f"no CUDA device can be used: {error}; see `nvidia-smi`, and in a container its --gpus"
        )
    if not count:
        return "there is no CUDA device; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return (
            f"NVRTC, by which cupy compiles kernels, is not to be had "
            f"({text_of(error).splitlines()[0]}): {INSTALL_NVRTC}"
        )
    return None


def missing() -> str | None:
    """What of it can be told without importing anything: None, there may be a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return f"cupy is not installed: {INSTALL}"
    if not any(Path(device).exists() for device in DRIVERS):
        return "there is no NVIDIA driver here (/dev/nvidiactl); in a container, see its --gpus"
    return None


_thread = threading.local()  # `is_relaxed`: its capture mode was set


def _why_not(error: Exception) -> str:
    """What stands behind an allocation that has no handle."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            return (
                f"it is in an expandable segment of torch: leave expandable_segments out of {name}"
            )
    return (
        f"{error}. Memory of expandable segments, of cudaMallocAsync and managed memory has no "
        f"handle: allocate these "
        "tensors by torch's usual allocator"
    )


@lru_cache(maxsize=64)
def cuda_device(index: int) -> CudaDevice:
    """The device of that number, as torch and CUDA_VISIBLE_DEVICES count. StateError: there is
    none.
    """
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
    except (
        Exception
    ) as error:  # cupy's and torch's own kinds: of the runtime, the driver, the compiler
        if isinstance(error, MemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY):
            needed = f" ({nbytes} bytes)" if nbytes else ""
            advice = (
                "free some: torch.cuda.empty_cache(), a smaller Options.host_memory_bytes or "
                "pack_bytes"
            )
            raise StateError(
                f"{what}{needed}: out of memory: {advice} [{error}]", retryable=True
            ) from error
        after = "most CUDA errors leave a process of no use for its GPU: start it anew"
        raise StateError(f"{what}: {error} ({after})") from error


class CudaDevice:
    """See `Device`."""

    def __init__(self, index: int) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._runtime = self._cupy.cuda.runtime
        self._lock = threading.Lock()  # guards both below
        self._module: Any = None
        self._idle: list[Any] = []  # streams: cupy keeps memory for each, so they are used again
        self.index = index
        self.name = f"cuda:{index}"

    def use(self) -> None:
        """Have the calling thread's CUDA calls be about this device. (Of the library's threads: a
        caller's is torch's.)
        """
        with failures(f"using {self.name}"):
            self._runtime.setDevice(self.index)
            if not getattr(_thread, "is_relaxed", False):
                driver.exchange_capture_mode(driver.RELAXED)
                _thread.is_relaxed = True

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """As `use`, for the block, in any thread, in the midst of anything."""
        before, mode = driver.context(), driver.exchange_capture_mode(driver.RELAXED)
        try:
            self._runtime.setDevice(self.index)
            yield
        finally:
            driver.set_context(before)
            driver.exchange_capture_mode(mode)

    def queue(self, *, spins: bool = False) -> CudaQueue:
        self.use()
        with failures(f"making a stream on {self.name}"):
            return CudaQueue(self, self._cupy.cuda.Stream(non_blocking=True), spins)

    def pinned(self, nbytes: int) -> memoryview:
        self.use()
        with failures("taking page-locked host memory", nbytes):
            # of a pool: giving it back to the driver waits for the GPU
            memory = self._cupy.cuda.alloc_pinned_memory(nbytes)
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
        with failures("giving page-locked host memory back"), self._borrowed():
            self._runtime.hostUnregister(address)

    def allocate(self, nbytes: int) -> DeviceBytes:
        self.use()
        # not behind the caller's work
        with failures(f"taking memory on {self.name}", nbytes), self._stream() as stream:
            memory = self._cupy.zeros(nbytes, self._cupy.uint8)
            stream.synchronize()  # the zeros are there, whichever queue comes next
        return DeviceBytes(self, memory.data.ptr, nbytes, memory)

    def digests(self, places: Sequence[tuple[int, int]]) -> list[int]:
        return self.relay(0, digested=places)

    def relay(
        self,
        room: int,
        gathered: Sequence[Spread] = (),
        digested: Sequence[tuple[int, int]] = (),
        scattered: Sequence[Spread] = (),
    ) -> list[int]:
        rows = [*gathered, *digested, *scattered]
        if not rows:
            return []
        self.use()
        steps = {"gathering": gathered, "digesting": digested, "scattering": scattered}
        what = ", ".join([step for step, its in steps.items() if its])
        with failures(f"{what} on {self.name}"), self._stream() as stream:
            # One table for all: to copy one out of pageable memory waits for whatever is on the
            # stream already.
            table = self.table(rows)
            ends = accumulate([sum(map(len, some)) for some in (gathered, digested, scattered)])
            to_gather, to_digest, to_scatter = [
                table[start:end] for start, end in pairwise((0, *ends))
            ]
            made = self._cupy.empty(len(digested), self._cupy.uint64)
            self.move("gather_runs", gathered, to_gather, room)
            if digested:
                self.launch("digest_chunks", len(digested), to_digest, made)
            self.move("scatter_runs", scattered, to_scatter, room)
            if not digested:
                stream.synchronize()
                return []
            found: list[int] = made.get().tolist()  # waits for all of it
        return found

    def changes(
        self, older: memoryview, newer: int, width: int
    ) -> tuple[memoryview, memoryview] | None:
        self.use()
        cupy, nbytes = self._cupy, older.nbytes
        host = ctypes.addressof(ctypes.c_char.from_buffer(older))
        with failures(f"comparing on {self.name}", 2 * nbytes), self._stream() as stream:
            # Copies: what was compared stays as it was, and is aligned.
            room = cupy.empty(2 * nbytes, cupy.uint8)
            queue = CudaQueue(self, stream, spins=False)
            copy(queue, room.data.ptr, host, nbytes)
            copy(queue, room.data.ptr + nbytes, newer, nbytes)
            tiles = -(-nbytes // TILE_BYTES)
            counts = cupy.empty(tiles, cupy.uint32)
            of = room.data.ptr, room.data.ptr + nbytes, nbytes // 8
            numbers = [*map(cupy.uint64, of), cupy.uint32(width)]
            nowhere = cupy.uint64(0)
            self.launch("list_changes", tiles, *numbers, counts, nowhere, nowhere, nowhere)
            found = counts.get()  # waits
            changed = int(found.sum())
            if 2 * changed * width > nbytes:
                return None
            made = cupy.empty((4 + width) * changed, cupy.uint8)
            to = cupy.uint64(made.data.ptr), cupy.uint64(made.data.ptr + 4 * changed)
            if changed:
                firsts = cupy.asarray(found.cumsum(dtype=found.dtype) - found)
                self.launch("list_changes", tiles, *numbers, counts, firsts, *to)
            listed = memoryview(made.get())
        return listed[: 4 * changed], listed[4 * changed :]

    def add(self, address: int, width: int, places: memoryview, differences: memoryview) -> None:
        count = places.nbytes // 4
        if not count:
            return
        self.use()
        cupy, numpy = self._cupy, importlib.import_module("numpy")
        with (
            failures(f"applying a delta on {self.name}", places.nbytes + differences.nbytes),
            self._stream() as stream,
        ):
            changes = [
                cupy.asarray(numpy.frombuffer(each, numpy.uint8)) for each in (places, differences)
            ]
            numbers = cupy.uint64(address), cupy.uint32(width), cupy.uint32(count)
            self.launch("add_changes", -(-count // THREADS), *numbers, *changes)
            stream.synchronize()

    def packing(self, region: DeviceBytes, pieces: Sequence[tuple[int, int, int]]) -> CudaPacking:
        self.use()
        with failures(f"packing on {self.name}"):
            return CudaPacking(self, region, list(cut_rows(pieces)))

    def export(self, address: int) -> Allocation:
        self.use()
        with failures(f"finding an allocation of {self.name}"):
            # torch hands out parts of it, and a handle is of all of it
            base, nbytes = driver.range_of(address)
        try:
            handle: bytes = self._runtime.ipcGetMemHandle(base)
        except self._runtime.CUDARuntimeError as error:
            raise StateError(
                f"its memory on {self.name} cannot be opened by other processes: {_why_not(error)}"
            ) from error
        return Allocation(base, nbytes, handle)

    def open(self, handle: bytes, nbytes: int) -> int:
        self.use()
        try:
            address = driver.open_handle(handle)
        except driver.DriverError as error:
            advice = (
                "its process has ended, or that GPU is not visible here "
                "(CUDA_VISIBLE_DEVICES), or has no peer access"
            )
            raise StateError(
                f"its memory cannot be opened on {self.name}: {error}: {advice}"
            ) from error
        # where that is not known, the source is believed
        with contextlib.suppress(driver.DriverError):
            base, size = driver.range_of(address)
            if address + nbytes > base + size:
                driver.close_handle(address)
                raise StateError(
                    f"its memory is said to have {nbytes} bytes, and has {base + size - address}"
                )
        return address

    def close(self, address: int) -> None:
        # it was the last reference, in any thread
        with failures("closing another process' memory"), self._borrowed():
            driver.close_handle(address)

    def settle(self) -> None:
        self.use()
        with failures(f"waiting for others' writes on {self.name}"):
            if driver.attribute(self.index, driver.WRITES_ORDERING) < driver.TO_OWNER:
                driver.flush_writes()

    def owns(self, address: int) -> bool:
        self.use()
        with failures("finding whose memory it is"):
            return bool(self._runtime.pointerGetAttributes(address).device == self.index)

    def dma_buf(self, address: int, nbytes: int) -> tuple[int, int]:
        self.use()
        if not driver.attribute(self.index, driver.DMA_BUF_SUPPORTED):
            raise StateError(f"{self.name} or its driver knows no dma-buf")
        # whole pages of the host: an allocation begins and ends with one
        start = address - address % mmap.PAGESIZE
        size = -(-(address + nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            return driver.dma_buf(start, size), start
        except driver.DriverError as error:
            raise StateError(f"{self.name} gives no dma-buf of this memory: {error}") from error

    def stream_sync(self) -> CudaMark:
        torch = sys.modules["torch"]
        with failures(f"marking the caller's stream on {self.name}"):
            with torch.cuda.device(self.index):
                is_capturing = torch.cuda.is_current_stream_capturing()
            if is_capturing:
                advice = "call this before it begins, or when it is over"
                raise StateError(
                    f"a CUDA graph is being captured on {self.name}'s present stream, and is not "
                    f"done: {advice}"
                )
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self.index))
        return CudaMark(self, event)

    # ----------------------------------------------------------------------------------------------
    # for queues, too

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
        """These numbers (of 64 bits, some of them signed) on the device, in the order of the
        current stream.
        """
        numpy = importlib.import_module("numpy")
        return self._cupy.asarray(numpy.fromiter(chain.from_iterable(rows), numpy.int64))

    def move(self, kernel: str, rows: Sequence[Spread], table: Any, room: int) -> None:
        """Rows of runs, with their table, on the current stream."""
        if rows:
            parts = parts_of(rows)
            self.launch(
                kernel, len(rows) * parts, table, self._cupy.uint64(room), self._cupy.uint32(parts)
            )

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        """On the current stream."""
        with self._lock:
            if self._module is None:
                self._module = self._cupy.RawModule(
                    code=SOURCE.read_text(encoding="utf-8"), options=("-std=c++17",)
                )
            try:
                # compiles it, or finds it in cupy's cache
                function = self._module.get_function(kernel)
            except OSError as error:
                advice = (
                    "set CUPY_CACHE_DIR to a directory that can be written, or "
                    "CUPY_CACHE_IN_MEMORY=1"
                )
                raise StateError(f"cupy cannot keep compiled kernels: {error}: {advice}") from error
        function((blocks,), (THREADS,), arguments)


class CudaMark:
    """See `Mark`. `event`: torch's, or cupy's."""

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device = device
        self._event = event

    @property
    def is_reached(self) -> bool:
        self._device.use()
        with failures("looking at the GPU's work"):
            if hasattr(self._event, "query"):
                return bool(self._event.query())
            status: int = sys.modules["cupy"].cuda.runtime.eventQuery(self._event.ptr)
            return status == 0  # else it is not reached, or `wait` names the fault

    def wait(self) -> None:
        self._device.use()
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

    def room(self, address: int) -> int:
        self._device.use()
        try:
            base, nbytes = driver.range_of(address)
        except driver.DriverError:  # of host memory
            return sys.maxsize
        return max(1, base + nbytes - address)

    def copy_many(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        # Offsets from address 0 are addresses.
        rows = [row for to, source, nbytes in pieces for row in straight_rows(to, source, nbytes)]
        if not rows:
            return
        self._device.use()
        with failures(f"copying {len(rows)} pieces"), self._stream:
            # (The table's memory may go at once: cupy gives it out again in the order of this
            # stream.)
            self._device.move("gather_runs", rows, self._device.table(rows), 0)

    def mark(self) -> Mark:
        self._device.use()
        with failures("marking a stream"):
            event = self._cupy.cuda.Event(block=not self._spins, disable_timing=True)
            event.record(self._stream)
        return CudaMark(self._device, event)


class CudaPacking:
    """See `Kernels`. The table stays on the device."""

    def __init__(
        self, device: CudaDevice, region: DeviceBytes, rows: Sequence[tuple[int, int, int]]
    ) -> None:
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
            self._device.launch(
                kernel, self._count, self._table, self._cupy.uint64(self._region.address)
            )

    def _wait(self) -> None:
        self._device.use()
        with failures(f"packing on {self._device.name}"):
            self.stream.synchronize()
