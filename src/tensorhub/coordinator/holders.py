"""The holders of one shard of a version: counted, and in order, so that no step has to look at all of them.

Responsible for counts and orders. Not responsible for the moment at which they change (`Shards`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from tensorhub.scheduler.choice import Wanted
from tensorhub.scheduler.sources import Sources, Standing
from tensorhub.types import Location


class Numbered(Protocol):
    """What holds. `number` is its place in the order of coming."""

    number: int


H = TypeVar("H", bound=Numbered)
Counts = tuple[bool, bool, bool]  # is complete, is a source, and its worker is heard of now
_number = attrgetter("number")


class Counted(NamedTuple):
    """What a holding counts as, and where it stands."""

    counts: Counts
    standing: Standing | None  # among those that can be read; None: it cannot
    is_stranded: bool  # it lacks something, and a source to have it from
    is_steady: bool  # it is a source that is not spot


NOTHING: Final = Counted((False, False, False), None, False, False)


class Holders(Generic[H]):
    """The holdings of one shard that do not leave, in the order in which they came."""

    def __init__(self) -> None:
        self.complete = 0  # that have all of it, committed or not
        self.sources = 0  # that are complete, committed, and take readers
        self.live_sources = 0  # those of them whose workers are heard of now
        self.nbytes = 0  # of the shard: the largest that was ever here
        self.chunks = 0  # the same
        self.patches = 0  # ACTIVE leases on them that were granted while nobody held all of it: these alone may form cycles
        self.steady: dict[H, None] = {}  # sources that are not spot
        self._minted = 0
        self._there: list[H] = []  # by number
        self._counts: dict[H, Counts] = {}
        self._fed: Sources[H] = Sources()  # that can be read, and do not wait for a source themselves
        self._stranded: Sources[H] = Sources()  # that can be read, and lack a source

    def __iter__(self) -> Iterator[H]:
        return iter(self._there)

    def __reversed__(self) -> Iterator[H]:
        return reversed(self._there)

    def __len__(self) -> int:
        return len(self._there)

    def __contains__(self, holding: object) -> bool:
        return holding in self._counts

    def add(self, holding: H, nbytes: int, chunks: int) -> None:
        """It comes, and is numbered; it counts as nothing yet."""
        self._minted += 1
        holding.number = self._minted
        self.nbytes, self.chunks = max(self.nbytes, nbytes), max(self.chunks, chunks)
        self._there.append(holding)
        self._counts[holding] = NOTHING.counts

    def remove(self, holding: H) -> None:
        """It leaves."""
        self.count(holding, NOTHING)
        del self._counts[holding]
        del self._there[bisect_left(self._there, holding.number, key=_number)]

    def count(self, holding: H, now: Counted) -> bool:
        """What it counts as from now on. Whether there is more to read from than before."""
        before, counts = self._counts[holding], now.counts
        if counts != before:
            self._counts[holding] = counts
            self.complete += counts[0] - before[0]
            self.sources += counts[1] - before[1]
            self.live_sources += counts[2] - before[2]
        if now.is_steady:
            self.steady[holding] = None
        else:
            self.steady.pop(holding, None)
        mine, other = (self._stranded, self._fed) if now.is_stranded else (self._fed, self._stranded)
        is_new = holding not in self._fed and (not now.is_stranded or holding not in self._stranded)
        other.drop(holding)
        if now.standing is None:
            mine.drop(holding)
            return counts > before
        mine.put(holding, now.standing)
        return is_new or counts > before

    def counted(self, holding: H) -> tuple[Counts, Standing | None, Standing | None]:
        """What it counts as; how it stands among those that can be read, and among those that lack a source."""
        return self._counts[holding], self._fed.standing(holding), self._stranded.standing(holding)

    def after(self, holding: H | None) -> Iterator[H]:
        """All holders but this one, beginning with the next one, as a ring."""
        place = bisect_right(self._there, holding.number, key=_number) if holding is not None else 0
        for at in (*range(place, len(self._there)), *range(place)):
            if self._there[at] is not holding:
                yield self._there[at]

    def best(
        self,
        reader: Location,
        transports: frozenset[str],
        wanted: Wanted,
        rates: Sequence[float],
        refuses: Callable[[H], bool],
        *,
        stranded: bool = False,
    ) -> H | None:
        """From which this reader would have everything first, of those that it does not refuse."""
        order = self._stranded if stranded else self._fed
        return order.best(reader, transports, wanted, rates, refuses)
