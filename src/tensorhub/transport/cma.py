"""The cma transport (cross-memory attach): a reader copies out of another process' memory on the
same host, by `process_vm_readv`.

The reader's CPU makes one copy, and the other process takes no part. The header tells the process
from every other, and the generation words say whether it may still be read (`generation_words`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tensorhub.errors import ProtocolError, TransportUnavailable
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.strided import Block, runs
from tensorhub.messages import Address
from tensorhub.transport.base import Channel, Destination, NotShared, Unusable
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.generation_words import NONCE_BYTES, WORD_BYTES, Header, order_fault
from tensorhub.transport.one_sided import (
    CALL_PIECES_MAX,
    NOT_FROM_THERE,
    RUN_BYTES_MIN,
    OneSidedOwner,
    OneSidedSession,
    Piece,
    SameHostTransport,
    Source,
    dialect_of,
    lanes_here,
    open_channel,
)
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.registry import Local
from tensorhub.types import Length, Range, RegistrationId


@dataclass(frozen=True, slots=True)
class MemoryIs:
    """The process that has the memory, by its number in the owner's own namespace. At that address
    it has this nonce, which no other process has.
    """

    pid: Annotated[int, Range(1, 2**31 - 1)]
    address: Address
    nonce: Annotated[bytes, Length(NONCE_BYTES)]


DIALECT = dialect_of("cma", MemoryIs)


_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)


# --------------------------------------------------------------------------------------------------
# copying


def copy(pid: int, call: Sequence[Piece]) -> None:
    """Copy these pieces (see `cut_up`) out of the memory of that process, without the GIL. OSError:
    not all could be read.

    The addresses here must be writable memory of that size; those there may be anything.
    """
    left = list(call)
    while left:
        here = array("Q", [number for piece in left for number in (piece.here, piece.nbytes)])
        there = array("Q", [number for piece in left for number in (piece.there, piece.nbytes)])
        count = _readv(pid, here.buffer_info()[0], len(left), there.buffer_info()[0], len(left))
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            here_at, there_at, nbytes = left[0]
            left[0] = Piece(here_at + count, there_at + count, nbytes - count)


def gather(pid: int, made: Sequence[Block], here: int) -> None:
    """Copy the bytes of these blocks of that process' memory to one place here. Otherwise as
    `copy`.
    """
    addresses, sizes = array("Q"), array("Q")
    for block in made:
        starts = runs(block)
        addresses.extend(starts)
        sizes.extend(array("Q", [block.run]) * len(starts))
    there = array("Q", bytes(16 * len(addresses)))
    there[0::2], there[1::2] = addresses, sizes
    at = there.buffer_info()[0]
    for first in range(0, len(sizes), CALL_PIECES_MAX):
        some = sizes[first : first + CALL_PIECES_MAX]
        nbytes = sum(some)
        target = array("Q", (here, nbytes))
        if _readv(pid, target.buffer_info()[0], 1, at + 16 * first, len(some)) != nbytes:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        here += nbytes


def _readv(pid: int, here: int, here_count: int, there: int, there_count: int) -> int:
    ctypes.set_errno(0)
    count: int = _libc.process_vm_readv(
        ctypes.c_int(pid),
        ctypes.c_void_p(here),
        ctypes.c_ulong(here_count),
        ctypes.c_void_p(there),
        ctypes.c_ulong(there_count),
        ctypes.c_ulong(0),
    )
    if count <= 0:
        code = ctypes.get_errno() or errno.EFAULT
        raise OSError(code, os.strerror(code))
    return count


def fault_here() -> str | None:
    """Why this process cannot read another one's memory at all, and what to do; None if it can."""
    if (fault := order_fault()) is not None:
        return fault
    if not hasattr(_libc, "process_vm_readv"):
        return "this C library has no process_vm_readv"
    seen, told = ctypes.c_uint64(), ctypes.c_uint64()
    try:
        copy(os.getpid(), [Piece(ctypes.addressof(seen), ctypes.addressof(told), WORD_BYTES)])
    except OSError as error:
        what = (
            "allow it in the container's seccomp profile (a kernel older than 4.8 needs "
            "CAP_SYS_PTRACE for that)"
        )
        return f"process_vm_readv is forbidden here ({error.strerror}): {what}"
    return None


