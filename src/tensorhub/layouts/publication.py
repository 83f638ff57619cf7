"""The tensors of several ranks together: a publication and its shard classes, and whether a reading
group reads all of it.

Responsible for the checks that no rank can make alone: a rank holds each byte of the version; no
rank holds a byte twice; ranks that describe one tensor agree; readers' ties are ties at the source
(R13); readers leave nothing unread. Every fault is named, in one error. Not responsible for
transfer plans (`plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from tensorhub.errors import ManifestMismatch, some
from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.boxes import (
    Box,
    Meetings,
    left_over,
    overlapping,
    shown,
    taken_out,
    volume,
    whole,
)
from tensorhub.layouts.catalogue import Catalogue, Kind, merged, numbers_in

_UNHELD = (
    ". Let the rank that has it register it under that name, as a DTensor or with its part "
    "in sources="
)
FAULTS_MAX = 1000  # that are listed; the error's text shows fewer


@dataclass(frozen=True, slots=True)
class ShardClass:
    """Ranks of equal coordinates: what one of them holds, all of them hold."""

    coordinates: Coordinates
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Publication:
    """What the ranks of a group have published. `ranks[i]`: what rank i holds."""

    ranks: tuple[Coordinates, ...]

    @cached_property
    def catalogue(self) -> Catalogue:
        """All of its tensors, in the order of the ranks."""
        return merged({rank: each.catalogue for rank, each in enumerate(self.ranks)})

    @cached_property
    def classes(self) -> tuple[ShardClass, ...]:
        """In the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, each in enumerate(self.ranks):
            found.setdefault(each.coordinates_id, []).append(rank)
        return tuple([ShardClass(self.ranks[ranks[0]], tuple(ranks)) for ranks in found.values()])

    @cached_property
    def ties(self) -> dict[int, int]:
        """Tensors that share all their memory with another one, on every rank that holds either:
        each, and the first of them.
        """
        shared = {
            piece[0]
            for each in self.classes
            for piece in _shared_places(each.coordinates, self.catalogue)
        }
        lying: dict[int, list[tuple[int, ...]]] = {tensor: [] for tensor in sorted(shared)}
        for number, each in enumerate(self.classes if shared else ()):
            for tensor, *place in places(each.coordinates, self.catalogue):
                if tensor in shared:
                    lying[tensor].append((number, *place))
        first: dict[tuple[tuple[int, ...], ...], int] = {}
        return {
            tensor: first.setdefault(tuple(sorted(its)), tensor) for tensor, its in lying.items()
        }

    @cached_property
    def overlaps(self) -> tuple[tuple[int, Box, frozenset[int]], ...]:
        """What several classes hold: tensor, part, and the numbers of the classes. It is within one
        piece of each.
        """
        held, meetings = (
            Held(self.catalogue, [each.coordinates for each in self.classes]),
            Meetings(),
        )
        shared_of: dict[Forms, list[tuple[Box, frozenset[int]]]] = {}
        found = []
        for tensor, forms in enumerate(held.forms):
            if forms not in shared_of:
                boxes = (
                    []
                    if self.catalogue.kind(tensor).ranks
                    else [(each, box) for _, each, box in held.boxes(forms)]
                )
                shared_of[forms] = _shared(boxes, meetings)
            found += [(tensor, box, holders) for box, holders in shared_of[forms]]
        return tuple(found)

    def check(self) -> Publication:
        """ManifestMismatch, with every fault, unless each byte has a holder, and only one piece on
        a rank.
        """
        holders = [each.coordinates for each in self.classes]
        faults = [*_unheld(self.catalogue, holders, "is held by no rank", self._plain)]
        advice = _UNHELD if faults else ""
        for each in self.classes:
            faults += _held_twice(each)
        refuse(faults, "fault(s) in what the ranks publish together", advice)
        return self

    def check_readers(self, readers: Sequence[Coordinates], *, partial: bool = False) -> None:
        """ManifestMismatch, with every fault, unless the ranks of a reading group together read
        every byte, or may leave some; and what shares memory at a reader shares it here.
        """
        distinct = list({each.coordinates_id: each for each in readers}.values())
        faults = (
            []
            if partial
            else [*_unheld(self.catalogue, distinct, "is read by no rank of the group")]
        )
        faults += [] if partial else self._unread_locals(distinct)
        for reader in distinct:
            faults += self._tie_faults(reader)
        hint = (
            ""
            if partial
            else " (register(..., partial=True) on each rank allows to leave some unread)"
        )
        refuse(faults, f"difference(s) between the published and the registered tensors{hint}")

    def unread(self, names: Container[str]) -> Iterator[str]:
        """A sentence for each tensor that no reader reads: its name is not in `names`."""
        for name, number in zip(self.catalogue.names, self.catalogue.kind_of, strict=True):
            kind = self.catalogue.kinds[number]
            if name not in names and not kind.ranks and volume(whole(kind.shape)):
                yield _missing(name, kind, [whole(kind.shape)], "is read by no rank of the group")

    def _plain(self, name: str) -> str:
        """Which ranks have a plain tensor of that name; empty if none has."""
        ranks = [
            n
            for each in self.classes
            if name in each.coordinates.catalogue.local_names
            for n in each.ranks
        ]
        what = (
            "has a plain tensor of that name, and does not say with "
            "sources= which part of it that is"
        )
        return f" (rank {some([*map(str, sorted(ranks))], most=3)} {what})" if ranks else ""

    def _unread_locals(self, readers: Sequence[Coordinates]) -> Iterator[str]:
        """Rank-local tensors that a rank holds and no reader has the like of."""
        if not self.catalogue.local_names:
            return
        read = {piece for each in readers for piece in _locals(each, self.catalogue)}
        for each in self.classes:
            for tensor, box in _locals(each.coordinates, self.catalogue):
                if (tensor, box) not in read:
                    name, ranks = self.catalogue.names[tensor], self.catalogue.kind(tensor).ranks
                    yield (
                        f"tensor {name!r}, local to rank {box[0].start} of {ranks}, is read by no "
                        f"rank of the group "
                        "(another layout can read it once its publisher says, by sources=, which "
                        "part of the model it is)"
                    )

    def _tie_faults(self, reader: Coordinates) -> Iterator[str]:
        """R13: what shares memory at the reader only would be overwritten there with two tensors'
        bytes.
        """
        first: dict[tuple[int, int], tuple[int, int]] = {}
        names, forms = self.catalogue.names, reader.geometry
        for tensor, region, offset, form in _shared_places(reader, self.catalogue):
            one, its = first.setdefault((region, offset), (tensor, form))
            if one == tensor and its == form:
                continue
            same = (
                self.ties.get(one, one) == self.ties.get(tensor, tensor)
                and forms[its][1] == forms[form][1]
            )
            if not same:
                both = (
                    f"tensors {names[one]!r} and {names[tensor]!r}"
                    if one != tensor
                    else f"parts of tensor {names[one]!r}"
                )
                yield f"{both} share memory at the reader only"


