"""What is copied from which source, what counts as missing, and where it is said to have been
read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tensorhub.messages import Origin
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.calls import LocalCopy
from tensorhub.worker.local_copying import Copier
from tensorhub.worker.owner import Owner

CONTENT = ContentId("content")
FIRST, SECOND = LocalCopy("first", 1), LocalCopy("second", 1)


class Rig:
    """Two sources of four chunks. `damaged`: what does not arrive with its digest."""

    def __init__(self, *held: Sequence[int], damaged: Sequence[tuple[str, int]] = ()) -> None:
        self.owner = Owner()
        self.moved: list[tuple[str, tuple[int, ...]]] = []
        self.arrived: list[tuple[list[int], Origin | None]] = []
        self._damaged = damaged
        for source, chunks in zip((FIRST, SECOND), held, strict=True):
            registration = RegistrationId(source.registration)
            self.owner.open(registration, 1, CONTENT, [1] * 4, complete=False)
            for chunk in chunks:
                origin = Origin(f"origin{chunk % 2}", 1)
                self.owner.mark_available(registration, 1, [(chunk, None)], origin)

    @contextmanager
    def access(
        self, source: LocalCopy, wanted: Sequence[int]
    ) -> Iterator[tuple[Access, str] | Wait | Refusal]:
        found = self.owner.begin(
            RegistrationId(source.registration), source.generation, CONTENT, wanted, 2
        )
        yield (found, source.registration) if isinstance(found, Access) else found
        if isinstance(found, Access):
            self.owner.end(found)

    def move(self, access: Access, source: str) -> dict[int, int | None]:
        self.moved.append((source, access.chunks))
        return {chunk: None for chunk in access.chunks if (source, chunk) not in self._damaged}

    def copy(self, there: frozenset[int] = frozenset()) -> frozenset[int]:
        def arrived(named: Sequence[tuple[int, int | None]], origin: Origin | None) -> None:
            self.arrived.append(([chunk for chunk, _ in named], origin))

        copier = Copier(self.access, self.owner.origins, self.move, arrived)
        found = copier.copy((FIRST, SECOND), 4, there)
        assert self.owner.is_quiet(RegistrationId("first"))
        return found


def test_batch_by_batch_and_what_one_source_lacks_from_the_next() -> None:
    rig = Rig([0, 1, 2], [2, 3])
    assert rig.copy() == {0, 1, 2, 3}
    assert rig.moved == [("first", (0, 1)), ("first", (2,)), ("second", (3,))]


def test_what_is_there_is_not_copied() -> None:
    rig = Rig([0, 1, 2, 3], [])
    assert rig.copy(frozenset({0, 1, 2})) == {0, 1, 2, 3}
    assert rig.moved == [("first", (3,))]


def test_what_arrives_damaged_is_asked_of_the_next_source_and_else_missing() -> None:
    rig = Rig([0, 1], [0], damaged=[("first", 0), ("first", 1)])
    assert rig.copy() == {0}
    assert rig.arrived == [([0], Origin("origin0", 1))]


def test_what_was_read_at_several_origins_is_said_for_each() -> None:
    rig = Rig([0, 1, 3], [])
    assert rig.copy() == {0, 1, 3}
    assert rig.arrived == [
        ([0], Origin("origin0", 1)),
        ([1], Origin("origin1", 1)),
        ([3], Origin("origin1", 1)),
    ]
