"""What a simulated handle says of the digests of its memory: made of its cells, in no time."""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub.accesses import Access
from tensorhub.messages import DigestAgain, TellDigests
from tensorhub.testing.sim.assertion import HOLDING
from tensorhub.testing.sim.layouts import is_of_other_layout
from tensorhub.testing.sim.memory import digest_of, sent_digest
from tensorhub.testing.sim.ports import HandlePort, WorldPort
from tensorhub.types import ContentId, RegistrationId


class SimDigests:
    """Those of one handle."""

    def __init__(self, world: WorldPort, handle: HandlePort) -> None:
        self._world = world
        self._handle = handle

    def tell_made(self) -> None:
        """Say which digests were made of what is published."""
        for message in self._handle.interpreter.tell_made(self._handle.worker.owner)[0]:
            self._handle.worker.say(message)

    def tell(self, question: TellDigests) -> None:
        """Say which digests the cells of this memory have, or of what is staged for it."""
        handle, generation, content = self._handle, question.generation, self._handle.member.content
        owner = handle.worker.owner
        if content is not None and handle.interpreter.must_make(question):
            selection, content_id = question.selection, ContentId(content.version.content_id)
            chunks = range(owner.chunk_count(handle.id, selection))
            access = owner.begin(handle.id, generation, content_id, chunks, 2**62, selection)
            if isinstance(access, Access) and not self.is_spoilt(access):
                for chunk, known in zip(access.chunks, access.digests, strict=True):
                    sent_digest(owner, access, chunk, known, handle.cell_in(selection, chunk))
                owner.end(access)

        def listed(target: RegistrationId, selection: str) -> tuple[int, Sequence[int | None]] | None:
            digests = owner.digests(target, generation, selection)
            return None if digests is None else (8, digests)

        def read_from(target: RegistrationId) -> Sequence[int]:
            return owner.read_from(target, generation, question.origin)

        for message in handle.interpreter.tell_digests(question, listed, read_from):
            handle.worker.say(message)

    def is_spoilt(self, access: Access) -> bool:
        """Whether what vouches for this access has changed. Then it has ended, and the coordinator hears so. Where the word
        of holders of another layout decides, nobody could find a lie there: its own owner does.
        """
        handle, cells = self._handle, self._handle.cells
        known = handle.worker.owner.vouched_by(access)
        is_believed = is_of_other_layout(handle.grid) and self._world.is_believed(handle)
        lies = self._world.guarantees.contents.lies if is_believed else ()
        spoilt = next((own for own, digest in known.items() if digest_of(cells[own]) != digest or cells[own] in lies), None)
        if spoilt is None:
            return False
        handle.worker.owner.end(access)
        self._world.driver.took("a replica finds out that its memory has changed")
        self.make_again(DigestAgain("", handle.id, access.generation, spoilt))
        return True

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
                    # Who asks himself has seen it: see `is_spoilt`.
                    changed, digest = not question.inquiry or digest_of(cell) != known, known.to_bytes(8, "big")
                owner.end(access)
                if changed:
                    handle.changed = content.version.content_id if handle.member.state in HOLDING else ""
                    self._world.guarantees.retained.lost(handle)  # and the coordinator will hear so
        handle.apply(handle.interpreter.digested_again(question, changed, digest, owner, self._world.now)[0])
