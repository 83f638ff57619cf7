"""Whether the ranks of a group that reads another layout read every byte of it together.

No rank can tell that alone, and the coordinator does not look into what the ranks say. So once all have said where they
read to (`ReadyToWrite.part_ids`), the lowest of those that read is told what describes them all. It checks that, and says
Covered, or ends the call for all of them with everything that is unread. Nothing is overwritten before (R7).

What ranks publish is checked in the same way, once all have called: each byte is somebody's, and no rank has one twice. A
publication of plain tensors need not be checked.

What was found once is remembered: by what describes the origin and the readers, both of which are named by their content. So
an equal group later, or a later version of equal layouts, need not be checked again.

A rank that is alone checks all by itself. A group of which every rank says `partial` may leave bytes unread. What has
begun to be overwritten under a former coordinator was checked there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Operation, RankPart
from tensorhub.messages import CheckCoverage, Covered
from tensorhub.types import OpKind

COVERED_KEPT_MAX = 4096


@dataclass(eq=False, repr=False)
class Coverage:
    """What is known of all groups."""

    _cluster: Cluster

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, str], None] = {}  # the ids of origins and readers; those that were used last come last

    def is_known(self, operation: Operation) -> bool:
        """Whether its ranks, which are all ready, are known to read what they must. If not, one of them is asked; and once
        more, when it says again that it is ready: it may have missed that.
        """
        if not operation.covers and must_cover(operation):
            readers = self._readers(operation)
            if readers is None:
                return False
            origin_id = next(iter(operation.parts.values())).layout.origin_id
            lowest = min((part for part in operation.parts.values() if part.needs_bytes), key=_rank)
            self._ask(operation, lowest, (origin_id, readers))
            return operation.covers
        return True

    def is_whole(self, operation: Operation) -> bool:
        """The same of a publish, in which all ranks have called: whether they are known to publish one whole version."""
        holdings = operation.bound.holdings
        if not operation.covers and any(holdings.parts.values()):
            published = self._cluster.describe(operation.bound, holdings)
            self._ask(operation, operation.parts[0], (published, published))
            return operation.covers
        return True

    def _ask(self, operation: Operation, one: RankPart, pair: tuple[str, str]) -> None:
        """Let that rank check it, unless that is known, or it was asked already: it answers, or asks what it has missed."""
        if one.checks == pair[1]:
            return
        if pair in self._known:
            self._remember(pair)
            operation.covers = True
            return
        one.checks = pair[1]
        self.ask_again(one)

    def ask_again(self, part: RankPart) -> None:
        """It may have missed what it was asked."""
        if part.checks and not part.operation.covers:
            self._cluster.tell(part.member, CheckCoverage(part.operation.key, part.rank, part.checks))

    def _readers(self, operation: Operation) -> str | None:
        """The id of what describes where its ranks have it, or read it to. None: of some rank that is not known."""
        layout = next(iter(operation.parts.values())).layout
        if not all(layout.parts.get(rank) for rank in range(operation.group.world_size)):
            return None
        return self._cluster.describe(operation.bound, layout)

    def heard(self, part: RankPart, message: Covered) -> None:
        """The answer of who was asked."""
        if part.checks == message.readers != "":
            publishes = part.operation.kind is OpKind.PUBLISH
            self._remember((message.readers if publishes else part.layout.origin_id, message.readers))
            part.operation.covers = True
            self._cluster.changed(part.operation)

    def _remember(self, pair: tuple[str, str]) -> None:
        self._known.pop(pair, None)
        self._known[pair] = None
        if len(self._known) > COVERED_KEPT_MAX:
            del self._known[next(iter(self._known))]


def must_cover(operation: Operation) -> bool:
    """Whether its ranks read another layout, must read every byte together, and no rank can tell that alone, or has told
    it, under a former coordinator.
    """
    group, parts = operation.group, operation.parts.values()
    if group.world_size == 1 or not any(part.bridges for part in parts) or operation.bound.is_laid_out_as(group):
        return False
    return not all(part.member.partial for part in parts) and not any(part.has_written for part in parts)


def _rank(part: RankPart) -> int:
    return part.rank
