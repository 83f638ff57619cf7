"""The holders of a version in one layout: counted, and in order, so that no step has to look at all
of them; and the encoded manifests that describe layouts.

A version has one `LayoutHoldings` for the published layout, and one for each other layout in which
a rank fills or holds the version. The chunks of such a layout follow from that layout and from the
published one.

`Holders` are the holdings of one shard. `Shards` are the shards of one layout: a changed holding is
counted once, before the next question, however much of it has changed. `LayoutHoldings` adds the
descriptions of the shards, which `Manifests` keeps.

Not responsible for what a holding counts as (`Held.counted`), nor for the layouts that a reader may
read (`ways`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from tensorhub.coordinator import limits
from tensorhub.messages import Need
from tensorhub.model.manifest import id_of
from tensorhub.scheduler.choice import Wanted
from tensorhub.scheduler.sources import Sources, Standing
from tensorhub.types import Location

Counts = tuple[bool, bool, bool]  # is complete, is a source, and its worker is heard of now
_number = attrgetter("number")


class Counted(NamedTuple):
    """What a holding counts as, and where it stands."""

    counts: Counts
    standing: Standing | None  # among those that can be read; None: it cannot
    is_stranded: bool  # it lacks something, and a source to have it from
    is_steady: bool  # it is a source that is not spot


class Held(Protocol):
    """A holding. `number` is its place in the order of coming."""

    number: int

    @property
    def shard(self) -> int: ...

    @property
    def counted(self) -> Counted: ...


H = TypeVar("H", bound=Held)
NOTHING: Final = Counted((False, False, False), None, False, False)


class Holders(Generic[H]):
    """The holdings of one shard that do not leave, in the order in which they came."""

    def __init__(self) -> None:
        self.complete = 0  # that have all of it, committed or not
        self.sources = 0  # that are complete, committed, and take readers
        self.live_sources = 0  # sources with workers that are heard of now
        self.nbytes = 0  # of the shard: the largest that was ever here
        self.chunks = 0  # of the shard: the most that were ever here
        # ACTIVE leases, granted while no holding had the whole shard: only such leases may form
        # cycles
        self.patches = 0
        self.steady: dict[H, None] = {}  # sources that are not spot
        self._minted = 0
        self._there: list[H] = []  # by number
        self._counts: dict[H, Counts] = {}
        # that can be read, and do not wait for a source themselves
        self._fed: Sources[H] = Sources()
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
        """Number a new holding, which counts as nothing yet."""
        self._minted += 1
        holding.number = self._minted
        self.nbytes, self.chunks = max(self.nbytes, nbytes), max(self.chunks, chunks)
        self._there.append(holding)
        self._counts[holding] = NOTHING.counts

    def remove(self, holding: H) -> None:
        """The holding leaves."""
        self.count(holding, NOTHING)
        del self._counts[holding]
        del self._there[bisect_left(self._there, holding.number, key=_number)]

    def count(self, holding: H, now: Counted) -> bool:
        """Set what the holding counts as. Whether readers have more to read from than before."""
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
        mine, other = (
            (self._stranded, self._fed) if now.is_stranded else (self._fed, self._stranded)
        )
        is_new = holding not in self._fed and (not now.is_stranded or holding not in self._stranded)
        other.drop(holding)
        if now.standing is None:
            mine.drop(holding)
            return counts > before
        mine.put(holding, now.standing)
        return is_new or counts > before

    def counted(self, holding: H) -> tuple[Counts, Standing | None, Standing | None]:
        """The holding's counts, and its standings: among fed holdings, and among holdings that lack
        a source.
        """
        return self._counts[holding], self._fed.standing(holding), self._stranded.standing(holding)

    def after(self, holding: H | None) -> Iterator[H]:
        """All holdings except this one, in ring order from the next holding on."""
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
        """The holding from which this reader would finish first. Refused holdings are left out."""
        order = self._stranded if stranded else self._fed
        return order.best(reader, transports, wanted, rates, refuses)


class Shards(dict[int, Holders[H]]):
    """Holders by shard; empty until every rank has published."""

    def __init__(self) -> None:
        # Counted: shards without a source, and shards without a complete holding.
        self.sourceless = self.broken = 0
        # Holdings of which something has changed since they were counted; none between two steps.
        self.uncounted: dict[H, None] = {}
        # readers have more to read from since the last wake; never so between two steps
        self.has_grown = False
        self.changes = 0  # of holdings, their counts, and parts

    def lay_out(self, world_size: int) -> None:
        """Every rank has published: make the shards. (Not earlier: a large `world_size` alone must
        not cost memory.)
        """
        self.update((shard, Holders()) for shard in range(world_size))
        self.sourceless = self.broken = world_size

    # -- changing

    def add(self, holding: H, nbytes: int, chunks: int) -> None:
        """The holding may be read from now on."""
        self[holding.shard].add(holding, nbytes, chunks)
        self.uncounted[holding] = None
        self.changes += 1

    def remove(self, holding: H) -> None:
        """The holding takes no readers any more."""
        there = self[holding.shard]
        sources, complete = there.sources, there.complete
        self.uncounted.pop(holding, None)
        there.remove(holding)
        self.changes += 1
        self._changed(there, sources, complete)

    def count(self) -> None:
        """Count the changed holdings."""
        for holding in self.uncounted:
            there = self[holding.shard]
            sources, complete = there.sources, there.complete
            self.has_grown = there.count(holding, holding.counted) or self.has_grown
            self._changed(there, sources, complete)
        self.changes += 1
        self.uncounted.clear()

    def _changed(self, there: Holders[H], sources: int, complete: int) -> None:
        """A shard had so many sources, and complete holdings, before."""
        self.sourceless += bool(sources) - bool(there.sources)
        self.broken += bool(complete) - bool(there.complete)

    # -- questions

    def of(self, shard: int) -> Holders[H]:
        """The holders of this shard, counted."""
        if self.uncounted:
            self.count()
        return self[shard]

    def is_whole(self, shard: int) -> bool:
        """Whether some holding has the whole shard, committed or not."""
        return self.of(shard).complete > 0

    def are_whole(self) -> bool:
        """Whether each shard has a complete holding, committed or not."""
        if self.uncounted:
            self.count()
        return not self.broken

    def have_sources(self) -> bool:
        """Whether every shard is held, complete and committed, by a replica that takes readers."""
        if self.uncounted:
            self.count()
        return not self.sourceless

    def missing(self) -> list[int]:
        """The shards without a source."""
        return (
            [] if self.have_sources() else [shard for shard in self if not self.of(shard).sources]
        )

    def copies(self) -> int:
        """How many complete copies can be read now: the least number of live sources of a shard."""
        return min((self.of(shard).live_sources for shard in self), default=0)


PARTS = 3  # of a rank: catalogue, arrangement and coordinates


class LayoutHoldings(Shards[H]):
    """The holdings of one version in one layout, with the descriptions of the shards."""

    def __init__(self, layout_id: str) -> None:
        super().__init__()
        self.layout_id = layout_id
        # by shard; of another layout those of the group that was the first to fill
        self.manifests: dict[int, bytes] = {}
        # As of `Member`; by shard, where they are known. For another layout: where the published
        # bytes lie in the readers' memory, as the first reader has said.
        self.parts: dict[int, tuple[bytes, ...]] = {}
        # What each shard's readers need of published shards, as the first reader has said.
        self.needs: dict[int, tuple[Need, ...]] = {}
        # Which rank holds which part (`Published`), and its id. Known once a reader of another
        # layout has needed the description, or the store has said it after a restart.
        self.description: bytes = b""
        self.described_as = ""
        # the description and the parts that it names are durable, or on their way to the store
        self.stored = False
        self.abandoned = False  # its last source left on purpose, and no source has come since
        self._classes: dict[int, tuple[int, ...]] = {}  # see `classes`; empty: to be made anew
        self._first: dict[int, int] = {}  # of each shard's class, as of `_classes`

    def __repr__(self) -> str:
        return f"<LayoutHoldings {self.layout_id} of {[len(there) for there in self.values()]}>"

    @property
    def has_holders(self) -> bool:
        return any(self.values())

    @property
    def classes(self) -> dict[int, tuple[int, ...]]:
        """Classes by their first shard: shards with equal parts have equal bytes in equal places. A
        plain shard is alone.
        """
        if not self._classes:
            found: dict[object, list[int]] = {}
            for shard in self:
                parts = self.parts.get(shard)
                # the last part names all parts
                found.setdefault(parts[-1] if parts else shard, []).append(shard)
            self._classes = {shards[0]: tuple(shards) for shards in found.values()}
            self._first = {
                shard: first for first, shards in self._classes.items() for shard in shards
            }
        return self._classes

    def class_of(self, shard: int) -> int:
        """The first shard of this shard's class."""
        return self._first[shard] if self.classes else shard

    def takes(self, shard: int, parts: tuple[bytes, ...]) -> bool:
        """Whether a rank with these parts holds the shard as the holders here do. Not for the
        published layout.
        """
        return len(parts) == PARTS and self.parts.get(shard, parts) == parts

    @property
    def is_described(self) -> bool:
        """Whether readers of other layouts can be told which rank holds which part."""
        return len(self.parts) == len(self) > 0 and (
            self.described_as != "" or len(self.manifests) == len(self)
        )

    def has_each_class(self) -> bool:
        """Whether each class has a source: a shard that is complete, committed, and in a replica
        that takes readers.
        """
        return self.have_sources() or all(
            any(self.of(s).sources for s in shards) for shards in self.classes.values()
        )

    def can_each_class_be_read(self) -> bool:
        """Whether each class has a source at a worker that is heard of now."""
        return all(
            any(self.of(shard).live_sources for shard in shards) for shards in self.classes.values()
        )

    def is_left(self) -> bool:
        """Whether of each class of shards some shard has a holder."""
        if not self.uncounted and not self.broken:
            return True
        return all(any(self[shard] for shard in shards) for shards in self.classes.values())

    def is_class_whole(self, first: int) -> bool:
        """Whether some holding has a whole shard of this class, committed or not."""
        return any(map(self.is_whole, self.classes[first]))

    def learn_parts(self, shard: int, parts: tuple[bytes, ...]) -> None:
        """Set the parts, which say which part of the model the shard is."""
        self.parts[shard] = parts
        self.changes += 1
        self._classes = {}

    def unlearn(self) -> list[bytes]:
        """Forget all manifests and parts, and the description, which are returned."""
        known = [*self.manifests.values(), *chain(*self.parts.values()), self.description]
        self.description, self.described_as = b"", ""
        self.manifests.clear()
        self.parts.clear()
        self.changes += 1
        self._classes = {}
        return known


