"""Devices, registered memory and queue pairs, by pyverbs.

A worker's `Fabric` opens each device when it is first needed, and keeps it until the worker ends: a context, a protection
domain, and the memory that was registered with it.

Memory is registered once, when it is first read from or into, a span of at most SPAN_BYTES at a time. Spans are short
because pyverbs keeps the GIL while it registers (some 0.2 ms per MiB). Registered memory is known by the object that says
where it is, never by its address, which may later belong to other memory. It is deregistered when it is released, or with
the last reference to that object. A GPU's memory is registered as a dma-buf, or by its address, which works with drivers
that know a GPU's addresses (peer memory).

A reader's queue pair lets nobody in. A source's queue pair can only be read through, and only where memory is registered.
Nothing of a source runs while it is read.

pyverbs' errors become OSErrors here. Its SGE and SendWR are not freed by themselves, and crash if they are closed twice.
Responsible for handles of the device and their order. Not responsible for which port or byte is meant.
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
import secrets
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tensorhub.cuda.device import Device as Accelerator
from tensorhub.errors import StateError, TransportUnavailable
from tensorhub.transport.rdma.messages import QueueCard
from tensorhub.transport.rdma.ports import Move, Port, gid_text, registration_fault

DEPTH = 64  # work requests of a queue pair that are not completed
READS_MAX = 16  # of them, that are on the wire at a time
TIMEOUT = 14  # 4.096 us << 14 = 67 ms without an answer; the device may take up to four times as long
RETRIES = 6  # (7 of receivers that are not ready would be for ever)
HOPS = 64
_SYSTEM_PATHS = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib64/python{}.{}/site-packages",
    "/usr/lib/python{}.{}/site-packages",
)

# ----------------------------------------------------------------------------------------------------------- pyverbs


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
    """pyverbs, of this interpreter's packages or of the system's. TransportUnavailable: it is not there."""
    if importlib.util.find_spec("pyverbs") is None:
        _find_system_pyverbs()
    try:
        names = ("addr", "cq", "device", "mr", "pd", "qp", "wr", "pyverbs_error")
        addr, cq, device, mr, pd, qp, wr, errors = [importlib.import_module(f"pyverbs.{name}") for name in names]
        try:
            enums = importlib.import_module("pyverbs.libibverbs_enums")
        except ImportError:  # rdma-core before 55
            enums = importlib.import_module("pyverbs.enums")
        importlib.import_module("pyverbs.fork").fork_init()  # a child's copy must never take a registered page from us
    except ImportError as error:
        raise TransportUnavailable(_MISSING.format(sys.version_info, error)) from error
    return _Verbs(addr, cq, device, mr, pd, qp, wr, errors, enums)


_MISSING = (
    "pyverbs cannot be imported by Python {0.major}.{0.minor} ({1}): install the system's packages (Debian: python3-pyverbs "
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
def _named(what: str) -> Iterator[None]:
    """Turn pyverbs' errors into an OSError that says what was tried."""
    try:
        yield
    except OverflowError as error:
        raise OSError(errno.EINVAL, f"{what}: {error}") from error
    except verbs().errors.PyverbsError as error:
        code = getattr(error, "error_code", 0)
        code = code if isinstance(code, int) and code > 0 else errno.EIO
        raise OSError(code, f"{what}: {os.strerror(code) if code != errno.EIO else error}") from error


# ------------------------------------------------------------------------------------------------- registered memory


class Spanned(Protocol):
    """Memory that can be registered. Known by its identity."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Ascending (address, bytes): together all of it, without overlaps. What is read at a time lies in one of them."""

    @property
    def device(self) -> Accelerator | None:
        """On which it is; None: in host memory."""


class Keys(NamedTuple):
    """Of a registered span: for this process' own requests, and for others'. `shift`: what is added to its addresses."""

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
        self._fault: tuple[int, str] | None = None  # why some of it cannot be: then none is to be counted on

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
    """Register memory, so that others can read it and this process' own reads can write it. OSError, which says what to do.

    Also what is only ever read by others is registered as writable: else the kernel might pin a page that a later write of
    this process replaces by another one.
    """
    enums = verbs().enums
    access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_READ
    try:
        with _named("ibv_reg_mr"):
            return verbs().mr.MR(domain, nbytes, access, address=address)
    except OSError as error:
        raise OSError(error.errno, registration_fault(error, nbytes)) from error


