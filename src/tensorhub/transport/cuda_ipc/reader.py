"""The cuda_ipc transport: a reader on the same host opens the source's GPU memory, and has its own GPU copy out of it.

Asking and waiting are as over tcp, on a Unix socket; the generation word is in shared memory, and is looked at when the GPU
is done (`transport.one_sided`). A source in this very process is read by its own addresses.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

from tensorhub.cuda import cupy_device
from tensorhub.cuda.copies import copy_pieces
from tensorhub.cuda.device import HANDLE_BYTES, Allocation, Device, Spread
from tensorhub.errors import ProtocolError, StateError, TransportUnavailable
from tensorhub.memory.strided import Block, runs
from tensorhub.memory.strided_device import rows_of_blocks
from tensorhub.transport import unix
from tensorhub.transport.base import DEVICE, Channel, Destination, NotShared, Unusable
from tensorhub.transport.connected import ConnectedTransport
from tensorhub.transport.cuda_ipc.allocations import Imports, Opened, this_process
from tensorhub.transport.cuda_ipc.messages import DIALECT, AllocationsAre
from tensorhub.transport.cuda_ipc.owner import CudaIpcOwner
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.kept import KEPT_S
from tensorhub.transport.one_sided import OneSidedChannel, Piece, Translated
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.transport.shm import segments as shm
from tensorhub.transport.strided_source import StridedSource
from tensorhub.types import Location

GROUP_BYTES = 4 * 2**30  # copied before the GPU is waited for: some 2 ms within one; a wait costs some 0.03 ms


class CudaIpcTransport(ConnectedTransport):
    """CUDA IPC; between GPU tensors of processes on one host."""

    dialect = DIALECT
    lanes = 1  # the GPU does the work
    fills = DEVICE
    strides = True
    batch_bytes = GROUP_BYTES

    def __init__(self, local: Local) -> None:
        """Nothing of CUDA is imported before a GPU's tensor is read."""
        if (fault := shm.fault_here() or cupy_device.missing()) is not None:
            raise TransportUnavailable(fault)
        super().__init__(local)
        self._imports = Imports()

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def serve(self) -> OwnerSide:
        return CudaIpcOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Open the source's allocations."""
        if destination.device is None:
            raise NotShared("the destination is in host memory")
        source = self._open(client, destination.device)
        if not destination.is_strided:
            return OneSidedChannel(client, source, destination)
        gathering = source, StridedSource(client, destination)
        return OneSidedChannel(client, source, destination, gathering, source.rows_of if source.by_kernel else None)

    def _open(self, client: ReadClient, device: Device) -> OnDevice:
        said = client.find(AllocationsAre)
        (descriptor,) = client.connection.receive_descriptors(1)
        try:
            words = shm.MappedSegment(descriptor, said.words[1])
            allocations = [Allocation(*each) for each in said.allocations]
            if any(len(each.handle) != HANDLE_BYTES for each in allocations):
                raise ProtocolError(f"a handle has {HANDLE_BYTES} bytes")
            # Then its addresses are read as they are: that is no source's word alone.
            is_here = said.process == this_process() and unix.is_this_process(client.connection.descriptor)
            opened = [] if is_here else self._imports.open(device, allocations)
            # A kernel reads another GPU's memory only once it was opened for that; a copy is made by the driver.
            by_kernel = not is_here or all(device.owns(each.address) for each in allocations)
        except StateError as error:
            raise Unusable(str(error)) from error
        finally:
            os.close(descriptor)
        addresses = [each.address for each in opened or allocations]
        places = [(each.address, each.nbytes, here) for each, here in zip(allocations, addresses, strict=True)]
        return OnDevice(device, places, words, said.words[0], opened, by_kernel=by_kernel)

    def sweep(self) -> None:
        self._imports.sweep(KEPT_S)
        super().sweep()

    def close(self) -> None:
        """See `Keeping`. A channel's allocations are closed with the last one that uses them."""
        self._imports.sweep(0.0)
        super().close()


class OnDevice(Translated):
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
        super().__init__(places)
        self._words = words
        self._words_there = words_there
        self._opened = opened
        self.by_kernel = by_kernel
        self._queue = device.queue(spins=True)

    def copy(self, call: Sequence[Piece]) -> None:
        """See `Source.copy`. StateError: the GPU has failed."""
        pieces = [(here, self._here(there, nbytes), nbytes) for here, there, nbytes in call]
        self._copy(pieces)

    def gather(self, made: Sequence[Block], here: int) -> None:
        """See `Gathering.gather`. StateError: the GPU has failed."""
        pieces: list[tuple[int, int, int]] = []
        for block in map(self._block_here, made):
            for start in runs(block):
                pieces.append((here, start, block.run))
                here += block.run
        self._copy(pieces)

    def _copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        copy_pieces(self._queue, pieces, by_kernel=self.by_kernel)
        self._queue.mark().wait()

    def rows_of(self, made: Sequence[Block]) -> list[Spread]:
        """These blocks, for the destination's device to gather. OSError: it does not reach them."""
        return rows_of_blocks(map(self._block_here, made))

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Source.is_unchanged`. A process that has died has not written since."""
        at = word - self._words_there
        if not 0 <= at <= self._words.nbytes - WORD_BYTES:
            raise OSError(errno.EFAULT, "its word is not in the memory that was shared")
        return generation != 0 and ctypes.c_uint64.from_address(self._words.address + at).value == generation
