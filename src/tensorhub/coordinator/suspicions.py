"""Bytes without their digest: who is to blame (R8).

A reader says that a chunk came without its digest; the owner digests it again. Have its bytes changed, its holding is
quarantined. Have they not, the way or the reader damages bytes: the pair is not tried again for a while, as after every
failed read, and a reader with whom several such sources have failed is the guilty one. So a reader that lies costs a source
one digest now and then, and itself its operation; those with the read-only token count as one reader, however many there
are. Not responsible for how operations end (`fills` says what is to blame).
"""

from __future__ import annotations

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Inquiry, RankPart, Worker
from tensorhub.coordinator.readers import Readers
from tensorhub.messages import DigestAgain, DigestedAgain
from tensorhub.types import READ_ONLY

INQUIRY_S = 1.0  # how often one reader can have one holding digest a chunk again


class Suspicions:
    """Asks owners, and hears their answers."""

    def __init__(self, cluster: Cluster, readers: Readers) -> None:
        self._cluster = cluster
        self._readers = readers

    def ask(self, part: RankPart, holding: Holding, chunk: int) -> None:
        """This reader got that chunk of this holding without its digest."""
        now, worker = self._cluster.now, part.member.worker
        reader = READ_ONLY if worker.read_only else worker.incarnation
        known = holding.inquiries.get(reader)
        if holding.leaving or (known is not None and now < known.asked_at + INQUIRY_S):
            return
        if known is None and len(holding.inquiries) >= limits.INQUIRIES_MAX:
            del holding.inquiries[next(iter(holding.inquiries))]
        inquiry = holding.inquiries[reader] = Inquiry(self._cluster.new_id(), part, now)
        question = DigestAgain(inquiry.ident, holding.member.registration, holding.generation, chunk)
        self._cluster.tell(holding.member, question)

    def answered(self, worker: Worker, answer: DigestedAgain) -> None:
        """The owner has looked. An answer to nothing that is asked now changes nothing (G9)."""
        member = worker.members.get(answer.registration)
        holding = member.holding if member is not None else None
        if holding is None or not answer.inquiry:
            return
        inquiry = next((each for each in holding.inquiries.values() if each.ident == answer.inquiry), None)
        if inquiry is None:
            return
        inquiry.ident = ""
        if answer.changed:
            self._readers.quarantine(holding)
        elif answer.changed is not None:
            inquiry.part.cleared.add(worker.name)
            self._cluster.changed(inquiry.part.operation)
