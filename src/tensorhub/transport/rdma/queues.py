"""Queue pairs, by pyverbs, and the devices that one worker has open.

A reader's queue pair gives no access. A source's queue pair can only be read through, and only
where memory is registered. Nothing of a source runs while it is read.

pyverbs' SGE and SendWR are not freed by themselves, and crash if they are closed twice.
Not responsible for devices and registered memory (`verbs`), nor for which port or byte is meant.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from tensorhub.cuda.device import Device as Accelerator
from tensorhub.transport.rdma.messages import QueueCard
from tensorhub.transport.rdma.ports import Move, Port, gid_text
from tensorhub.transport.rdma.verbs import Device, Spanned, named, verbs
from tensorhub.transport.staging import Packing, Pinned, Staging

# 4.096 us << 14 = 67 ms without an answer; the device may take up to four times as long
TIMEOUT = 14
RETRIES = 6  # (7 of receivers that are not ready would be for ever)
HOPS = 64
# guards completion channels' descriptors, which are told apart by their number
_channels = threading.Lock()
CHANNELS_TRIED_MAX = 3
# at the source one is copied by the GPU, one is on the wire, one is announced, one is free
BUFFERS = 4


class Queue:
    """One end of a queue pair, which is read through. OSError: it cannot be had, or not
    connected.
    """

    is_reader = False

    def __init__(self, device: Device, port: Port) -> None:
        self.device = device
        self.port = port
        self._open: list[Any] = []  # what is to be closed, the last one first
        try:
            with named(f"a queue pair cannot be made on {port}"):
                self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        v, enums = verbs(), verbs().enums
        at = self.device.context.query_port(self.port.number)
        if at.state != enums.IBV_PORT_ACTIVE:
            raise OSError(
                errno.ENETDOWN,
                f"the RDMA port {self.port} is down: check cable, switch and interface",
            )
        self._completions = self._made_completions()
        depth = self.device.depth if self.is_reader else 1
        cap = v.qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = v.qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC,
            scq=self._completions,
            rcq=self._completions,
            cap=cap,
            sq_sig_all=0,
        )
        attributes = v.qp.QPAttr(port_num=self.port.number)
        attributes.pkey_index = 0
        attributes.qp_access_flags = self._access()
        self._pair = v.qp.QP(self.device.domain, init, attributes)
        self._open.append(self._pair)
        reads = self.device.reads_made if self.is_reader else self.device.reads_answered
        self.card = QueueCard(
            self._pair.qp_num,
            secrets.randbits(24),
            self.port.gid,
            int(at.lid),
            int(at.active_mtu),
            reads,
        )

    def _made_completions(self) -> Any:
        made = verbs().cq.CQ(self.device.context, 1)
        self._open.append(made)
        return made

    def _access(self) -> int:
        return 0 if self.is_reader else int(verbs().enums.IBV_ACCESS_REMOTE_READ)

    def connect(self, theirs: QueueCard) -> None:
        """Connect to the peer's end. The kernel may look for a route for a second; pyverbs keeps
        the GIL meanwhile.
        """
        v = verbs()
        with named(f"{self.port} does not get through to {gid_text(theirs.gid)}"):
            attributes = v.qp.QPAttr(port_num=self.port.number)
            attributes.path_mtu = min(self.card.mtu, theirs.mtu)
            attributes.dest_qp_num = theirs.number
            attributes.rq_psn = theirs.sequence
            attributes.max_dest_rd_atomic = attributes.max_rd_atomic = min(
                self.card.reads, theirs.reads
            )
            attributes.min_rnr_timer = 12
            attributes.qp_access_flags = self._access()
            gid = v.addr.GID(":".join(theirs.gid[at : at + 2].hex() for at in range(0, 16, 2)))
            route = v.addr.GlobalRoute(dgid=gid, sgid_index=self.port.gid_index, hop_limit=HOPS)
            attributes.ah_attr = v.addr.AHAttr(
                port_num=self.port.number, is_global=1, gr=route, dlid=theirs.lid
            )
            attributes.sq_psn = self.card.sequence
            attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = (
                TIMEOUT,
                RETRIES,
                RETRIES,
            )
            self._pair.to_rts(attributes)

    def fail(self) -> None:
        """Let every running request fail, at both ends."""
        v = verbs()
        with named("ibv_modify_qp"):
            self._pair.modify(v.qp.QPAttr(qp_state=v.enums.IBV_QPS_ERR), v.enums.IBV_QP_STATE)

    def close(self) -> None:
        """Take it apart: nothing is read through it, or written by it, afterwards. A second call
        does nothing.
        """
        while self._open:
            self._open.pop().close()


class ReaderQueue(Queue):
    """The end that reads. For one thread."""

    is_reader = True

    def _made_completions(self) -> Any:
        v = verbs()
        for _ in range(CHANNELS_TRIED_MAX):
            with _channels:
                before = _event_descriptors()
                channel = v.cq.CompChannel(self.device.context)
                found = _event_descriptors() - before
            if len(found) == 1:
                break
            # another thread has made or closed one at this very moment: pyverbs does not say which
            # is which
            channel.close()
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

    def post(
        self, moves: Sequence[Move], first: int, signaled: frozenset[int], fenced: frozenset[int]
    ) -> None:
        """Start these reads, numbered from `first`. The completion of a `signaled` one is reported,
        and means that all before it are done. A `fenced` one begins when all before it are done.
        OSError.
        """
        v = verbs()
        opened: list[Any] = []
        try:
            with named("ibv_post_send"):
                for number, move in enumerate(moves, first):
                    part = v.wr.SGE(move.here, move.nbytes, move.here_key)
                    flags = (v.enums.IBV_SEND_SIGNALED if number in signaled else 0) | (
                        v.enums.IBV_SEND_FENCE if number in fenced else 0
                    )
                    work = v.wr.SendWR(
                        number, v.enums.IBV_WR_RDMA_READ, num_sge=1, sg=[part], send_flags=flags
                    )
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
        """The (number, status) of the requests that are complete now."""
        with named("ibv_poll_cq"):
            _, found = self._completions.poll(self.device.depth)
        return [(each.wr_id, each.status) for each in found]

    def arm(self) -> None:
        """Have the descriptor become readable by the next completion; look once more by `poll`
        before waiting for it.
        """
        with named("ibv_req_notify_cq"):
            self._completions.req_notify()

    def take_event(self) -> None:
        """The descriptor is readable: take what it is readable for."""
        with named("ibv_get_cq_event"):
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


class Buffers:
    """Registered buffers at one end of a queue pair, through which bytes of a GPU go, or of many
    places of the host.
    """

    def __init__(self, device: Device) -> None:
        self.pinned: Pinned | None = None
        self.untaken = 0  # pieces in them that the reader has not read yet
        self._device = device

    def prepare(self, gpu: Accelerator | None) -> Pinned:
        """Those for that GPU; None: for the host. StateError: no memory. OSError: they cannot be
        registered.
        """
        if self.pinned is None or self.pinned.staging.device is not gpu:
            self.release()
            pinned = Pinned(Packing(BUFFERS) if gpu is None else Staging(gpu, buffers=BUFFERS))
            for span in pinned.spans:
                self._device.keys(pinned, *span)
            self.pinned = pinned
        return self.pinned

    def release(self) -> None:
        pinned, self.pinned, self.untaken = self.pinned, None, 0
        if pinned is not None:
            self._device.release(pinned)


class Fabric:
    """What one worker has open on these ports. For several threads."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self.ports = tuple(ports)
        self._lock = threading.Lock()
        self._devices: dict[str, Device] = {}

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
