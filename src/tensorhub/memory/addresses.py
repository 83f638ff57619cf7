"""Bytes where they lie, in host memory or a GPU's: views of them, their addresses, and copies from
one place to another.

Not responsible for what the bytes are of (`tensors`, `regions`), nor for bytes that follow strips
(`strided`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator

from tensorhub.cuda.device import DeviceBytes

Bytes = memoryview | DeviceBytes
"""Of a region or a tensor, in place."""


def bytes_at(address: int, nbytes: int, storage: object) -> memoryview:
    """The writable bytes there, which `storage` keeps; the view keeps `storage`."""
    if not nbytes:
        return memoryview(bytearray())
    buffer = (ctypes.c_char * nbytes).from_address(address)
    buffer.storage = storage  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")


def copy_bytes(source: Bytes, target: Bytes) -> None:
    """Copy all bytes of one writable view to another of its size, on whichever devices they are."""
    for each in source, target:
        if isinstance(each, DeviceBytes):
            queue = each.device.queue()
            queue.copy(_pointer(target), _pointer(source), source.nbytes)
            queue.mark().wait()
            return
    # ctypes lets go of the GIL meanwhile; a slice assignment of gigabytes would stop the
    # heartbeats.
    ctypes.memmove(_pointer(target), _pointer(source), source.nbytes)


def guarded_pieces(view: memoryview, piece_bytes: int) -> Iterator[memoryview]:
    """The bytes of a view, copied by the kernel into a buffer that each piece overwrites. OSError
    (EFAULT): some of them are not mapped any more; a direct access would end the process with
    SIGSEGV. Without descriptors for the buffer, the pieces are views of the bytes themselves.
    """
    nbytes = min(piece_bytes, view.nbytes)
    descriptor = -1
    try:
        descriptor = os.memfd_create("tensorhub-digest", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        buffer = mmap.mmap(descriptor, nbytes)  # it takes a descriptor of its own
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        yield from (view[offset : offset + nbytes] for offset in range(0, view.nbytes, nbytes))
        return
    try:
        with buffer, memoryview(buffer) as copied:
            for offset in range(0, view.nbytes, nbytes):
                piece = view[offset : offset + nbytes]
                if os.pwrite(descriptor, piece, 0) != piece.nbytes:
                    raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
                with copied[: piece.nbytes] as there:
                    yield there
    finally:
        os.close(descriptor)


class PyBuffer(ctypes.Structure):
    """Python's Py_buffer: ctypes has no address of memory that cannot be written, and Python no
    view with any strides.
    """

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("nbytes", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: Bytes) -> int:
    """Where the bytes of a contiguous view are, also of one that cannot be written."""
    if isinstance(view, DeviceBytes):
        return view.address
    buffer = PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address: int = buffer.address or 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


def _pointer(view: Bytes) -> int:
    return (
        view.address
        if isinstance(view, DeviceBytes)
        else ctypes.addressof(ctypes.c_char.from_buffer(view))
    )
