"""Whether the ranks of a group that reads another layout read every byte of it together.

No rank can tell that alone, and the coordinator does not look into what the ranks say. So once all have said where they
read to (`ReadyToWrite.part_ids`), the lowest of those that read is told what describes them all. It checks that, and says
Covered, or ends the call for all of them with everything that is unread. Nothing is overwritten before (R7).

What ranks publish is checked in the same way, once all have called: each byte is somebody's, and no rank has one twice. A
publication of plain tensors need not be checked. Where ranks of different shards publish the same bytes (norms of
tensor-parallel ranks), readers take them from any of these ranks. So each rank is asked for their digests, at each
publication. If these differ, the publication ends for all ranks, and the error names tensors and ranks.

What was found once is remembered, by what describes the publication and the readers. Content names both. So an equal group
later, or a later version of equal layouts, need not be checked again.

A rank that is alone checks all by itself. A group of which every rank says `partial` may leave bytes unread. What has
begun to be overwritten under a former coordinator was checked there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Operation, RankPart
from tensorhub.coordinator.refusals import Blame
from tensorhub.errors import IntegrityError
from tensorhub.messages import CheckCoverage, Covered
from tensorhub.types import OpKind

COVERED_KEPT_MAX = 4096
NAMES_MAX = 8  # that an error names


@dataclass(eq=False, repr=False)
class Coverage:
    """What is known of all groups."""

    _cluster: Cluster

    def __post_init__(self) -> None:
        # By the ids of publications and readers, whether ranks of different shards publish the same bytes. Those that were
        # used last come last.
        self._known: dict[tuple[str, str], bool] = {}

    def is_known(self, operation: Operation) -> bool:
        """Whether its ranks, which are all ready, are known to read what they must. If not, one of them is asked; and once
        more, when it says again that it is ready: it may have missed that.
        """
        if not operation.covers and must_cover(operation):
            readers = self._readers(operation)
            if readers is None:
                return False
            lowest = min((part for part in operation.parts.values() if part.needs_bytes), key=_rank)
            self._ask(operation, lowest, (operation.bound.holdings.described_as, readers))
            return operation.covers
        return True

    def is_whole(self, operation: Operation) -> bool:
        """The same of a publish, in which all ranks have called: whether they are known to publish one whole version."""
        holdings = operation.bound.holdings
        if not operation.covers and any(holdings.parts.values()):
            published = self._cluster.describe(operation.bound, holdings)
            pair = published, published
            if self._known.get(pair):
                self._remember(pair, is_shared=True)
                for part in operation.parts.values():
                    self._check(part, published)
            else:
                self._ask(operation, operation.parts[0], pair)
            return operation.covers
        return True

    def _ask(self, operation: Operation, one: RankPart, pair: tuple[str, str]) -> None:
        """Let that rank check it, unless that is known, or it was asked already: it answers, or asks what it has missed."""
        if pair in self._known and one.checks != pair[1]:
            self._remember(pair, is_shared=False)
            operation.covers = True
        else:
            self._check(one, pair[1])

    def _check(self, part: RankPart, readers: str) -> None:
        if part.checks != readers:
            part.checks = readers
            self.ask_again(part)

    def ready(self, part: RankPart) -> None:
        """It says that it is ready: perhaps once more, since it has missed a question."""
        part.checks = ""

    def ask_again(self, part: RankPart) -> None:
        """It may have missed what it was asked."""
        operation = part.operation
        if part.checks and not operation.covers and part.rank not in operation.agreed.ranks:
            self._cluster.tell(part.member, CheckCoverage(operation.key, part.rank, part.checks))

    def _readers(self, operation: Operation) -> str | None:
        """The id of what describes where its ranks have it, or read it to. None: of some rank that is not known."""
        layout = next(iter(operation.parts.values())).layout
        if not all(layout.parts.get(rank) for rank in range(operation.group.world_size)):
            return None
        return self._cluster.describe(operation.bound, layout)

    def heard(self, part: RankPart, message: Covered) -> Blame | None:
        """The answer of who was asked."""
        operation = part.operation
        if part.checks != message.readers or not message.readers:
            return None
        is_shared = operation.kind is OpKind.PUBLISH and message.shares
        published = message.readers if operation.kind is OpKind.PUBLISH else operation.bound.holdings.described_as
        self._remember((published, message.readers), is_shared=is_shared)
        self._cluster.changed(operation)
        if is_shared:
            operation.agreed.ranks.add(part.rank)
            operation.covers = len(operation.agreed.ranks) == len(operation.parts)
            return _drifted(part, message)
        operation.covers = True
        return None

    def _remember(self, pair: tuple[str, str], *, is_shared: bool) -> None:
        self._known.pop(pair, None)
        self._known[pair] = is_shared
        if len(self._known) > COVERED_KEPT_MAX:
            del self._known[next(iter(self._known))]


def must_cover(operation: Operation) -> bool:
    """Whether its ranks read another layout, must read every byte together, and no rank can tell that alone, or has told
    it, under a former coordinator.
    """
    group, parts = operation.group, operation.parts.values()
    if group.world_size == 1 or not any(part.bridges for part in parts) or operation.bound.is_laid_out_as(group):
        return False
    return not all(part.member.said.partial for part in parts) and not any(part.has_written for part in parts)


def _drifted(part: RankPart, message: Covered) -> Blame | None:
    """What this rank says that it publishes, and another rank has published with other bytes."""
    operation, unlike = part.operation, dict[int, list[str]]()
    for each in message.shared:
        digest, rank = operation.agreed.digests.setdefault(each.number, (each.digest, part.rank))
        if digest != each.digest:
            unlike.setdefault(rank, []).append(each.what)
    if not unlike:
        return None
    rank, names = next(iter(unlike.items()))
    shown = ", ".join(names[:NAMES_MAX]) + (f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else "")
    what = f"publish of {operation.group.model.name!r}: version {operation.bound.number}"
    text = (
        f"{what}: ranks {rank} and {part.rank} of group {operation.group.name!r} both have {shown}, and their bytes differ: "
        "a reader would get either. Look at what has drifted there and make them equal; or let one rank publish it, with an "
        "empty list in sources= on the others"
    )
    return Blame(IntegrityError(text, retryable=False))


def _rank(part: RankPart) -> int:
    return part.rank
