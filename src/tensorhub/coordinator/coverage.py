"""Whether ranks together have every byte of a version: as readers of another layout, and as
publishers; and whether the bytes of equal parts are equal.

A single rank cannot tell, and the coordinator does not decode what the ranks say. Once all ranks
have said where they read to (`ReadyToWrite.part_ids`), the lowest reading rank gets the id of a
description of all ranks. That rank checks the description and answers Covered, or ends the call for
all ranks with an error that names the unread bytes. No rank overwrites memory before (R7).

A publication is checked likewise, once all ranks have called: each byte has a publisher, and no
rank has a byte twice. A publication of plain tensors need not be checked. If ranks of different
shards publish equal parts (norms of tensor-parallel ranks), readers take these bytes from any of
the ranks. So at each publication each rank is asked for the digests of these bytes. If the digests
differ, the publication ends for all ranks, and the error names tensors and ranks.

The coordinator remembers each result by the ids of two descriptions: of the publication and of the
readers. Equal content has equal ids. So an equal group later, or a later version of equal layouts,
need not be checked again.

A group of one rank checks by itself. A group in which every rank says `partial` may leave bytes
unread. A fill that began to overwrite memory under a former coordinator was checked by that
coordinator.

Shards that describe one part of the model (HSDP, data parallelism) form one class. Ranks of a
reader read different selections from the shards of a class, so no digest of a selection shows that
two shards have drifted apart. The digests of the shards' own chunks do. When a class is published,
all its publishers are asked for these digests (`testimonies`). Votes of readers of another layout
count once the publishers have answered. If the digests differ, no reader of another layout commits,
and the error names ranks and tensors (`Version.drifted`). No holding is quarantined: it is not
known which bytes are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Operation, RankPart, Version
from tensorhub.coordinator.refusals import Blame
from tensorhub.errors import IntegrityError
from tensorhub.messages import CheckCoverage, Covered
from tensorhub.model.digests import head_of
from tensorhub.model.manifest import Manifest
from tensorhub.types import OpKind

COVERED_KEPT_MAX = 4096
NAMES_MAX = 8  # tensors that an error names
# a longer manifest is not decoded for an error: all workers would wait for that
DECODED_BYTES_MAX = 2**20


@dataclass(eq=False, repr=False)
class Coverage:
    """Which readers were checked against which publications."""

    _cluster: Cluster

    def __post_init__(self) -> None:
        # By the ids of publication and readers: whether ranks of different shards publish equal
        # parts. The most recently used entry comes last.
        self._known: dict[tuple[str, str], bool] = {}

    def is_known(self, operation: Operation) -> bool:
        """Whether the ranks, which are all ready, are known to read every byte. If not, one rank is
        asked, and asked again when it repeats that it is ready: it may have missed the question.
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
        """Whether the ranks of a publish, which have all called, are known to publish one whole
        version.
        """
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
        """Let this rank check the pair, unless the result is known or the rank was asked
        already.
        """
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
        """The rank says that it is ready, perhaps once more, since it has missed a question."""
        part.checks = ""

    def ask_again(self, part: RankPart) -> None:
        """Repeat the question: the rank may have missed it."""
        operation = part.operation
        if part.checks and not operation.covers and part.rank not in operation.agreed.ranks:
            self._cluster.tell(part.member, CheckCoverage(operation.key, part.rank, part.checks))

    def _readers(self, operation: Operation) -> str | None:
        """The id of the description of all ranks that read. None: the parts of some rank are not
        known.
        """
        layout = next(iter(operation.parts.values())).layout
        if not all(layout.parts.get(rank) for rank in range(operation.group.world_size)):
            return None
        return self._cluster.describe(operation.bound, layout)

    def heard(self, part: RankPart, message: Covered) -> Blame | None:
        """The answer of the rank that was asked. Returns the blame if two ranks have published
        different bytes.
        """
        operation = part.operation
        if part.checks != message.readers or not message.readers:
            return None
        is_shared = operation.kind is OpKind.PUBLISH and message.shares
        published = (
            message.readers
            if operation.kind is OpKind.PUBLISH
            else operation.bound.holdings.described_as
        )
        self._remember((published, message.readers), is_shared=is_shared)
        self._cluster.changed(operation)
        if is_shared:
            operation.agreed.ranks.add(part.rank)
            operation.covers = len(operation.agreed.ranks) == len(operation.parts)
            return _have_drifted(part, message)
        operation.covers = True
        return None

    def _remember(self, pair: tuple[str, str], *, is_shared: bool) -> None:
        self._known.pop(pair, None)
        self._known[pair] = is_shared
        if len(self._known) > COVERED_KEPT_MAX:
            del self._known[next(iter(self._known))]


