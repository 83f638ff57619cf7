"""Who is asked for digests that are not known, and whose word decides.

The publisher is asked first, then those who read from it directly, who say what it said to them, and then whoever holds the
chunks. Of a selection of a class, the publisher of the first shard that is left decides.

A publisher without a connection may come back within its lease, and is not passed over before that. But of a selection those
who have what can vouch for it (they read from the publisher directly, or with what encloses the selection) are asked
meanwhile, if others hold what was published. What they say is what the publisher would say, unless they lie: it is
hearsay, and the publisher is asked once it is back.

Responsible for who is asked, and for who is silent. Not responsible for what is told, nor for votes (`testimonies`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub.coordinator import bridges
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, RankPart, Testimony, Version
from tensorhub.messages import TellDigests

ANSWER_S = 5.0  # nobody waits for one that was silent for twice that, unless nobody else has said all digests
NOBODY = "nobody"  # has published it, as far as is known


@dataclass(eq=False, repr=False)
class Tellers:
    """Changes who was asked for a testimony; nobody else does."""

    _cluster: Cluster

    def ask(self, testimony: Testimony) -> None:
        """Ask for what is not known yet: one worker at a time, where one is enough."""
        self._set_timer(testimony)
        for registration, (session, _) in list(testimony.asked.items()):
            member = self._cluster.members.get(registration)
            if member is None or (member.worker.session not in (session, None)):
                del testimony.asked[registration]  # it is gone, or has not heard the question
        publisher = self.publisher(testimony)
        # Of a selection its holders have made the digests themselves: these do not count.
        is_selected = testimony.need is not None and not testimony.root
        if is_selected and bridges.is_anybody_believed(testimony):
            is_selected, testimony.is_believed = False, True
        if not testimony.root and (publisher is not None or is_selected):
            answered = publisher is None or publisher.member.registration in testimony.answered
            if publisher is not None and not answered and self.can_tell(publisher):
                self.ask_one(testimony, publisher.member, publisher.generation, "")
                if testimony.need is None or _is_in_touch(publisher) or not self._is_held_by_others(testimony):
                    return
            if not testimony.second_hand:
                origin = NOBODY if publisher is None else publisher.member.registration
                for member, generation in self._witnesses(testimony):
                    if not is_selected or _reads_it(member, testimony):
                        self.ask_one(testimony, member, generation, origin)
                if testimony.asked or is_selected:
                    return
                testimony.second_hand = True
                testimony.answered.clear()
        if not testimony.asked:
            self._ask_next(testimony)

    def may_say_otherwise(self, testimony: Testimony) -> bool:
        """Whether others have told its digests, and its publisher, which is in touch, has not said yet whether that is so.
        It is asked.
        """
        publisher = self.publisher(testimony) if testimony.hearsay else None
        if publisher is None or not self.can_tell(publisher) or not _is_in_touch(publisher):
            return False
        self._set_timer(testimony)
        self.ask_one(testimony, publisher.member, publisher.generation, "")
        return publisher.member.registration in testimony.asked

    def _set_timer(self, testimony: Testimony) -> None:
        due = "digests", testimony.version.info.model
        if due not in self._cluster.timers:
            self._cluster.timers.set(*due, self._cluster.now + ANSWER_S)

    def is_anybody_awaited(self, testimony: Testimony) -> bool:
        """Whether somebody may still tell it. A publisher that is out of touch comes back, or is lost; until then nobody
        reads again what only its word could vouch for.
        """
        if testimony.asked:
            return True
        publisher = self.publisher(testimony)
        return publisher is not None and self.can_tell(publisher) and publisher.member.registration not in testimony.answered

    def publisher(self, testimony: Testimony) -> Holding | None:
        """Whose word decides. Of a class, that is the publisher of the first shard that is left, if one is."""
        version = testimony.version
        if testimony.need is None or testimony.origin_id != version.holdings.described_as:
            return testimony.publisher
        known = [version.testimonies.get(shard) for shard in version.holdings.classes.get(testimony.shard, ())]
        publishers = [each.publisher for each in known if each is not None and each.publisher is not None]
        last = testimony.publisher or next(iter(publishers), None)  # others may have read from it
        tellers = list(filter(self.can_tell, publishers))
        tellers.sort(key=lambda each: (each.member.registration in testimony.unaware, not _is_in_touch(each)))
        publisher = next(iter(tellers), last)
        if publisher is not testimony.publisher:
            if testimony.publisher is not None and not testimony.root:  # of one who tells it, all or nothing
                self._cluster.forget_list(testimony)
                testimony.asked.clear()
                testimony.answered.clear()
                testimony.second_hand = False
            testimony.publisher = publisher
        return publisher

    @staticmethod
    def is_publisher(holding: Holding) -> bool:
        testimony = holding.version.testimonies.get(holding.shard)
        return not holding.bridges and testimony is not None and testimony.publisher is holding

    def _ask_next(self, testimony: Testimony) -> None:
        publisher = self.publisher(testimony)
        first = [publisher] if publisher is not None and self.can_tell(publisher) else []
        for member, generation in [*((h.member, h.generation) for h in first), *self._witnesses(testimony)]:
            if member.registration not in testimony.answered and member.worker.session is not None:
                if testimony.root:
                    self._cluster.forget_list(testimony)  # of one who tells it, all or nothing
                self.ask_one(testimony, member, generation, "")
                return

    def overdue(self, model_name: str) -> None:
        """Nobody waits any longer for those who say nothing. Once everybody has been asked, all are asked again."""
        model = self._cluster.models.get(model_name)
        if model is None:
            return
        for version in model.versions.values():
            for testimony in all_of(version):
                publisher = testimony.publisher
                is_asked = publisher is not None and publisher.member.registration in testimony.asked
                if not testimony.root if is_asked else testimony.is_there:
                    continue
                if not testimony.asked:
                    testimony.answered.clear()
                for registration in testimony.silent & testimony.asked.keys():
                    del testimony.asked[registration]
                    testimony.answered.add(registration)
                testimony.silent = set(testimony.asked)
            self._cluster.wake_all(version.starving)

    @staticmethod
    def _is_held_by_others(testimony: Testimony) -> bool:
        """Whether others have just what was published, so that readers can verify it without the publisher."""
        version = testimony.version
        for shard in version.holdings.classes.get(testimony.shard, ()):
            there, own = version.holdings[shard], version.testimonies.get(shard)
            publisher = own.publisher if own is not None else None
            if there.live_sources > int(publisher in there and publisher is not None and there.counted(publisher)[0][2]):
                return True
        return False

    def ask_one(self, testimony: Testimony, member: Member, generation: int, origin: str) -> None:
        registration, session = member.registration, member.worker.session
        if session is not None and registration not in testimony.answered and not _was_asked(testimony, member):
            testimony.asked[registration] = session, generation
            of = ("", 0) if testimony.need is None else (testimony.need.selection, testimony.need.shard)
            self._cluster.tell(member, TellDigests(registration, generation, origin, *of))

    def _witnesses(self, testimony: Testimony) -> Iterator[tuple[Member, int]]:
        """Who has chunks of that shard, and under which generation; first those who claim to have all chunks. Once a root is
        known, readers that fill are not asked: their list is not the published one yet.
        """
        version, seen = testimony.version, set[str]()
        running = [] if testimony.root else [each for each in version.bound.values() if not each.is_read_only]
        parts = [p for o in running for p in o.parts.values() if p.reading and _reads(p, testimony)]
        for part in sorted(parts, key=lambda p: p.claim is None):
            seen.add(part.member.registration)
            yield part.member, part.call.generation
        for holding in _holders(testimony):
            if holding.member.registration not in seen and (holding.committed or not testimony.root):
                yield holding.member, holding.generation

    def can_tell(self, holding: Holding) -> bool:
        """Whether its owner still has it, as it was published."""
        member = holding.member
        here = self._cluster.members.get(member.registration) is member and not holding.quarantined
        return here and (member.holding is holding or holding in member.leaving)


def all_of(version: Version) -> Iterator[Testimony]:
    yield from version.testimonies.values()
    yield from version.selections.values()


def is_asked(version: Version, registration: str) -> bool:
    """Whether somebody waits for what it says of that version's digests."""
    return any(registration in testimony.asked for testimony in all_of(version))