def register_on(device: Accelerator, domain: Any, address: int, nbytes: int) -> tuple[Any, int]:
    """The same with a GPU's memory, and the shift of its keys (see `Keys`). OSError: it is not to be reached from outside.

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
            with _named("ibv_reg_dmabuf_mr"):  # its addresses begin with the dma-buf
                region = verbs().mr.DmaBufMR(domain, nbytes, access, dmabuf=descriptor, offset=address - start)
            return region, -start
        except OSError as error:
            faults.append(str(error.strerror))
        finally:
            os.close(descriptor)  # the region keeps what it stands for
    try:
        return register(domain, address, nbytes), 0
    except OSError as error:
        text = f"{device.name} and this device do not reach each other (dma-buf: {faults[0]}; peer memory: {error.strerror})"
        raise OSError(error.errno, text) from error


class Device:
    """One device, open. For several threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()  # guards what is registered
        with _named(f"the RDMA device {name} cannot be opened"):
            self.context = verbs().device.Context(name=name)
            self.domain = verbs().pd.PD(self.context)
            limits = self.context.query_device()
        self.reads_made = max(1, min(READS_MAX, limits.max_qp_init_rd_atom))
        self.reads_answered = max(1, min(READS_MAX, limits.max_qp_rd_atom))
        self.depth = min(DEPTH, limits.max_qp_wr)
        self._memories: weakref.WeakKeyDictionary[Spanned, Registered] = weakref.WeakKeyDictionary()
        self._pages: dict[int, Any] = {}  # of generation words, by address

    def __repr__(self) -> str:
        return f"<Device {self.name}, {len(self._memories)} memories>"

    def keys(self, memory: Spanned, address: int, nbytes: int) -> Keys:
        """The keys of a part of that memory. OSError: it cannot be registered."""
        with self.lock:
            if memory not in self._memories:
                self._memories[memory] = Registered(self.domain, memory)
            return self._memories[memory].keys(address, nbytes)

    def page_key(self, address: int) -> int:
        """The remote key of the page there, which stays where it is until the device is closed. OSError."""
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


class Fabric:
    """What one worker has open on these ports. For several threads."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self.ports = tuple(ports)
        self._lock = threading.Lock()
        self._devices: dict[str, Device] = {}

    def __repr__(self) -> str:
        return f"<Fabric of {', '.join(map(str, self.ports))}; {len(self._devices)} devices open>"

    def device(self, port: Port) -> Device:
        """The port's device, open. OSError."""
        with self._lock:
            if port.device not in self._devices:
                self._devices[port.device] = Device(port.device)
            return self._devices[port.device]

    def reader(self, port: Port) -> ReaderQueue:
        """A queue pair's end that reads. OSError."""
        return ReaderQueue(self.device(port), port)

    def source(self, port: Port) -> Queue:
        """A queue pair's end that is read through. OSError."""
        return Queue(self.device(port), port)

    def release(self, memory: Spanned) -> None:
        """See `Device.release`."""
        with self._lock:
            devices = list(self._devices.values())
        for device in devices:
            device.release(memory)

    def close(self) -> None:
        """Close every device; queue pairs must be closed before."""
        with self._lock:
            for device in self._devices.values():
                device.close()
            self._devices.clear()


# ------------------------------------------------------------------------------------------------------- queue pairs


_channels = threading.Lock()  # guards completion channels' descriptors, which are told apart by their number
CHANNELS_TRIED_MAX = 3


