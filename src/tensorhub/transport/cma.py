"""Cross-memory attach: one process copies out of another one's memory on the same host, by `process_vm_readv`.

One copy, by the reader's CPU, and nothing of the other process takes part. So the owner says where it may be read, and when
no longer: its *generation words* lie in its own memory, beside a nonce that tells its process from every other. A reader
copies first and looks at both afterwards (R3): both unchanged means that nobody was told, up to then, that these bytes may
be overwritten.

The order of memory. The owner's store of a word comes before its later writes, and the reader's look at it comes after its
copying. On x86-64 every processor sees stores in the order in which they were made, also those of several threads, and loads
are done in order: a plain store of 8 aligned bytes suffices, and a torn look can never give a whole word that is not there.
Elsewhere the store would need a barrier that the reader's processor takes part in (`membarrier`), so cma is x86-64's only.

Responsible for the words, the copying and its limits. Not responsible for who is told where to read: `runtime.cma_channel`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tensorhub.types import RegistrationId

GROUP_BYTES = 16 * 2**20  # copied by one thread at a time, so that all threads end at about the same time
CALL_BYTES = 8 * 2**20  # of one system call: a millisecond or so, after which a reader that is cut off notices
CALL_PIECES_MAX = 1024  # Linux' IOV_MAX
NONCE_BYTES = 16
WORD_BYTES = 8
_PAGE_WORDS = mmap.PAGESIZE // WORD_BYTES
_NONCE_WORDS = NONCE_BYTES // WORD_BYTES
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)


class Piece(NamedTuple):
    """So many bytes from an address there to an address here."""

    here: int
    there: int
    nbytes: int


# --------------------------------------------------------------------------------------------------------- copying


def cut_up(pieces: Sequence[Piece], call_bytes: int = CALL_BYTES) -> Iterator[list[Piece]]:
    """What one system call each copies: at most `call_bytes`, in CALL_PIECES_MAX pieces, in their order."""
    call: list[Piece] = []
    room = call_bytes
    for piece in pieces:
        here, there, left = piece
        while left:
            taken = min(left, room)
            call.append(Piece(here, there, taken))
            here, there, left, room = here + taken, there + taken, left - taken, room - taken
            if not room or len(call) == CALL_PIECES_MAX:
                yield call
                call, room = [], call_bytes
    if call:
        yield call


def copy(pid: int, call: Sequence[Piece]) -> None:
    """Copy these pieces (see `cut_up`) out of the memory of that process, without the GIL. OSError: not all could be read.

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
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    if not hasattr(_libc, "process_vm_readv"):
        return "this C library has no process_vm_readv"
    seen, told = ctypes.c_uint64(), ctypes.c_uint64(1)
    try:
        copy(os.getpid(), [Piece(ctypes.addressof(seen), ctypes.addressof(told), WORD_BYTES)])
    except OSError as error:
        what = "allow it in the container's seccomp profile (a kernel older than 4.8 needs CAP_SYS_PTRACE for that)"
        return f"process_vm_readv is forbidden here ({error.strerror}): {what}"
    return None


