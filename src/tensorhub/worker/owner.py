"""The owner's authority over its registered memory (R3): which chunks an access may read, and under
which generation.

Theory of operation. Each registration is closed, or open under one generation word. Open means:
these bytes are what `content_id` says, for every chunk that is marked available (G6). A lane that
wants to touch memory calls `begin`, which checks registration, generation and content and counts
the access; it calls `end` when the kernel or device no longer needs the bytes.

The fence is two steps: `close` (from here on every `begin` is refused) and waiting until
`is_quiet`. Only then may the memory be written, and only then can it be opened with other bytes,
under another generation (the caller mints each only once). A fence that is given up ends with
`reopen`: the bytes are unchanged, so running accesses do no harm; they are counted by registration,
so that the next fence waits for them, too. Results that name an older generation (a digest, a chunk
that arrived) are dropped on sight.

Responsible for the decision. Not responsible for the available chunks of a memory and their digests
(`books`), nor for locks, waiting, sockets, digesting or time: `runtime.data.serving` wraps this in
a condition variable. Every entry point costs at most the size of its request; `open` costs one pass
over the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tensorhub.machine import IllegalStep, demand
from tensorhub.messages import Origin
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.books import Books
from tensorhub.worker.grids import Grid

_WAIT = Wait()


class Owner:
    """One worker's registered memories, and the accesses to them that run now."""

    def __init__(self) -> None:
        self._memories: dict[RegistrationId, Books] = {}
        self._running: dict[int, Access] = {}  # by number
        self._next_access = 0  # above every number given out

    # ------------------------------------------------------------------------------------ life of
    # memory

    def open(
        self,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        sizes: Sequence[int],
        *,
        complete: bool,
        digests: Sequence[int | None] | None = None,
        tells: bool = False,
        serves: bool = True,
        grid: str = "",
    ) -> None:
        """Let readers in under `generation`. `sizes`: bytes per chunk; `complete`: every chunk may
        be read already; `tells`: new digests are collected for `take_made`; `serves` False: no
        reader may read the memory, and only its books are kept. `grid`: names its chunks.

        If this content was open in that grid before, its digests are kept from the last time: see
        `kept`.
        """
        old = self._memories.get(registration)
        if old is not None:
            self._check_may_open(registration, old, generation)
        if digests is not None and len(digests) != len(sizes):
            raise ValueError(f"{len(digests)} digests for {len(sizes)} chunks")
        origins: list[Origin | None] | None = None
        is_known = old is not None and (content_id, grid, len(sizes)) == (
            old.content_id,
            old.grid_id,
            len(old.own.sizes),
        )
        if digests is None and old is not None and is_known and content_id:
            digests, origins = old.own.digests, old.origins
        memory = Books(
            generation=generation,
            content_id=content_id,
            own=Grid(sizes, [None] * len(sizes) if digests is None else list(digests)),
            available=bytearray([complete]) * len(sizes),
            missing=0 if complete else len(sizes),
            origins=origins,
            serves=serves,
            grid_id=grid,
        )
        if tells:
            memory.own.tell()
        if old is not None:
            memory.story = old.story
        memory.story.tell("opened", generation, content_id, "complete" if complete else "filling")
        self._memories[registration] = memory

    def _check_may_open(self, registration: RegistrationId, old: Books, generation: int) -> None:
        if old.is_open:
            raise IllegalStep(f"{registration} is open already", old.story)
        if old.accesses:
            raise IllegalStep(
                f"{registration} still has {old.accesses} running accesses", old.story
            )
        if generation == old.generation:
            raise IllegalStep(
                f"generation {generation} of {registration} was used before", old.story
            )

    def former(
        self, registration: RegistrationId, content_id: ContentId, grid: str
    ) -> tuple[ContentId, Sequence[int | None], bytearray] | None:
        """The content that this memory had last, with the digests of its chunks and which of them
        were there. None: it had `content_id` itself, another grid, or a content without name.
        """
        memory = self._memories.get(registration)
        if memory is None or memory.grid_id != grid or memory.content_id in ("", content_id):
            return None
        return memory.content_id, memory.own.digests, bytearray(memory.available)

    def held(
        self, registration: RegistrationId, content_id: ContentId, grid: str
    ) -> tuple[int, ContentId, Sequence[int | None], bytearray] | None:
        """As `former`, of memory that is open and has all of another content: with its
        generation.
        """
        memory = self._memories.get(registration)
        if memory is None or not memory.is_open or memory.missing:
            return None
        found = self.former(registration, content_id, grid)
        return None if found is None else (memory.generation, *found)

    def reopen(self, registration: RegistrationId, generation: int) -> None:
        """Let readers in again under another generation, to the unchanged bytes of the last one."""
        memory = self._memories[registration]
        if memory.is_open or generation == memory.generation:
            raise IllegalStep(
                f"{registration} is open already, or was open under generation {generation}",
                memory.story,
            )
        memory.generation, memory.is_open = generation, True
        memory.story.tell("reopened", generation, "accesses", memory.accesses)

    def close(self, registration: RegistrationId) -> None:
        """Refuse every further access; running ones go on until they end. Closing twice changes
        nothing.
        """
        memory = self._memories.get(registration)
        if memory is not None and memory.is_open:
            memory.is_open = False
            memory.story.tell("closed", memory.generation, "accesses", memory.accesses)

    def forget(self, registration: RegistrationId) -> None:
        """Drop the books of a closed, quiet registration (it is deregistered; its id is never used
        again).
        """
        memory = self._memories.get(registration)
        if memory is None:
            return
        if memory.is_open or memory.accesses:
            raise IllegalStep(f"{registration} is open or in use", memory.story)
        del self._memories[registration]

    def select(
        self,
        registration: RegistrationId,
        generation: int,
        selection: str,
        sizes: Sequence[int],
        under: Callable[[int], Sequence[tuple[int, int]]] | None = None,
    ) -> bool:
        """Let this memory be read in the chunks of that selection as well. `under`: see `Grid`.
        False: it is not open under that generation.
        """
        memory = self._at(registration, generation)
        if memory is None:
            return False
        if selection not in memory.selections:
            found = Grid(sizes, [None] * len(sizes), under=under)
            if memory.own.made is not None:
                found.tell()
            memory.selections[selection] = found
        return True

    def deselect(self, selection: str) -> None:
        """Forget that selection of every memory; running accesses go on."""
        for memory in self._memories.values():
            memory.selections.pop(selection, None)

    def under(
        self, registration: RegistrationId, selection: str
    ) -> Callable[[int], Sequence[tuple[int, int]]] | None:
        """See `Grid`; None: that selection is not known."""
        grid = self._grid(registration, selection)
        return None if grid is None else grid.under

    def selections(self, registration: RegistrationId) -> tuple[str, ...]:
        """The known selections of this memory."""
        memory = self._memories.get(registration)
        return () if memory is None else tuple(memory.selections)

    # ------------------------------------------------------------------------------------------
    # available chunks

    def mark_available(
        self,
        registration: RegistrationId,
        generation: int,
        arrived: Iterable[tuple[int, int | None]],
        origin: Origin | None = None,
    ) -> bool:
        """Let readers read these verified (chunk, digest) pairs; `origin`: where the chunks were
        read, if known. False: they are of an older generation, and dropped.
        """
        memory = self._at(registration, generation)
        if memory is None:
            return False
        memory.mark_available(arrived, origin)
        return True

    def revoke(
        self, registration: RegistrationId, generation: int, chunks: Iterable[int]
    ) -> frozenset[int]:
        """Let no access begin to these chunks, which are not as published. Returns the running
        accesses to them.
        """
        memory = self._at(registration, generation)
        if memory is None:
            return frozenset()
        wrong = set(chunks)
        running = frozenset(
            number
            for number, access in self._running.items()
            if access.registration == registration and not wrong.isdisjoint(memory.touched(access))
        )
        memory.revoke(wrong)
        return running

    def unload(self, registration: RegistrationId) -> frozenset[int]:
        """Let no access begin until chunks are marked available again, whose digests stay. Returns
        the running accesses. Under whichever generation it is open, or closed.
        """
        memory = self._memories.get(registration)
        if memory is not None:
            memory.unload()
        return self.accesses_to(registration)

    def take_made(
        self, registration: RegistrationId, selection: str = "", *, if_all: bool = False
    ) -> tuple[list[tuple[int, int]], bool]:
        """The digests that were made since the last time, ascending; and whether all digests of
        that grid are known. `if_all`: take them only if all are known.
        """
        grid = self._grid(registration, selection)
        return ([], False) if grid is None else grid.take_made(if_all=if_all)

    def is_news(self, registration: RegistrationId, selection: str = "") -> bool:
        """Whether made digests should be taken: the first one since the last time was made, or the
        last one of the grid.
        """
        grid = self._grid(registration, selection)
        return (
            grid is not None
            and grid.made is not None
            and (len(grid.made) == 1 or not grid.undigested)
        )

    def chunk_count(self, registration: RegistrationId, selection: str = "") -> int:
        """The chunk count of the memory's own grid, or of that selection; 0: the grid is not
        known.
        """
        grid = self._grid(registration, selection)
        return 0 if grid is None else len(grid.sizes)

    def _grid(self, registration: RegistrationId, selection: str) -> Grid | None:
        memory = self._memories.get(registration)
        return None if memory is None else memory.grid(selection)

    def origin(self, registration: RegistrationId, generation: int, chunk: int) -> Origin | None:
        """Where that chunk was read, if known."""
        memory = self._at(registration, generation)
        return None if memory is None or memory.origins is None else memory.origins[chunk]

    def origins(self, access: Access) -> list[Origin | None]:
        """Where the chunks of a running access to the memory's own grid were read."""
        origins = self._memories[access.registration].origins
        return [None if origins is None else origins[chunk] for chunk in access.chunks]

    def set_digest(
        self,
        registration: RegistrationId,
        generation: int,
        chunk: int,
        digest: int,
        selection: str = "",
    ) -> int | None:
        """Remember a chunk's digest; the first digest counts. Returns the digest that counts; None
        for an older generation without accesses, and for a forgotten selection.

        An access that began before the memory was closed or reopened gets the first digest, too:
        the bytes may have changed since.
        """
        memory = self._memories.get(registration)
        if memory is None or (memory.generation != generation and not memory.accesses):
            return None
        grid = memory.grid(selection)
        if grid is None:
            return None
        return grid.keep(chunk, digest)

    def has(
        self, registration: RegistrationId, generation: int, runs_max: int, selection: str = ""
    ) -> tuple[tuple[int, int], ...]:
        """The first (first, count) runs of chunks that may be read under this generation."""
        memory = self._at(registration, generation)
        return () if memory is None else memory.runs(selection, runs_max)

    def digest(self, registration: RegistrationId, generation: int, chunk: int) -> int | None:
        """The digest of a chunk, None if it is not known (or the generation is an older one)."""
        memory = self._at(registration, generation)
        return None if memory is None else memory.own.digests[chunk]

    def digests(
        self, registration: RegistrationId, generation: int, selection: str = ""
    ) -> tuple[int | None, ...] | None:
        """All digests, None for an unknown digest; None altogether for an older generation and an
        unknown selection.
        """
        memory = self._at(registration, generation)
        grid = None if memory is None else memory.grid(selection)
        return None if grid is None else tuple(grid.digests)

    def kept(self, registration: RegistrationId, generation: int) -> list[tuple[int, int]]:
        """Chunks that may not be read, with the digests that they had when this content was here
        before: a chunk that still has its digest need not be brought again (R9).
        """
        memory = self._at(registration, generation)
        return [] if memory is None else memory.kept()

    def is_complete(self, registration: RegistrationId, generation: int) -> bool:
        """Whether every chunk may be read under this generation."""
        memory = self._at(registration, generation)
        return memory is not None and memory.missing == 0

    def _at(self, registration: RegistrationId, generation: int) -> Books | None:
        memory = self._memories.get(registration)
        return (
            memory
            if memory is not None and memory.is_open and memory.generation == generation
            else None
        )

    # ----------------------------------------------------------------------------------------------
    # accesses

    def begin(
        self,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        wanted: Sequence[int],
        bytes_max: int,
        selection: str = "",
    ) -> Access | Wait | Refusal:
        """Start an access to those of the `wanted` chunks that may be read now, one at least, then
        up to `bytes_max`. The chunks are of that selection, or ("") of the memory's own grid.
        """
        memory = self._memories.get(registration)
        if memory is None:
            return Refusal("nothing is registered under that id")
        if not memory.is_open or not memory.serves or memory.generation != generation:
            return Refusal("the memory has changed its generation")
        # A publisher opens before its content id is minted; its generation alone names the content.
        if memory.content_id and memory.content_id != content_id:
            return Refusal("the memory holds another content")
        grid = memory.grid(selection)
        if grid is None:
            return Refusal("that selection is not known here, or not any more")
        if not wanted or min(wanted) < 0 or max(wanted) >= len(grid.sizes):
            return Refusal(
                f"the content has chunks 0 to {len(grid.sizes) - 1}, and others (or none) are "
                f"asked for"
            )
        chunks, rest = memory.readable(grid, wanted, bytes_max)
        if not chunks:
            return _WAIT
        number, self._next_access = self._next_access, self._next_access + 1
        memory.accesses += 1
        digests = tuple(grid.digests[chunk] for chunk in chunks)
        made = Access(
            number, registration, generation, tuple(chunks), digests, tuple(rest), selection
        )
        self._running[number] = made
        return made

    def end(self, access: Access) -> None:
        """The access no longer touches the memory."""
        memory = self._memories[access.registration]
        if self._running.pop(access.number, None) is None:
            raise IllegalStep(
                f"access {access.number} to {access.registration} has ended before", memory.story
            )
        memory.accesses -= 1

    def is_quiet(self, registration: RegistrationId) -> bool:
        """Whether no access to this registration runs. Closed and quiet means: fenced."""
        memory = self._memories.get(registration)
        return memory is None or memory.accesses == 0

    def accesses_to(self, registration: RegistrationId) -> frozenset[int]:
        """The numbers of the accesses to this registration that run."""
        return frozenset(
            number
            for number, access in self._running.items()
            if access.registration == registration
        )

    # ---------------------------------------------------------------------------------------------
    # inspection

    def check_invariants(self) -> None:
        """Raise InvariantBroken if this object's own books disagree."""
        counts: dict[RegistrationId, int] = {}
        for access in self._running.values():
            counts[access.registration] = counts.get(access.registration, 0) + 1
        for registration, memory in self._memories.items():
            is_counted = memory.accesses == counts.pop(registration, 0)
            demand(is_counted, "accesses to memory are counted", memory)
            demand(memory.is_sound, "the books of memory agree", memory)
        demand(not counts, "accesses run to known registrations", counts)

    def __repr__(self) -> str:
        live = sum(memory.is_open for memory in self._memories.values())
        return f"<Owner {live} open of {len(self._memories)}, {len(self._running)} accesses>"
