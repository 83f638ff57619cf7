"""Devices and the memory that is registered with them, by pyverbs.

Memory is registered once, when it is first read from or into, a span of at most SPAN_BYTES at a
time. Spans are short because pyverbs keeps the GIL while it registers (some 0.2 ms per MiB).
Registered memory is known by the object that says where it is, never by its address, which may
later belong to other memory. It is deregistered when it is released, or with the last reference to
that object. A GPU's memory is registered as a dma-buf, or by its address, which works with drivers
that know a GPU's addresses (peer memory).

pyverbs' errors become OSErrors here. Responsible for a device's handles and their order. Not
responsible for queue pairs (`queues`), nor for which port or byte is meant.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import importlib
import importlib.util
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tensorhub.cuda.device import Device as Accelerator
from tensorhub.errors import StateError, TransportUnavailable
from tensorhub.transport.rdma import ports as rdma

DEPTH = 64  # work requests of a queue pair that are not completed
READS_MAX = 16  # of them, that are on the wire at a time
_SYSTEM_PATHS = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib64/python{}.{}/site-packages",
    "/usr/lib/python{}.{}/site-packages",
)

# --------------------------------------------------------------------------------------------------
# pyverbs


class _Verbs(NamedTuple):
    """pyverbs' modules."""

    addr: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    errors: Any
    enums: Any


@functools.cache
def verbs() -> _Verbs:
    """pyverbs, of this interpreter's packages or of the system's. TransportUnavailable: it is not
    there.
    """
    if importlib.util.find_spec("pyverbs") is None:
        _find_system_pyverbs()
    try:
        names = ("addr", "cq", "device", "mr", "pd", "qp", "wr", "pyverbs_error")
        addr, cq, device, mr, pd, qp, wr, errors = [
            importlib.import_module(f"pyverbs.{name}") for name in names
        ]
        try:
            enums = importlib.import_module("pyverbs.libibverbs_enums")
        except ImportError:  # rdma-core before 55
            enums = importlib.import_module("pyverbs.enums")
        # a child's copy must never take a registered page from us
        importlib.import_module("pyverbs.fork").fork_init()
    except ImportError as error:
        raise TransportUnavailable(_MISSING.format(sys.version_info, error)) from error
    return _Verbs(addr, cq, device, mr, pd, qp, wr, errors, enums)


_MISSING = (
    "pyverbs cannot be imported by Python {0.major}.{0.minor} ({1}): install the system's packages "
    "(Debian: python3-pyverbs "
    "ibverbs-providers), which are for the system's own Python version"
)


def _find_system_pyverbs() -> None:
    """Have the system's package found, and nothing else that lies beside it."""
    for path in _SYSTEM_PATHS:
        place = Path(path.format(*sys.version_info)) / "pyverbs"
        spec = importlib.util.spec_from_file_location(
            "pyverbs", place / "__init__.py", submodule_search_locations=[str(place)]
        )
        if (place / "__init__.py").is_file() and spec is not None and spec.loader is not None:
            package = importlib.util.module_from_spec(spec)
            sys.modules["pyverbs"] = package
            spec.loader.exec_module(package)
            return


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Turn pyverbs' errors into an OSError that names the attempt."""
    try:
        yield
    except OverflowError as error:
        raise OSError(errno.EINVAL, f"{what}: {error}") from error
    except verbs().errors.PyverbsError as error:
        code = getattr(error, "error_code", 0)
        code = code if isinstance(code, int) and code > 0 else errno.EIO
        raise OSError(
            code, f"{what}: {os.strerror(code) if code != errno.EIO else error}"
        ) from error


# -------------------------------------------------------------------------------------------------
# registered memory


class Spanned(Protocol):
    """Memory that can be registered. Known by its identity."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Ascending (address, bytes): together all of it, without overlaps. What is read at a time
        lies in one of them.
        """

    @property
    def device(self) -> Accelerator | None:
        """On which it is; None: in host memory."""


class Keys(NamedTuple):
    """Of a registered span: for requests of this process, and of remote ones. `shift`: added to its
    addresses.
    """

    local: int
    remote: int
    shift: int = 0


class Registered:
    """What is registered of one memory with one device."""

    def __init__(self, domain: Any, memory: Spanned) -> None:
        self._domain = domain
        self._spans = memory.spans
        self._device = memory.device
        self._starts = [address for address, _ in self._spans]
        self._regions: dict[int, tuple[Any, Keys]] = {}  # by the span's place
        # why some of it cannot be: then none is to be counted on
        self._fault: tuple[int, str] | None = None

    def keys(self, address: int, nbytes: int) -> Keys:
        """Of the span in which that lies, which is registered if it is not yet. OSError."""
        if self._fault is not None:
            raise OSError(*self._fault)
        place = bisect.bisect_right(self._starts, address) - 1
        start, size = self._spans[place] if place >= 0 else (0, 0)
        if address + nbytes > start + size:
            raise OSError(errno.EFAULT, "it is outside of the memory that it is said to be in")
        if place not in self._regions:
            try:
                self._regions[place] = self._registered(start, size)
            except OSError as error:
                self._fault = error.errno or errno.EIO, error.strerror or str(error)
                raise
        return self._regions[place][1]

    def _registered(self, start: int, size: int) -> tuple[Any, Keys]:
        if self._device is None:
            region, shift = register(self._domain, start, size), 0
        else:
            region, shift = register_on(self._device, self._domain, start, size)
        return region, Keys(region.lkey, region.rkey, shift)

    def close(self) -> None:
        """Deregister it: reads of it fail from now on."""
        for region, _ in self._regions.values():
            region.close()
        self._regions.clear()