def _was_asked(testimony: Testimony, member: Member) -> bool:
    """Whether it has heard the question."""
    known = testimony.asked.get(member.registration)
    return known is not None and known[0] == member.worker.session


def _is_in_touch(holding: Holding) -> bool:
    """Whether its owner can be asked now."""
    return holding.member.worker.session is not None


def _reads_it(member: Member, testimony: Testimony) -> bool:
    """Whether what it fills, or holds, was read from that of which the selection is."""
    part, holding = member.part, member.holding
    fills = part is not None and part.in_layout is not None and _reads(part, testimony)
    return fills or holding is None or holding.layout.origin_id == testimony.origin_id


def _reads(part: RankPart, testimony: Testimony) -> bool:
    """Whether that rank fills what the testimony is of."""
    if testimony.need is not None:
        return part.needs is not None and testimony.need in part.needs and part.layout.origin_id == testimony.origin_id
    return part.shard == testimony.shard and not part.bridges


def _holders(testimony: Testimony) -> Iterator[Holding]:
    """Who may hold what it is of. Of a selection those come first who have read just that."""
    version, need, origin_id = testimony.version, testimony.need, testimony.origin_id
    if need is None:
        yield from version.holdings.get(testimony.shard, ())
        return
    for layout in version.others.values():
        for shard, needs in layout.needs.items():
            if need in needs and layout.origin_id == origin_id:
                yield from layout[shard]
    for origin in version.described_as(origin_id):
        for shard in origin.classes.get(testimony.shard, ()):
            yield from origin[shard]
