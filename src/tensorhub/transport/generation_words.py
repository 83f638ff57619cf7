"""The generation words of one worker's registrations, at which those look who read its memory by themselves.

A reader copies first and looks at the word and at the nonce beside it afterwards (R3). Both are unchanged: up to then nobody
was told that these bytes may be overwritten.

The order of memory. The owner's store of a word comes before its later writes, and the reader's look at it comes after its
copying. On x86-64 every processor sees stores in the order in which they were made, also those of several threads, and loads
are done in order: a plain store of 8 aligned bytes suffices, and a torn look can never give a whole word that is not there.
Elsewhere the store would need a barrier that the reader's processor takes part in (`membarrier`), so what reads by the CPU
is x86-64's only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

from tensorhub.types import RegistrationId

NONCE_BYTES = 16
WORD_BYTES = 8
_PAGE_WORDS = mmap.PAGESIZE // WORD_BYTES
_NONCE_WORDS = NONCE_BYTES // WORD_BYTES


class Header(NamedTuple):
    """Where a process' nonce is, and what it must be: `nonce`, NONCE_BYTES long."""

    pid: int
    address: int
    nonce: bytes


def _private(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class GenerationWords:
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
        return f"<GenerationWords of {len(self._places)} registrations>"

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