def refuse(faults: Iterable[str], what: str, advice: str = "") -> None:
    """ManifestMismatch, if there are any. `advice`: what to do, a sentence behind them."""
    found = list(dict.fromkeys(faults))
    if not found:
        return
    raise ManifestMismatch(
        f"{len(found)} {what}: {some(found, '; ')}{advice}", differences=tuple(found[:FAULTS_MAX])
    )


# --------------------------------------------------------------------------------------------------
# coverage


# Of pieces of one tensor: the numbers of the arrangement, and of the form in it.
Forms: TypeAlias = tuple[tuple[int, int], ...]


class Held:
    """Which pieces some ranks hold of a catalogue's tensors. Tensors are alike if they are of one
    kind and the ranks have equal forms of them: one answer goes for all.

    `forms[i]`: of the pieces of tensor i; `pieces[i]`: their numbers in their arrangements.
    `holders[n]`: which of the ranks have arrangement n.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        ranks: Sequence[Coordinates],
        wanted: Iterable[int] | None = None,
    ) -> None:
        """`wanted`: the numbers of tensors, in any order; None: all."""
        self._ranks = ranks
        arrangements = {each.arrangement.arrangement_id: each.arrangement for each in ranks}
        numbers = {key: number for number, key in enumerate(arrangements)}
        self.arrangements = list(arrangements.values())
        self.holders: list[list[int]] = [[] for _ in arrangements]
        for number, each in enumerate(ranks):
            self.holders[numbers[each.arrangement.arrangement_id]].append(number)
        is_wanted = bytearray(len(catalogue.names))
        for tensor in range(len(catalogue.names)) if wanted is None else wanted:
            is_wanted[tensor] = 1
        # Tuples: most are shared, and none costs the garbage collector.
        self.forms: list[Forms] = [()] * len(catalogue.names)
        self.pieces: list[tuple[int, ...]] = [()] * len(catalogue.names)
        # of tensors with several pieces: all but the first
        more: dict[int, list[tuple[tuple[int, int], int]]] = {}
        for number, arrangement in enumerate(self.arrangements):
            theirs_here = numbers_in(arrangement.catalogue, catalogue)
            alone: list[Forms] = [((number, form),) for form in range(len(arrangement.forms))]
            for piece, (theirs, form) in enumerate(
                zip(arrangement.tensors, arrangement.form_of, strict=True)
            ):
                tensor = theirs if theirs_here is None else theirs_here[theirs]
                if tensor < 0 or not is_wanted[tensor]:
                    continue
                if self.forms[tensor]:
                    more.setdefault(tensor, []).append(((number, form), piece))
                else:
                    self.forms[tensor], self.pieces[tensor] = alone[form], (piece,)
        for tensor, rest in more.items():
            self.forms[tensor] += tuple([form for form, _ in rest])
            self.pieces[tensor] += tuple([piece for _, piece in rest])

    def boxes(self, forms: Forms) -> Iterator[tuple[int, int, Box]]:
        """Of each rank that has one of these: which of them, the rank's number, and the box."""
        for column, (number, form) in enumerate(forms):
            for holder in self.holders[number]:
                yield column, holder, self._ranks[holder].geometry[form][1]


