"""Reading another process' memory: what is copied, what words say, and that no stale or torn byte
is ever named.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tensorhub.memory.addresses import address_of
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.manifest import TensorDescription, build_manifest
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.transport import cma
from tensorhub.transport.cma import CmaTransport, Process
from tensorhub.transport.generation_words import WORD_BYTES, GenerationWords
from tensorhub.transport.one_sided import (
    CALL_BYTES,
    CALL_PIECES_MAX,
    LANES_MAX,
    Piece,
    cut_up,
)
from tensorhub.types import ContentId, RegistrationId
from tests.transport.patience import local

HERE = os.getpid()
needs_cma = pytest.mark.skipif(cma.fault_here() is not None, reason=str(cma.fault_here()))


# --------------------------------------------------------------------------------------------------
# copying


@given(st.lists(st.integers(0, 3 * CALL_BYTES), max_size=8), st.integers(0, 3000))
def test_calls_are_small_and_leave_nothing_out(sizes: list[int], many: int) -> None:
    pieces = [
        Piece(index << 40, index << 50, size) for index, size in enumerate([*sizes, *[7] * many])
    ]
    calls = list(cut_up(pieces))
    for call in calls:
        assert 0 < len(call) <= CALL_PIECES_MAX
        assert sum(piece.nbytes for piece in call) <= CALL_BYTES
        assert all(piece.nbytes for piece in call)
    done: dict[int, int] = {}
    for here, there, nbytes in (piece for call in calls for piece in call):
        index = here >> 40
        assert (here - (index << 40)) == (there - (index << 50)) == done.get(index, 0)
        done[index] = done.get(index, 0) + nbytes
    assert done == {index: piece.nbytes for index, piece in enumerate(pieces) if piece.nbytes}


@needs_cma
def test_what_cannot_be_read_is_an_error_and_what_lies_before_it_is_copied() -> None:
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    pages[:] = b"x" * len(pages)
    there = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    _libc_mprotect(there + mmap.PAGESIZE)
    target = bytearray(2 * mmap.PAGESIZE)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno says it
        cma.copy(HERE, [Piece(address_of(memoryview(target)), there, len(target))])
    assert caught.value.errno == errno.EFAULT
    assert target == b"x" * mmap.PAGESIZE + bytes(mmap.PAGESIZE)


@needs_cma
@pytest.mark.parametrize("cores", [1, 2, 100])
def test_a_source_is_read_by_as_many_threads_as_there_are_cores_for(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    with closing(CmaTransport(local())) as transport:
        assert transport.lanes == min(LANES_MAX, cores)


@needs_cma
def test_a_copy_that_brings_nothing_is_no_fault_of_an_earlier_call() -> None:
    ctypes.set_errno(errno.EPERM)
    target = bytearray(1)
    at = address_of(memoryview(target))
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno says it
        cma.copy(HERE, [Piece(at, at, 0)])
    assert caught.value.errno == errno.EFAULT


def _libc_mprotect(address: int) -> None:
    assert (
        ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), ctypes.c_int(0)
        )
        == 0
    )


@needs_cma
def test_a_process_that_has_ended_says_so() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    target = bytearray(8)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno says it
        cma.copy(ended.pid, [Piece(address_of(memoryview(target)), 4096, 8)])
    assert caught.value.errno == errno.ESRCH
    assert "pid namespaces" in cma.why_not(caught.value)


def test_each_reason_says_what_to_do() -> None:
    assert "ptrace_scope" in cma.why_not(OSError(errno.EPERM, "no"))
    assert "Bad address" in cma.why_not(OSError(errno.EFAULT, "Bad address"))


def test_other_machines_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cma.fault_here() == "it is for Linux on x86-64, and this is linux on aarch64"


@needs_cma
def test_a_kernel_that_forbids_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(cma, "_readv", forbidden)
    fault = cma.fault_here()
    assert fault is not None
    assert "seccomp" in fault


@pytest.mark.parametrize(
    ("scope", "says"), [("0", None), ("1", "name cma in transports="), ("2", "CAP_SYS_PTRACE")]
)
def test_yama_is_told_of(scope: str, says: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ptrace_scope"
    assert cma.restriction(file) is None  # no Yama
    file.write_text(f"{scope}\n")
    found = cma.restriction(file)
    assert found is None if says is None else found is not None and says in found


# --------------------------------------------------------------------------------------------------
# words


@needs_cma
def test_every_registration_has_a_word_of_its_own() -> None:
    words, many = GenerationWords(), 2000
    for number in range(many):
        words.set(RegistrationId(str(number)), number + 1)
    places = {words.address(RegistrationId(str(number))) for number in range(many)}
    assert len(places) == many
    assert all(place % WORD_BYTES == 0 for place in places)
    look = Process(words.header)
    assert all(look.is_unchanged(words.address(RegistrationId(str(n))), n + 1) for n in range(many))
    words.close()
    assert not look.is_there()
    assert not any(
        look.is_unchanged(words.address(RegistrationId(str(n))), n + 1) for n in range(many)
    )


def test_a_registration_is_closed_until_its_word_is_set_and_once_it_is_forgotten() -> None:
    words, registration = GenerationWords(), RegistrationId("r")
    assert words.get(registration) == 0
    words.set(registration, 5)
    assert words.get(registration) == 5
    words.set(registration, 0)
    assert words.get(registration) == 0
    words.forget(registration)
    assert words.get(registration) == 0


@needs_cma
def test_a_word_is_looked_at_with_the_nonce() -> None:
    words, other = GenerationWords(), GenerationWords()
    words.set(RegistrationId("r"), 5)
    at = words.address(RegistrationId("r"))
    assert Process(words.header).is_unchanged(at, 5)
    assert not Process(words.header).is_unchanged(at, 6)
    assert not Process(words.header._replace(nonce=other.header.nonce)).is_unchanged(at, 5)
    assert not Process(words.header._replace(nonce=other.header.nonce)).is_there()
    words.set(RegistrationId("r"), 0)
    assert not Process(words.header).is_unchanged(at, 5)
    assert not Process(words.header).is_unchanged(at, 0)  # no generation at all


# --------------------------------------------------------------------------- what an owner does
# while a reader reads

CELLS = 4
CELL_BYTES = 4096
REGISTRATION = RegistrationId("r")
MANIFEST = build_manifest(
    [TensorDescription("t", "uint8", (CELLS * CELL_BYTES,), 1 << 40, CELLS * CELL_BYTES)],
    CELL_BYTES,
    "none",
)


@dataclass
class _Owner:
    """Memory whose every byte says under which generation it was written."""

    generations: count[int] = field(default_factory=lambda: count(1))
    bytes: bytearray = field(default_factory=lambda: bytearray(CELLS * CELL_BYTES))
    words: GenerationWords = field(default_factory=GenerationWords)
    generation: int = 0  # open now, or last
    is_open: bool = False

    def __post_init__(self) -> None:
        self.shared = SharedOwner(words=self.words)
        self.memory = ChunkMemory(MANIFEST, [memoryview(self.bytes)])

    def toggle(self) -> None:
        """Open the memory, with what it holds, or fence it."""
        if self.is_open:
            self.shared.fence(REGISTRATION)
        else:
            self.write(range(CELLS))
            self.shared.open(
                REGISTRATION, self.generation, ContentId("c"), self.memory, complete=True
            )
        self.is_open = not self.is_open

    def write(self, cells: range) -> None:
        """Overwrite some of it, if it may be."""
        if not self.is_open:
            self.generation = next(self.generations)
            for cell in cells:
                self.bytes[cell * CELL_BYTES : (cell + 1) * CELL_BYTES] = (
                    bytes([self.generation % 256]) * CELL_BYTES
                )

    def forget(self) -> None:
        """The registration ends, and another one takes its place."""
        if not self.is_open:
            self.shared.forget(REGISTRATION)
            self.words.set(
                RegistrationId(f"other {self.generation}"), 2**40 + next(self.generations)
            )


@dataclass
class _Reader:
    """Reads piece by piece what it was told lies somewhere, and looks at the word at last."""

    owner: _Owner
    target: bytearray = field(default_factory=lambda: bytearray(CELLS * CELL_BYTES))
    located: tuple[int, int, int] | None = None  # generation, address, word
    copied: int = 0

    def locate(self) -> None:
        if self.owner.is_open:
            right = (REGISTRATION, self.owner.generation, ContentId("c"))
            with self.owner.shared.access(None, *right, range(CELLS), 2**40, 0) as answer:
                assert isinstance(answer, tuple)
                access, memory = answer
                self.located = (
                    access.generation,
                    memory.address(0),
                    self.owner.shared.word_of(access),
                )
                self.copied = 0

    def copy(self) -> None:
        if self.located is not None and self.copied < len(self.target):
            here, half = address_of(memoryview(self.target)), CELL_BYTES // 2
            cma.copy(HERE, [Piece(here + self.copied, self.located[1] + self.copied, half)])
            self.copied += half

    def look(self) -> None:
        """What it names must be of that generation, whole."""
        if self.located is None or not self.copied:
            return
        generation, _, word = self.located
        if Process(self.owner.words.header).is_unchanged(word, generation):
            assert set(self.target[: self.copied]) == {generation % 256}
        self.located = None


STEPS = st.sampled_from(
    [
        "toggle",
        "toggle",
        "write one",
        "write one",
        "forget",
        "end",
        "locate",
        "copy",
        "copy",
        "look",
    ]
)


@needs_cma
@settings(max_examples=300)
@given(st.lists(STEPS, min_size=3, max_size=12))
def test_no_interleaving_gives_a_reader_what_is_not_of_its_generation(steps: list[str]) -> None:
    owner = _Owner()
    reader = _Reader(owner)
    does: dict[str, Callable[[], None]] = {
        "toggle": owner.toggle,
        "write one": lambda: owner.write(range(1)),
        "forget": owner.forget,
        "end": owner.words.close,
        "locate": reader.locate,
        "copy": reader.copy,
        "look": reader.look,
    }
    for step in ["toggle", "locate", "copy", *steps, "look"]:
        does[step]()


@needs_cma
def test_an_undisturbed_reader_names_what_it_read() -> None:
    """The property above would hold for a reader that names nothing."""
    owner = _Owner()
    owner.toggle()
    reader = _Reader(owner)
    reader.locate()
    assert reader.located is not None
    assert Process(owner.words.header).is_unchanged(reader.located[2], owner.generation)
    owner.shared.end_reading()
    assert not Process(owner.words.header).is_unchanged(reader.located[2], owner.generation)
    assert owner.shared.header is None