def restriction(path: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> str | None:
    """How Yama restricts reading between this machine's processes, and what to do; None: it does
    not.
    """
    try:
        scope = path.read_text().strip()
    except OSError:  # this kernel has no Yama
        return None
    match scope:
        case "0":
            return None
        case "1":
            return (
                "kernel.yama.ptrace_scope is 1: only sources that name cma in transports= let "
                "others read them"
            )
        case _:
            return (
                f"kernel.yama.ptrace_scope is {scope}: only readers with CAP_SYS_PTRACE may "
                f"read (none, at 3)"
            )


def why_not(error: OSError) -> str:
    """What an error of the first read from a process means, and what to do."""
    match error.errno:
        case errno.EPERM:
            return (
                "the kernel forbids reading that process: run both as one user, and where "
                "kernel.yama.ptrace_scope is 1, "
                "name cma in the source's transports=, or give the reader CAP_SYS_PTRACE"
            )
        case errno.ESRCH:
            return (
                "there is no such process here: workers in different pid namespaces need "
                "different Location.host"
            )
        case _:
            return f"its memory cannot be read ({error.strerror})"


def let_others_read() -> None:
    """Let this user's other processes read this one, where Yama forbids it (ptrace_scope 1)."""
    _libc.prctl(
        ctypes.c_int(_PR_SET_PTRACER),
        _PR_SET_PTRACER_ANY,
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )


class Process(Source):
    """That process' memory, as `transport.one_sided` reads it. For several threads."""

    hot_bytes = 2**20  # what a core's own cache holds on a server

    def __init__(self, header: Header) -> None:
        self.header = header

    def copy(self, call: Sequence[Piece]) -> None:
        """See `copy`."""
        copy(self.header.pid, call)

    def gather(self, made: Sequence[Block], here: int) -> None:
        """See `gather`."""
        gather(self.header.pid, made, here)

    def is_there(self) -> bool:
        """Whether the process is the header's process. OSError if it cannot be read."""
        seen = ctypes.create_string_buffer(NONCE_BYTES)
        copy(self.header.pid, [Piece(ctypes.addressof(seen), self.header.address, NONCE_BYTES)])
        return seen.raw == self.header.nonce

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Source.is_unchanged`: one call looks at the nonce and at the word."""
        seen = ctypes.create_string_buffer(NONCE_BYTES + WORD_BYTES)
        at = ctypes.addressof(seen)
        copy(
            self.header.pid,
            [
                Piece(at, self.header.address, NONCE_BYTES),
                Piece(at + NONCE_BYTES, word, WORD_BYTES),
            ],
        )
        return generation != 0 and seen.raw == self.header.nonce + generation.to_bytes(
            WORD_BYTES, sys.byteorder
        )


class _CmaSession(OneSidedSession):
    def find(
        self, registration: RegistrationId, memory: ChunkMemory, word: tuple[int, int]
    ) -> tuple[object, Sequence[int]]:
        """In which process this is."""
        header = self._memory.header
        if memory.device is not None:
            raise NotShared("its tensors are on a GPU, which is not read this way")
        if header is None or not self._lane.is_local:
            raise Unusable(NOT_FROM_THERE)
        return MemoryIs(*header), ()


class CmaOwner(OneSidedOwner):
    """It says which process this is, so that a reader can make sure of it."""

    dialect = DIALECT
    sessions = _CmaSession


class CmaTransport(SameHostTransport):
    """process_vm_readv; between processes of one user on one host."""

    dialect = DIALECT

    def __init__(self, local: Local) -> None:
        if (fault := fault_here()) is not None:
            raise TransportUnavailable(fault)
        if local.is_named:
            let_others_read()
        super().__init__(local)
        self.lanes = lanes_here()

    def serve(self) -> OwnerSide:
        return CmaOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Find the process. Unusable: it is out of reach."""
        peer, right = client.peer, client.right
        if peer.header is None or peer.registration != right.registration:
            peer.header, peer.registration = _find(client), right.registration
        return open_channel(client, Process(peer.header), destination, RUN_BYTES_MIN)


def _find(client: ReadClient) -> Header:
    """The owner's process, once the reader has seen that its nonce is the owner's."""
    if not client.peer.is_local:
        raise Unusable(
            "it is connected from another host: workers on different hosts need different "
            "Location.host"
        )
    said = client.find(MemoryIs)
    if len(said.nonce) != NONCE_BYTES:
        raise ProtocolError(f"a nonce has {NONCE_BYTES} bytes")
    process = Process(Header(said.pid, said.address, said.nonce))
    try:
        is_there = process.is_there()
    except OSError as error:
        raise Unusable(why_not(error)) from error
    if not is_there:
        raise Unusable(
            "its process is another one here: workers in different pid "
            "namespaces need different hosts"
        )
    return process.header
