"""A worker's memory and the right to read it, for threads; the fence; and the lanes that serve
readers.

`SharedOwner` puts the pure `Owner` behind one condition variable. It is what transports know of a
worker's memory (`transport.owner.OwnedMemory`). While a lane digests or sends it holds no lock,
only a counted access; the generation is checked, under the lock, for every send call. One-sided
readers have no access: they look at the registration's generation word, which is cleared under the
same lock. Not responsible for the places of readers (`served_lanes`), for the existence of
versions, nor for sending readers here.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from itertools import islice
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import anyio
import anyio.to_thread

from tensorhub.errors import DrainTimeout, StateError
from tensorhub.layouts.reading import Selection
from tensorhub.layouts.shared import Share
from tensorhub.machine import InvariantBroken
from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.on_demand import Loader
from tensorhub.messages import Origin
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX, Access, Refusal, Wait
from tensorhub.model.digests import pack, root_of, runs_of
from tensorhub.runtime.data.bases import Bases
from tensorhub.runtime.data.deltas import Deltas
from tensorhub.runtime.data.selections import Selections
from tensorhub.runtime.data.served_lanes import ServedLanes
from tensorhub.runtime.data.served_times import ServedTimes
from tensorhub.runtime.data.vote_budget import VoteBudget
from tensorhub.runtime.threads import run_in_thread
from tensorhub.transport.base import NotShared
from tensorhub.transport.generation_words import WORD_BYTES, GenerationWords, Header
from tensorhub.transport.owner import CannotServe, Lane, OpenMemory, OwnerSide
from tensorhub.transport.segments import Segment
from tensorhub.types import ContentId, Incarnation, RegistrationId
from tensorhub.worker.fencing import look
from tensorhub.worker.owner import Owner

FENCE_GRACE_S = 1.0  # how long a send call may go on before its reader is taken for stopped
FENCE_TIMEOUT_S = 60.0
# in one access, before a fence gets its turn, or a reader finds that a digest is there
DIGESTED_BYTES = 8 * 2**20
P = ParamSpec("P")
T = TypeVar("T")

NOT_OPEN = Refusal("this memory is not open under that generation")
STOPPED = Refusal("this reader is served no more")
BROKEN = Refusal("this memory was written, replaced or freed since others may read it")


class Promise(Protocol):
    """An owner's promise that its memory stays as it is while it may be read, as far as a check can
    tell. For any thread.
    """

    def is_there(self, regions: Iterable[int] | None) -> bool:
        """Whether the memory of these regions (None: of all) was neither replaced nor freed, so
        that it can be touched.
        """

    def is_kept(self, regions: Iterable[int] | None) -> bool:
        """Whether, besides, no write to it was seen."""


def _locked(method: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[SharedOwner, P], T]:
    """The method of `Owner` with that name, as a method of `SharedOwner` under its lock."""

    @wraps(method)
    def under_lock(self: SharedOwner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._changed:
            return method(self._owner, *args, **kwargs)

    return under_lock


class SharedOwner:
    """One worker's `Owner` with the memory itself and the lanes that serve it. Every method may be
    called by any thread.
    """

    def __init__(
        self,
        sides: Sequence[OwnerSide] = (),
        *,
        fence_grace_s: float = FENCE_GRACE_S,
        words: GenerationWords | None = None,
    ) -> None:
        """`sides`: the owner's sides of its transports besides tcp. `words`: the generation words
        for one-sided readers, if not new ones; without sides there are no one-sided readers.
        """
        self.sides = tuple(sides)
        # `take_made` has something; any thread
        self.on_made: Callable[[RegistrationId], None] = lambda registration: None
        # That chunk of its own grid may have changed under that generation; any thread.
        self.on_suspicion: Callable[[RegistrationId, int, int], None] = (
            lambda registration, generation, chunk: None
        )
        # guards everything below; notified when any of it changes
        self._changed = threading.Condition()
        self._owner = Owner()
        self._memory: dict[RegistrationId, ChunkMemory] = {}
        # the registration's memory in the chunks of selections
        self._selected: dict[RegistrationId, dict[str, ChunkMemory]] = {}
        self._votes: dict[RegistrationId, VoteBudget] = {}
        self._promises: dict[RegistrationId, Promise] = {}
        self._loaders: dict[RegistrationId, Loader] = {}  # of memory that is loaded on demand
        # under which generation a promise was found broken
        self._broken: dict[RegistrationId, int] = {}
        self._selections = Selections()
        self._lanes = ServedLanes(self._changed)
        self.served_times = ServedTimes()
        self.deltas = Deltas()
        self._bases = Bases(self._owner, self.access)
        self._inside: dict[int, Lane | None] = {}  # access number -> its lane; None: a local copy
        self._fence_grace_s = fence_grace_s
        # Always a registration's open generation; 0, from before the fence, where it is closed.
        self._words = words if words is not None else _words_for(sides)

    def __repr__(self) -> str:
        return f"<SharedOwner {self._owner!r}, {len(self._lanes)} lanes>"

    # -------------------------------------------------------------------------------------------
    # what is held

    # The books, as they are now.
    digests = _locked(Owner.digests)
    has = _locked(Owner.has)
    origin = _locked(Owner.origin)
    origins = _locked(Owner.origins)
    take_made = _locked(Owner.take_made)
    selections = _locked(Owner.selections)
    chunk_count = _locked(Owner.chunk_count)
    is_quiet = _locked(Owner.is_quiet)

    def open(
        self,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        memory: ChunkMemory,
        *,
        complete: bool,
        digests: Sequence[int | None] | None = None,
        tells: bool = False,
        promise: Promise | None = None,
        keeps_base: bool = False,
        loader: Loader | None = None,
    ) -> None:
        """Let readers in: to all of it, or (complete False) to what `mark_available` names from now
        on. `tells`: `on_made` hears of digests that are made. `promise`: looked at before and after
        the memory is touched. `keeps_base`: the memory is as it was when it was fenced. `loader`:
        hears which chunks are asked for, of memory that is loaded on demand. Such memory is neither
        the base of a delta, nor read one-sided: what is not loaded there is no content.
        """
        what, grid = (registration, generation, content_id, memory.sizes), memory.manifest.grid_id
        with self._changed:
            if loader is None:
                others = {r: m for r, m in self._memory.items() if r not in self._loaders}
                opened = registration, content_id, memory, complete, keeps_base
                self._bases.opened(*opened, others)
                self.deltas.opened(registration, generation, content_id, memory)
            else:
                self._loaders[registration] = loader
            self._owner.open(*what, complete=complete, digests=digests, tells=tells, grid=grid)
            self._memory[registration] = memory
            self._selected.pop(registration, None)
            self._votes[registration] = VoteBudget(sum(memory.sizes))
            self._promises.pop(registration, None)
            if promise is not None:
                self._promises[registration] = promise
            self._set_word(registration, generation)
            self._changed.notify_all()

    def keep_books(
        self,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        memory: ChunkMemory,
        digests: Sequence[int | None] | None = None,
    ) -> None:
        """Remember the chunks that arrive, until they are forgotten, for memory that serves no
        reader. `digests`: of chunks that may be there already; see `kept`.
        """
        with self._changed:
            if self._owner.digests(registration, generation) is None:
                what, grid = (
                    (registration, generation, content_id, memory.sizes),
                    memory.manifest.grid_id,
                )
                self._owner.open(*what, complete=False, digests=digests, serves=False, grid=grid)
                self._memory[registration] = memory

    def reopen(self, registration: RegistrationId, generation: int) -> None:
        """See `Owner.reopen`: the content and its digests get another generation."""
        with self._changed:
            self._owner.reopen(registration, generation)
            self.deltas.reopened(registration, generation)
            self._set_word(registration, generation)
            self._changed.notify_all()

    def mark_available(
        self,
        registration: RegistrationId,
        generation: int,
        arrived: Iterable[tuple[int, int | None]],
        origin: Origin | None = None,
    ) -> bool:
        """See `Owner.mark_available`; readers that wait for these chunks go on."""
        with self._changed:
            taken = self._owner.mark_available(registration, generation, arrived, origin)
            self._changed.notify_all()
            return taken

    def revoke(self, registration: RegistrationId, generation: int, chunks: Iterable[int]) -> None:
        """See `Owner.revoke`; returns when no read of these chunks runs. A reader that takes them
        too slowly loses its connection.
        """
        with self._changed:
            inside = self._owner.revoke(registration, generation, chunks)
            if not self._changed.wait_for(
                lambda: inside.isdisjoint(self._inside), self._fence_grace_s
            ):
                self._stop_those_inside(inside)
                self._changed.wait_for(lambda: inside.isdisjoint(self._inside), FENCE_TIMEOUT_S)

    def unload(self, registration: RegistrationId) -> bool:
        """See `Owner.unload`. Whether no access runs any more, so that the memory can be given
        back. Blocks; a reader is not hurried, unless it takes very long.
        """
        with self._changed:
            inside = self._owner.unload(registration)
            if not self._changed.wait_for(lambda: inside.isdisjoint(self._inside), FENCE_TIMEOUT_S):
                self._stop_those_inside(inside)
            return inside.isdisjoint(self._inside)

    def wake(self) -> None:
        """Those that wait for chunks are to look again, as what they wait for cannot be loaded."""
        with self._changed:
            self._changed.notify_all()

    def listed(
        self, registration: RegistrationId, generation: int, selection: str = ""
    ) -> tuple[int, tuple[int | None, ...]] | None:
        """Bytes of one digest, and all digests; None for each that is not known, or altogether for
        an older generation.
        """
        with self._changed:
            digests, memory = (
                self._owner.digests(registration, generation, selection),
                self._memory.get(registration),
            )
            return None if digests is None or memory is None else (memory.width, digests)

    def make_digests(
        self,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        selection: str = "",
        *,
        bytes_max: int = DIGESTED_BYTES,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make those that are missing. Blocks; ends early where the memory is taken back, has
        changed, or `is_over`. `bytes_max`: of chunks that are digested before a fence gets its
        turn, if that is more than one chunk.

        From the last one on: readers begin with the first ones, and have them made. Digests of a
        selection are made for a vote, within its budget.
        """
        with self.vote(registration, selection) as may:
            digests = self.digests(registration, generation, selection) if may else None
            missing = [chunk for chunk, digest in enumerate(digests or ()) if digest is None]
        while missing and not is_over():
            window = missing[: -CHUNKS_PER_ACCESS_MAX - 1 : -1]
            terms = (None, registration, generation, content_id, window, bytes_max, 0.0, selection)
            with self.vote(registration, selection) as may, self.access(*terms) as answer:
                if not may or not isinstance(answer, tuple):
                    return
                access, memory = answer
                try:
                    self.digests_of(access, memory)
                except CannotServe:
                    return
            del missing[-len(access.chunks) :]

    @contextmanager
    def vote(self, registration: RegistrationId, selection: str) -> Iterator[bool]:
        """The block works for a vote on that selection. False: the budget is used up. "" stands for
        the memory's own chunks, whose digests have no budget.
        """
        began = time.thread_time()
        with self._changed:
            budget = self._votes.get(registration) if selection else None
            may = budget is None or budget.allows(selection)
        try:
            yield may
        finally:
            with self._changed:
                if budget is not None:
                    budget.spent_s += time.thread_time() - began

    def digests_of_shares(
        self, registration: RegistrationId, generation: int, shares: Sequence[Share]
    ) -> list[bytes]:
        """Digests of the memory that this rank publishes and other ranks publish, too. Blocks.
        StateError: it was taken back.
        """
        with self.access(None, registration, generation, ContentId(""), [0], 1, 0.0) as answer:
            if not isinstance(answer, tuple) or not self._is_kept(registration, None):
                raise StateError(
                    "the memory was taken back before what it shares with other ranks was digested"
                )
            chunks = tuple([(strip,) for share in shares for strip in share.chunks])
            made = iter(answer[1].selected(Selection(chunks)).digests(range(len(chunks))))
            return [
                root_of(pack(list(islice(made, len(share.chunks))), answer[1].width))
                for share in shares
            ]

    def kept(self, registration: RegistrationId, generation: int) -> list[tuple[int, int]]:
        """See `Owner.kept`; nothing, where there are no digests to tell by."""
        with self._changed:
            memory = self._memory.get(registration)
            return (
                self._owner.kept(registration, generation)
                if memory is not None and memory.width
                else []
            )

    def verify(
        self,
        registration: RegistrationId,
        generation: int,
        kept: Iterable[tuple[int, int]],
        check: Callable[[], object],
    ) -> list[int]:
        """The `kept` chunks that still have their digest; readers may read them from now on.
        `check` is called between two chunks, and ends the call by raising.
        """
        memory, found = self._memory[registration], list[int]()
        for chunk, digest in kept:
            check()
            if memory.digest(chunk) == digest and self.mark_available(
                registration, generation, [(chunk, digest)]
            ):
                found.append(chunk)
        return found

    # ------------------------------------------------------------------------------------------
    # deltas

    def base(self, registration: RegistrationId) -> Base | None:
        """What a memory that is being filled has of an older content."""
        with self._changed:
            return self._bases.of(registration)

    def deltas_of(
        self, access: Access, memory: ChunkMemory, base: ContentId
    ) -> Mapping[int, tuple[bytes, ...]]:
        """See `OwnedMemory.deltas_of`."""
        if memory.is_strided:
            return {}
        with self.touching(access, access.chunks[0]):
            return self.deltas.find(access, memory, base)

    def forget(self, registration: RegistrationId) -> None:
        """Let go of fenced memory."""
        with self._changed:
            self.deltas.forget(registration)
            self._bases.forget(registration)
            self._owner.forget(registration)
            memory = self._memory.pop(registration, None)
            self._selected.pop(registration, None)
            self._votes.pop(registration, None)
            self._promises.pop(registration, None)
            self._loaders.pop(registration, None)
            self._broken.pop(registration, None)
            if self._words is not None:
                self._words.forget(registration)
        for side in self.sides:
            side.forget(registration)
        if memory is not None:
            self.release(memory)

    def release(self, memory: ChunkMemory) -> None:
        """Deregister what a device has registered of memory that is neither read nor filled any
        more.
        """
        for side in self.sides:
            side.release(memory)

    def check_invariants(self) -> None:
        with self._changed:
            self._owner.check_invariants()

    # ------------------------------------------------------------------------------------------
    # one-sided readers

    @property
    def header(self) -> Header | None:
        """By what one-sided readers know this process; None: there are none."""
        return None if self._words is None else self._words.header

    def word_of(self, access: Access) -> int:
        """Where the word of this access' registration is."""
        with self._changed:
            if self._words is None:
                raise InvariantBroken("there are no words here")
            return self._words.address(access.registration)

    def select(
        self, reader: Lane, registration: RegistrationId, generation: int, name: str
    ) -> bool | Refusal:
        """See `OwnedMemory.select`."""
        selection = self._selections.find(name)
        with self._changed:
            memory = self._memory.get(registration)
            is_known = name in self._selected.get(registration, ())
        if selection is None:
            return False
        if memory is None:
            return NOT_OPEN
        if not is_known:
            if (refusal := self._selections.spend(reader, name)) is not None:
                return refusal
            if fault := memory.fault(selection):  # before the lock is taken
                return Refusal(f"that selection is not of this memory: {fault}")
        with self._changed:
            if self._memory.get(registration) is not memory:
                return NOT_OPEN
            selected = self._selected.setdefault(registration, {})
            if is_known and name not in selected:
                # it has given way meanwhile, or the memory was opened anew: the reader says it
                # again
                return False
            under = None
            if registration in self._loaders:
                under = lru_cache(None)(lambda chunk: memory.under(selection.chunks[chunk]))
            if not self._owner.select(registration, generation, name, selection.sizes, under):
                return NOT_OPEN
            if name not in selected:
                selected[name] = memory.selected(selection)
            if not reader.is_read_only and registration in self._votes:
                self._votes[registration].of_workers.add(name)
        return True

    def upload(
        self,
        reader: Lane,
        registration: RegistrationId,
        name: str,
        total: int,
        offset: int,
        piece: bytes,
    ) -> int | Refusal:
        """See `OwnedMemory.upload`."""
        with self._changed:
            memory = self._memory.get(registration)
        if memory is None:
            return NOT_OPEN
        found = self._selections.upload(reader, memory.parts_max, name, total, offset, piece)
        if isinstance(found, Refusal):
            return found
        following, gone = found
        with self._changed:
            for each in gone:
                self._owner.deselect(each)
                for selected in self._selected.values():
                    selected.pop(each, None)
                for budget in self._votes.values():
                    budget.of_workers.discard(each)
        return following

    def find(self, registration: RegistrationId, generation: int) -> OpenMemory | Refusal:
        """What one-sided readers may read there, and its word. NotShared: memory that is loaded on
        demand.
        """
        with self._changed:
            if registration in self._loaders:
                raise NotShared("an archived version is loaded as it is asked for: tcp serves it")
            if self._words is None or not generation or self._words.get(registration) != generation:
                return NOT_OPEN
            memory = self._memory.get(registration)
            if memory is None:
                return NOT_OPEN
            found = OpenMemory(memory, (self._words.address(registration), WORD_BYTES))
        # a device must not be told of what was freed
        return found if self.look(registration, generation) else BROKEN

    def memory_of(self, registration: RegistrationId) -> ChunkMemory | None:
        """That of a registration that is open, or was."""
        with self._changed:
            return self._memory.get(registration)

    def holds(self, registration: RegistrationId, memory: ChunkMemory) -> bool:
        """Whether that memory was not let go meanwhile."""
        with self._changed:
            return self._memory.get(registration) is memory

    def end_reading(self) -> None:
        """End the promise of this worker's memory, since the worker ends: one-sided readers discard
        what they read from now on.
        """
        with self._changed:
            if self._words is not None:
                self._words.close()
                self._words = None
        for side in self.sides:
            side.close()

    def _set_word(self, registration: RegistrationId, generation: int) -> None:
        if self._words is not None:
            self._words.set(registration, 0 if registration in self._loaders else generation)

    def _close(self, registration: RegistrationId) -> None:
        """Refuse every further access. One-sided readers name nothing from here on: the word comes
        before any write (R3).
        """
        self._owner.close(registration)
        self.deltas.closed(registration)
        self._set_word(registration, 0)

    # ----------------------------------------------------------------------------------------------
    # accesses

    @contextmanager
    def access(
        self,
        lane: Lane | None,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        wanted: Sequence[int],
        bytes_max: int,
        patience_s: float,
        selection: str = "",
        *,
        also_written: bool = False,
    ) -> Iterator[tuple[Access, ChunkMemory] | Wait | Refusal]:
        """Have some of the chunks to read for the length of the block, after at most `patience_s`
        of waiting for one.

        Memory that was seen to be written is refused (unless `also_written`), and so is memory that
        was replaced or freed.
        """
        began = time.monotonic()
        until = began + patience_s
        loads = self._asked_of_loader(registration, selection, wanted)
        terms = (
            lane,
            registration,
            generation,
            content_id,
            wanted,
            bytes_max,
            selection,
            also_written,
            loads,
        )
        with self._changed:
            answer = self._begin(*terms)
            is_waiting = isinstance(answer, Wait)
            while isinstance(answer, Wait) and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)
                answer = self._begin(*terms)
            if is_waiting and lane is not None:
                lane.empty_s += time.monotonic() - began
            memory = (
                self._in_chunks_of(registration, selection) if isinstance(answer, Access) else None
            )
        if not isinstance(answer, Access) or memory is None:
            assert not isinstance(answer, Access)
            yield answer
            return
        is_kept = True
        try:
            is_kept = self._is_kept(
                registration, memory.regions_of(answer.chunks), also_written=also_written
            )
            if is_kept:
                yield answer, memory
            else:
                yield BROKEN
        finally:
            with self._changed:
                self._owner.end(answer)
                del self._inside[answer.number]
                self._changed.notify_all()
            if not is_kept:
                self._break(registration, generation, 0 if selection else answer.chunks[0])

    def look(self, registration: RegistrationId, generation: int) -> bool:
        """Whether all of that memory is as promised, as far as a check can tell. If not, no further
        reader is let in.
        """
        is_kept = self._is_kept(registration, None)
        if not is_kept:
            self._break(registration, generation, 0)
        return is_kept

    def _is_kept(
        self,
        registration: RegistrationId,
        regions: Iterable[int] | None,
        *,
        also_written: bool = False,
    ) -> bool:
        promise = self._promises.get(registration)
        if promise is None:
            return True
        return promise.is_there(regions) if also_written else promise.is_kept(regions)

    def _break(self, registration: RegistrationId, generation: int, chunk: int) -> None:
        """That promise was found broken: no reader is let in any more. Its owner hears of it,
        once.
        """
        with self._changed:
            is_news = (
                self._broken.get(registration) != generation and registration in self._promises
            )
            if is_news:
                self._broken[registration] = generation
        if is_news:
            self.on_suspicion(registration, generation, chunk)

    def _in_chunks_of(self, registration: RegistrationId, selection: str) -> ChunkMemory:
        """That memory in the chunks of a selection by which it is known; "": in its own."""
        return self._selected[registration][selection] if selection else self._memory[registration]

    def _begin(
        self,
        lane: Lane | None,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        wanted: Sequence[int],
        bytes_max: int,
        selection: str,
        also_written: bool,
        loads: Callable[[], Refusal | None],
    ) -> Access | Wait | Refusal:
        if lane is not None and lane.is_stopped:
            return STOPPED
        if self._broken.get(registration) == generation and not also_written:
            return BROKEN
        answer = self._owner.begin(
            registration, generation, content_id, wanted, bytes_max, selection
        )
        if isinstance(answer, Access):
            self._inside[answer.number] = lane
        fault = None if isinstance(answer, Refusal) else loads()
        return fault if fault is not None and isinstance(answer, Wait) else answer

    def _asked_of_loader(
        self, registration: RegistrationId, selection: str, wanted: Sequence[int]
    ) -> Callable[[], Refusal | None]:
        """Asks the loader of that memory, if it has one, for what lies under these chunks; see
        `Loader.want`.
        """
        loader = self._loaders.get(registration)
        if loader is None:
            return lambda: None
        runs = runs_of(wanted) if not selection else self._under(registration, selection, wanted)
        return lambda: loader.want(runs)

    def _under(
        self, registration: RegistrationId, selection: str, wanted: Sequence[int]
    ) -> list[tuple[int, int]]:
        """What lies under these chunks of a selection. Found without the lock: it may take long."""
        with self._changed:
            under = self._owner.under(registration, selection)
            there = range(self._owner.chunk_count(registration, selection))
        if under is None:
            return []
        return [run for chunk in wanted if chunk in there for run in under(chunk)]

    def digests_of(self, access: Access, memory: ChunkMemory) -> list[tuple[int, int]]:
        """The access' chunks with their digests (0: there are none); missing ones are made and
        kept. CannotServe.
        """
        missing = [
            chunk
            for chunk, digest in zip(access.chunks, access.digests, strict=True)
            if digest is None
        ]
        with self.touching(access, next(iter(missing), 0)):
            kept = {
                chunk: self.keep_digest(access, memory, chunk, made)
                for chunk, made in _made(memory, missing)
            }
        known = zip(access.chunks, access.digests, strict=True)
        return [(chunk, kept[chunk] if digest is None else digest) for chunk, digest in known]

    @contextmanager
    def touching(self, access: Access, chunk: int) -> Iterator[None]:
        """The block touches that chunk and others of the access. CannotServe: they were freed
        meanwhile, or this process lacks something that reading them takes.
        """
        try:
            yield
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise CannotServe(f"the source cannot read its memory: {error}") from error
            self._break(access.registration, access.generation, 0 if access.selection else chunk)
            raise CannotServe(BROKEN.reason) from error

    def keep_digest(self, access: Access, memory: ChunkMemory, chunk: int, made: int) -> int:
        """Keep a digest that was made of a chunk of the access. Returns the digest that counts: the
        first.

        CannotServe: the memory was written, replaced or freed meanwhile, so the digest may be of
        other bytes; or the reader is stopped, and a fence waits for this access.
        """
        if not self._is_kept(access.registration, memory.regions_of([chunk])):
            self._break(access.registration, access.generation, 0 if access.selection else chunk)
            raise CannotServe(BROKEN.reason)
        with self._changed:
            lane = self._inside.get(access.number)
            if lane is not None and lane.is_stopped:
                raise CannotServe(STOPPED.reason)
            kept = self._owner.set_digest(
                access.registration, access.generation, chunk, made, access.selection
            )
            is_news = self._owner.is_news(access.registration, access.selection)
        if is_news:
            self.on_made(access.registration)
        return made if kept is None else kept

    # ----------------------------------------------------------------------------------------------
    # the fence

    def fence(self, registration: RegistrationId, timeout_s: float = FENCE_TIMEOUT_S) -> None:
        """Refuse every further read of this memory, and return once none runs any more: it may be
        written then.

        A reader that does not take its bytes within the grace (half of `timeout_s` at most) loses
        its connection. Needs no cooperation of a reader. Raises DrainTimeout (the memory must not
        be written) if an access cannot be ended; nothing is let in again, unless by `reopen`.
        """
        started = time.monotonic()
        grace_until, until = started + min(self._fence_grace_s, timeout_s / 2), started + timeout_s
        with self._changed:
            self._close(registration)
            self._changed.notify_all()
            while not (
                step := look(self._owner, registration, time.monotonic(), grace_until, until)
            ).stands:
                self._stop_those_inside(step.overdue)
                if step.is_late:
                    raise DrainTimeout(
                        f"{registration} is still being read after {timeout_s:g} s: do not write it"
                    )
                self._changed.wait((until if step.overdue else grace_until) - time.monotonic())

    async def fence_async(
        self, registration: RegistrationId, timeout_s: float = FENCE_TIMEOUT_S
    ) -> None:
        """As `fence`, for a task. It cannot be cancelled in between: memory is fenced, or it is
        not.
        """
        with self._changed:
            self._close(registration)
            self._changed.notify_all()
            if self._owner.is_quiet(registration):
                return
        limiter = anyio.CapacityLimiter(1)
        with anyio.CancelScope(shield=True):
            await run_in_thread(self.fence, registration, timeout_s, limiter=limiter)

    # ----------------------------------------------------------------------------------------------
    # lanes

    def add_lane(self, lane: Lane) -> None:
        with self._changed:
            self._lanes.add(lane)

    def admit(self, lane: Lane, reader: Incarnation, readers_max: int, of_one_max: int) -> str:
        """See `ServedLanes.admit`."""
        with self._changed:
            return self._lanes.admit(lane, reader, readers_max, of_one_max)

    def remove_lane(self, lane: Lane) -> None:
        """The lane's thread is done with it."""
        with self._changed:
            if lane in self._inside.values():
                raise InvariantBroken(f"{lane!r} is inside an access")
            self._lanes.discard(lane)
            self._changed.notify_all()
        self._selections.leave(lane)

    def cut(self, reader: Incarnation, timeout_s: float = FENCE_TIMEOUT_S) -> None:
        """End every connection of this reader; returns when none of them reads any more."""
        with self._changed:
            for lane in self._lanes:
                if lane.reader == reader:
                    self._lanes.stop(lane)
            self._changed.wait_for(
                lambda: all(lane.reader != reader for lane in self._lanes), timeout_s
            )

    def stop(self, lane: Lane) -> None:
        """Have a lane end soon."""
        with self._changed:
            self._lanes.stop(lane)

    def _stop_those_inside(self, accesses: Iterable[int]) -> None:
        for lane in [self._inside.get(access) for access in accesses]:
            if lane is not None and not lane.is_stopped:
                self._lanes.stop(lane)


def _made(memory: ChunkMemory, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each chunk with its digest, made now; on the CPU one after the other, as the caller asks for
    each.
    """
    if memory.device is not None:
        yield from zip(chunks, memory.digests(chunks), strict=True)
        return
    for chunk in chunks:
        yield chunk, memory.guarded_digest(chunk)


def _words_for(sides: Sequence[OwnerSide]) -> GenerationWords | None:
    """Where their readers look; None: none of them does."""
    if any(side.shares_memory for side in sides):
        return GenerationWords(lambda nbytes: Segment(nbytes).bytes_at(0, nbytes))
    return GenerationWords() if any(side.is_one_sided for side in sides) else None
