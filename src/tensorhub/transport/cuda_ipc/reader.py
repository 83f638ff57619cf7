"""The cuda_ipc transport: a reader on the same host opens the source's GPU memory, and has its own GPU copy out of it.

Asking and waiting are as over tcp, on a Unix socket; the generation word is in shared memory, and is looked at when the GPU
is done (`transport.one_sided`). A source in this very process is read by its own addresses.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
from collections.abc import Sequence

from tensorhub.cuda import cupy_device
from tensorhub.cuda.copies import copy_pieces
from tensorhub.cuda.device import HANDLE_BYTES, Allocation, Device
from tensorhub.errors import ProtocolError, StateError, TransportUnavailable
from tensorhub.messages import AllocationsAre, FindAllocations
from tensorhub.transport.base import DEVICE, Channel, Cutter, Destination, NotShared, ReadRight, Transport, Unusable
from tensorhub.transport.cuda_ipc.allocations import Imports, Opened, this_process
from tensorhub.transport.cuda_ipc.owner import CudaIpcOwner
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.one_sided import OneSidedChannel, Piece
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.peers import Peers
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.transport.shm import segments as shm
from tensorhub.types import Endpoint, Location

KEPT_S = 60.0  # of an allocation that nobody reads
GROUP_BYTES = 4 * 2**30  # copied before the GPU is waited for: some 2 ms within one; a wait costs some 0.03 ms


class CudaIpcTransport(Transport):
    """CUDA IPC; between GPU tensors of processes on one host."""

    name = "cuda_ipc"
    lanes = 1  # the GPU does the work
    fills = DEVICE
    batch_bytes = GROUP_BYTES

    def __init__(self, local: Local) -> None:
        """Nothing of CUDA is imported before a GPU's tensor is read."""
        if (fault := shm.fault_here() or cupy_device.missing()) is not None:
            raise TransportUnavailable(fault)
        self._peers = Peers(local, self.name)
        self._imports = Imports()

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and open what is to be read. Unusable (NotShared); see `Transport.open`."""
        device = destination.device
        if device is None:
            raise NotShared("the destination is in host memory")
        peer = self._peers.open(endpoint.address, right, cutter)
        client = ReadClient(self._peers, peer, right, cutter)
        try:
            with client.failures():
                source = self._open(client, right, device)
        except BaseException:
            client.close()
            raise
        return OneSidedChannel(client, source, right, destination, cutter)

    def _open(self, client: ReadClient, right: ReadRight, device: Device) -> OnDevice:
        message = client.ask(FindAllocations(0, right.registration, right.generation))
        if not isinstance(message, AllocationsAre):
            raise ProtocolError(f"it is asked for its allocations, and answers {type(message).__name__}")
        if message.reason:
            raise (NotShared if message.is_usual else Unusable)(message.reason)
        if not message.allocations:
            raise NotShared("its tensors are not on a GPU")
        (descriptor,) = client.connection.receive_descriptors(1)
        try:
            words = shm.MappedSegment(descriptor, message.words[1])
            allocations = [Allocation(*each) for each in message.allocations]
            if any(len(each.handle) != HANDLE_BYTES for each in allocations):
                raise ProtocolError(f"a handle has {HANDLE_BYTES} bytes")
            is_here = message.process == this_process()
            opened = [] if is_here else self._imports.open(device, allocations)
            # A kernel reads another GPU's memory only once it was opened for that; a copy is made by the driver.
            by_kernel = not is_here or all(device.owns(each.address) for each in allocations)
        except StateError as error:
            raise Unusable(str(error)) from error
        finally:
            os.close(descriptor)
        addresses = [each.address for each in opened or allocations]
        places = [(each.address, each.nbytes, here) for each, here in zip(allocations, addresses, strict=True)]
        return OnDevice(device, places, words, message.words[0], opened, by_kernel=by_kernel)

    def serve(self) -> OwnerSide:
        """See `Transport.serve`."""
        return CudaIpcOwner()

    def sweep(self) -> None:
        """See `Keeping`."""
        self._imports.sweep(KEPT_S)
        self._peers.sweep()

    def close(self) -> None:
        """See `Keeping`. A channel's allocations are closed with the last one that uses them."""
        self._imports.sweep(0.0)
        self._peers.close()


class OnDevice:
    """See `transport.one_sided.Source`."""

    hot_bytes = call_bytes = group_bytes = GROUP_BYTES

    def __init__(
        self,
        device: Device,
        places: Sequence[tuple[int, int, int]],
        words: shm.MappedSegment,
        words_there: int,
        opened: Sequence[Opened] = (),
        *,
        by_kernel: bool = True,
    ) -> None:
        """`places`: each allocation's address at the source, bytes, and address here; `opened`: kept open. `by_kernel`:
        this device's kernels can read there.
        """
        self._places = sorted(places)
        self._starts = [start for start, _, _ in self._places]
        self._words = words
        self._words_there = words_there
        self._opened = opened
        self._by_kernel = by_kernel
        self._queue = device.queue(spins=True)

    def __repr__(self) -> str:
        return f"<OnDevice, {len(self._places)} allocations>"

    def copy(self, call: Sequence[Piece]) -> None:
        """See `Source.copy`. StateError: the GPU has failed."""
        pieces = [(here, self._here(there, nbytes), nbytes) for here, there, nbytes in call]
        copy_pieces(self._queue, pieces, by_kernel=self._by_kernel)
        self._queue.mark().wait()

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Source.is_unchanged`. A process that has died has not written since."""
        at = word - self._words_there
        if not 0 <= at <= self._words.nbytes - WORD_BYTES:
            raise OSError(errno.EFAULT, "its word is not in the memory that was shared")
        return generation != 0 and ctypes.c_uint64.from_address(self._words.address + at).value == generation

    def _here(self, there: int, nbytes: int) -> int:
        """Where that is in this process. OSError: nowhere."""
        number = bisect.bisect_right(self._starts, there) - 1
        if number >= 0:
            start, size, here = self._places[number]
            if there + nbytes <= start + size:
                return here + there - start
        raise OSError(errno.EFAULT, "it is in no allocation that was opened")
