"""The baseline of one-sided transports: the same bytes, copied out of another process' memory, and
nothing else.

By `process_vm_readv` (cma), or by memmove out of a mapping of the memfd in which they are (shm); by
one thread or by two, which take turns at calls of 8 MiB. With digests the calls are of 1 MiB, each
piece is digested while it is in the cache, and compared with the source's digest, which was made
before.
"""

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import xxhash

from benches.comparison.threads import in_threads
from tensorhub.memory.addresses import address_of, bytes_at
from tensorhub.transport import cma, segments as shm
from tensorhub.transport.nixl.agents import Exposures, make_agent
from tensorhub.transport.one_sided import Piece, cut_up
from tensorhub.types import RegistrationId

Kind = Literal["cma", "shm", "nixl"]
POLL_S = 0.0002
HOT_BYTES = 2**20  # of a call whose pieces are digested: they are still in the nearest cache


@dataclass(frozen=True, slots=True)
class Lie:
    """Where the bytes of a process lie. `segments`: (address, bytes, descriptor) of the shared
    memory that they are in.
    """

    pid: int
    addresses: tuple[int, ...]
    segments: tuple[tuple[int, int, int], ...]
    agent: bytes = b""  # its NIXL agent's metadata

    @staticmethod
    def of(views: Sequence[memoryview], exposures: Exposures | None = None) -> "Lie":
        """Of this process' own memory."""
        places = [(address_of(view), view.nbytes) for view in views]
        agent = (
            exposures.of(RegistrationId("bare"), places, views).metadata
            if exposures is not None
            else b""
        )
        segments = shm.segments_of([(address_of(view), view.nbytes) for view in views]) or ()
        found = tuple(
            [(segment.address, segment.nbytes, segment.descriptor) for segment in segments]
        )
        return Lie(os.getpid(), tuple([address_of(view) for view in views]), found, agent)


def digests_of(views: Sequence[memoryview]) -> list[int]:
    """Of each piece that a reader digests."""
    pieces = [Piece(address_of(view), 0, view.nbytes) for view in views]
    cut = [piece for call in cut_up(pieces, HOT_BYTES) for piece in call]
    return [xxhash.xxh3_64_intdigest(bytes_at(piece.here, piece.nbytes, None)) for piece in cut]


class NixlRead:
    """One READ of everything, straight into these views."""

    def __init__(self, there: Lie, views: Sequence[memoryview]) -> None:
        self._agent = agent = make_agent("bare")
        here = [(address_of(view), view.nbytes, 0) for view in views]
        agent.register_memory([(*place, "") for place in here], "DRAM")
        name = agent.add_remote_agent(there.agent)
        far = [
            (address, view.nbytes, 0) for address, view in zip(there.addresses, views, strict=True)
        ]
        mine, theirs = (
            agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM"),
            agent.prep_xfer_dlist(name, far, "DRAM"),
        )
        every = list(range(len(here)))
        self._transfer = agent.make_prepped_xfer("READ", mine, every, theirs, every)

    def read(self) -> None:
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(self._transfer)
        if state != "DONE":
            raise SystemExit(f"NIXL's transfer ended as {state}")


class Reader:
    """Copies from there into these views, again and again."""

    def __init__(self, kind: Kind, there: Lie, views: Sequence[memoryview]) -> None:
        self._copy = self._by_shm if kind == "shm" else self._by_cma
        self._transfer = NixlRead(there, views) if kind == "nixl" else None
        self._pid = there.pid
        self._mapped = (
            [_map(there.pid, segment[2], segment[1]) for segment in there.segments]
            if kind == "shm"
            else []
        )
        addresses = (
            there.addresses
            if kind != "shm"
            else [self._here(there, address) for address in there.addresses]
        )
        places = zip(views, addresses, strict=True)
        pieces = [Piece(address_of(view), address, view.nbytes) for view, address in places]
        self._calls, self._hot_calls = list(cut_up(pieces)), list(cut_up(pieces, HOT_BYTES))
        self._arrived = [
            [bytes_at(piece.here, piece.nbytes, None) for piece in call] for call in self._hot_calls
        ]

    def read(self, threads: int, digests: list[int] | None = None) -> None:
        """Copy all of it. `digests`: what `digests_of` gave there; ValueError if one differs."""
        if self._transfer is not None:
            self._transfer.read()
            return
        calls = self._calls if digests is None else self._hot_calls
        ends = list(accumulate(len(call) for call in calls))

        def work(part: int) -> None:
            for number in range(part, len(calls), threads):
                self._copy(calls[number])
                if digests is not None:
                    expected = digests[ends[number] - len(calls[number]) : ends[number]]
                    _compare(self._arrived[number], expected)

        in_threads(threads, work)

    def _by_cma(self, call: Sequence[Piece]) -> None:
        cma.copy(self._pid, call)

    def _by_shm(self, call: Sequence[Piece]) -> None:
        for here, there, nbytes in call:
            ctypes.memmove(here, there, nbytes)

    def _here(self, there: Lie, address: int) -> int:
        for (start, nbytes, _), mapped in zip(there.segments, self._mapped, strict=True):
            if start <= address < start + nbytes:
                return mapped.address + address - start
        raise ValueError("that source's memory is not shared")


def _map(pid: int, descriptor: int, nbytes: int) -> shm.MappedSegment:
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
    try:
        return shm.MappedSegment(opened, nbytes)
    finally:
        os.close(opened)


def _compare(arrived: Sequence[memoryview], expected: Sequence[int]) -> None:
    if [xxhash.xxh3_64_intdigest(view) for view in arrived] != expected:
        raise ValueError("a piece arrived with other bytes than were there")
