"""The publisher's digests decide (R8): what publishers say of their chunks' digests, and whether readers agree.

Theory of operation. A publisher says its digests as it makes them. A reader verifies what it reads against its source, and
serves it on. Its vote names the root of its own list of digests, and counts only if that is the root of the publisher's
list. If the roots differ, the reader is sent the publisher's list, page by page. It finds the chunks that are wrong, says
where they came from, and reads them again.

If the publisher's list is not complete, the publisher is asked for the rest. If the publisher has gone, those who read from
it directly say what it said to them. If nobody is left who did, whoever holds the chunks is asked. Once a root is known,
nobody has to be trusted: a list from anybody is right if it has that root.

Of a selection, what others than its publisher say is `hearsay`.

Responsible for lists and roots, and for which votes count. Not responsible for who is asked (`tellers`), for who is to blame
(`corruption_checks`), nor for what a vote leads to (`operations`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub.coordinator import bridges, hearsay, limits, replicas
from tensorhub.coordinator.actions import Digested
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.corruption_checks import CorruptionChecks
from tensorhub.coordinator.entities import (
    Holding,
    Member,
    Operation,
    RankPart,
    Testimony,
    Version,
    Worker,
)
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.layout_holdings import LayoutHoldings
from tensorhub.coordinator.operation_handlers import Blame
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.supply import wants_source
from tensorhub.coordinator.tellers import Tellers, all_of
from tensorhub.digests import ROOT_BYTES, WIDTHS, root_of, width_in
from tensorhub.errors import IntegrityError, StateError
from tensorhub.layouts.published import Published
from tensorhub.messages import Compare, Compared, Digests, Need, Prepared, Stray, digests_bytes_max
from tensorhub.types import OpKind

# Of one rank in one operation, besides one for each selection, which it may have to read again to be vouched for. After that
# its memory, or its word, is not believed any more.
COMPARISONS_MAX = 16


@dataclass(eq=False, repr=False)
class Testimonies:
    """Changes testimonies and the claims of parts; nobody else does."""

    _cluster: Cluster
    _readers: Readers
    _holdings: Holdings
    _corruption_checks: CorruptionChecks
    _tellers: Tellers
    _recording: dict[int, Version] = field(default_factory=dict, init=False)  # whose roots are on their way to the store

    # -- votes

    def expect(self, part: RankPart) -> None:
        """This rank, which bridges, has said what it needs: it will name roots of that."""
        for need in part.needs or ():
            testimony = self.of_need(part, need)
            if testimony.need != need:  # a read-only worker has said it has other chunks: see `disagreement`
                key = part.layout.origin_id, need.shard, need.selection
                self._cluster.forget_selection(part.operation.bound, key)
                testimony = self.of_need(part, need)
            testimony.needed_by = {each: None for each in testimony.needed_by if not each.operation.decided}
        for first in replicas.needed(part):
            self._are_replicas_known(part.operation.bound, first)
            self._compare_replicas(part.operation.bound, first)

    def claim(self, part: RankPart, message: Prepared) -> None:
        """This rank has every chunk, and names the roots of its digests. It reads no more. Its vote counts if they agree."""
        if part.rereads is not None and (testimony := self._of(part, part.rereads)).unaware:
            testimony.answered -= testimony.unaware  # it has been read since, perhaps there
            testimony.unaware.clear()
        part.claim, part.rereads, part.moved_at = {}, None, self._cluster.now
        if part.bridges:
            said = {(each.shard, each.selection): each.root for each in message.roots}
            for need in part.needs or ():
                part.claim[need] = said.get((need.shard, need.selection), b"")
        else:
            part.claim[None] = message.root
        if part.page_session != part.member.worker.session:  # else the page that it was sent reaches it, or has reached it
            part.page = None
        for each in part.claim:
            self._of(part, each).answered.discard(part.member.registration)  # it has more to tell now
        if part.holding is not None:
            part.holding.chunks_verified = part.chunks
            self._holdings.verified(part.holding, is_so=True)
        self._readers.release_all(part, "verified")
        self._cluster.changed(part.operation, part)

    def settle(self, operation: Operation) -> Blame | None:
        """Count the votes that agree with their publisher. For each of the others that have news, do what brings it on."""
        for part in list(operation.parts.values() if operation.news is None else operation.news):
            if part.misled:
                return Blame(hearsay.misled(part), part.rank, again=True)
            if part.claim is None or part.voted:
                continue
            for need, root in list(part.claim.items()):
                blame = self._settle_claim(part, need, root)
                if blame is not None:
                    return blame
            if not part.claim and not self._may_be_overruled(part):
                self._accept(part)
        return None

    def _may_be_overruled(self, part: RankPart) -> bool:
        """Whether a publisher is back by now, before whom others were believed. Each is heard first."""
        return any(self._tellers.may_say_otherwise(self.of_need(part, need)) for need in part.needs or ())

    def _settle_claim(self, part: RankPart, need: Need | None, root: bytes) -> Blame | None:
        """The same for one of the roots that it names."""
        testimony, version = self._of(part, need), part.operation.bound
        unproven = version.unproven.intersection(replicas.needed(part)) if version.unproven else ()
        if part.page is not None and part.encloses and part.compares == need:
            pass  # it may be about to read that again, whoever vouches for it meanwhile
        elif not all(self._are_replicas_known(version, first) for first in unproven):
            pass  # else it might be half of one, and half of another one that has drifted apart
        elif self._tellers.may_say_otherwise(testimony):
            pass  # its publisher is back, and is heard first
        elif need is not None and testimony.disputed and bridges.must_enclose(part, need):
            if _is_believed_no_more(part):
                return Blame(_unlike(part.operation, part), part.rank)
            if part.page is None:
                self._enclose(part, testimony, need)
        elif (testimony.root and root == testimony.root) or not (testimony.width or testimony.root or root):
            self._agree(part, need)
        elif not testimony.width:
            pass  # nobody has said yet whether its chunks have digests
        elif testimony.turned_away:
            self._cluster.forget_list(testimony)  # perhaps there is room the next time
            testimony.answered.clear()
            return Blame(_no_room(testimony), part.rank)
        elif not testimony.root or not testimony.is_there:
            self._tellers.ask(testimony)
            is_awaited = part.page is not None or self._tellers.is_anybody_awaited(testimony)
            if need is not None and not is_awaited and bridges.must_enclose(part, need):
                if not bridges.can_enclose(part):
                    is_known_now = part.origin is not None and any(version.described_as(part.origin.origin_id))
                    return Blame(_unplanned(part), part.rank, again=is_known_now)
                if _is_believed_no_more(part):
                    return Blame(_unlike(part.operation, part), part.rank)
                self._enclose(part, testimony, need)
        elif _is_believed_no_more(part):
            return Blame(_unlike(part.operation, part), part.rank)
        elif part.page is None:
            part.compares = need
            self._send_page(part, testimony, 0)
        return None

    @staticmethod
    def _agree(part: RankPart, need: Need | None) -> None:
        """What it has of this is what was published."""
        assert part.claim is not None
        del part.claim[need]
        if part.page is not None and part.compares == need:
            part.page = None

    def compared(self, part: RankPart, answer: Compared) -> None:
        """The rank has compared a page of the publisher's digests with its own."""
        if part.claim is None or (part.page is None and not answer.rereads):
            return
        need = part.compares
        if need not in part.claim or (need is not None and (need.shard, need.selection) != (answer.shard, answer.selection)):
            return  # it is agreed since, or about something else
        testimony = self._of(part, need)
        for stray in answer.strays:
            if need is not None and testimony.hearsay and self._is_evidence(part, testimony, stray):
                hearsay.dispute(self._cluster, part, testimony, need)
            else:
                self._corruption_checks.trace(part, stray, need)
        if answer.rereads:
            part.claim, part.page, part.rereads = None, None, need
            part.comparisons += 1
            if part.holding is not None:
                self._holdings.verified(part.holding, is_so=False)
            self._cluster.changed(part.operation)
        elif part.encloses or not testimony.root:  # all that it has of that was read with what encloses it
            part.page = None
            part.comparisons += 1
            testimony.answered.discard(part.member.registration)
            if part.encloses and (part.member.worker.read_only or testimony.disputed):  # others do not depend on its word
                self._agree(part, need)
            self._cluster.changed(part.operation)
        elif not testimony.pages:  # forgotten since, to make room: nothing is agreed by a part of it
            part.page = None
            self._cluster.changed(part.operation)
        elif answer.following >= testimony.chunks and not part.claim[need]:
            self._agree(part, need)
            self._cluster.changed(part.operation)
        elif answer.following >= testimony.chunks:  # it finds nothing wrong in a list that has another root
            part.page = None
            part.comparisons += 1
            self._cluster.changed(part.operation)
        elif part.page is not None and answer.following == (part.page + 1) * testimony.page_chunks:
            self._send_page(part, testimony, part.page + 1)

    def _is_evidence(self, part: RankPart, testimony: Testimony, stray: Stray) -> bool:
        """Whether that chunk has come from its publisher, or from another one who holds what it is of. (Workers do not
        depend on what read-only workers say.)
        """
        publisher, origin = testimony.publisher, stray.origin
        if part.member.worker.read_only or origin is None:
            return False
        is_publishers = publisher is not None and publisher.member.registration == origin.registration
        return is_publishers or self._corruption_checks.is_of_origin(part, stray)

    def _accept(self, part: RankPart) -> None:
        """Count its vote: from now on the rank cannot time out or be cancelled alone."""
        self._record(part.operation.bound)
        part.voted, part.claim, part.page = True, None, None
        if part.holding is not None:
            self._holdings.completed(part.holding)
        self._cluster.note(part.member)
        self._cluster.changed(part.operation, part)

    def _send_page(self, part: RankPart, testimony: Testimony, page: int) -> None:
        part.page, part.page_session, part.encloses = page, part.member.worker.session, False
        first, values, last = page * testimony.page_chunks, testimony.pages[page], page + 1 == len(testimony.pages)
        of = ("", 0) if testimony.need is None else (testimony.need.selection, testimony.need.shard)
        self._cluster.tell(part.member, Compare(part.operation.key, part.rank, first, values, last, *of))

    def cannot_be_proved(self, part: RankPart) -> bool:
        """Whether it has read all, nobody can tell digests that count, and nobody is left whose chunks would enclose it."""
        for need in part.claim or ():
            if need is None or part.origin is None or not bridges.must_enclose(part, need):
                continue
            testimony = self.of_need(part, need)
            has_told = part.member.registration in testimony.answered and not self._tellers.is_anybody_awaited(testimony)
            if has_told and not part.origin.is_class_whole(need.shard):
                return True
        return False

    def _enclose(self, part: RankPart, testimony: Testimony, need: Need) -> None:
        """Nobody can tell digests of that selection which count. Where the source's own digests are known, the rank reads it
        again with the chunks that enclose it, and is believed then.
        """
        version, origin = testimony.version, part.origin
        assert origin is not None
        shards = [shard for shard in origin.classes.get(need.shard, ()) if origin.is_whole(shard)]
        for own in [self.of(version, shard) for shard in shards] if origin is version.holdings else ():
            if not own.root:
                self._tellers.ask(own)
        if any(bridges.grid_root(version, origin, shard) for shard in shards):
            part.compares = need
            part.page, part.page_session, part.encloses = 0, part.member.worker.session, True
            of = need.selection, need.shard
            self._cluster.tell(part.member, Compare(part.operation.key, part.rank, 0, b"", True, *of, enclose=True))

    def root_for(self, part: RankPart) -> bytes:
        """The root that a fetch compares by itself. It is nobody's source, so nobody else depends on its word."""
        return self._of(part, None).root if part.operation.kind is OpKind.FETCH and not part.bridges else b""

    # -- what is told

    def told(self, worker: Worker, message: Digests) -> None:
        """A worker tells digests. They count from a publisher, and from whoever was asked."""
        member = worker.members.get(message.registration)
        found = self._about(member, message.generation) if member is not None else None
        if member is None:
            return
        if found is None:
            self._told_nothing(member, message)
            return
        holding, version, layout = found
        testimony = self._told_of(member, version, layout, message)
        if testimony is None:
            return
        is_publishers = holding is not None and holding is self._tellers.publisher(testimony)
        overrules = is_publishers and testimony.hearsay and holding is not None and self._tellers.can_tell(holding)
        if overrules and testimony.differs(message.runs, message.digests):
            self._cluster.forget_list(testimony)
            hearsay.overrule(self._cluster, testimony)
            self._tellers.ask(testimony)  # for the rest: who reads what was read so waits for that
        asked = member.registration in testimony.asked
        if not testimony.width or not (asked or (is_publishers and not testimony.root)):
            return  # once a root is known, one worker tells all: mixed words of several would accuse whoever tells the last
        testimony.silent.discard(member.registration)
        if message.last:
            testimony.asked.pop(member.registration, None)
            testimony.answered.add(member.registration)
        if testimony.need is not None and not testimony.root and not is_publishers:
            testimony.hearsay = True
        if not testimony.is_there and self._take(testimony, message, overrules=overrules):
            self._complete(testimony, holding)
        if is_publishers and asked and message.last and testimony.is_there and message.chunks == testimony.chunks:
            testimony.hearsay = testimony.disputed = False  # it has said all of it
        if message.last or testimony.is_there or testimony.turned_away:  # else it brings nobody on who waits
            self._bring_on(testimony)

    def _bring_on(self, testimony: Testimony) -> None:
        """Those who wait for that. Of a selection that is who needs it, unless others read from those (of whom its root says
        whether they are vouched for): ranks may have thousands of selections.
        """
        version = testimony.version
        is_read_on = any(layout.origin_id not in ("", version.holdings.described_as) for layout in version.others.values())
        if testimony.need is None or is_read_on:
            self._cluster.wake_all(version.starving)
            return
        for part in testimony.needed_by:
            waits = part.claim is not None or part.rereads is not None or wants_source(part)
            if part.operation.decided or not waits:
                continue  # it waits for no digests, nor for a source: there may be others once those are known
            if part.operation.is_read_only:  # there may be many
                self._cluster.wake(part.operation)
            elif not self._is_left_as_it_is(part, testimony):
                self._cluster.changed(part.operation, part)

    def _is_left_as_it_is(self, part: RankPart, testimony: Testimony) -> bool:
        """Settle what it claims of that alone, where its digests are known: it may claim thousands of others, for which it
        still waits then.
        """
        need, claim = testimony.need, part.claim
        if not claim or need not in claim or not testimony.root:
            return False
        return self._settle_claim(part, need, claim[need]) is None and bool(claim)

    def _told_nothing(self, member: Member, message: Digests) -> None:
        """It does not hold that any more."""
        for version in member.group.model.versions.values():
            for testimony in all_of(version):
                asked = testimony.asked.get(member.registration)
                if asked is not None and asked[1] == message.generation:
                    del testimony.asked[member.registration]
                    testimony.answered.add(member.registration)
                    self._cluster.wake_all(version.starving)

    def publisher_is_back(self, holding: Holding) -> None:
        """It says again what it holds, and that it has published that."""
        testimony = self.of(holding.version, holding.shard)
        known, member = testimony.publisher.member if testimony.publisher is not None else None, holding.member
        if known is not None and (known.registration, known.worker.incarnation) != (
            member.registration,
            member.worker.incarnation,
        ):
            return  # another worker has the publisher's place now, and has read what it holds
        testimony.publisher = holding
        testimony.answered.discard(holding.member.registration)

    def _told_of(
        self, member: Member, version: Version, layout: LayoutHoldings[Holding], message: Digests
    ) -> Testimony | None:
        """What these digests are of; None: nobody needs that."""
        if not message.selection:
            return None if layout.origin_id else self.of(version, member.shard, member.manifest)
        found = version.selections_of(layout, member.shard, message.selection, message.shard)
        asked = (each for each in found if member.registration in each.asked)
        return next(asked, next(iter(found), None))

    def _take(self, testimony: Testimony, message: Digests, *, overrules: bool) -> bool:
        """Enter them, `overrules`: also where others have said some. Whether all are known now."""
        if testimony.need is not None and message.chunks != testimony.need.chunks:
            testimony.unaware.add(message.registration)
            return False  # it does not know that selection: nobody has read it there
        testimony.unaware.discard(message.registration)
        within = all(first >= 0 and count > 0 and first + count <= message.chunks for first, count in message.runs)
        if not within or len(message.digests) != sum(count for _, count in message.runs) * testimony.width:
            return False
        if testimony.chunks != message.chunks and (testimony.chunks >= 0 or not self._begin(testimony, message.chunks)):
            return False
        testimony.enter(message.runs, message.digests, overrules=overrules)
        return testimony.is_there

    def _begin(self, testimony: Testimony, chunks: int) -> bool:
        """Make room for a list. Lists whose root is known make room for others: they can be told again."""
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
        """These are durable."""
        version.roots_stored = True
        for shard in range(len(roots) // ROOT_BYTES):
            self.of(version, shard).root = roots[shard * ROOT_BYTES : (shard + 1) * ROOT_BYTES]

    def _complete(self, testimony: Testimony, teller: Holding | None) -> None:
        root, version = root_of(testimony.values), testimony.version
        if testimony.root and root != testimony.root and testimony.hearsay and teller is testimony.publisher:
            hearsay.overrule(self._cluster, testimony)
        elif testimony.root and root != testimony.root:  # who told this does not hold what it says
            self._cluster.forget_list(testimony)
            if teller is not None and teller.committed and not self._tellers.is_publisher(teller):
                self._corruption_checks.condemn(teller)
            return
        testimony.root = root
        testimony.finish()
        testimony.asked.clear()  # no list from others is of use any more
        self._record(version)
        if testimony.need is None:
            self._compare_replicas(version, version.holdings.class_of(testimony.shard))

    # -- replicas

    def _are_replicas_known(self, version: Version, first: int) -> bool:
        """Whether all publishers of a class that can tell have told the digests of their own chunks. They are asked."""
        shards, are_known = version.holdings.classes[first], True
        for testimony in [self.of(version, shard) for shard in shards] if len(shards) > 1 else ():
            publisher = testimony.publisher
            if publisher is not None and testimony.width and not testimony.root and self._tellers.can_tell(publisher):
                self._tellers.ask_one(testimony, publisher.member, publisher.generation, "")
                are_known = are_known and publisher.member.registration in testimony.answered
        return are_known

    def _compare_replicas(self, version: Version, first: int) -> None:
        """If two ranks that are to have the same bytes do not, all who read them have to know."""
        found = replicas.drifted(version, first) if first not in version.drifted else None
        if found is not None:
            version.drifted[first] = *found, replicas.what_differs(version, *found)
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

    @staticmethod
    def _about(member: Member, generation: int) -> tuple[Holding | None, Version, LayoutHoldings[Holding]] | None:
        """What this registration holds, or fills, under that generation."""
        for holding in member.holdings:
            if holding.generation == generation:
                return holding, holding.version, holding.layout
        part = member.part
        if part is None or not part.operation.running or part.operation.kind is OpKind.PUBLISH:
            return None
        return (part.holding, part.operation.bound, part.layout) if part.call.generation == generation else None

    # -- looking up

    def _of(self, part: RankPart, need: Need | None) -> Testimony:
        version = part.operation.bound
        return self.of(version, part.shard, part.member.begun) if need is None else self.of_need(part, need)

    def of_need(self, part: RankPart, need: Need) -> Testimony:
        """What is known of that selection, which this rank reads of its origin."""
        version, key = part.operation.bound, (part.layout.origin_id, need.shard, need.selection)
        testimony = version.selections.get(key)
        if testimony is None:
            page_bytes = digests_bytes_max(self._cluster.options.frame_bytes_max)
            testimony = Testimony(version, need.shard, need, part.layout.origin_id, page_bytes=page_bytes)
            version.selections[key] = testimony
            self._cluster.selections += 1
        if not testimony.width:
            testimony.width = WIDTHS[Published.decode(part.layout.origins).digest]
        testimony.needed_by[part] = None
        return testimony

    def of(self, version: Version, shard: int, manifest: bytes = b"") -> Testimony:
        """What is known of that shard. `manifest`: as the asker knows it, in case that nobody else has told it."""
        testimony = version.testimonies.get(shard)
        if testimony is None:
            page_bytes = digests_bytes_max(self._cluster.options.frame_bytes_max)
            testimony = version.testimonies[shard] = Testimony(version, shard, page_bytes=page_bytes)
        if not testimony.width:
            testimony.width = width_in(version.manifests.get(shard) or manifest)
        return testimony


def _no_room(testimony: Testimony) -> StateError:
    info = testimony.version.info
    return StateError(
        f"version {info.version} of {info.model!r}: the coordinator has no room for its publisher's digests "
        f"(DIGEST_BYTES_MAX), without which nothing is committed: publish with a larger chunk_bytes",
        retryable=True,
    )


def _unplanned(part: RankPart) -> StateError:
    operation = part.operation
    return StateError(
        f"{operation.kind} of {operation.group.model.name!r}: version {operation.bound.number}: rank {part.rank} has begun "
        "before it was known what its source was read from, and nothing vouches for what it has read; call again",
        retryable=True,
    )


def _is_believed_no_more(part: RankPart) -> bool:
    return part.comparisons >= COMPARISONS_MAX + len(part.needs or ())


def _unlike(operation: Operation, part: RankPart) -> IntegrityError:
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: version {operation.bound.number}: after {part.comparisons} "
        f"readings rank {part.rank} still has other digests than were published. The machine of worker "
        f"{part.member.worker.name!r} may damage bytes: look at its memory, or use another one"
    )
