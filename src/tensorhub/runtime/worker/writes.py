"""Whether memory that others may read was written: torch's counts (R15) and a second digest (R8) tell.

Not responsible for telling the caller (`worker.mutation_guard`), nor for who may read the memory (`worker.owner`).
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import anyio
import anyio.to_thread

from tensorhub.errors import StateError
from tensorhub.memory.files import FileMemory
from tensorhub.memory.regions import Memory
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.member import Member
from tensorhub.worker.member_memory import Content


class Writes:
    """Those to one handle's memory."""

    def __init__(self, member: Member, memory: Memory, owner: SharedOwner) -> None:
        self._member = member
        self._memory = memory
        self._owner = owner
        self._registration = RegistrationId(member.shard.registration)
        # `memory.versions()` when it was opened last; kept by a fence, as it may be reopened.
        self._versions: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"<Writes of {self._member!r}>"

    def made(self) -> None:
        """From now on others may read the memory."""
        self._versions = self._memory.versions()

    def library_wrote(self) -> None:
        """Have torch count the library's write, so that autograd sees it. A write of the caller's shows all the same."""
        before = self._memory.versions()
        self._memory.count_write()
        if self._versions is not None:
            counts = zip(self._versions, before, self._memory.versions(), strict=True)
            self._versions = tuple([known + now - was for known, was, now in counts])

    def written(self) -> list[str]:
        """Names of tensors that (R15) torch has counted a write of since the memory was opened."""
        now = self._memory.versions()
        if self._versions is None or now == self._versions:
            return []
        counts = zip(self._memory.descriptions, self._versions, now, strict=False)
        return [tensor.name for tensor, was, count in counts if count != was]

    async def changed(self) -> tuple[str, ...]:
        """Names of the tensors that have a chunk without the digest with which it was published or read (R8), in order.

        StateError: the memory holds no version, is taken back meanwhile, or its version has no digests.
        """
        content = self._member.content
        if content is None:
            raise StateError("the memory holds no version to compare it with")
        found = dict[str, None]()
        for chunk in range(content.manifest.chunk_count):
            changed, _ = await anyio.to_thread.run_sync(partial(self._has_changed, content, chunk, ""))
            if changed is None:
                raise StateError("the memory was taken back while it was compared, or its version has no digests")
            if changed:
                found.update(dict.fromkeys(content.manifest.tensors_in(chunk)))
        return tuple(found)

    async def look_again(
        self, generation: int, chunk: int, selection: str, limiter: anyio.CapacityLimiter
    ) -> tuple[bool | None, bytes]:
        """Has this chunk, of that selection, changed since its digest was made (R8)? None: nobody can tell. And which digest
        is that?
        """
        content = self._member.content
        if content is None or content.generation != generation:
            return None, b""
        look = partial(self._has_changed, content, chunk, selection)
        return await anyio.to_thread.run_sync(look, limiter=limiter)

    def _has_changed(self, content: Content, chunk: int, selection: str) -> tuple[bool | None, bytes]:
        """Whether a chunk that others may read has lost its digest, and that. None: it is not to be read, or has none."""
        right = (self._registration, content.generation, ContentId(content.version.content_id))
        with self._owner.access(None, *right, [chunk], 1, 0.0, selection) as answer:
            if not isinstance(answer, tuple):
                return None, b""
            access, memory = answer
            if not memory.width:
                return None, b""
            ((_, known),) = self._owner.digests_of(access, memory)
            now: int | None = None
            if isinstance(self._memory, FileMemory) and not selection:
                now = self._memory.digest(content.manifest, chunk)
            else:
                with suppress(StateError):  # what cannot be read has changed: a file was made shorter
                    now = memory.digest(chunk)
            return now != known, known.to_bytes(memory.width, "big")
