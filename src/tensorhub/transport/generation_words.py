"""The generation words of one worker's registrations. One-sided readers look at them.

A reader copies first. Then it looks at the word, and at the nonce beside the words (R3). If both
are unchanged, no writer had been told by then that these bytes may be overwritten.

Memory order: the owner stores the word before its later writes, and the reader looks at the word
after its copy. On x86-64, every processor sees stores in the order in which they were made, those
of several threads included, and loads are done in order. So a plain store of 8 aligned bytes
suffices, and no reader sees half of a word. Other processors would need a barrier that the reader's
processor takes part in (`membarrier`). So transports by which the CPU reads are for x86-64 only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

from tensorhub.types import RegistrationId

NONCE_BYTES = 16
WORD_BYTES = 8
_PAGE_WORDS = mmap.PAGESIZE // WORD_BYTES
_NONCE_WORDS = NONCE_BYTES // WORD_BYTES


class Header(NamedTuple):
    """How a reader recognises a process: NONCE_BYTES at that address are `nonce`."""

    pid: int
    address: int
    nonce: bytes


def _private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def order_fault() -> str | None:
    """Why a word proves nothing on this kind of machine; None if it does."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"it is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
    return None


class GenerationWords:
    """The words, in memory that readers can see. A word is 0 while its registration is closed.

    One place serves several registrations, one after the other, but no generation is used twice.
    Not thread-safe: the owner calls it under the lock that guards the generations themselves.
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

    def _add_page(self) -> None:
        mapping = self._allocate(mmap.PAGESIZE)
        first = len(self._pages) * _PAGE_WORDS
        self._pages.append((ctypes.c_uint64 * _PAGE_WORDS).from_buffer(mapping))
        self._free.extend(range(first + _PAGE_WORDS - 1, first - 1, -1))

    def set(self, registration: RegistrationId, generation: int) -> None:
        """The registration is open under that generation (0: closed). Once this returns, every
        reader sees the new word.
        """
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
        if registration not in self._places:
            return 0
        page, word = divmod(self._places[registration], _PAGE_WORDS)
        return self._pages[page][word]

    def address(self, registration: RegistrationId) -> int:
        """Where its word is. KeyError if it was never set."""
        page, word = divmod(self._places[registration], _PAGE_WORDS)
        return ctypes.addressof(self._pages[page]) + word * WORD_BYTES

    def forget(self, registration: RegistrationId) -> None:
        """Free the place of a closed registration."""
        place = self._places.pop(registration, None)
        if place is not None:
            self._free.append(place)

    def close(self) -> None:
        """Close all registrations: no reader can name a chunk any more."""
        for page in self._pages:
            ctypes.memset(page, 0, mmap.PAGESIZE)
