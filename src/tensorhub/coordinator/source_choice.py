"""Which source a reader gets, and which holdings have a source.

A holding is *fed* if it is complete, or if its chain of sources ends at a complete holding. The
source of a reader is fed, or the reader waits for another source. Each holding is filled from one
other holding, so the holdings downstream of a holding that is fed no more are fed no more either.
With partial copies and with reads across layouts a holding has several sources, which may form a
circle. So `Feeding.settle` takes a whole chain for not fed first, and then looks which holdings of
the chain have a source outside it.

`SourceChoice` ranks the sources that a reader may read by site, load, depth and slowness, and
changes nothing. Not responsible for leases (`readers`), for which needs a reader has (`ways`), nor
for estimates and orders (`scheduler`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from operator import attrgetter

from tensorhub.coordinator import ways
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, RankPart, ReadLease, Version
from tensorhub.coordinator.layout_holdings import Holders
from tensorhub.coordinator.states import LeaseState, WorkerState
from tensorhub.coordinator.waiting import is_filled_by, lacking
from tensorhub.coordinator.ways import Source
from tensorhub.messages import Need
from tensorhub.scheduler.choice import Wanted, rank
from tensorhub.scheduler.links import Distance, distance
from tensorhub.types import SAME_HOST_TRANSPORTS


@dataclass(eq=False, repr=False)
class Feeding:
    """Changes which holdings are fed; no other component does."""

    _cluster: Cluster
    # Holdings that are fed no more in this step. Holdings downstream of them seem to be fed until
    # `settle`.
    dry: dict[Holding, None] = field(default_factory=dict, init=False)

    def feed(self, holding: Holding | None) -> None:
        """The chunks or the sources of a holding have changed: so may its downstream holdings."""
        if holding is None:
            return
        self._cluster.reckon(holding)
        if holding.verified or is_filled_by(holding, _is_surely_fed):
            self._spread(holding)
        elif holding.is_fed:
            self.dry[holding] = None
            self._become_fed(holding, is_so=False)

    def begun(self, lease: ReadLease, filled: Holding) -> None:
        """Through this new lease a holding is filled from now on."""
        self._cluster.reckon(filled)
        if not lease.holding.is_fed or not (lease.need is None or is_filled_by(filled, _is_fed)):
            return
        # the source may be filled from it: that is not known before all are settled
        if lease.partial and self.dry:
            self.dry[filled] = None
        else:
            self._spread(filled)

    def settle(self) -> None:
        """A holding that lost its feed may have found another source by now. If not, its downstream
        holdings are not fed either.
        """
        while self.dry:
            holding, _ = self.dry.popitem()
            if holding.is_fed:
                continue
            dry = [each for each in self.follow(holding) if not each.verified]
            for each in dry:
                if each.is_fed:
                    self._become_fed(each, is_so=False)
            # without other layouts and patches, each of them was filled from another dry holding
            for each in dry:
                if (each.peers.patches or each.bridges) and is_filled_by(each, _is_fed):
                    self._spread(each)

    def _spread(self, holding: Holding) -> None:
        """The holding is fed: so are its downstream holdings."""
        todo = [] if holding.is_fed else [holding]
        while todo:
            each = todo.pop()
            if not each.is_fed:
                self._become_fed(each, is_so=True)
                todo += [
                    reader
                    for reader in _filled(each)
                    if not reader.bridges or is_filled_by(reader, _is_fed)
                ]

    def _become_fed(self, holding: Holding, *, is_so: bool) -> None:
        """The readers of this holding need another source from now on, or need none any more; a
        reader without a source may read a fed holding.
        """
        holding.is_fed = is_so
        if is_so:
            holding.layout.has_grown = True
            self._cluster.reckon(holding)
        self._cluster.note(holding.member)
        for lease in holding.readers.values():
            self._cluster.wake(lease.part.operation)

    def follow(self, holding: Holding) -> dict[Holding, None]:
        """The downstream holdings. There may be many, so they count as work of this step."""
        found = _filled_by(holding)
        self._cluster.followed += len(found)
        return found


def _filled(holding: Holding) -> list[Holding]:
    """The holdings that are filled through lasting leases on this holding."""
    return [
        lease.part.holding
        for lease in holding.readers.values()
        if lease.part.holding is not None
        and not lease.part.holding.complete
        and lease.state is LeaseState.ACTIVE
        and not lease.dropping
    ]


def _filled_by(holding: Holding) -> dict[Holding, None]:
    """The holding and all its downstream holdings, in topological order."""
    todo, seen = [holding], {holding: None}
    for each in todo:
        for reader in _filled(each):
            if reader not in seen:
                seen[reader] = None
                todo.append(reader)
    return seen


_is_fed = attrgetter("is_fed")


def _is_surely_fed(holding: Holding) -> bool:
    """Partial copies may form cycles: a holding that is fed through them may be fed by the holding
    in question.
    """
    return holding.verified or (holding.is_fed and not holding.peers.patches)


LOOKS_MAX = 32  # at sources that might be faster
GAIN_S = 0.25  # so much sooner at least a reader must have the rest elsewhere
PATCHES_MAX = 4  # partial copies that one reader reads from while no rank holds the whole shard


@dataclass(eq=False, repr=False)
class SourceChoice:
    """Of the sources that there are now."""

    _cluster: Cluster
    _feeding: Feeding

    def sources(self, part: RankPart, needs: Sequence[Need] | None = None) -> list[Source]:
        """The best sources of a reader; if it bridges, for these needs (None: all). Empty: there is
        no candidate now, or only in other sites, and a neighbour is tried again soon.
        """
        version = part.operation.bound
        if part.bridges:
            wanted = part.needs or () if needs is None else needs
            found = ways.choose(part, wanted, lambda need: self.choose(part, version, need))
        else:
            holding = self.choose(part, version)
            found = [] if holding is None else [(None, holding)]
        now, attempts = self._cluster.now, part.attempts
        is_patient = attempts.follows_at > now or any(
            attempts.retry_at[each] > now for each in attempts.spared
        )
        return [] if is_patient and any(is_far(each, part) for _, each in found) else found

    def neighbour_is_served_by(self, part: RankPart) -> float:
        """When a neighbour that fills the same, and lacks a source, is expected to have one: only
        its source has not heard yet that it may serve.
        """
        looks = count()

        def by(holding: Holding) -> float:
            its = holding.member.part
            is_near = not is_far(holding, part) and _may_bring(holding, part)
            return its.attempts.served_by if its is not None and is_near else -inf

        now, there = self._cluster.now, part.layout.of(part.shard)
        refuses: Callable[[Holding], bool] = lambda h: next(looks) < LOOKS_MAX and by(h) <= now  # noqa: E731
        found = self._best(part, there, refuses, stranded=True)
        return by(found) if found is not None else -inf

    def choose(self, part: RankPart, version: Version, need: Need | None = None) -> Holding | None:
        """The source from which it would have everything first, or None if there is none now. What
        has failed it comes after all that have failed less.

        The core never assumes that shard k reads shard k; with equal layouts it does. Of equals it
        is the newest: the publisher, which is the oldest, is chosen last, so that its unpublish is
        short.
        """
        holders = _holders(part, version, need)
        refuses = self._refusing(part, need)
        untried: Callable[[Holding], bool] = lambda h: _has_failed(h, part) or refuses(h)  # noqa: E731
        best = [h for there in holders if (h := self._best(part, there, untried, need)) is not None]
        found = best[0] if best else None
        if len(best) > 1:
            rates = self._cluster.links.rates(self._cluster.now)
            found = min(best, key=lambda h: _estimate(h, part, _wanted(h.peers, need), rates))
        if found is None and part.attempts.failures:
            workers = (
                self._cluster.workers.get(incarnation) for incarnation in part.attempts.failures
            )
            theirs = [
                m.holding
                for w in workers
                if w is not None
                for m in w.members.values()
                if m.holding is not None
            ]
            failed = [h for h in theirs if any(h in there for there in holders) and not refuses(h)]
            rates = self._cluster.links.rates(self._cluster.now)
            order = lambda h: (  # noqa: E731
                part.attempts.failures[h.member.worker.incarnation],
                _estimate(h, part, _wanted(h.peers, need), rates),
            )
            found = min(failed, key=order, default=None)
        return found

    def _refusing(self, part: RankPart, need: Need | None) -> Callable[[Holding], bool]:
        """Which sources this reader cannot have for that need, as things stand: none that leaves,
        or is fed no more.
        """
        below: dict[Holding, None] | None = None

        def refuses(holding: Holding) -> bool:
            nonlocal below
            if holding is part.holding or not holding.is_fed or not self._reachable(holding, part):
                return True
            if need is not None and not holding.complete:
                return True
            if (
                holding.complete
                or need is not None
                or part.holding is None
                or not part.holding.readers
            ):
                return False
            if not (
                part.holding.is_fed or holding.peers.patches or part.bridges or self._feeding.dry
            ):
                # each has one source: a holding that is filled from this reader is no more fed than
                # the reader
                return False
            below = self._below(part.holding) if below is None else below
            return holding in below

        return refuses

    def faster(self, part: RankPart, factor: float, gain_s: float) -> Holding | None:
        """A source from which this reader would have the rest so many times sooner, and as much
        sooner, than from its present source, if one of the first few candidates is. It is at least
        as near. It has more than the reader, unless the gain may be zero.
        """
        there, own, has = part.layout.of(part.shard), part.holding, part.attempts.progress[0]
        (lease,), rest, rates = (
            part.leases.values(),
            _rest(part),
            self._cluster.links.rates(self._cluster.now),
        )
        now_s = _estimate(lease.holding, part, rest, rates, lease)[0][1]
        if now_s <= gain_s:
            return None
        below: dict[Holding, None] | None = None
        looks = 0

        def refuses(holding: Holding) -> bool:
            nonlocal below, looks
            looks += 1
            if looks > LOOKS_MAX:
                return False
            if (
                holding in (lease.holding, own)
                or not holding.is_fed
                or self._is_out_of_question(holding, part)
            ):
                return True
            if holding.complete:
                return False
            if gain_s > 0 and holding.chunks_verified <= has:
                return True
            if below is None:
                below = self._below(own) if own is not None else {}
            return holding in below

        found = self._best(part, there, refuses)
        if found is None or looks > LOOKS_MAX:
            return None
        then_s = _estimate(found, part, rest, rates)[0][1]
        return found if now_s > factor * then_s and now_s >= then_s + gain_s else None

    def _is_out_of_question(self, holding: Holding, part: RankPart) -> bool:
        """Whether no reader leaves its source for that holding: it is farther, or has failed this
        reader.
        """
        if holding.member.worker.incarnation in part.attempts.failures or not self._reachable(
            holding, part
        ):
            return True
        return any(_is_nearer(lease.holding, holding, part) for lease in part.leases.values())

    def partial_holdings(self, part: RankPart, there: Holders[Holding]) -> list[Holding]:
        """Partial copies that the part may read and does not read yet. Every reader reads from the
        next copy in the list, so that a chunk of one copy comes to all readers; the further copies
        are the best ones.
        """
        if part.is_abandoned:
            return []  # its last holder left on purpose: no reader waits for it (R12)
        mine = part.holding
        read = [
            lease.holding
            for lease in part.leases.values()
            if not lease.dropping and lease.need is None
        ]
        neighbour = next(
            (h for h in there.after(mine) if h is not mine and self._reachable(h, part)), None
        )
        found = [neighbour] if neighbour is not None and neighbour not in read else []
        rates = self._cluster.links.rates(self._cluster.now)
        while len(read) + len(found) < PATCHES_MAX:
            passed = [neighbour, mine, *read, *found]
            refuses = lambda h, passed=passed: h in passed or not self._reachable(h, part)  # noqa: E731
            best = [
                self._best(part, there, refuses, stranded=stranded) for stranded in (False, True)
            ]
            candidates = [h for h in best if h is not None]
            if not candidates:
                break
            found.append(
                min(candidates, key=lambda h: _estimate(h, part, _wanted(there, None), rates))
            )
        return found

    def _best(
        self,
        part: RankPart,
        there: Holders[Holding],
        refuses: Callable[[Holding], bool],
        need: Need | None = None,
        *,
        stranded: bool = False,
    ) -> Holding | None:
        """The holding from which the part would have everything first."""
        reader, rates = part.member.worker, self._cluster.links.rates(self._cluster.now)
        return there.best(
            reader.location,
            reader.transports,
            _wanted(there, need),
            rates,
            refuses,
            stranded=stranded,
        )

    def _below(self, holding: Holding) -> dict[Holding, None]:
        """The downstream holdings. They must not fill this holding: reader and source would wait
        for each other.
        """
        return self._feeding.follow(holding)

    def _reachable(self, holding: Holding, part: RankPart) -> bool:
        source = holding.member.worker
        if source.state is not WorkerState.LIVE or not _may_bring(holding, part):
            return False
        return part.attempts.retry_at.get(source.incarnation, 0.0) <= self._cluster.now

    def is_left(self, part: RankPart) -> bool:
        """Whether all that the reader lacks may still come: from holdings of which the reader has
        not heard that they are damaged. Some may be silent now.
        """
        below = {} if part.holding is None else self._below(part.holding)
        needs = lacking(part) if part.bridges else [None]
        return all(
            any(
                _may_bring(each, part) and each.is_fed and each not in below
                for there in _holders(part, part.operation.bound, need)
                for each in there
            )
            for need in needs
        )


def _holders(part: RankPart, version: Version, need: Need | None) -> list[Holders[Holding]]:
    """The holders from which the part reads this: of its own shard in its own layout, or of the
    shards of a class.
    """
    if need is None:
        layout = part.layout if part.bridges else version.holdings
        return [layout.of(part.shard)]
    return [version.holdings.of(shard) for shard in version.holdings.classes[need.shard]]


def _may_bring(holding: Holding, part: RankPart) -> bool:
    """Whether that reader can read there, and has not heard that it is damaged."""
    if not holding.takes_readers or holding.member.registration in part.attempts.damaged:
        return False
    return bool(part.member.worker.reaches(holding.member.worker, across=part.bridges))


def _wanted(there: Holders[Holding], need: Need | None) -> Wanted:
    """The size of a shard that a reader reads. (The grid is the publisher's; readers of another
    layout count their own grid.)
    """
    if need is not None:
        return Wanted(need.nbytes, need.nbytes / need.chunks)
    return Wanted(there.nbytes, there.nbytes / max(1, there.chunks))


def _estimate(
    holding: Holding,
    part: RankPart,
    wanted: Wanted,
    rates: Sequence[float],
    lease: ReadLease | None = None,
) -> tuple[tuple[int, float], int]:
    """When it would have everything from there; the newest comes first of equals. `lease`: its own,
    if it reads there.
    """
    reader, worker = part.member.worker, holding.member.worker
    load = holding.load_without(lease)
    # a reader on its host takes no share of its link
    if worker.reaches(reader) & SAME_HOST_TRANSPORTS:
        load = load._replace(readers=0)
    apart = distance(reader.location, worker.location)
    return rank(apart, load, holding.traffic.depth, wanted, rates), -holding.number


def _rest(part: RankPart) -> Wanted:
    """What the part still has to read."""
    there = part.layout.of(part.shard)
    left, wanted = (
        max(0, there.chunks - part.attempts.progress[0]) / max(1, there.chunks),
        _wanted(there, None),
    )
    return Wanted(round(wanted.nbytes * left), wanted.chunk_bytes)


def is_far(holding: Holding, part: RankPart) -> bool:
    """Whether it is in another site than that reader."""
    return distance(part.member.worker.location, holding.member.worker.location) is Distance.FAR


def _has_failed(holding: Holding, part: RankPart) -> bool:
    """Whether it has failed that reader, and not only refused it since it may not have heard yet
    that it may write.
    """
    incarnation = holding.member.worker.incarnation
    return incarnation in part.attempts.failures and incarnation not in part.attempts.spared


def _is_nearer(one: Holding, other: Holding, part: RankPart) -> bool:
    """Whether the first is nearer to that reader."""
    mine, theirs = (
        distance(part.member.worker.location, each.member.worker.location) for each in (one, other)
    )
    return mine < theirs
