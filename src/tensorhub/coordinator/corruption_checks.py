"""Bytes that do not match their digest: which worker is to blame (R8).

A reader reports a chunk that came without its digest, and the owner digests that chunk again. If
its bytes have changed, its holding is quarantined. If they have not, the network or the reader
damages bytes: this reader does not read from this source for a while, as after every failed read.
If a reader reports several such sources, the reader is to blame. So a reader that lies costs a
source one digest now and then, and costs itself its operation. All readers with the read-only token
count as one.

Not responsible for how operations end (`fills` names the cause in the error).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Inquiry, RankPart, Worker
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.readers import Readers
from tensorhub.messages import DigestAgain, DigestedAgain, Need, Origin, Revoked, Stray
from tensorhub.types import READ_ONLY

INQUIRY_S = 1.0  # how often one reader can have one holding digest a chunk again


@dataclass(eq=False, repr=False)
class CorruptionChecks:
    """Asks owners, and hears their answers."""

    _cluster: Cluster
    _readers: Readers
    _holdings: Holdings

    def ask(self, part: RankPart, holding: Holding, chunk: int, need: Need | None = None) -> None:
        """This reader got that chunk of this holding without its digest, or with another one than
        was published. `need`: of which the chunk is; None: of the grid of both.
        """
        self._ask(part, part.member.worker, holding, chunk, need)

    def trace(self, part: RankPart, stray: Stray, need: Need | None = None) -> None:
        """A chunk of this reader has another digest than was published. Is the source that it names
        to blame?
        """
        holding = self._find(stray.origin)
        if holding is not None and holding.version is part.operation.version:
            self._readers.avoid(
                part,
                holding,
                "corrupt",
                f"chunk {stray.chunk} has another digest than was published",
            )
            self.ask(part, holding, stray.chunk, need)

    def _find(self, origin: Origin | None) -> Holding | None:
        """What that memory holds under that generation; None, if it does not any more."""
        member = self._cluster.members.get(origin.registration) if origin is not None else None
        held = member.holdings if member is not None else []
        return next(
            (h for h in held if origin is not None and h.generation == origin.generation), None
        )

    def _ask(
        self, part: RankPart | None, worker: Worker, holding: Holding, chunk: int, need: Need | None
    ) -> None:
        now = self._cluster.now
        reader = READ_ONLY if worker.read_only else worker.incarnation
        inquiries = holding.trust.inquiries
        known = inquiries.get(reader)
        if holding.leaving or (known is not None and now < known.asked_at + INQUIRY_S):
            return
        if known is None and len(inquiries) >= limits.INQUIRIES_MAX:
            del inquiries[next(iter(inquiries))]
        inquiry = inquiries[reader] = Inquiry(self._cluster.new_id(), part, now, chunk, need)
        of = ("", 0) if need is None else (need.selection, need.shard)
        question = DigestAgain(
            inquiry.ident, holding.member.registration, holding.generation, chunk, *of
        )
        self._cluster.tell(holding.member, question)

    def answered(self, worker: Worker, answer: DigestedAgain) -> None:
        """The owner has looked. An answer to a question that is not open changes nothing (G9)."""
        member = worker.members.get(answer.registration)
        holding = member.holding if member is not None else None
        if (
            holding is not None
            and not answer.inquiry
            and answer.changed
            and answer.generation == holding.generation
        ):
            self._holdings.quarantine(holding)
        if holding is None or not answer.inquiry:
            return
        inquiry = next(
            (each for each in holding.trust.inquiries.values() if each.ident == answer.inquiry),
            None,
        )
        if inquiry is None:
            return
        inquiry.ident = ""
        if answer.changed:
            self._holdings.quarantine(holding)
        elif answer.changed is not None:
            self._judge(holding, inquiry, answer)

    def _judge(self, holding: Holding, inquiry: Inquiry, answer: DigestedAgain) -> None:
        """The source's bytes have the digest that it sends with them. Do they have the published
        one?
        """
        version, need = holding.version, inquiry.need
        if need is not None:
            testimony = version.selections.get((need.shard, need.selection))
        else:
            testimony = None if holding.bridges else version.testimonies.get(holding.shard)
        published = testimony.digest(inquiry.chunk) if testimony is not None else b""
        is_right = published in (b"", answer.digest)
        if is_right or (testimony is not None and holding is testimony.publisher):
            if inquiry.part is not None:
                inquiry.part.proof.exonerated.add(holding.member.worker.name)
                self._cluster.changed(inquiry.part.operation)
        elif holding.is_published:  # two publishers of one class have drifted apart
            if (
                inquiry.part is not None
                and testimony is not None
                and testimony.publisher is not None
            ):
                inquiry.part.proof.drifted = testimony.publisher.shard, holding.shard, ""
                self._cluster.changed(inquiry.part.operation)
        elif holding.committed or answer.origin is None:
            self.condemn(holding)
        else:  # the holding finds out before it commits; ask the source that its bytes came from
            source = self._find(answer.origin)
            knows = source is not None and (need is not None or source.layout is holding.layout)
            if source is not None and knows and source is not holding and source.version is version:
                self._ask(holding.member.part, holding.member.worker, source, inquiry.chunk, need)

    def condemn(self, holding: Holding) -> None:
        """The holding has other bytes than were published, although it is committed, or has read
        from no worker.
        """
        holding.trust.condemned = True
        condemned, owner = holding.version.condemned, holding.member
        condemned[owner.worker.incarnation] = None
        if len(condemned) > limits.INQUIRIES_MAX:
            del condemned[next(iter(condemned))]
        self._holdings.quarantine(holding)
        reason = "its bytes have other digests than were published"
        self._cluster.tell(
            owner, Revoked(owner.registration, holding.version.info.content_id, reason)
        )
        if owner.group.operation is not None:
            self._cluster.changed(owner.group.operation)
