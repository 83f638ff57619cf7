"""The promise of a memory's owner: its bytes stay unchanged while readers may read them (R8, R15).

Responsible for telling the caller that published bytes were written. The call that takes the memory
back, or the next call, reports a finding. Not responsible for the finding itself: the shell's
`written` names the tensors, and the shell makes the digests again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorhub.errors import MutabilityViolation, some
from tensorhub.types import HandleState
from tensorhub.worker.member import Member
from tensorhub.worker.member_memory import Content

TENSORS_NAMED_MAX = 5  # in an error


class MutationGuard:
    """The guard of one handle. `written`: names of tensors that were written since the memory was
    opened last.
    """

    def __init__(self, member: Member, written: Callable[[], Sequence[str]]) -> None:
        self._member = member
        self._written = written
        # the running call's finding when it took the memory back
        self.violation: MutabilityViolation | None = None
        # what the next call says of bytes that have changed while readers could read them
        self._spoiled: str | None = None

    def __repr__(self) -> str:
        return (
            f"<MutationGuard of {self._member!r}{' broken' if self._spoiled is not None else ''}>"
        )

    def made(self) -> None:
        """From now on readers may read the memory."""
        self._spoiled = None

    def call_begins(self) -> None:
        """The finding of the last call was reported."""
        self.violation = None

    def taken_back(self) -> None:
        """The published memory is fenced: look for writes since it was published."""
        self.violation = self._find_violation()

    def changed(self, content: Content, chunk: int | None, broken: str = "") -> MutabilityViolation:
        """A repeated digest of this chunk differs (R8). `chunk` None: the chunk is one that a
        reader of another layout has read. `broken`: the tensors that were seen to be written,
        replaced or freed instead.
        """
        title, number = self._member.shard.title, content.version.version
        what = (
            broken
            or "a chunk as a reader of another layout reads it does not have its digest any more"
        )
        if chunk is not None and not broken:
            names = ", ".join(map(repr, content.manifest.tensors_in(chunk)[:TENSORS_NAMED_MAX]))
            what = f"{names} (chunk {chunk} does not have its digest any more)"
        if content.published:
            during, do = "published", "write in mutate(), and publish a new version"
        else:
            during, do = (
                "held for others to read",
                "it was given up here, and can be replicated again",
            )
        text = (
            f"version {number} of {title} was written, or damaged, while it was {during}: {what}. "
            f"No worker reads it from here now: unpublish() before you write; {do}"
        )
        if self._member.state is not HandleState.FILLING:
            self._spoiled = text
        return MutabilityViolation(text)

    def check_kept(self) -> None:
        """Raise MutabilityViolation if the memory is published and has been written since."""
        violation = self._find_violation() if self._member.state is HandleState.READY else None
        if violation is not None:
            raise violation

    def raise_violation(self) -> None:
        if self.violation is not None:
            self._spoiled = None  # said now
            raise self.violation

    def raise_spoiled(self) -> None:
        """Raise MutabilityViolation if a repeated digest differed (R8); once, if the memory was
        given up since.
        """
        if self._spoiled is not None:
            error = MutabilityViolation(self._spoiled, memory="torn")
            if self._member.state is not HandleState.READY:
                self._spoiled = None
            raise error

    def _find_violation(self) -> MutabilityViolation | None:
        """The violation that a write has left to be seen (R15), or that was found while readers
        could read.
        """
        names = [repr(name) for name in self._written()]
        if not names:
            return (
                None if self._spoiled is None else MutabilityViolation(self._spoiled, memory="torn")
            )
        return MutabilityViolation(
            f"version {self._member.version} of {self._member.shard.title} was written while it "
            f"was published: "
            f"{some(names, most=TENSORS_NAMED_MAX)}. Readers may have "
            "got other bytes, or have failed: "
            "unpublish() before you write, or write in mutate(), and publish a new version",
            memory="torn",
        )
