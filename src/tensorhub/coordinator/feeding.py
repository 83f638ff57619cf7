"""Who is fed: who has everything, or is filled, perhaps through others that fill, by somebody who has.

A reader's source is fed, or the reader waits for another one. Each holding is filled from one other, so what is filled from
one that is fed no more is fed no more either. With patches and reads across layouts a holding has several sources, which
may form a circle. So `settle` takes a whole chain for dry first, and then looks who is fed by somebody outside it.

Responsible for keeping `Holding.is_fed` true to that, and for waking whom a change concerns. Not responsible for leases
(`readers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, ReadLease
from tensorhub.coordinator.states import LeaseState
from tensorhub.coordinator.supply import is_filled_by


@dataclass(eq=False, repr=False)
class Feeding:
    """Changes who is fed; nobody else does."""

    _cluster: Cluster
    # Who is fed no more in this step. What is filled from it seems to be fed until `settle`.
    dry: dict[Holding, None] = field(default_factory=dict, init=False)

    def feed(self, holding: Holding | None) -> None:
        """What a holding has, or is filled from, has changed: so may have what is filled from it."""
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
        if lease.partial and self.dry:  # the source may be filled from it: that is not known before all are settled
            self.dry[filled] = None
        else:
            self._spread(filled)

    def settle(self) -> None:
        """Whoever is fed no more may have found another source by now. If not, what is filled from it is not fed either."""
        while self.dry:
            holding, _ = self.dry.popitem()
            if holding.is_fed:
                continue
            dry = [each for each in self.follow(holding) if not each.verified]
            for each in dry:
                if each.is_fed:
                    self._become_fed(each, is_so=False)
            for each in dry:  # as it was published, and without patches, each was filled from one of the others
                if (each.peers.patches or each.bridges) and is_filled_by(each, _is_fed):
                    self._spread(each)

    def _spread(self, holding: Holding) -> None:
        """It is fed: so is all that is filled from it."""
        todo = [] if holding.is_fed else [holding]
        while todo:
            each = todo.pop()
            if not each.is_fed:
                self._become_fed(each, is_so=True)
                todo += [reader for reader in _filled(each) if not reader.bridges or is_filled_by(reader, _is_fed)]

    def _become_fed(self, holding: Holding, *, is_so: bool) -> None:
        """Who reads there needs another source from now on, or needs none any more; who lacks one may read what is fed."""
        holding.is_fed = is_so
        if is_so:
            holding.layout.has_grown = True
            self._cluster.reckon(holding)
        self._cluster.note(holding.member)
        for lease in holding.readers.values():
            self._cluster.wake(lease.part.operation)

    def follow(self, holding: Holding) -> dict[Holding, None]:
        """What is filled from it. That may be long, so it counts as work of this step."""
        found = _filled_by(holding)
        self._cluster.followed += len(found)
        return found


def _filled(holding: Holding) -> list[Holding]:
    """Those that are filled through leases on it which last."""
    return [
        lease.part.holding
        for lease in holding.readers.values()
        if lease.part.holding is not None
        and not lease.part.holding.complete
        and lease.state is LeaseState.ACTIVE
        and not lease.dropping
    ]


def _filled_by(holding: Holding) -> dict[Holding, None]:
    """It, and what is filled from it, directly or through others: each after one that fills it."""
    todo, seen = [holding], {holding: None}
    for each in todo:
        for reader in _filled(each):
            if reader not in seen:
                seen[reader] = None
                todo.append(reader)
    return seen


_is_fed = attrgetter("is_fed")


def _is_surely_fed(holding: Holding) -> bool:
    """Patches may form cycles: what is fed through them may be fed by what is asked about."""
    return holding.verified or (holding.is_fed and not holding.peers.patches)