def register(domain: Any, address: int, nbytes: int) -> Any:
    """Register memory, so that remote processes can read it and this process' own reads can write
    it. OSError, which says what to do.

    Memory that is only ever read by remote processes is registered as writable, too: else the
    kernel might pin a page that a later write of this process replaces by another one.
    """
    enums = verbs().enums
    access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ
    try:
        with named("ibv_reg_mr"):
            return verbs().mr.MR(domain, nbytes, access, address=address)
    except OSError as error:
        raise OSError(error.errno, rdma.registration_fault(error, nbytes)) from error


def register_on(device: Accelerator, domain: Any, address: int, nbytes: int) -> tuple[Any, int]:
    """As `register`, of a GPU's memory; with the shift of its keys (see `Keys`). OSError: it is not
    to be reached from outside.

    As NCCL and UCX do, by a dma-buf where the GPU gives one, else by its address (nvidia-peermem).
    """
    faults: list[str] = []
    try:
        descriptor, start = device.dma_buf(address, nbytes)
    except StateError as error:
        faults.append(str(error))
    else:
        enums = verbs().enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ
        try:
            with named("ibv_reg_dmabuf_mr"):  # its addresses begin with the dma-buf
                region = verbs().mr.DmaBufMR(
                    domain, nbytes, access, dmabuf=descriptor, offset=address - start
                )
            return region, -start
        except OSError as error:
            faults.append(str(error.strerror))
        finally:
            os.close(descriptor)  # the region keeps what it stands for
    try:
        return register(domain, address, nbytes), 0
    except OSError as error:
        text = (
            f"{device.name} and this device do not reach each other (dma-buf: {faults[0]}; peer "
            f"memory: {error.strerror})"
        )
        raise OSError(error.errno, text) from error


class Device:
    """One device, open. For several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()  # guards what is registered
        with named(f"the RDMA device {name} cannot be opened"):
            self.context = verbs().device.Context(name=name)
            self.domain = verbs().pd.PD(self.context)
            limits = self.context.query_device()
        self.reads_made = max(1, min(READS_MAX, limits.max_qp_init_rd_atom))
        self.reads_answered = max(1, min(READS_MAX, limits.max_qp_rd_atom))
        self.depth = min(DEPTH, limits.max_qp_wr)
        self._memories: weakref.WeakKeyDictionary[Spanned, Registered] = weakref.WeakKeyDictionary()
        self._pages: dict[int, Any] = {}  # of generation words, by address

    def keys(self, memory: Spanned, address: int, nbytes: int) -> Keys:
        """The keys of a part of that memory. OSError: it cannot be registered."""
        with self.lock:
            if memory not in self._memories:
                self._memories[memory] = Registered(self.domain, memory)
            return self._memories[memory].keys(address, nbytes)

    def fault_of(self, memory: Spanned) -> str | None:
        """Register the memory's first span. Why the memory cannot be registered, judging by that
        and by the limit.
        """
        spans = memory.spans
        if not spans:
            return None
        try:
            self.keys(memory, *spans[0])
        except OSError as error:
            return error.strerror or str(error)
        if len(spans) == 1 or memory.device is not None:
            return None
        return rdma.memlock_fault(sum(nbytes for _, nbytes in spans[1:]))

    def page_key(self, address: int) -> int:
        """The remote key of the page there, which stays where it is until the device is closed.
        OSError.
        """
        page = address - address % mmap.PAGESIZE
        with self.lock:
            if page not in self._pages:
                self._pages[page] = register(self.domain, page, mmap.PAGESIZE)
            return int(self._pages[page].rkey)

    def landing(self, nbytes: int) -> Landing:
        """See `Landing`. OSError."""
        return Landing(self, nbytes)

    def release(self, memory: Spanned) -> None:
        """Deregister it. Reads into it or out of it must have ended, or they fail."""
        with self.lock:
            registered = self._memories.pop(memory, None)
            if registered is not None:
                registered.close()

    def close(self) -> None:
        with self.lock:
            for registered in self._memories.values():
                registered.close()
            self._memories.clear()
            for page in self._pages.values():
                page.close()
            self._pages.clear()
            self.domain.close()
            self.context.close()


class Landing:
    """Registered memory of this library's own, in which a reader looks at a source's words.
    Zeroed.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._bytes = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._region = register(device.domain, self.address, nbytes)
        self.key = int(self._region.lkey)

    def word(self, place: int) -> ctypes.c_uint64:
        """The 8 bytes at that place."""
        return ctypes.c_uint64.from_address(self.address + place)

    def read(self, place: int, nbytes: int) -> bytes:
        return self._bytes[place : place + nbytes]

    def close(self) -> None:
        self._region.close()
