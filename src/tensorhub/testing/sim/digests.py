"""What a simulated handle says of the digests of its memory: made of its cells, in no time."""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub.messages import DigestAgain, TellDigests
from tensorhub.model.accesses import Access
from tensorhub.testing.sim.assertion import HOLDING
from tensorhub.testing.sim.memory import digest_of, sent_digest
from tensorhub.testing.sim.ports import HandlePort, WorldPort
from tensorhub.types import ContentId, RegistrationId


class SimDigests:
    """Those of one handle."""

    def __init__(self, world: WorldPort, handle: HandlePort) -> None:
        self._world = world
        self._handle = handle

    def tell_made(self) -> None:
        """Report the digests that were made of the publication."""
        for message in self._handle.interpreter.tell_made(self._handle.worker.owner)[0]:
            self._handle.worker.say(message)

    def tell(self, question: TellDigests) -> None:
        """Report the digests of this memory's cells, or of its staged cells."""
        handle, generation, content = self._handle, question.generation, self._handle.member.content
        owner = handle.worker.owner
        if content is not None and handle.interpreter.must_make(question):
            selection, content_id = question.selection, ContentId(content.version.content_id)
            chunks = range(owner.chunk_count(handle.id, selection))
            access = owner.begin(handle.id, generation, content_id, chunks, 2**62, selection)
            if isinstance(access, Access):
                for chunk, known in zip(access.chunks, access.digests, strict=True):
                    sent_digest(owner, access, chunk, known, handle.cell_in(selection, chunk))
                owner.end(access)

        def listed(
            target: RegistrationId, selection: str
        ) -> tuple[int, Sequence[int | None]] | None:
            digests = owner.digests(target, generation, selection)
            return None if digests is None else (8, digests)

        for message in handle.interpreter.tell_digests(question, listed):
            handle.worker.say(message)

    def make_again(self, question: DigestAgain) -> None:
        """Tell whether a cell has changed since its digest was made (R8)."""
        handle, changed, digest = self._handle, None, b""
        content, owner = handle.member.content, handle.worker.owner
        if content is not None:
            right = (question.generation, ContentId(content.version.content_id))
            chunk, selection = handle.interpreter.asked_about(question)
            access = owner.begin(handle.id, *right, [chunk], 1, selection)
            if isinstance(access, Access):
                if content.manifest.digest != "none":
                    cell = handle.cell_in(selection, chunk)
                    known = sent_digest(owner, access, chunk, access.digests[0], cell)
                    changed, digest = digest_of(cell) != known, known.to_bytes(8, "big")
                owner.end(access)
                if changed:
                    handle.changed = (
                        content.version.content_id if handle.member.state in HOLDING else ""
                    )
                    self._world.guarantees.retained.lost(handle)  # and the coordinator will hear so
        told = question, changed, digest, owner, handle.worker.now
        handle.apply(handle.interpreter.digested_again(*told)[0])