class Queue:
    """One end of a queue pair, which is read through. OSError: it cannot be had, or not connected."""

    is_reader = False

    def __init__(self, device: Device, port: Port) -> None:
        self.device = device
        self.port = port
        self._open: list[Any] = []  # what is to be closed, the last one first
        try:
            with _named(f"a queue pair cannot be made on {port}"):
                self._make()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.port}>"

    def _make(self) -> None:
        v, enums = verbs(), verbs().enums
        at = self.device.context.query_port(self.port.number)
        if at.state != enums.IBV_PORT_ACTIVE:
            raise OSError(errno.ENETDOWN, f"the RDMA port {self.port} is down: check cable, switch and interface")
        self._completions = self._made_completions()
        depth = self.device.depth if self.is_reader else 1
        cap = v.qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = v.qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=cap, sq_sig_all=0)
        attributes = v.qp.QPAttr(port_num=self.port.number)
        attributes.pkey_index = 0
        attributes.qp_access_flags = self._access()
        self._pair = v.qp.QP(self.device.domain, init, attributes)
        self._open.append(self._pair)
        reads = self.device.reads_made if self.is_reader else self.device.reads_answered
        self.card = QueueCard(self._pair.qp_num, secrets.randbits(24), self.port.gid, int(at.lid), int(at.active_mtu), reads)

    def _made_completions(self) -> Any:
        made = verbs().cq.CQ(self.device.context, 1)
        self._open.append(made)
        return made

    def _access(self) -> int:
        return 0 if self.is_reader else int(verbs().enums.IBV_ACCESS_REMOTE_READ)

    def connect(self, theirs: QueueCard) -> None:
        """Connect to the other end. The kernel may look for a route for a second; pyverbs keeps the GIL meanwhile."""
        v = verbs()
        with _named(f"{self.port} does not get through to {gid_text(theirs.gid)}"):
            attributes = v.qp.QPAttr(port_num=self.port.number)
            attributes.path_mtu = min(self.card.mtu, theirs.mtu)
            attributes.dest_qp_num = theirs.number
            attributes.rq_psn = theirs.sequence
            attributes.max_dest_rd_atomic = attributes.max_rd_atomic = min(self.card.reads, theirs.reads)
            attributes.min_rnr_timer = 12
            attributes.qp_access_flags = self._access()
            gid = v.addr.GID(":".join(theirs.gid[at : at + 2].hex() for at in range(0, 16, 2)))
            route = v.addr.GlobalRoute(dgid=gid, sgid_index=self.port.gid_index, hop_limit=HOPS)
            attributes.ah_attr = v.addr.AHAttr(port_num=self.port.number, is_global=1, gr=route, dlid=theirs.lid)
            attributes.sq_psn = self.card.sequence
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = TIMEOUT, RETRIES, RETRIES
            self._pair.to_rts(attributes)

    def fail(self) -> None:
        """Let every running request fail, at both ends."""
        v = verbs()
        with _named("ibv_modify_qp"):
            self._pair.modify(v.qp.QPAttr(qp_state=v.enums.IBV_QPS_ERR), v.enums.IBV_QP_STATE)

    def close(self) -> None:
        """Take it apart: nothing is read through it, or written by it, afterwards. A second call does nothing."""
        while self._open:
            self._open.pop().close()


class ReaderQueue(Queue):
    """The end that reads. For one thread."""

    is_reader = True

    def __repr__(self) -> str:
        return f"<ReaderQueue on {self.port}>"

    def _made_completions(self) -> Any:
        v = verbs()
        for _ in range(CHANNELS_TRIED_MAX):
            with _channels:
                before = _event_descriptors()
                channel = v.cq.CompChannel(self.device.context)
                found = _event_descriptors() - before
            if len(found) == 1:
                break
            channel.close()  # somebody else has made or closed one at this very moment: pyverbs does not say which is whose
        else:
            raise OSError(errno.EAGAIN, "the completion channel's descriptor cannot be told")
        self._channel = channel
        self._open.append(channel)
        self.descriptor = found.pop()  # readable when there are completions, once `arm` was called
        made = v.cq.CQ(self.device.context, self.device.depth + 1, None, self._channel)
        self._open.append(made)
        return made

    def close(self) -> None:
        with _channels:
            super().close()

    def post(self, moves: Sequence[Move], first: int, signaled: frozenset[int], fenced: frozenset[int]) -> None:
        """Start these reads, numbered from `first`. The completion of a `signaled` one is reported, and means that all
        before it are done. A `fenced` one begins when all before it are done. OSError.
        """
        v = verbs()
        opened: list[Any] = []
        try:
            with _named("ibv_post_send"):
                for number, move in enumerate(moves, first):
                    part = v.wr.SGE(move.here, move.nbytes, move.here_key)
                    flags = (v.enums.IBV_SEND_SIGNALED if number in signaled else 0) | (
                        v.enums.IBV_SEND_FENCE if number in fenced else 0
                    )
                    work = v.wr.SendWR(number, v.enums.IBV_WR_RDMA_READ, num_sge=1, sg=[part], send_flags=flags)
                    part.close()
                    if opened:
                        opened[-1].next_wr = work
                    opened.append(work)
                    work.set_wr_rdma(move.there_key, move.there)
                if opened:
                    self._pair.post_send(opened[0])
        finally:
            for work in opened:
                work.close()

    def poll(self) -> list[tuple[int, int]]:
        """The (number, status) of what is done now."""
        with _named("ibv_poll_cq"):
            _, found = self._completions.poll(self.device.depth)
        return [(each.wr_id, each.status) for each in found]

    def arm(self) -> None:
        """Have the descriptor become readable by the next completion; look once more by `poll` before waiting for it."""
        with _named("ibv_req_notify_cq"):
            self._completions.req_notify()

    def take_event(self) -> None:
        """The descriptor is readable: take what it is readable for."""
        with _named("ibv_get_cq_event"):
            self._channel.get_cq_event(self._completions)
            self._completions.ack_events(1)


def _event_descriptors() -> set[int]:
    """This process' descriptors of device events."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
    return found


class Landing:
    """Registered memory of this library's own, in which a reader looks at a source's words. Zeroed."""

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
