"""The deltas that a worker serves: what makes a version's chunks of the version before.

Theory of operation. A trainer overwrites version v-1 with version v, so the worker keeps a
*shadow*: each chunk as it was when it was looked at last. Once v is published, each chunk is
compared with its shadow, by a reader's lane that asks for the chunk or by `make` for the rest. The
delta is kept, and the shadow takes the chunk over. The deltas of some versions are kept, so that a
reader that is several versions behind gets a chain. A replica needs no shadow: it keeps the deltas
that it has applied itself.

Nothing is kept of a registration until a reader has asked for its deltas (`on_wanted`), and until
there is room for that (`begin`). A wrong delta does no harm: the reader digests what it makes.

Responsible for which deltas exist. Not responsible for their form (`tensorhub.deltas`), for the
room (`worker.budget`), nor for permission to read the memory (`serving`). For all threads.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tensorhub import deltas
from tensorhub.memory.addresses import copy_bytes
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import CHAIN_MAX
from tensorhub.model.accesses import Access
from tensorhub.types import ContentId, RegistrationId

DELTA_SHARE = 4  # the deltas of all versions take one part in so many of the shadow's size
VERSIONS_MAX = 16  # whose deltas are kept
COMPARED_MAX = 4  # chunks at a time, each of which takes a few times its size meanwhile
# versions in a row of which no reader asks for deltas: then none is made until one asks again
UNASKED_MAX = 4


@dataclass(slots=True)
class _Version:
    """One generation of a registration's content. `made`: by chunk, the generation that its deltas
    start from, and the deltas; without deltas the chunk is better sent whole.
    """

    generation: int
    content_id: ContentId
    made: dict[int, tuple[int, tuple[bytes, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class _History:
    """What is known of one registration, in one grid."""

    grid_id: str
    widths: Sequence[int] = ()  # bytes of a word, by region
    room: int = 0  # bytes that the deltas may take
    taken: int = 0  # that they take
    open_generation: int = 0  # under which the memory may be read now; 0: none
    shadow: mmap.mmap | None = None
    starts: Sequence[int] = ()  # where each chunk's shadow begins, and the end
    # the generation that each chunk's shadow is of; 0: none
    shadow_of: list[int] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)  # chunks that are being compared
    versions: list[_Version] = field(default_factory=list)  # oldest first
    is_asked_for: bool = False  # a reader wants deltas
    unasked: int = 0  # versions, up to the newest one, of which no reader has asked for deltas

    @property
    def newest(self) -> _Version | None:
        return self.versions[-1] if self.versions else None

    def generation_of(self, content_id: ContentId) -> int:
        """0: it is not known."""
        found = (v.generation for v in self.versions if v.content_id == content_id)
        return next(found, 0)

    def chain(self, chunk: int, start: int) -> tuple[bytes, ...]:
        """The deltas from that generation to the newest one; empty: there is no such chain, or it
        is too long.
        """
        found: tuple[bytes, ...] = ()
        by_generation = {version.generation: version for version in self.versions}
        at = self.versions[-1].generation
        while at != start:
            step = by_generation[at].made.get(chunk) if at in by_generation else None
            if step is None or not step[1] or len(found) + len(step[1]) > CHAIN_MAX:
                return ()
            at, found = step[0], step[1] + found
        return found

    def trim(self) -> None:
        """Forget the oldest deltas, until the rest fits; those of the newest version stay."""
        while len(self.versions) > VERSIONS_MAX:
            self._forget_oldest(self.versions.pop(0))
        for version in self.versions[:-1]:
            if self.taken <= self.room:
                return
            self._forget_oldest(version)

    def _forget_oldest(self, version: _Version) -> None:
        self.taken -= sum(len(each) for _, made in version.made.values() for each in made)
        version.made.clear()


class Deltas:
    """Those of one worker."""

    def __init__(self) -> None:
        # a reader has asked for deltas of this registration; any thread
        self.on_wanted: Callable[[RegistrationId], None] = lambda registration: None
        # the room of this registration is free again; any thread
        self.on_dropped: Callable[[RegistrationId], None] = lambda registration: None
        self._changed = threading.Condition()  # guards what follows; notified when a chunk is done
        self._histories: dict[RegistrationId, _History] = {}
        self._begun: set[RegistrationId] = set()  # there is room for these
        self._compared = 0  # chunks that are being compared

    def __repr__(self) -> str:
        return f"<Deltas of {len(self._begun)} registrations>"

    # -- life of a registration

    def opened(
        self,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        memory: ChunkMemory,
    ) -> None:
        """Readers may read that content from now on. A publisher's is named later."""
        grid = memory.manifest.grid_id
        with self._changed:
            history = self._histories.get(registration)
            if history is None or history.grid_id != grid:
                self._drop(registration)
                history = self._histories[registration] = _History(grid)
            history.unasked += 1
            # who fills memory names its content, and needs no shadow; who publishes needs one
            needs_shadow = not content_id and history.shadow is None
            if history.unasked > UNASKED_MAX or needs_shadow:
                self._drop(registration)
            history.open_generation = generation
            history.versions.append(_Version(generation, content_id))
            history.trim()

    def reopened(self, registration: RegistrationId, generation: int) -> None:
        """The newest content goes on under another generation."""
        with self._changed:
            history = self._histories.get(registration)
            newest = history.newest if history is not None else None
            if history is None or newest is None:
                return
            history.shadow_of = [
                generation if each == newest.generation else each for each in history.shadow_of
            ]
            newest.generation = history.open_generation = generation

    def closed(self, registration: RegistrationId) -> None:
        """The memory may be read no more, and its fence waits for comparisons: no other begins."""
        with self._changed:
            if (history := self._histories.get(registration)) is not None:
                history.open_generation = 0
                self._changed.notify_all()

    def named(self, registration: RegistrationId, generation: int, content_id: ContentId) -> None:
        """The publication under that generation was committed."""
        with self._changed:
            history = self._histories.get(registration)
            for version in history.versions if history is not None else ():
                if version.generation == generation:
                    version.content_id = content_id

    def begin(self, registration: RegistrationId, memory: ChunkMemory, *, has_shadow: bool) -> None:
        """There is room (`room_for`): keep deltas of that registration, if it is still there.
        OSError: no memory.
        """
        sizes = memory.sizes
        with self._changed:
            history = self._histories.get(registration)
            if history is None or history.grid_id != memory.manifest.grid_id:
                return
            history.widths = deltas.word_widths(memory.manifest)
            if has_shadow:  # private: its pages come and go several times as fast as shared ones
                kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                history.shadow = mmap.mmap(-1, max(1, sum(sizes)), kind)
            history.room = sum(sizes) // DELTA_SHARE
            history.starts = list(accumulate(sizes, initial=0))
            history.shadow_of = [0] * len(sizes)
            self._begun.add(registration)

    @staticmethod
    def room_for(memory: ChunkMemory, *, has_shadow: bool) -> int:
        """The host memory that `begin` needs, in bytes."""
        nbytes = sum(memory.sizes)
        return nbytes // DELTA_SHARE + (nbytes if has_shadow else 0)

    def ask_again(self, registration: RegistrationId) -> None:
        """It cannot begin now: the next reader that asks is news (`on_wanted`)."""
        with self._changed:
            if (history := self._histories.get(registration)) is not None:
                history.is_asked_for = False

    def is_begun(self, registration: RegistrationId) -> bool:
        with self._changed:
            return registration in self._begun

    def end(self, registration: RegistrationId) -> None:
        """Its room is needed for something else."""
        with self._changed:
            self._drop(registration)

    def forget(self, registration: RegistrationId) -> None:
        """The registration is no more."""
        with self._changed:
            self._drop(registration)
            self._histories.pop(registration, None)

    def _drop(self, registration: RegistrationId) -> None:
        """Keep the names of its contents only. The next reader that asks has it begin again."""
        history = self._histories.get(registration)
        if registration not in self._begun or history is None:
            return
        self._begun.discard(registration)
        shadow, history.shadow = history.shadow, None  # no further comparison begins
        self._changed.notify_all()
        self._changed.wait_for(lambda: not history.busy)
        for version in history.versions:
            version.made.clear()
        history.shadow_of, history.is_asked_for = [], False
        history.taken = history.room = 0
        if shadow is not None:
            with contextlib.suppress(BufferError):
                shadow.close()
        self.on_dropped(registration)

    # -- making and finding deltas

    def missing(self, registration: RegistrationId, generation: int) -> list[int]:
        """The chunks whose shadow is not of that generation, which is the newest; none, where no
        shadow is kept.
        """
        with self._changed:
            history = self._histories.get(registration)
            newest = history.newest if history is not None else None
            if history is None or newest is None or history.shadow is None:
                return []
            if newest.generation != generation:
                return []
            return [c for c, of in enumerate(history.shadow_of) if of != generation]

    def make(self, access: Access, memory: ChunkMemory) -> None:
        """Compare the chunks of an access with their shadows, until the memory is closed. OSError:
        some of it is not mapped any more.
        """
        with self._changed:
            history = self._histories.get(access.registration)
        if history is not None:
            for chunk in access.chunks:
                self._compare(history, access.generation, chunk, memory)

    def find(
        self, access: Access, memory: ChunkMemory, base: ContentId
    ) -> Mapping[int, tuple[bytes, ...]]:
        """See `OwnedMemory.deltas_of`."""
        with self._changed:
            history = self._histories.get(access.registration)
            if history is None or not memory.width:
                return {}
            is_begun = access.registration in self._begun
            is_news = not is_begun and not history.is_asked_for
            history.is_asked_for, history.unasked = True, 0
            start = history.generation_of(base)
        if is_news:
            self.on_wanted(access.registration)
        if not is_begun or not start:
            return {}
        self.make(access, memory)
        found: dict[int, tuple[bytes, ...]] = {}
        with self._changed:
            newest = history.newest
            if newest is None or newest.generation != access.generation:
                return {}
            for chunk in access.chunks:
                chain = history.chain(chunk, start)
                if chain and sum(map(len, chain)) < memory.sizes[chunk]:
                    found[chunk] = chain
        return found

    def keep(
        self,
        registration: RegistrationId,
        generation: int,
        base: ContentId,
        arrived: Mapping[int, tuple[bytes, ...]],
    ) -> None:
        """These deltas were applied to that content."""
        with self._changed:
            history = self._histories.get(registration)
            newest = history.newest if history is not None else None
            if registration not in self._begun or history is None or newest is None:
                return
            start = history.generation_of(base)
            if newest.generation != generation or not start:
                return
            for chunk, made in arrived.items():
                self._enter(history, newest, chunk, start, made)

    def _compare(self, history: _History, generation: int, chunk: int, memory: ChunkMemory) -> None:
        """Make the delta of one chunk, unless it is there. Another thread that makes it is waited
        for, and so is a turn.
        """

        def is_needless() -> bool:
            return (
                history.open_generation != generation
                or history.shadow is None
                or history.shadow_of[chunk] == generation
            )

        with self._changed:
            self._changed.wait_for(
                lambda: (
                    is_needless() or (chunk not in history.busy and self._compared < COMPARED_MAX)
                )
            )
            newest, shadow = history.newest, history.shadow
            if is_needless() or newest is None or shadow is None:
                return
            before = history.shadow_of[chunk]
            history.busy.add(chunk)
            self._compared += 1
        made: bytes | None = None
        is_made = False
        try:
            with (
                memoryview(shadow) as whole,
                whole[history.starts[chunk] : history.starts[chunk + 1]] as old,
            ):
                if before:
                    made = memory.advance(chunk, old, history.widths[memory.region_of(chunk)])
                else:
                    copy_bytes(memory.copied(chunk, bytearray(memory.sizes[chunk])), old)
            is_made = True
        finally:
            with self._changed:
                history.busy.discard(chunk)
                self._compared -= 1
                # `reopened` may have renamed it meanwhile
                history.shadow_of[chunk] = newest.generation if is_made else 0
                if is_made and before:
                    kept = () if made is None else (made,)
                    self._enter(history, newest, chunk, before, kept)
                self._changed.notify_all()

    def _enter(
        self,
        history: _History,
        version: _Version,
        chunk: int,
        start: int,
        made: tuple[bytes, ...],
    ) -> None:
        history.taken += sum(map(len, made)) - sum(map(len, version.made.get(chunk, (0, ()))[1]))
        version.made[chunk] = start, made
        history.trim()
        if history.taken > history.room:  # what came first stays: readers get deltas of a part
            history.taken -= sum(map(len, made))
            version.made[chunk] = start, ()