def restriction(path: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> str | None:
    """Between which processes of this machine Yama lets it work, and what to do; None if it is not in the way."""
    try:
        scope = path.read_text().strip()
    except OSError:  # this kernel has no Yama
        return None
    match scope:
        case "0":
            return None
        case "1":
            return "kernel.yama.ptrace_scope is 1: only sources that name cma in transports= let others read them"
        case _:
            return f"kernel.yama.ptrace_scope is {scope}: only readers with CAP_SYS_PTRACE may read (none, at 3)"


def why_not(error: OSError) -> str:
    """What an error of the first read from a process means, and what to do."""
    match error.errno:
        case errno.EPERM:
            return (
                "the kernel forbids reading that process: run both as one user, and where kernel.yama.ptrace_scope is 1, "
                "name cma in the source's transports=, or give the reader CAP_SYS_PTRACE"
            )
        case errno.ESRCH:
            return "there is no such process here: workers in different pid namespaces need different Location.host"
        case _:
            return f"its memory cannot be read ({error.strerror})"


def let_others_read() -> None:
    """Have Yama (ptrace_scope 1) let this user's other processes read this one. Without Yama nothing happens."""
    _libc.prctl(ctypes.c_int(_PR_SET_PTRACER), _PR_SET_PTRACER_ANY, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


# ----------------------------------------------------------------------------------------------------------- words


class Header(NamedTuple):
    """Where a process' nonce is, and what it must be: `nonce`, NONCE_BYTES long."""

    pid: int
    address: int
    nonce: bytes


def _private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Words:
    """The generation words of one worker's registrations, where readers find them: 0 while nothing is open there.

    A word's place is used for several registrations, one after the other, but no generation is ever used twice. Not
    thread-safe: whoever has it calls it under the lock that guards the generations themselves.
    """

    def __init__(self, allocate: Callable[[int], mmap.mmap | memoryview] = _private) -> None:
        """`allocate`: gives so many zeroed bytes."""
        self._allocate = allocate
        self._pages: list[ctypes.Array[ctypes.c_uint64]] = []  # each keeps its mapping
        self._places: dict[RegistrationId, int] = {}  # page * _PAGE_WORDS + word
        self._free: list[int] = []
        self._add_page()
        del self._free[-_NONCE_WORDS:]  # the first of the first page
        nonce = os.urandom(NONCE_BYTES)
        ctypes.memmove(self._pages[0], nonce, NONCE_BYTES)
        self.header = Header(os.getpid(), ctypes.addressof(self._pages[0]), nonce)

    def __repr__(self) -> str:
        return f"<Words of {len(self._places)} registrations>"

    def _add_page(self) -> None:
        mapping = self._allocate(mmap.PAGESIZE)
        first = len(self._pages) * _PAGE_WORDS
        self._pages.append((ctypes.c_uint64 * _PAGE_WORDS).from_buffer(mapping))
        self._free.extend(range(first + _PAGE_WORDS - 1, first - 1, -1))

    def set(self, registration: RegistrationId, generation: int) -> None:
        """This registration is open under that generation; 0: it is closed. When it returns every reader would see it."""
        if registration not in self._places:
            if not generation:
                return
            if not self._free:
                self._add_page()
            self._places[registration] = self._free.pop()
        page, word = divmod(self._places[registration], _PAGE_WORDS)
        self._pages[page][word] = generation

    def get(self, registration: RegistrationId) -> int:
        """Under which generation it is open; 0: it is not."""
        page, word = divmod(self._places.get(registration, -1), _PAGE_WORDS)
        return self._pages[page][word] if page >= 0 else 0

    def address(self, registration: RegistrationId) -> int:
        """Where its word is. KeyError if it was never set."""
        page, word = divmod(self._places[registration], _PAGE_WORDS)
        return ctypes.addressof(self._pages[page]) + word * WORD_BYTES

    def forget(self, registration: RegistrationId) -> None:
        """Its place may be another one's. It must be closed."""
        place = self._places.pop(registration, None)
        if place is not None:
            self._free.append(place)

    def close(self) -> None:
        """No reader may name anything as read any more, whatever is open."""
        for page in self._pages:
            ctypes.memset(page, 0, mmap.PAGESIZE)


class Process:
    """That process' memory, as `runtime.one_sided` reads it. For several threads."""

    hot_bytes = 2**20  # what a core's own cache holds on a server
    call_bytes = CALL_BYTES
    group_bytes = GROUP_BYTES

    def __init__(self, header: Header) -> None:
        self._header = header

    def __repr__(self) -> str:
        return f"<Process {self._header.pid}>"

    def copy(self, call: Sequence[Piece]) -> None:
        """See `copy`."""
        copy(self._header.pid, call)

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Look.is_unchanged`."""
        return Look(self._header).is_unchanged(word, generation)


class Look:
    """What a reader sees of an owner's nonce and word, after it has copied. For one thread."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._seen = ctypes.create_string_buffer(NONCE_BYTES + WORD_BYTES)
        self._at = ctypes.addressof(self._seen)

    def is_there(self) -> bool:
        """Whether that process is the one that the header is of. OSError if it cannot be read."""
        copy(self._header.pid, [self._nonce_piece()])
        return self._seen.raw[:NONCE_BYTES] == self._header.nonce

    def is_unchanged(self, word: int, generation: int) -> bool:
        """Whether it is, and its word at that address says that generation. OSError if it cannot be read."""
        copy(self._header.pid, [self._nonce_piece(), Piece(self._at + NONCE_BYTES, word, WORD_BYTES)])
        expected = self._header.nonce + generation.to_bytes(WORD_BYTES, sys.byteorder)
        return generation != 0 and self._seen.raw == expected

    def _nonce_piece(self) -> Piece:
        return Piece(self._at, self._header.address, NONCE_BYTES)
