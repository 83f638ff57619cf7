"""Memory that other processes of this host can map: memfds, tensors in them, and their mappings at
a reader.

A *segment* is one memfd. It is sealed when it is made, so its size never changes, and a reader of a
mapping never meets a SIGBUS. All its blocks are allocated at once, so a lack of memory is an error
when the segment is made, and does not end the process later. Because of the seals, only this
process' own mapping can write to it; a process with the descriptor cannot.

Responsible for segments and for tensors in them. Not responsible for the right to map a segment,
nor to read its bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tensorhub.errors import InvalidType, StateError, shown
from tensorhub.memory.addresses import bytes_at
from tensorhub.transport.generation_words import order_fault

CGROUPS = Path("/sys/fs/cgroup")
ALIGNMENT = 64  # of each tensor in its segment: a cache line, and more than any dtype wants
_SIZE_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)
_F_SEAL_FUTURE_WRITE = 16  # Linux 5.1


# --------------------------------------------------------------------------------------------------
# segments


class Segment:
    """Shared memory that this process has made, zeroed. It lives as long as something here refers
    to it.

    Raises StateError: the kernel has no memfds, or there is no memory.
    """

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: 1 or more."""
        # else the kernel would make room, by ending processes
        if nbytes > (available := available_bytes()):
            raise StateError(
                f"{nbytes} bytes of shared memory cannot be had: "
                f"{available} are available; free some"
            )
        self.nbytes = nbytes
        try:
            self.descriptor = os.memfd_create("tensorhub", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            raise StateError(
                f"memory cannot be shared here: memfd_create is missing or forbidden ({error})"
            ) from error
        weakref.finalize(self, os.close, self.descriptor)
        try:
            os.ftruncate(self.descriptor, nbytes)
            os.posix_fallocate(self.descriptor, 0, nbytes)
            self._mapping = mmap.mmap(self.descriptor, nbytes)
            fcntl.fcntl(
                self.descriptor,
                fcntl.F_ADD_SEALS,
                _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
            )
        except (OSError, ValueError, OverflowError) as error:
            raise StateError(
                f"{nbytes} bytes of shared memory cannot be had ({error}): free some"
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        with _lock:
            _made.add(self)

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """A writable view, which keeps the segment."""
        return bytes_at(self.address + offset, nbytes, self)


def fault_here() -> str | None:
    """Why memory cannot be shared here, and what to do; None if it can."""
    if (fault := order_fault()) is not None:
        return fault
    try:
        Segment(mmap.PAGESIZE)
    except StateError as error:
        return str(error)
    return None


def available_bytes() -> int:
    """What the system can give without swapping, by its own estimate; and not more than the limit
    of this process' container or unit leaves, beyond which the kernel kills.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return min(int(found[1]) * 1024 if found else sys.maxsize, _left_in_cgroup())


def _left_in_cgroup() -> int:
    try:
        named = Path("/proc/self/cgroup").read_text().partition("0::/")[2].partition("\n")[0]
        limit, used, stat = [
            (CGROUPS / named / f"memory.{each}").read_text() for each in ("max", "current", "stat")
        ]
        kept = dict(line.split() for line in stat.splitlines())
        # the kernel gives up what it caches of files
        return max(0, int(limit) - int(used) + int(kept["file"]) - int(kept["shmem"]))
    except (OSError, ValueError, KeyError):  # "max", or there are no cgroups of version 2
        return sys.maxsize


_lock = threading.Lock()
_made: weakref.WeakSet[Segment] = weakref.WeakSet()


def segments_of(places: Iterable[tuple[int, int]]) -> tuple[Segment, ...] | None:
    """This process' segments in which these (address, bytes) lie. None: a place lies in none."""
    with _lock:
        made = tuple(_made)
    found = {_containing(made, address, nbytes) for address, nbytes in places}
    return None if None in found else tuple(segment for segment in made if segment in found)


def _containing(made: Sequence[Segment], address: int, nbytes: int) -> Segment | None:
    return next(
        (s for s in made if s.address <= address and address + nbytes <= s.address + s.nbytes), None
    )


class MappedSegment:
    """Another process' segment, which can only be read from here; unmapped with the last reference
    to it.

    Raises StateError: the descriptor is of something else, or cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """The caller keeps the descriptor. It comes from another process, so it may be of
        anything.
        """
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
                raise StateError(
                    "a segment's size is not sealed: whoever maps it could be killed by whoever "
                    "shrinks it"
                )
            if (size := os.fstat(descriptor).st_size) != nbytes:
                raise StateError(f"a segment is said to have {nbytes} bytes, and has {size}")
        except OSError as error:
            raise StateError(
                f"a descriptor that is said to be of a segment is of something else ({error})"
            ) from error
        self.nbytes = nbytes
        self.address: int = _map(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if self.address == _MAP_FAILED:
            raise StateError(
                f"a segment of {nbytes} bytes cannot be mapped ({os.strerror(ctypes.get_errno())})"
            )
        weakref.finalize(self, _unmap, self.address, nbytes)


_libc = ctypes.CDLL(None, use_errno=True)
_MAP_FAILED = ctypes.c_void_p(-1).value
_map = _libc.mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_unmap = _libc.munmap
_unmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


# --------------------------------------------------------------------------------------------------
# tensors


def shared_empty_like(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """New tensors with the names, shapes and dtypes of these tensors, zeroed, in memory that
    workers on the same host can map.

    `tensors`: torch tensors, on any device, "meta" included, or numpy arrays; the new tensors are
    of their kind, contiguous and on the CPU. Tensors that share their bytes of one storage share
    them again. Register them: readers on this host then copy at memory's speed, and a replica in
    such memory is a source in this way, too. It is given back when the last tensor of the mapping
    has gone here, and no reader has it mapped any more.

    Raises StateError: the kernel cannot share memory, there is too little of it, or a tensor has no
    plain bytes (quantized, sparse, an object), or this is no mapping.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidType(
            f"tensors={shown(tensors)}: give a mapping of names to tensors; of a module, its "
            f"state_dict()"
        )
    layout: dict[object, _Place] = {}
    names: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        nbytes = _nbytes(name, tensor)
        names[name] = key = _identity(name, tensor)
        if key not in layout:
            layout[key] = _Place(end, nbytes)
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    segment = Segment(end) if end else None
    views = {
        key: segment.bytes_at(*place) if segment and place.nbytes else None
        for key, place in layout.items()
    }
    return {name: _like(tensor, views[names[name]]) for name, tensor in tensors.items()}


class _Place(NamedTuple):
    offset: int
    nbytes: int


def _is_numpy(tensor: Any) -> bool:
    return hasattr(tensor, "__array_interface__") and not hasattr(tensor, "untyped_storage")


def _nbytes(name: str, tensor: Any) -> int:
    if _is_numpy(tensor):
        if tensor.dtype.hasobject:
            raise StateError(
                f"{name!r} cannot be shared: an array of objects has no bytes of its own"
            )
        return int(tensor.nbytes)
    if (
        not hasattr(tensor, "untyped_storage")
        or str(tensor.layout) != "torch.strided"
        or tensor.is_quantized
    ):
        raise StateError(
            f"{name!r} cannot be shared: it is no strided torch.Tensor (take `.int_repr()` of a "
            f"quantized one)"
        )
    return int(prod(tensor.shape) * tensor.element_size())


def _identity(name: str, tensor: Any) -> object:
    """Equal for tensors that share their bytes."""
    if _is_numpy(tensor):
        return tensor.__array_interface__["data"][0], tensor.nbytes, tensor.strides
    if tensor.is_meta or not tensor.numel():
        return name
    return tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.stride()


def _like(tensor: Any, memory: memoryview | None) -> Any:
    if _is_numpy(tensor):
        numpy = sys.modules["numpy"]
        made = (
            numpy.empty(0, tensor.dtype)
            if memory is None
            else numpy.frombuffer(memory, tensor.dtype)
        )
        return made.reshape(tensor.shape)
    torch = sys.modules["torch"]
    if memory is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
