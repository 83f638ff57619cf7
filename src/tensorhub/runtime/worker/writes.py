"""Whether memory that readers may read was written: torch's counts (R15) and a second digest (R8)
tell.

It is the `Promise` that the memory's owner looks at. Not responsible for telling the caller
(`worker.mutation_guard`), nor for permission to read (`worker.owner`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import anyio
import anyio.to_thread

from tensorhub.errors import StateError, some
from tensorhub.memory.files import FileMemory
from tensorhub.memory.on_demand import OnDemandMemory
from tensorhub.memory.regions import Memory, is_packed
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.data.serving import BROKEN, SharedOwner
from tensorhub.transport.owner import CannotServe
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.member import Member
from tensorhub.worker.member_memory import Content
from tensorhub.worker.mutation_guard import TENSORS_NAMED_MAX

LOADED_WITHIN_S = 5.0  # what is not there by then has not changed, as far as is known


class Writes:
    """Those to one handle's memory."""

    def __init__(self, member: Member, memory: Memory, owner: SharedOwner) -> None:
        self._member = member
        self._memory = memory
        self._owner = owner
        self._registration = RegistrationId(member.shard.registration)
        # `memory.versions()` when it was opened last; kept by a fence, as it may be reopened.
        self._versions: tuple[int, ...] | None = None
        self._numbers = {tensor.name: number for number, tensor in enumerate(memory.descriptions)}
        self._manifest: Manifest | None = None  # of what was opened last
        # The numbers of its regions' tensors, as they are asked about. Of a packed region readers
        # read a copy: none.
        self._of_regions: dict[int, tuple[int, ...]] = {}
        self._counting = threading.Lock()  # held while a write of the library's is counted

    def __repr__(self) -> str:
        return f"<Writes of {self._member!r}>"

    def made(self, manifest: Manifest) -> None:
        """Note that readers may read the memory from now on, in the regions of that manifest."""
        self._manifest, self._of_regions = manifest, {}
        self._versions = self._memory.versions()

    def is_there(self, regions: Iterable[int] | None) -> bool:
        """See `Promise`."""
        return not self._memory.moved(self._tensors_of(regions))

    def is_kept(self, regions: Iterable[int] | None) -> bool:
        """See `Promise`."""
        tensors = self._tensors_of(regions)
        return not self._memory.moved(tensors) and not self._written(tensors)

    def _tensors_of(self, regions: Iterable[int] | None) -> Sequence[int] | None:
        if self._manifest is None:
            return None
        if regions is None:
            regions = range(len(self._manifest.regions))
        return [number for region in regions for number in self._tensors_in(region)]

    def _tensors_in(self, region: int) -> tuple[int, ...]:
        assert self._manifest is not None
        if region not in self._of_regions:
            named = (self._numbers.get(tensor.name) for tensor in self._manifest.by_region[region])
            numbers = [number for number in named if number is not None]
            is_padded = any(self._memory.descriptions[number].strides for number in numbers)
            is_copy = is_packed(self._manifest, region) and not is_padded
            self._of_regions[region] = () if is_copy else tuple(numbers)
        return self._of_regions[region]

    def library_wrote(self) -> None:
        """Have torch count the library's write, so that autograd sees it. A write of the caller's
        still shows.
        """
        with self._counting:
            before = self._memory.versions()
            self._memory.count_write()
            if self._versions is not None:
                counts = zip(self._versions, before, self._memory.versions(), strict=True)
                self._versions = tuple([known + now - was for known, was, now in counts])

    def written(self) -> list[str]:
        """Names of tensors that (R15) torch has counted a write of since the memory was opened, or
        that it has freed.
        """
        return [self._memory.descriptions[number].name for number in self._written(None)]

    def _written(self, tensors: Sequence[int] | None) -> list[int]:
        """The numbers of those (None: of all, or of these)."""
        with self._counting:
            known, now = self._versions, self._memory.versions(tensors)
        if not known or (tensors is None and now == known):
            return []
        numbers = range(len(known)) if tensors is None else tensors
        return [
            number for number, count in zip(numbers, now, strict=True) if count != known[number]
        ]

    def broken(self) -> str:
        """How the owner's promise was seen to be broken since the memory was opened; "": it was
        not.
        """
        tensors = self._tensors_of(None)
        moved = self._memory.moved(tensors)
        found = {
            "written": [number for number in self._written(tensors) if number not in moved],
            "replaced or freed": moved,
        }
        names = self._memory.descriptions
        return "; ".join(
            f"{some([repr(names[number].name) for number in numbers], most=TENSORS_NAMED_MAX)} "
            f"({what})"
            for what, numbers in found.items()
            if numbers
        )

    async def changed(self) -> tuple[str, ...]:
        """Names of the tensors that have a chunk without the digest with which it was published or
        read (R8), in order.

        StateError: the memory holds no version, is taken back meanwhile, or its version has no
        digests.
        """
        content = self._member.content
        if content is None:
            raise StateError("the memory holds no version to compare it with")
        found = dict[str, None]()
        for chunk in range(content.manifest.chunk_count):
            changed, _ = await anyio.to_thread.run_sync(
                partial(self._has_changed, content, chunk, "")
            )
            if changed is None:
                raise StateError(
                    "the memory was taken back while it was compared, or its version has no digests"
                )
            if changed:
                found.update(dict.fromkeys(content.manifest.tensors_in(chunk)))
        return tuple(found)

    async def look_again(
        self, generation: int, chunk: int, selection: str, limiter: anyio.CapacityLimiter
    ) -> tuple[bool | None, bytes]:
        """Whether this chunk of that selection has changed since its digest was made (R8), or None
        if that is unknown; and that digest.
        """
        content = self._member.content
        if content is None or content.generation != generation:
            return None, b""
        if await anyio.to_thread.run_sync(self.broken):  # whatever is being digested now
            return True, b""
        look = partial(self._has_changed, content, chunk, selection)
        return await anyio.to_thread.run_sync(look, limiter=limiter)

    def _has_changed(
        self, content: Content, chunk: int, selection: str
    ) -> tuple[bool | None, bytes]:
        """Whether a chunk that readers may read has lost its digest, and the digest. None: the
        chunk may not be read, or has no digest.

        A chunk that was written before it had a digest counts as changed, and so does a chunk that
        was replaced or freed.
        """
        right = (self._registration, content.generation, ContentId(content.version.content_id))
        is_loaded = isinstance(self._memory, OnDemandMemory)
        with self._owner.access(
            None,
            *right,
            [chunk],
            1,
            LOADED_WITHIN_S if is_loaded else 0.0,
            selection,
            also_written=True,
        ) as answer:
            if not isinstance(answer, tuple):
                return (True if answer is BROKEN else None), b""
            access, memory = answer
            if not memory.width:
                return None, b""
            try:
                ((_, known),) = self._owner.digests_of(access, memory)
            except CannotServe:
                return True, b""
            now: int | None = None
            if isinstance(self._memory, FileMemory) and not selection:
                now = self._memory.digest(content.manifest, chunk)
            else:
                # what cannot be read has changed: a file was made shorter
                with suppress(StateError):
                    now = memory.digest(chunk)
            return now != known, known.to_bytes(memory.width, "big")
