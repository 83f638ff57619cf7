"""The cuda_ipc transport: a reader on the same host opens the source's GPU memory, and has its own
GPU copy out of it.

Asking and waiting are as over tcp, on a Unix socket; the generation word is in shared memory, and
is looked at when the GPU is done (`transport.one_sided`). A source in this very process is read by
its own addresses.

A handle names a whole allocation. torch hands out parts of allocations, so each is opened once and
used for all tensors in it. Memory that is mapped here outlives its process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from tensorhub.cuda import cupy_device
from tensorhub.cuda.copies import copy_pieces
from tensorhub.cuda.device import HANDLE_BYTES, Allocation, Device, Spread
from tensorhub.errors import ProtocolError, StateError, TransportUnavailable
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.strided import Block
from tensorhub.memory.strided_device import rows_of_blocks
from tensorhub.messages import Address
from tensorhub.transport import segments as shm, unix
from tensorhub.transport.base import DEVICE, Channel, Destination, NotShared, Unusable
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.one_sided import (
    OneSidedOwner,
    OneSidedSession,
    Piece,
    SameHostTransport,
    Translated,
    dialect_of,
    open_channel,
)
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.peers import Kept
from tensorhub.transport.registry import Local
from tensorhub.transport.segments import segments_of
from tensorhub.transport.shm import Mapped
from tensorhub.types import Length, RegistrationId


@lru_cache(maxsize=1)
def this_process() -> bytes:
    """This process' id among processes of all times; a forked child gets one of its own."""
    return os.urandom(16)


os.register_at_fork(after_in_child=this_process.cache_clear)


def export(device: Device, places: Iterable[tuple[int, int]]) -> list[Allocation]:
    """The allocations in which these (address, bytes) are, each once, ascending. StateError: one of
    them has no handle.
    """
    found: list[Allocation] = []
    for address, nbytes in sorted(places):
        if not found or address + nbytes > found[-1].address + found[-1].nbytes:
            found.append(device.export(address))
    return found


class Opened:
    """Another process' allocation, open here as long as something refers to it."""

    def __init__(self, device: Device, allocation: Allocation) -> None:
        """StateError: it cannot be opened."""
        self.address = device.open(allocation.handle, allocation.nbytes)
        self.nbytes = allocation.nbytes
        # the end of the process closes it, too
        weakref.finalize(self, device.close, self.address).atexit = False


class Imports(Kept[tuple[str, bytes], Opened]):
    """Other processes' allocations that one worker has open, by device and handle. Unused ones are
    kept for a while, for the next version. A channel's allocations stay open until it is closed.
    """

    def open(self, device: Device, allocations: Sequence[Allocation]) -> list[Opened]:
        """Each of them, in their order. StateError: one cannot be opened."""
        return [self._open(device, allocation) for allocation in allocations]

    def _open(self, device: Device, allocation: Allocation) -> Opened:
        def make() -> Opened:
            try:
                return Opened(device, allocation)
            except StateError:
                # CUDA opens nothing where the source had other memory before, which is still open
                # here.
                self.sweep(0.0)
            return Opened(device, allocation)

        key = device.name, allocation.handle
        return self.find_or_make(key, lambda known: known.nbytes == allocation.nbytes, make)


ALLOCATIONS_MAX = 4096  # of one registration: they fit a message


@dataclass(frozen=True, slots=True)
class AllocationsAre:
    """The GPU's allocations in which the registration is: (address, bytes, IPC handle) at the
    owner. `process` names the owner's process: within that one, addresses are as good as handles.

    `words`: (address, bytes) of the shared memory in which the registration's generation word is.
    One byte with that memory's descriptor follows.
    """

    process: Annotated[bytes, Length(16)]
    allocations: Annotated[
        tuple[tuple[Address, Address, Annotated[bytes, Length(HANDLE_BYTES)]], ...],
        Length(ALLOCATIONS_MAX),
    ]
    words: tuple[Address, Address]


DIALECT = dialect_of("cuda_ipc", AllocationsAre)