class Manifests:
    """The encoded manifests of registrations and versions, and the parts of layouts, each kept once
    however many need it: all replicas of a shard have equal manifests. A component that needs one
    calls `keep`, and `release` when it does not need it any more.
    """

    def __init__(self) -> None:
        self.nbytes = 0  # of all that are kept
        # by content: the one object, and how many keep it
        self._kept: dict[bytes, tuple[bytes, int]] = {}
        self._ids: dict[bytes, str] = {}  # of those that are kept
        self._by_id: dict[str, bytes] = {}  # the other way round

    def __repr__(self) -> str:
        return f"<Manifests: {len(self._kept)} of {self.nbytes} bytes>"

    def new_bytes(self, *manifests: bytes) -> int:
        """How many more bytes there would be if these were kept, too."""
        return sum(map(len, {manifest for manifest in manifests if manifest not in self._kept}))

    def has_room_for(self, *manifests: bytes) -> bool:
        """Whether these may be kept, too."""
        return self.nbytes + self.new_bytes(*manifests) <= limits.MANIFEST_BYTES_MAX

    def keep(self, manifest: bytes) -> bytes:
        """The equal manifest that is kept already; or this manifest, which is kept from now on."""
        if not manifest:
            return manifest
        known, count = self._kept.get(manifest, (manifest, 0))
        if not count:
            self.nbytes += len(manifest)
            # once for all that keep it: a manifest may have 48 MiB
            self._ids[known] = ident = id_of(known)
            self._by_id[ident] = known
        self._kept[known] = (known, count + 1)
        return known

    def keep_all(self, blobs: Iterable[bytes]) -> tuple[bytes, ...]:
        """Each of them."""
        return tuple([self.keep(blob) for blob in blobs])

    def id_of(self, kept: bytes) -> str:
        """The id of a manifest, or a part, that is kept."""
        return self._ids[kept]

    def name(self, manifest: bytes) -> str:
        """The id of any manifest."""
        return self._ids.get(manifest) or id_of(manifest)

    def find(self, manifest_id: str) -> bytes | None:
        """The manifest of that id, if it is kept."""
        return self._by_id.get(manifest_id)

    def release(self, *manifests: bytes) -> None:
        """Once for each `keep`."""
        for manifest in filter(None, manifests):
            known, count = self._kept[manifest]
            if count > 1:
                self._kept[known] = (known, count - 1)
            else:
                del self._kept[known]
                del self._by_id[self._ids.pop(known)]
                self.nbytes -= len(known)
