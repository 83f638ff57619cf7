"""Reading by NIXL: one agent of a worker does all its reads, and they land in memory of that agent.

UCX cannot take a read back: a read that was given up may still write later. So reads land in memory
that has no other use, on the destination's device, and the bytes are copied from there. An agent
with a read whose end is not known takes no new readers. It ends with its last reader, and its reads
end with it (`Agents`).

Responsible for reading, and for its end. Not responsible for deciding whether a read counts
(`nixl.transport`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tensorhub.cuda.copies import copy_pieces, joined
from tensorhub.cuda.device import Device, Mark
from tensorhub.errors import TransportUnavailable
from tensorhub.transport.base import NotShared
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.nixl.agents import GPU_ADVICE, ON_HOST, make_agent, name_of
from tensorhub.transport.one_sided import Piece, Source, cut_up

SLOT_BYTES = 2 * 2**20  # of one read: where UCX copies by itself (cma), nothing cuts it short
SLOTS = 4  # of one landing: reads in flight, of one thread
LANDINGS_MAX = 64  # of one agent
PAUSE_LEAST_S, PAUSE_MOST_S = 20e-6, 1e-3  # between two looks at a read
GRACE_S = 0.2  # for reads that were given up to end by themselves


def check_metadata(name: str, metadata: bytes) -> None:
    """ValueError unless it begins like the metadata of an agent with this name. NIXL checks the
    rest.
    """
    named = name.encode()
    if not metadata.startswith(
        b"nixlSerDes|Agent" + len(named).to_bytes(8, sys.byteorder) + named + b"|Conns"
    ):
        raise ValueError("it is none of that agent: other versions of NIXL may have another form")


def _kind(device: int) -> tuple[str, int]:
    """How NIXL names that memory: its kind, and which of it."""
    return ("DRAM", 0) if device == ON_HOST else ("VRAM", device)


class Landing:
    """Memory in which reads land, one in each of its slots: on that device, or the host. For one
    thread at a time.
    """

    def __init__(self, agent: Any, device: Device | None = None) -> None:
        nbytes = SLOTS * SLOT_BYTES
        self.device = device
        self.kind, self.number = _kind(ON_HOST if device is None else device.index)
        self._copying: dict[int, Mark] = {}  # by slot: what the device copies out of it
        if device is None:
            self._bytes: object = (mapping := mmap.mmap(-1, nbytes))
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        else:
            self._bytes = taken = device.allocate(nbytes)
            self._queue, self.address = device.queue(), taken.address
        agent.register_memory([(self.address, nbytes, self.number, "")], self.kind)

    def copy_out(self, slot: int, pieces: Sequence[Piece]) -> None:
        """Copy what has landed in that slot to where it belongs. On a device, the copy has only
        begun when this returns.
        """
        at, moves = self.address + slot * SLOT_BYTES, list[tuple[int, int, int]]()
        for here, _, nbytes in pieces:
            moves.append((here, at, nbytes))
            at += nbytes
        if self.device is None:
            for move in joined(moves):
                ctypes.memmove(*move)
            return
        self.device.settle()
        copy_pieces(self._queue, moves)
        self._copying[slot] = self._queue.mark()

    def empty(self, slot: int) -> None:
        """Wait until what has landed there is where it is wanted."""
        if (mark := self._copying.pop(slot, None)) is not None:
            mark.wait()

    def settle(self) -> None:
        """As `empty`, of all slots."""
        for slot in list(self._copying):
            self.empty(slot)


# whose agents did not end when they were to: they may be written until the process ends
_unended: list[Landing] = []


@dataclass(slots=True)
class _Loaded:
    """Another agent, as this one knows it."""

    metadata: bytes
    users: int = 0


@dataclass(slots=True)
class _Reading:
    """A read that was posted. Nothing else refers to its handle, which keeps the agent: not even
    errors' frames do.
    """

    handle: Any
    slot: int
    pieces: Sequence[Piece]

    def release(self) -> None:
        self.handle.release()
        self.handle = None


Watch = Callable[[float], None]
"""Called again and again during a wait, with the time at which it began (`time.monotonic`). Ends it
by raising OSError.
"""


class ReadingAgent:
    """An agent that reads, and the memory in which its reads land. For several threads.
    TransportUnavailable.
    """

    def __init__(self) -> None:
        self._agent = make_agent("reader")
        self._lock = threading.Lock()  # guards the attributes below
        self._landings: list[Landing] = []  # that are free
        self._landings_made = 0
        self._loaded: dict[str, _Loaded] = {}
        # reads whose end is not known, and where they may write until then
        self._left: list[tuple[_Reading, Landing]] = []
        self.users = 0  # belongs to `Agents`
        self.is_spent = False  # no new reader may use it

    def __repr__(self) -> str:
        return (
            f"<ReadingAgent of {len(self._loaded)} sources, {self._landings_made} landings, "
            f"{len(self._left)} reads left>"
        )

    def load(self, name: str, metadata: bytes) -> None:
        """Know that agent, until `unload`. OSError: NIXL does not take it. ValueError: it is
        none.
        """
        check_metadata(name, metadata)
        with self._lock:
            known = self._loaded.get(name)
            if known is None:
                self._load(name, metadata)
                known = self._loaded[name] = _Loaded(metadata)
            if known.metadata != metadata:
                raise ValueError("another agent has that name")
            known.users += 1

    def _load(self, name: str, metadata: bytes) -> None:
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            self.is_spent = True  # what it kept of that is not known
            text = (
                f"NIXL cannot reach it ({name_of(error)}): their UCX needs a way in common "
                f"(UCX_TLS, UCX_NET_DEVICES)"
            )
            raise OSError(errno.EHOSTUNREACH, text) from error.with_traceback(None)
        if (found if isinstance(found, str) else found.decode(errors="replace")) != name:
            self.is_spent = True
            raise ValueError(f"it is said to be {name!r}, and is of another agent")

    def unload(self, name: str) -> None:
        """One user of that agent less."""
        with self._lock:
            known = self._loaded[name]
            known.users -= 1
            if not known.users:
                del self._loaded[name]
                if not self._left:  # else a read from it might run on
                    with suppress(Exception):  # it is forgotten already where a read has failed
                        self._agent.remove_remote_agent(name)

    def prepare(self, device: Device) -> None:
        """Make sure that reads can land there. NotShared: they cannot."""
        try:
            landing = self._take(device)
        except OSError as error:
            raise NotShared(str(error.strerror)) from error
        with self._lock:
            self._landings.append(landing)

    def read(
        self,
        name: str,
        pieces: Sequence[Piece],
        watch: Watch,
        there: int = ON_HOST,
        here: Device | None = None,
    ) -> None:
        """Copy these pieces out of that agent's memory (`there`: the number of a GPU) into memory
        of the device `here`. OSError: not all could be read. Nothing is written after that.
        """
        landing, batches, free = self._take(here), cut_up(pieces, SLOT_BYTES), deque(range(SLOTS))
        posted: deque[_Reading] = deque()
        try:
            while True:
                while free and (batch := next(batches, None)) is not None:
                    landing.empty(slot := free.popleft())
                    self._post(name, there, landing, slot, batch, posted)
                if not posted:
                    break
                self._wait(posted[0], watch)
                landing.copy_out(posted[0].slot, posted[0].pieces)
                posted[0].release()
                free.append(posted.popleft().slot)
        finally:
            try:
                landing.settle()
            finally:
                self._give_back(landing, posted)

    def _take(self, device: Device | None) -> Landing:
        with self._lock:
            for landing in self._landings:
                if landing.device is device:
                    self._landings.remove(landing)
                    return landing
            if self._landings_made >= LANDINGS_MAX:
                raise OSError(errno.ENOBUFS, f"{LANDINGS_MAX} threads read by NIXL already")
            try:
                made = Landing(self._agent, device)
            except Exception as error:
                advice = "look at `ulimit -l`" if device is None else GPU_ADVICE
                text = f"NIXL has no memory to read into ({name_of(error)}): {advice}"
                raise OSError(errno.ENOMEM, text) from error.with_traceback(None)
            self._landings_made += 1
            return made

    def _post(
        self,
        name: str,
        device: int,
        landing: Landing,
        slot: int,
        pieces: Sequence[Piece],
        posted: deque[_Reading],
    ) -> None:
        agent, here, at = self._agent, [], landing.address + slot * SLOT_BYTES
        for piece in pieces:
            here.append((at, piece.nbytes, landing.number))
            at += piece.nbytes
        kind, number = _kind(device)
        there = [(piece.there, piece.nbytes, number) for piece in pieces]
        try:
            mine, theirs = (
                agent.get_xfer_descs(here, landing.kind),
                agent.get_xfer_descs(there, kind),
            )
            posted.append(_Reading(agent.initialize_xfer("READ", mine, theirs, name), slot, pieces))
            agent.transfer(posted[-1].handle)  # a failure shows as its state, too
        except Exception as error:
            text = f"NIXL cannot read there ({name_of(error)})"
            raise OSError(errno.EIO, text) from error.with_traceback(None)

    def _wait(self, reading: _Reading, watch: Watch) -> None:
        since, pause_s = time.monotonic(), PAUSE_LEAST_S
        while not self._is_done(reading):
            watch(since)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)

    def _is_done(self, reading: _Reading) -> bool:
        """Whether a read has ended well. OSError: it has failed."""
        try:
            state = self._agent.check_xfer_state(reading.handle)
        except Exception as error:
            text = f"NIXL's read has failed ({name_of(error)})"
            raise OSError(errno.EIO, text) from error.with_traceback(None)
        if state not in ("DONE", "PROC"):
            raise OSError(errno.EIO, f"NIXL's read has ended as {state}")
        return bool(state == "DONE")

    def _give_back(self, landing: Landing, posted: Iterable[_Reading]) -> None:
        """Use a landing again only if all its reads have ended well. Any other read may still write
        there.
        """
        until = time.monotonic() + GRACE_S
        left = [reading for reading in posted if not self._ends_well(reading, until)]
        with self._lock:
            if left:
                self.is_spent = True
                self._left += [(reading, landing) for reading in left]
            else:
                self._landings.append(landing)

    def _ends_well(self, reading: _Reading, until: float) -> bool:
        """Whether this read does so in time; then it is released."""
        with suppress(OSError):
            while not self._is_done(reading):
                if time.monotonic() > until:
                    return False
                time.sleep(PAUSE_MOST_S)
            reading.release()
            return True
        return False

    def close(self) -> None:
        """End the agent and its running reads. No reader may use it."""
        for reading, _ in self._left:
            with suppress(Exception):
                reading.release()
        inside = weakref.ref(self._agent.agent)
        del self._agent  # ends it: from here on nothing writes into its landings
        if inside() is not None:  # something refers to it all the same
            _unended.extend(landing for _, landing in self._left)
        self._left.clear()
        self._landings.clear()


class Agents:
    """A worker's reading agents: one at a time takes new readers, and a spent one ends with its
    last reader.
    """

    def __init__(self) -> None:
        """Raises TransportUnavailable."""
        self._lock = threading.Lock()
        self._present: ReadingAgent | None = ReadingAgent()
        self._is_closed = False

    def enter(self) -> ReadingAgent:
        """The agent to read by now, for one reader, which leaves it. TransportUnavailable."""
        with self._lock:
            if self._is_closed:
                raise TransportUnavailable("this worker is about to end")
            if self._present is None or self._present.is_spent:
                self._let_go()
                self._present = ReadingAgent()
            self._present.users += 1
            return self._present

    def leave(self, agent: ReadingAgent) -> None:
        with self._lock:
            agent.users -= 1
            if agent is self._present:
                if agent.is_spent or self._is_closed:
                    self._let_go()
            elif not agent.users:
                agent.close()

    def close(self) -> None:
        """Admit no new reader; the agent ends with its last reader."""
        with self._lock:
            self._is_closed = True
            self._let_go()

    def _let_go(self) -> None:
        agent, self._present = self._present, None
        if agent is not None and not agent.users:
            agent.close()


class Remote(Source):
    """One source's agent, as `transport.one_sided` reads it. For several threads; `close` is for
    the last one.
    """

    hot_bytes = SLOTS * SLOT_BYTES  # smaller calls would leave the wire idle between them

    def __init__(
        self,
        agents: Agents,
        name: str,
        metadata: bytes,
        is_over: Callable[[], bool],
        stall_timeout_s: float,
        there: int = ON_HOST,
        here: Device | None = None,
    ) -> None:
        """`is_over`: no caller waits for a read any more. `there`: the number of the source's GPU;
        `here`: the destination's. Raises OSError, ValueError, TransportUnavailable (see `load`);
        NotShared: nothing can be read to there.
        """
        self._agents = agents
        self._name = name
        self._is_over = is_over
        self._stall_timeout_s = stall_timeout_s
        self._there = there
        self._here = here
        self._agent = agents.enter()
        try:
            if here is not None:
                self._agent.prepare(here)
            self._agent.load(name, metadata)
        except BaseException:
            agents.leave(self._agent)
            raise

    def __repr__(self) -> str:
        return f"<Remote {self._name} by {self._agent!r}>"

    def _watch(self, since: float) -> None:
        if self._is_over():
            raise OSError(errno.ECANCELED, "the connection to its owner has ended")
        if time.monotonic() - since > self._stall_timeout_s:
            raise TimeoutError(
                errno.ETIMEDOUT, f"NIXL has brought nothing for {self._stall_timeout_s:g} s"
            )

    def copy(self, call: Sequence[Piece]) -> None:
        self._agent.read(self._name, call, self._watch, self._there, self._here)

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Source.is_unchanged`. Only the process that told of the agent answers. The word is
        in host memory, wherever the bytes are.
        """
        seen = ctypes.c_uint64()
        self._agent.read(self._name, [Piece(ctypes.addressof(seen), word, WORD_BYTES)], self._watch)
        return generation != 0 and seen.value == generation

    def close(self) -> None:
        self._agent.unload(self._name)
        self._agents.leave(self._agent)