def must_cover(operation: Operation) -> bool:
    """Whether the ranks read another layout and must read every byte together, a single rank cannot
    tell, and no former coordinator has checked the fill.
    """
    group, parts = operation.group, operation.parts.values()
    if (
        group.world_size == 1
        or not any(part.bridges for part in parts)
        or operation.bound.is_laid_out_as(group)
    ):
        return False
    return not all(part.member.said.partial for part in parts) and not any(
        part.has_written for part in parts
    )


def _have_drifted(part: RankPart, message: Covered) -> Blame | None:
    """The blame if this rank and another rank have published different bytes of one tensor."""
    operation, unlike = part.operation, dict[int, list[str]]()
    for each in message.shared:
        digest, rank = operation.agreed.digests.setdefault(each.number, (each.digest, part.rank))
        if digest != each.digest:
            unlike.setdefault(rank, []).append(each.what)
    if not unlike:
        return None
    rank, names = next(iter(unlike.items()))
    shown = ", ".join(names[:NAMES_MAX]) + (
        f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    )
    what = f"publish of {operation.group.model.name!r}: version {operation.bound.number}"
    text = (
        f"{what}: ranks {rank} and {part.rank} of group {operation.group.name!r} both have "
        f"{shown}, and their bytes differ: "
        "a reader would get either. Look at what has drifted there and make them equal; or let one "
        "rank publish it, with an "
        "empty list in sources= on the others"
    )
    return Blame(IntegrityError(text, retryable=False))


def _rank(part: RankPart) -> int:
    return part.rank


def drifted(version: Version, first: int) -> tuple[int, int] | None:
    """Two shards of a class with different digests, or None."""
    known = [shard for shard in version.holdings.classes[first] if version.root(shard)]
    return next(
        ((one, other) for one in known[:1] for other in known[1:] if _differ(version, one, other)),
        None,
    )


def _differ(version: Version, one: int, other: int) -> bool:
    return _have_one_grid(version, one, other) and version.root(one) != version.root(other)


def _have_one_grid(version: Version, one: int, other: int) -> bool:
    """Whether the segments of two shards lie in equal places. With equal settings they are cut into
    equal chunks.
    """
    return head_of(version.manifests.get(one, b"")) == head_of(version.manifests.get(other, b""))


def what_differs(version: Version, one: int, other: int) -> str:
    """The tensors in which two shards differ, if that is still known: the end of an error's
    sentence.
    """
    manifest = version.manifests.get(one, b"")
    chunks = list(_chunks_that_differ(version, one, other))
    if not chunks or len(manifest) > DECODED_BYTES_MAX:
        return (
            f"chunk {chunks[0]} is the first of {len(chunks)}"
            if chunks
            else "in which tensors is not known any more"
        )
    described = Manifest.decode(manifest)
    names = list(dict.fromkeys(name for chunk in chunks for name in described.tensors_in(chunk)))
    shown = ", ".join(map(repr, names[:NAMES_MAX]))
    return (
        shown if len(names) <= NAMES_MAX else f"{shown} and {len(names) - NAMES_MAX} more tensors"
    )


def _chunks_that_differ(version: Version, one: int, other: int) -> Iterator[int]:
    mine, theirs = version.testimonies[one], version.testimonies[other]
    if mine.chunks == theirs.chunks:
        yield from (
            chunk for chunk in range(mine.chunks) if mine.digest(chunk) != theirs.digest(chunk)
        )
