"""The few calls of CUDA's driver that cupy lacks, or makes with the GIL: these may wait for the
GPU, and that perhaps for a host function that needs the GIL. They are about the calling thread's
present context.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from tensorhub.cuda.device import HANDLE_BYTES

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
WRITES_ORDERING = 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: compared with TO_OWNER
DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
TO_OWNER = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
_DMA_BUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: of another GPU's memory, by this GPU's kernels
_WITH_PEERS = 1


class DriverError(Exception):
    """A call has failed; named as in the driver's documentation."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'').decode() or status}")


def range_of(address: int) -> tuple[int, int]:
    """The (address, bytes) of the allocation in which that address is."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    _call(
        "cuMemGetAddressRange_v2",
        ctypes.byref(base),
        ctypes.byref(nbytes),
        ctypes.c_uint64(address),
    )
    return base.value, nbytes.value


def open_handle(handle: bytes) -> int:
    """Where another process' allocation is here. One that is open already is where it was, and is
    closed as often.
    """
    address = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_WITH_PEERS),
    )
    return address.value


def close_handle(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def exchange_capture_mode(mode: int) -> int:
    """The calling thread's from now on; returns what it was."""
    found = ctypes.c_int(mode)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(found))
    return found.value


def attribute(index: int, number: int) -> int:
    """What the driver says of that device; 0 if it does not know what that is."""
    device, value = ctypes.c_int(), ctypes.c_int()
    try:
        _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        _call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), device)
    except DriverError:
        return 0
    return value.value


def dma_buf(address: int, nbytes: int) -> int:
    """A descriptor of these whole pages of the host's size."""
    found = ctypes.c_int(-1)
    size, flags = ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
    _call(
        "cuMemGetHandleForAddressRange",
        ctypes.byref(found),
        ctypes.c_uint64(address),
        size,
        ctypes.c_int(_DMA_BUF),
        flags,
    )
    return found.value


def flush_writes() -> None:
    """What other devices have written into the present GPU's memory is there for it."""
    _call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(0), ctypes.c_int(TO_OWNER))


def context() -> int | None:
    """The calling thread's present one; None: it has none yet."""
    found = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(found))
    return found.value


def set_context(context: int | None) -> None:
    _call("cuCtxSetCurrent", ctypes.c_void_p(context))