class _CudaIpcSession(OneSidedSession):
    def find(
        self, registration: RegistrationId, memory: ChunkMemory, word: tuple[int, int]
    ) -> tuple[object, Sequence[int]]:
        """How the registration's memory is opened, and the memory of its generation word."""
        if memory.device is None or not self._connection.passes_descriptors:
            raise NotShared("its tensors are not on a GPU")
        self._check_given()
        if not (words := segments_of([word])):
            raise Unusable("its generation words are not in shared memory")
        try:
            exported = tuple(export(memory.device, memory.places))
        except StateError as error:
            raise Unusable(str(error)) from error
        if len(exported) > ALLOCATIONS_MAX:
            raise Unusable(
                f"its tensors are in {len(exported)} allocations, more than {ALLOCATIONS_MAX}"
            )
        said = AllocationsAre(this_process(), exported, (words[0].address, words[0].nbytes))
        return said, [words[0].descriptor]


class CudaIpcOwner(OneSidedOwner):
    """It hands over the handles of a registration's GPU memory, and the memory of its generation
    word.
    """

    dialect = DIALECT
    sessions = _CudaIpcSession
    shares_memory = True


# copied before the GPU is waited for: some 2 ms within one; a wait costs some 0.03 ms
GROUP_BYTES = 4 * 2**30


class CudaIpcTransport(SameHostTransport):
    """CUDA IPC; between GPU tensors of processes on one host."""

    dialect = DIALECT
    lanes = 1  # the GPU does the work
    fills = DEVICE
    batch_bytes = GROUP_BYTES

    def __init__(self, local: Local) -> None:
        """Nothing of CUDA is imported before a GPU's tensor is read."""
        if (fault := shm.fault_here() or cupy_device.missing()) is not None:
            raise TransportUnavailable(fault)
        super().__init__(local)
        self._imports = Imports()
        self._kept = (self._imports,)

    def serve(self) -> OwnerSide:
        return CudaIpcOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Open the source's"""
        if destination.device is None:
            raise NotShared("the destination is in host memory")
        return open_channel(client, self._open(client, destination.device), destination)

    def _open(self, client: ReadClient, device: Device) -> OnDevice:
        said = client.find(AllocationsAre)
        (descriptor,) = client.connection.receive_descriptors(1)
        try:
            words = shm.MappedSegment(descriptor, said.words[1])
            allocations = [Allocation(*each) for each in said.allocations]
            if any(len(each.handle) != HANDLE_BYTES for each in allocations):
                raise ProtocolError(f"a handle has {HANDLE_BYTES} bytes")
            # Then its addresses are read as they are: that is no source's word alone.
            is_here = said.process == this_process() and unix.is_this_process(
                client.connection.descriptor
            )
            opened = [] if is_here else self._imports.open(device, allocations)
            # A kernel reads another GPU's memory only once it was opened for that; a copy is made
            # by the driver.
            by_kernel = not is_here or all(device.owns(each.address) for each in allocations)
        except StateError as error:
            raise Unusable(str(error)) from error
        finally:
            os.close(descriptor)
        addresses = [each.address for each in opened or allocations]
        places = [
            (each.address, each.nbytes, here)
            for each, here in zip(allocations, addresses, strict=True)
        ]
        return OnDevice(
            device, places, Mapped([(said.words[0], words)]), opened, by_kernel=by_kernel
        )


class OnDevice(Translated):
    """See `transport.one_sided.Source`."""

    hot_bytes = call_bytes = group_bytes = GROUP_BYTES

    def __init__(
        self,
        device: Device,
        places: Sequence[tuple[int, int, int]],
        words: Mapped,
        opened: Sequence[Opened] = (),
        *,
        by_kernel: bool = True,
    ) -> None:
        """`places`: each allocation's address at the source, bytes, and address here; `opened`:
        kept open. `by_kernel`: this device's kernels can read there.
        """
        super().__init__(places)
        self._words = words
        self._opened = opened
        self.by_kernel = by_kernel
        self._queue = device.queue(spins=True)

    def copy(self, call: Sequence[Piece]) -> None:
        """See `Source.copy`. StateError: the GPU has failed."""
        pieces = [(here, self._here(there, nbytes), nbytes) for here, there, nbytes in call]
        copy_pieces(self._queue, pieces, by_kernel=self.by_kernel)
        self._queue.mark().wait()

    def rows_of(self, made: Sequence[Block]) -> list[Spread] | None:
        """See `Source.rows_of`. OSError: it does not reach them."""
        return rows_of_blocks(map(self._block_here, made)) if self.by_kernel else None

    def is_unchanged(self, word: int, generation: int) -> bool:
        return self._words.is_unchanged(word, generation)