def _unheld(
    catalogue: Catalogue,
    holders: Sequence[Coordinates],
    otherwise: str,
    if_local: Callable[[str], str] = lambda name: "",
) -> Iterator[str]:
    """Tensors of which a part is in no piece of these, a sentence each. `if_local`: said where a
    plain one has that name.
    """
    held, meetings = Held(catalogue, holders), Meetings()
    left_of: dict[tuple[int, Forms], list[Box]] = {}
    for name, number, forms in zip(catalogue.names, catalogue.kind_of, held.forms, strict=True):
        kind = catalogue.kinds[number]
        if kind.ranks:
            continue  # each rank's is its own
        if (number, forms) not in left_of:
            boxes = dict.fromkeys(box for _, _, box in held.boxes(forms))
            left_of[number, forms] = left_over(whole(kind.shape), boxes, meetings)
        if left := left_of[number, forms]:
            yield _missing(name, kind, left, otherwise) + (
                if_local(name) if name in catalogue.local_names else ""
            )


def _shared(
    held: Iterable[tuple[int, Box]], meetings: Meetings
) -> list[tuple[Box, frozenset[int]]]:
    """Parts with several holders, each with its first holder and all holders that share this part
    with the first.
    """
    by_holder = sorted(held, key=lambda each: each[0])
    if overlapping([box for _, box in by_holder], meetings) is None:
        return []
    first: list[tuple[Box, int]] = []  # no two of these boxes share an element
    found: dict[Box, set[int]] = {}
    for holder, box in by_holder:
        left = [box]
        for part, owner in first:
            if owner != holder and left:
                taken, left = taken_out(left, part, meetings)
                for each in taken:
                    found.setdefault(each, {owner}).add(holder)
        first += [(each, holder) for each in left]
    return [(box, frozenset(holders)) for box, holders in found.items()]


def _missing(name: str, kind: Kind, left: Sequence[Box], otherwise: str) -> str:
    nbytes = sum(map(volume, left)) * kind.itemsize
    if len(left) == 1 and left[0] == whole(kind.shape):
        return f"tensor {name!r} ({nbytes} bytes) {otherwise}"
    more = f" and {len(left) - 3} more parts" if len(left) > 3 else ""
    return (
        f"of tensor {name!r}, {', '.join(map(shown, left[:3]))}{more} ({nbytes} bytes) {otherwise}"
    )


def _held_twice(each: ShardClass) -> Iterator[str]:
    """Tensors of which the rank has two pieces that share elements: its two copies might differ."""
    arrangement = each.coordinates.arrangement
    if len(set(arrangement.tensors)) == len(arrangement.tensors):
        return
    forms_of: dict[int, list[int]] = {}
    for tensor, form in zip(arrangement.tensors, arrangement.form_of, strict=True):
        forms_of.setdefault(tensor, []).append(form)
    found: dict[tuple[int, ...], tuple[Box, Box] | None] = {}
    meetings = Meetings()
    for tensor, forms in forms_of.items():
        if len(forms) < 2:
            continue
        if tuple(forms) not in found:
            boxes = [each.coordinates.geometry[form][1] for form in forms]
            both = overlapping(boxes, meetings)
            found[tuple(forms)] = None if both is None else (boxes[both[0]], boxes[both[1]])
        if (pair := found[tuple(forms)]) is not None:
            name = each.coordinates.catalogue.names[tensor]
            one, other = map(shown, pair)
            yield (
                f"rank {each.ranks[0]} holds parts {one} and {other} of tensor {name!r}, which "
                f"overlap: leave one out"
            )


# --------------------------------------------------------------------------------------------------
# ties


def _locals(rank: Coordinates, catalogue: Catalogue) -> Iterator[tuple[int, Box]]:
    """The rank-local tensors of a rank, by their numbers in this catalogue."""
    for tensor, _, _, form in places(rank, catalogue):
        kind, box, _ = rank.geometry[form]
        if kind.ranks:
            yield tensor, box


def places(rank: Coordinates, catalogue: Catalogue) -> Iterator[tuple[int, int, int, int]]:
    """Of each piece: the tensor's number in this catalogue, region, offset, form."""
    arrangement = rank.arrangement
    numbers = numbers_in(arrangement.catalogue, catalogue)
    tensors = (
        arrangement.tensors if numbers is None else map(numbers.__getitem__, arrangement.tensors)
    )
    return zip(tensors, arrangement.regions, arrangement.offsets, arrangement.form_of, strict=True)


def _shared_places(rank: Coordinates, catalogue: Catalogue) -> Iterator[tuple[int, int, int, int]]:
    """As `places`, of the pieces that begin where another piece begins."""
    if len(set(rank.arrangement.regions)) == len(rank.arrangement.regions):
        return
    at: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for piece in places(rank, catalogue):
        at.setdefault(piece[1:3], []).append(piece)
    for pieces in at.values():
        if len(pieces) > 1:
            yield from pieces
