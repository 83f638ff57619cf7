"""Bugs in what becomes of readers that change their source in mid-fill. Whatever is believed of
links and workers (`tests.testing.wild`), so that they do so again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tensorhub.coordinator.entities import Holding, RankPart
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.source_choice import SourceChoice
from tensorhub.testing import Fault
from tests.testing.bugs import bug as any_bug, replaced

bug = partial(any_bug, is_wild=True, faults=(Fault.SLOW, Fault.CRASH))


@bug("R9: a reader is moved to what is filled from it: both wait for each other")
def moved_to_what_it_fills() -> Iterator[None]:
    with replaced(SourceChoice, "_below", lambda self, holding: {}):
        yield


@bug("R9: who changes its source keeps the old one, and shares it with those that need it more")
def the_old_source_is_kept() -> Iterator[None]:
    def swap(self: Readers, part: RankPart, holding: Holding) -> None:
        self._tell_to_add(part, self.lend(part, None, holding))

    with replaced(Readers, "_swap", swap):
        yield
