"""What publishers say of their chunks' digests, and whether readers agree (R8).

Theory of operation. A publisher says its digests as it makes them. A reader verifies what it reads
against its source, and serves it on. Its vote names the root of its own list of digests. The
coordinator compares that root with the root of the publisher's list. If the roots differ, the
reader is sent the publisher's list, page by page. The reader finds the chunks that are wrong, says
where they came from, and reads them again.

A reader of another layout votes with one root for each selection that it reads. The publisher is
asked for the digests of that selection at the first vote, and the list is kept for the other
readers of that layout.

A publisher may be unable to say its digests: it is lost, silent, or does not know the selection.
Then the digests count with which the source has sent the bytes: `Proof.by_source`. Once a root is
known, no worker has to be trusted: a list from any holder is right if the list has that root.

Responsible for lists and roots, for the workers that are asked for lists, and for which votes
count. Not responsible for blame (`corruption_checks`), nor for what a vote leads to (`operations`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorhub.coordinator import coverage, limits
from tensorhub.coordinator.actions import Digested
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.corruption_checks import CorruptionChecks
from tensorhub.coordinator.entities import (
    Holding,
    Member,
    Operation,
    Question,
    RankPart,
    Testimony,
    Version,
    Worker,
)
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.refusals import Blame
from tensorhub.coordinator.states import PartState
from tensorhub.errors import IntegrityError, StateError
from tensorhub.layouts.published import decoded
from tensorhub.messages import (
    Compare,
    Compared,
    Digests,
    Need,
    Prepared,
    TellDigests,
    digests_bytes_max,
)
from tensorhub.model.digests import ROOT_BYTES, WIDTHS, root_of, width_in
from tensorhub.types import OpKind

ANSWER_S = 5.0  # looked at so often: a worker that has said nothing for so long is not waited for
# of one rank in one operation; after that its memory, or its word, is not believed any more
COMPARISONS_MAX = 16


@dataclass(eq=False, repr=False)
class Testimonies:
    """Changes testimonies and the claims of parts; no other component does."""

    _cluster: Cluster
    _readers: Readers
    _holdings: Holdings
    _corruption_checks: CorruptionChecks
    # by record: roots on their way to the store
    _recording: dict[int, Version] = field(default_factory=dict, init=False)

    # -- votes

    def expect(self, part: RankPart) -> None:
        """This rank, which bridges, has named its needs. Later it will name a root for each
        need.
        """
        for need in part.needs or ():
            testimony = self.of_need(part, need)
            testimony.needed_by = {
                each: None for each in testimony.needed_by if not each.operation.decided
            }

    def claim(self, part: RankPart, message: Prepared) -> None:
        """This rank has every chunk, reads no more, and names its roots. Its vote counts if the
        roots agree.
        """
        part.proof.claim, part.proof.rereads = {}, None
        part.move(self._cluster.now)
        if part.reads:
            self._cluster.become(part, PartState.CLAIMING, "has every chunk")
        part.proof.by_source = False
        if part.bridges:
            said = {(each.shard, each.selection): each.root for each in message.roots}
            for need in part.needs or ():
                part.proof.claim[need] = said.get((need.shard, need.selection), b"")
        else:
            part.proof.claim[None] = message.root
        if (
            part.proof.page_session != part.member.worker.session
        ):  # else the page that it was sent reaches it, or has reached it
            part.proof.page = None
        for each in part.proof.claim:
            testimony = self._of(part, each)
            if each is not None and not testimony.root:  # it may have been read there since
                testimony.answered.clear()
        if part.holding is not None:
            self._holdings.verified(part.holding, is_so=True)
        self._readers.release_all(part, "verified")
        self._cluster.changed(part.operation, part)

    def settle(self, operation: Operation) -> Blame | None:
        """Count the votes that agree with their publisher. Continue the comparison for each other
        vote with news.
        """
        for part in list(operation.parts.values() if operation.news is None else operation.news):
            if part.state is not PartState.CLAIMING:
                continue
            for need, root in list(part.proof.claim.items()):
                blame = self._settle_claim(part, need, root)
                if blame is not None:
                    return blame
            if not part.proof.claim:
                self._accept(part)
        return None

    def _settle_claim(self, part: RankPart, need: Need | None, root: bytes) -> Blame | None:
        """Settle one root that the rank names."""
        testimony, version = self._of(part, need), part.operation.bound
        if need is not None and not self._are_replicas_known(version, need.shard):
            pass  # else the rank might have mixed the bytes of two replicas that have drifted apart
        elif root == testimony.root and (
            root or not testimony.width
        ):  # as was published; or there are no digests
            self._agree(part, need, by_source=False)
        elif not testimony.root and not self._is_publisher_awaited(testimony, root):
            if testimony.turned_away:
                self._cluster.forget_list(testimony)  # perhaps there is room the next time
                testimony.answered.clear()
                return Blame(_no_room(testimony), part.rank)
            self._agree(part, need, by_source=True)
        elif not testimony.root:
            pass
        elif not testimony.is_there:
            self._ask_next(testimony)
        elif part.proof.comparisons >= COMPARISONS_MAX:
            return Blame(_unlike(part.operation, part), part.rank)
        elif part.proof.page is None:
            part.proof.compares = need
            self._send_page(part, testimony, 0)
        return None

    @staticmethod
    def _agree(part: RankPart, need: Need | None, *, by_source: bool) -> None:
        """The rank's bytes count: they are the published bytes, or (`by_source`) no publisher says
        otherwise.
        """
        del part.proof.claim[need]
        part.proof.by_source = part.proof.by_source or by_source
        if part.proof.page is not None and part.proof.compares == need:
            part.proof.page = None

    def compared(self, part: RankPart, answer: Compared) -> None:
        """The rank has compared a page of the publisher's digests with its own."""
        if part.state is not PartState.CLAIMING or (part.proof.page is None and not answer.rereads):
            return
        need = part.proof.compares
        if need not in part.proof.claim or (
            need is not None and (need.shard, need.selection) != (answer.shard, answer.selection)
        ):
            return  # it is agreed since, or about something else
        testimony = self._of(part, need)
        for stray in answer.strays:
            self._corruption_checks.trace(part, stray, need)
        if answer.rereads:
            part.proof.page, part.proof.rereads = None, need
            self._cluster.become(
                part, PartState.READING, "has found other digests than were published"
            )
            part.proof.comparisons += 1
            if part.holding is not None:
                self._holdings.verified(part.holding, is_so=False)
            self._cluster.changed(part.operation)
        elif (
            not testimony.pages
        ):  # forgotten since, to make room: nothing is agreed by a part of it
            part.proof.page = None
            self._cluster.changed(part.operation)
        elif answer.following >= testimony.chunks and not part.proof.claim[need]:
            self._agree(part, need, by_source=False)
            self._cluster.changed(part.operation)
        elif (
            answer.following >= testimony.chunks
        ):  # it finds nothing wrong in a list that has another root
            part.proof.page = None
            part.proof.comparisons += 1
            self._cluster.changed(part.operation)
        elif (
            part.proof.page is not None
            and answer.following == (part.proof.page + 1) * testimony.page_chunks
        ):
            self._send_page(part, testimony, part.proof.page + 1)

    def _accept(self, part: RankPart) -> None:
        """Count its vote: from now on the rank cannot time out or be cancelled alone."""
        self._record(part.operation.bound)
        part.proof.page = None
        self._cluster.become(part, PartState.VOTED, "its digests are agreed")
        if part.holding is not None:
            part.holding.trust.by_source = part.proof.by_source
            self._holdings.completed(part.holding)
        self._cluster.note(part.member)
        self._cluster.changed(part.operation, part)

    def _send_page(self, part: RankPart, testimony: Testimony, page: int) -> None:
        part.proof.page, part.proof.page_session = page, part.member.worker.session
        first, values, last = (
            page * testimony.page_chunks,
            testimony.pages[page],
            page + 1 == len(testimony.pages),
        )
        self._cluster.tell(
            part.member, Compare(part.operation.key, part.rank, first, values, last, *testimony.of)
        )

    def root_for(self, part: RankPart) -> bytes:
        """The root that a fetch compares by itself. A fetch is no reader's source, so no other rank
        depends on its word.
        """
        return (
            self._of(part, None).root
            if part.operation.kind is OpKind.FETCH and not part.bridges
            else b""
        )

    # -- asking for digests

    def _is_publisher_awaited(self, testimony: Testimony, root: bytes) -> bool:
        """Whether the publisher may still say the digests. Asks the publisher. `root`: as a reader
        names it.
        """
        if not testimony.width:
            return bool(root)  # it is not known yet whether the chunks have digests
        publisher = self.publisher(testimony)
        if publisher is None or not self._can_tell(publisher):
            return False
        self._set_timer(testimony)
        member = publisher.member
        if member.worker.session is None:  # it may come back within its lease
            return not testimony.selection and member.registration not in testimony.answered
        self._ask(testimony, member, publisher.generation)
        return member.registration in testimony.asked

    def _ask_next(self, testimony: Testimony) -> None:
        """The root is known, and the list is not: ask the next holder for the list."""
        self._set_timer(testimony)
        for registration, question in list(testimony.asked.items()):
            member = self._cluster.members.get(registration)
            if member is None or member.worker.session not in (question.session, None):
                del testimony.asked[registration]  # it is gone, or has not heard the question
        for holding in self._holders(testimony) if not testimony.asked else ():
            member = holding.member
            if member.registration not in testimony.answered and member.worker.session is not None:
                # a list never mixes the digests of two workers
                self._cluster.forget_list(testimony)
                self._ask(testimony, member, holding.generation)
                return

    def _holders(self, testimony: Testimony) -> Iterator[Holding]:
        """The holders of the chunks: first the publisher."""
        publisher, version = self.publisher(testimony), testimony.version
        if publisher is not None and self._can_tell(publisher):
            yield publisher
        if not testimony.selection:
            yield from (
                each for each in version.holdings.get(testimony.shard, ()) if each.committed
            )
            return
        for layout in version.others.values():
            for shard, needs in layout.needs.items():
                if testimony.of in ((need.selection, need.shard) for need in needs):
                    yield from (each for each in layout[shard] if each.committed)

    def _ask(self, testimony: Testimony, member: Member, generation: int) -> None:
        registration, session = member.registration, member.worker.session
        known = testimony.asked.get(registration)
        if (
            session is None
            or registration in testimony.answered
            or (known is not None and known.session == session)
        ):
            return
        testimony.asked[registration] = Question(session, self._cluster.now)
        self._cluster.tell(member, TellDigests(registration, generation, *testimony.of))

    def _set_timer(self, testimony: Testimony) -> None:
        due = "digests", testimony.version.info.model
        if due not in self._cluster.timers:
            self._cluster.timers.set(*due, self._cluster.now + ANSWER_S)

    def overdue(self, model_name: str) -> None:
        """Give up the workers that have been silent. Once every holder of a known root has been
        asked, all holders are asked again.
        """
        model = self._cluster.models.get(model_name)
        for version in model.versions.values() if model is not None else ():
            for testimony in all_of(version):
                if testimony.root and not testimony.asked:
                    testimony.answered.clear()
                for registration, question in list(testimony.asked.items()):
                    if question.heard_at + ANSWER_S <= self._cluster.now:
                        del testimony.asked[registration]
                        testimony.answered.add(registration)
            self._cluster.wake_all(version.starving)

    def publisher(self, testimony: Testimony) -> Holding | None:
        """The publisher that decides: for a selection, a publisher of some shard of the class."""
        version, known = testimony.version, testimony.publisher
        if not testimony.selection or (known is not None and self._may_know(known, testimony)):
            return known
        shards = version.holdings.classes.get(testimony.shard, ())
        each = [
            own.publisher for shard in shards if (own := version.testimonies.get(shard)) is not None
        ]
        found = next(
            (one for one in each if one is not None and self._may_know(one, testimony)), known
        )
        # a list never mixes the digests of two workers
        if found is not known and not testimony.root:
            self._cluster.forget_list(testimony)
            testimony.asked.clear()
            testimony.publisher = found
        return found

    def _may_know(self, publisher: Holding, testimony: Testimony) -> bool:
        """Whether this publisher can be asked now for the selection's digests, and has not told all
        that it could.
        """
        has_told = publisher.member.registration in testimony.answered
        return not has_told and self._can_tell(publisher) and _is_connected(publisher)

    def _can_tell(self, holding: Holding) -> bool:
        """Whether the owner still has this holding, with unchanged bytes as far as is known."""
        member = holding.member
        here = (
            self._cluster.members.get(member.registration) is member
            and not holding.trust.quarantined
        )
        return here and (member.holding is holding or holding in member.leaving)

    # -- digests that arrive

    def told(self, worker: Worker, message: Digests) -> None:
        """A worker tells digests. They count from a publisher, and, once a root is known, from the
        holder that was asked.
        """
        member = worker.members.get(message.registration)
        if member is None:
            return
        holding = next(
            (each for each in member.holdings if each.generation == message.generation), None
        )
        if holding is None:
            return
        testimony = self._told_of(holding, message)
        if testimony is None:
            return
        is_publishers = holding is self.publisher(testimony)
        asked = member.registration in testimony.asked
        if not testimony.width or not (asked if testimony.root else is_publishers):
            # once a root is known, one worker tells all: a mixed list would accuse the worker that
            # completes it
            return
        if member.registration in testimony.asked:
            testimony.asked[member.registration].heard_at = self._cluster.now
        if message.last:
            testimony.asked.pop(member.registration, None)
            testimony.answered.add(member.registration)
        if not testimony.is_there and self._take(testimony, message):
            self._complete(testimony, holding)
        # else no waiting rank can go on
        if message.last or testimony.is_there or testimony.turned_away:
            self._bring_on(testimony)

    def _bring_on(self, testimony: Testimony) -> None:
        """Wake the waiting ranks: for a selection only the ranks that need it, of thousands of
        selections.
        """
        if not testimony.selection:
            self._cluster.wake_all(testimony.version.starving)
            return
        for part in testimony.needed_by:
            if part.operation.decided or part.state is not PartState.CLAIMING:
                continue
            if part.operation.is_read_only:  # there may be many
                self._cluster.wake(part.operation)
            elif not self._is_left_as_it_is(part, testimony):
                self._cluster.changed(part.operation, part)

    def _is_left_as_it_is(self, part: RankPart, testimony: Testimony) -> bool:
        """Settle this one claim of the rank, if its digests are known. Whether the rank still waits
        for other claims: there may be thousands.
        """
        claim = part.proof.claim
        need = next((each for each in claim if self._of(part, each) is testimony), None)
        if need is None or not testimony.root:
            return False
        return self._settle_claim(part, need, claim[need]) is None and bool(claim)

    def publisher_is_back(self, holding: Holding) -> None:
        """The owner announces this holding again, and that it has published it."""
        testimony = self.of(holding.version, holding.shard)
        known, member = (
            testimony.publisher.member if testimony.publisher is not None else None,
            holding.member,
        )
        if known is not None and (known.registration, known.worker.incarnation) != (
            member.registration,
            member.worker.incarnation,
        ):
            return  # another worker has the publisher's place now, and has read what it holds
        testimony.publisher = holding
        testimony.answered.discard(holding.member.registration)

    def _told_of(self, holding: Holding, message: Digests) -> Testimony | None:
        """The testimony that these digests belong to; None: no reader needs them."""
        version = holding.version
        if message.selection:
            return version.selections.get((message.shard, message.selection))
        return (
            None
            if holding.bridges
            else self.of(version, holding.shard, holding.member.said.manifest)
        )

    def _take(self, testimony: Testimony, message: Digests) -> bool:
        """Enter the digests. Whether the list is complete now."""
        if testimony.selection and not message.chunks:
            return False  # it does not know the selection, or its budget of votes is used up
        within = all(
            first >= 0 and count > 0 and first + count <= message.chunks
            for first, count in message.runs
        )
        if (
            not within
            or len(message.digests) != sum(count for _, count in message.runs) * testimony.width
        ):
            return False
        if testimony.chunks != message.chunks and (
            testimony.chunks >= 0 or not self._begin(testimony, message.chunks)
        ):
            return False
        testimony.enter(message.runs, message.digests)
        return testimony.is_there

    def _begin(self, testimony: Testimony, chunks: int) -> bool:
        """Make room for a list. Lists whose root is known make room for others: they can be told
        again.
        """
        nbytes = chunks * (testimony.width + 1)
        lists = self._cluster.testimonies
        most = limits.DIGEST_BYTES_MAX - nbytes
        for other in list(lists) if self._cluster.list_bytes > most else ():
            if other.root and self._cluster.list_bytes > most:
                self._cluster.forget_list(other)
                other.answered.clear()
        testimony.turned_away = self._cluster.list_bytes > most
        if not testimony.turned_away:
            testimony.begin(chunks)
            lists[testimony] = None
            self._cluster.list_bytes += nbytes
        return not testimony.turned_away

    def recover(self, version: Version, roots: bytes) -> None:
        """The version's roots, as the store has them."""
        version.roots_stored = True
        for shard in range(len(roots) // ROOT_BYTES):
            self.of(version, shard).root = roots[shard * ROOT_BYTES : (shard + 1) * ROOT_BYTES]

    def _complete(self, testimony: Testimony, teller: Holding) -> None:
        root, version = root_of(testimony.values), testimony.version
        # the teller does not hold the published bytes
        if testimony.root and root != testimony.root:
            self._cluster.forget_list(testimony)
            if teller.committed and not teller.is_published:
                self._corruption_checks.condemn(teller)
            return
        testimony.root = root
        testimony.finish()
        testimony.asked.clear()  # the list is complete: no further answer is of use
        self._record(version)
        if not testimony.selection:
            self._compare_replicas(version, version.holdings.class_of(testimony.shard))

    # -- replicas

    def compare_replicas(self, version: Version) -> None:
        """The version was published: ask all ranks that have published equal parts of the model for
        their digests.
        """
        for first in version.holdings.classes:
            self._are_replicas_known(version, first)

    def _are_replicas_known(self, version: Version, first: int) -> bool:
        """Whether all publishers of a class that can tell have told the digests of their own
        chunks. They are asked.
        """
        shards, are_known = version.holdings.classes.get(first, ()), True
        for testimony in [self.of(version, shard) for shard in shards] if len(shards) > 1 else ():
            publisher = testimony.publisher
            if (
                publisher is None
                or testimony.root
                or not (self._can_tell(publisher) and _is_connected(publisher))
            ):
                continue
            if testimony.width:
                self._ask(testimony, publisher.member, publisher.generation)
                self._set_timer(testimony)
                are_known = are_known and publisher.member.registration in testimony.answered
        return are_known

    def _compare_replicas(self, version: Version, first: int) -> None:
        """If two ranks of a class have different bytes, tell every operation on this version."""
        found = coverage.drifted(version, first) if first not in version.drifted else None
        if found is not None:
            version.drifted[first] = *found, coverage.what_differs(version, *found)
            for operation in version.bound.values():
                self._cluster.changed(operation)

    def _record(self, version: Version) -> None:
        """Have the roots of all shards made durable, once they are known."""
        roots = [each.root for _, each in sorted(version.testimonies.items()) if each.root]
        if not version.roots_stored and len(roots) == version.info.world_size:
            version.roots_stored = True
            self._cluster.note(version)
            info = version.info
            entry = Digested(info.model, info.version, info.content_id, b"".join(roots))
            self._recording[self._cluster.persist(entry)] = version

    def recorded(self, record: int, *, failed: bool = False) -> None:
        """The store has an entry, or cannot take it: roots are tried again with the next vote."""
        version = self._recording.pop(record, None)
        if version is not None and failed:
            version.roots_stored = False
            self._cluster.note(version)

    # -- looking up

    def _of(self, part: RankPart, need: Need | None) -> Testimony:
        version = part.operation.bound
        return (
            self.of(version, part.shard, part.member.begun)
            if need is None
            else self.of_need(part, need)
        )

    def of_need(self, part: RankPart, need: Need) -> Testimony:
        """The testimony of a selection that this rank reads."""
        version, key = part.operation.bound, (need.shard, need.selection)
        testimony = version.selections.get(key)
        if testimony is None:
            page_bytes = digests_bytes_max(self._cluster.options.frame_bytes_max)
            testimony = Testimony(version, need.shard, need.selection, page_bytes=page_bytes)
            version.selections[key] = testimony
            self._cluster.selections += 1
        if not testimony.width:
            testimony.width = WIDTHS[decoded(version.holdings.description).digest]
        testimony.needed_by[part] = None
        return testimony

    def of(self, version: Version, shard: int, manifest: bytes = b"") -> Testimony:
        """The testimony of a shard. `manifest`: as the caller knows it, used if the version has no
        manifest of the shard.
        """
        testimony = version.testimonies.get(shard)
        if testimony is None:
            page_bytes = digests_bytes_max(self._cluster.options.frame_bytes_max)
            testimony = version.testimonies[shard] = Testimony(
                version, shard, page_bytes=page_bytes
            )
        if not testimony.width:
            testimony.width = width_in(version.manifests.get(shard) or manifest)
        return testimony


def all_of(version: Version) -> Iterator[Testimony]:
    yield from version.testimonies.values()
    yield from version.selections.values()


def is_asked(version: Version, registration: str) -> bool:
    """Whether a reader waits for this registration's digests of that version."""
    return any(registration in testimony.asked for testimony in all_of(version))


def _is_connected(holding: Holding) -> bool:
    return holding.member.worker.session is not None


def _no_room(testimony: Testimony) -> StateError:
    info = testimony.version.info
    return StateError(
        f"version {info.version} of {info.model!r}: the coordinator has no room for its "
        f"publisher's digests "
        f"(DIGEST_BYTES_MAX), without which nothing is committed: publish with a larger "
        f"chunk_bytes",
        retryable=True,
    )


def _unlike(operation: Operation, part: RankPart) -> IntegrityError:
    what = f"{operation.kind} of {operation.group.model.name!r}: version {operation.bound.number}"
    return IntegrityError(
        f"{what}: after {part.proof.comparisons} readings rank {part.rank} still has other digests "
        f"than were published. The "
        f"machine of worker {part.member.worker.name!r} may damage bytes: look at its memory, or "
        f"use another one"
    )
