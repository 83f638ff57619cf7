"""What the owner of a memory has promised: that its bytes stay as they are while others may read them (R8, R15).

Responsible for finding out that they were written, by torch's counts or by a second digest, and for who is told: each
finding once, by the call that takes the memory back or by the next one. Not responsible for who may read
it (`worker.owner`).
"""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread

from tensorhub.errors import MutabilityViolation
from tensorhub.logs import get_logger
from tensorhub.memory.files import FileMemory
from tensorhub.memory.tensors import Memory
from tensorhub.messages import DigestAgain
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.types import ContentId, HandleState, RegistrationId
from tensorhub.worker.holding import Content
from tensorhub.worker.member import Member

TENSORS_NAMED_MAX = 5  # in an error

log = get_logger("tensorhub.worker")


class Promise:
    """That of one handle."""

    def __init__(self, member: Member, memory: Memory, owner: SharedOwner) -> None:
        self._member = member
        self._memory = memory
        self._owner = owner
        self._registration = RegistrationId(member.shard.registration)
        # `memory.versions()` when it was opened last; kept by a fence, as it may be reopened.
        self._versions: tuple[int, ...] | None = None
        self._violation: MutabilityViolation | None = None  # what the running call has found when it took the memory back
        self._spoiled: str | None = None  # what the next call says of bytes that have changed while others could read them

    def __repr__(self) -> str:
        return f"<Promise of {self._member!r}{' broken' if self._spoiled is not None else ''}>"

    def made(self) -> None:
        """From now on others may read the memory."""
        self._versions, self._spoiled = self._memory.versions(), None

    def library_wrote(self) -> None:
        """So torch counts it: autograd kept nothing of what is there now. What the owner himself has written still shows."""
        before = self._memory.versions()
        self._memory.count_write()
        if self._versions is not None:
            counts = zip(self._versions, before, self._memory.versions(), strict=True)
            self._versions = tuple([known + now - was for known, was, now in counts])

    def call_begins(self) -> None:
        """What the last call has found was said."""
        self._violation = None

    def taken_back(self) -> None:
        """Nobody reads what was published any more: was it kept?"""
        self._violation = self._find_violation()
        if self._violation is not None:
            log.warning("published_memory_written", registration=self._registration, reason=str(self._violation))

    def check_kept(self) -> None:
        """Raise MutabilityViolation if the memory is published and has been written since."""
        violation = self._find_violation() if self._member.state is HandleState.READY else None
        if violation is not None:
            raise violation

    def raise_violation(self) -> None:
        if self._violation is not None:
            self._spoiled = None  # said now
            raise self._violation

    def raise_spoiled(self) -> None:
        """Raise MutabilityViolation if a second digest was another one (R8); once, if that memory was given up since."""
        if self._spoiled is not None:
            error = MutabilityViolation(self._spoiled, memory="torn")
            if self._member.state is not HandleState.READY:
                self._spoiled = None
            raise error

    def _find_violation(self) -> MutabilityViolation | None:
        """What a second digest has shown, or (R15) torch has counted since the memory was opened."""
        if self._spoiled is not None:
            return MutabilityViolation(self._spoiled, memory="torn")
        now = self._memory.versions()
        if self._versions is None or now == self._versions:
            return None
        counts = zip(self._memory.descriptions, self._versions, now, strict=False)
        names = [repr(tensor.name) for tensor, was, count in counts if count != was]
        more = f" (and {len(names) - TENSORS_NAMED_MAX} more)" if len(names) > TENSORS_NAMED_MAX else ""
        return MutabilityViolation(
            f"version {self._member.version} of {self._member.shard.title} was written while it was published: "
            f"{', '.join(names[:TENSORS_NAMED_MAX])}{more}. Readers may have got other bytes, or have failed: "
            "unpublish() before you write, or write in mutate(), and publish a new version",
            memory="torn",
        )

    async def look_again(
        self, question: DigestAgain, limiter: anyio.CapacityLimiter
    ) -> tuple[bool | None, bytes, MutabilityViolation]:
        """Has this chunk changed since its digest was made (R8)? None: nobody can tell. And which digest is that? If it has
        changed, the error tells of it.
        """
        content, changed, digest = self._member.content, None, b""
        if content is not None and content.generation == question.generation:
            look = partial(self._has_changed, content, question.chunk)
            changed, digest = await anyio.to_thread.run_sync(look, limiter=limiter)
        text = "the memory has changed"
        if changed and content is not None and self._member.content is content:
            text = self._changed_text(content, question.chunk)
            log.warning("held_memory_changed", registration=self._registration, reason=text)
            if self._member.state is not HandleState.FILLING:
                self._spoiled = text
        return changed, digest, MutabilityViolation(text)

    def _has_changed(self, content: Content, chunk: int) -> tuple[bool | None, bytes]:
        """Whether a chunk that others may read has lost its digest, and that. None: it is not to be read, or has none."""
        right = (self._registration, content.generation, ContentId(content.version.content_id))
        with self._owner.access(None, *right, [chunk], 1, 0.0) as answer:
            if not isinstance(answer, tuple):
                return None, b""
            access, memory = answer
            if not memory.width:
                return None, b""
            ((_, known),) = self._owner.digests_of(access, memory)
            if isinstance(self._memory, FileMemory):  # nothing here touches its mapping: see there
                now = self._memory.digest(content.manifest, chunk)
            else:
                now = memory.digest(chunk)
            return now != known, known.to_bytes(memory.width, "big")

    def _changed_text(self, content: Content, chunk: int) -> str:
        title, number = self._member.shard.title, content.version.version
        names = ", ".join(map(repr, content.manifest.tensors_in(chunk)[:TENSORS_NAMED_MAX]))
        if content.published:
            during, do = "published", "write in mutate(), and publish a new version"
        else:
            during, do = "held for others to read", "it was given up here, and can be replicated again"
        return (
            f"version {number} of {title} was written, or damaged, while it was {during}: {names} (chunk {chunk} does not "
            f"have its digest any more). Nobody reads it from here now: unpublish() before you write; {do}"
        )
