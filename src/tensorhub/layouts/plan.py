"""The plan: which bytes a reader takes from which source, as families of cells.

    1. likeness      pieces of the reader are alike if they have the same form, and if the sources hold the same forms of
                     their tensors: what is read of one of them is read of all
    2. stretches     of like pieces, those whose memory is an equal distance apart, at the reader and at each source
    3. templates     for one of them: the reader's box is met with the sources' boxes, each byte taken once
    4. families      a template's cell, at the first piece of a stretch, and how far apart the rest are

A model of 100,000 tensors has a few dozen likenesses, so the geometry of step 3 costs nothing. Steps 1 and 2 cost a few
operations for each tensor. No cell is made before it is asked for.

Where several sources hold a byte (replicated tensors, key-value heads), those that are read anyway come first, then
those that give the least so far. `turn` decides between equals, so that the ranks of a reading group do not all choose
the same one.

Responsible for what is read from whom. Not responsible for whether the sources are a whole version (`publication`), nor
for when cells are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import sub
from typing import NamedTuple, TypeAlias

from tensorhub.errors import ManifestMismatch
from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.boxes import Box, Meetings, left_over, meet, shown, taken_out, volume
from tensorhub.layouts.catalogue import numbers_in
from tensorhub.layouts.cells import Cell, Family, Loop, Loops, Step, folded, joined
from tensorhub.layouts.pieces import within

NAMES_MAX = 10  # in one error
PLACES_PER_MEETING = 8  # that are looked at in the time that two boxes take to be met
MANY = 60  # stretches of like pieces: then it is worth to look for fewer


class Unheld(NamedTuple):
    """A part of a reader's tensor that no source has. `count`: bytes of it."""

    name: str
    box: Box
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name!r} {shown(self.box)} ({self.nbytes} bytes)"


@dataclass(frozen=True)
class Plan:
    """`families`: in the order of the reader's memory. `unheld`: what no source has, empty unless that was allowed."""

    families: tuple[Family, ...]
    unheld: tuple[Unheld, ...] = ()

    @cached_property
    def of_source(self) -> dict[int, tuple[Family, ...]]:
        """The families of each source that is read at all, by its number, in the plan's order."""
        found: dict[int, list[Family]] = {}
        for family in self.families:
            found.setdefault(family.source, []).append(family)
        return {source: tuple(families) for source, families in sorted(found.items())}

    @cached_property
    def needs(self) -> dict[int, int]:
        """Bytes from each source that is read at all."""
        return {source: sum(family.nbytes for family in families) for source, families in self.of_source.items()}

    @property
    def nbytes(self) -> int:
        return sum(self.needs.values())

    @property
    def cell_count(self) -> int:
        return sum(family.length for family in self.families)

    @property
    def run_count(self) -> int:
        return sum(family.runs for family in self.families)

    def cells(self, source: int) -> Iterator[Cell]:
        for family in self.of_source.get(source, ()):
            yield from family.cells()


def plan(
    reader: Coordinates,
    sources: Sequence[Coordinates],
    *,
    preferred: Iterable[int] = (),
    turn: int = 0,
    partial: bool = False,
) -> Plan:
    """What the reader takes from each of these sources. `preferred`: sources that are read anyway.

    ManifestMismatch, with everything that no source has, unless `partial`.
    """
    made = _Planning(reader, sources, preferred, turn).made()
    if made.unheld and not partial:
        sentences = tuple([f"no source holds {each}" for each in made.unheld])
        more = len(sentences) - NAMES_MAX
        text = "; ".join(sentences[:NAMES_MAX]) + (f" (and {more} more)" if more > 0 else "")
        raise ManifestMismatch(f"{len(sentences)} part(s) of the reader's tensors: {text}", differences=sentences)
    return made


# ----------------------------------------------------------------------------------------------------- likeness


_Forms: TypeAlias = tuple[
    tuple[int, int], ...
]  # of pieces of one tensor: the numbers of the arrangement, and of the form in it


class _Likeness(NamedTuple):
    """The reader's form; for each of the sources' pieces of the tensor, the number of its arrangement, and its form
    there.
    """

    form: int
    held: _Forms


class _Stretch(NamedTuple):
    """Like pieces of the reader. `places`: region and offset of the first of them; then those of each of the sources' pieces
    of its tensor. `steps`: how far apart those of the following pieces are.
    """

    likeness: _Likeness
    pieces: list[int]
    places: tuple[int, ...]
    steps: tuple[int, ...]

    def split(self, count: int) -> Iterator[_Stretch]:
        """In so many of equal length, or fewer."""
        each = -(-len(self.pieces) // count)
        for at in range(0, len(self.pieces), each):
            places = tuple([place + at * step for place, step in zip(self.places, self.steps, strict=True)])
            yield self._replace(pieces=self.pieces[at : at + each], places=places)


class _Part(NamedTuple):
    """What one source gives of a likeness, counted from the beginnings of the pieces. `column`: which of the source's
    pieces.
    """

    source: int
    column: int
    source_offset: int
    reader_offset: int
    loops: Loops
    run: int
    nbytes: int


class _Candidate(NamedTuple):
    """A source's piece that has something of a likeness: which piece, and what both have."""

    source: int
    column: int
    common: Box


class _Planning:
    """One plan being made."""

    def __init__(
        self,
        reader: Coordinates,
        sources: Sequence[Coordinates],
        preferred: Iterable[int],
        turn: int,
    ) -> None:
        self._reader = reader
        self._sources = sources
        self._turn = turn
        self._in_use = set(preferred)
        self._given = [0] * len(sources)  # bytes that each source gives so far
        arrangements = {each.arrangement.arrangement_id: each.arrangement for each in sources}
        numbers = {key: number for number, key in enumerate(arrangements)}
        self._arrangements = list(arrangements.values())
        self._of_arrangement: list[list[int]] = [[] for _ in arrangements]  # the sources of each
        for number, each in enumerate(sources):
            self._of_arrangement[numbers[each.arrangement.arrangement_id]].append(number)
        self._candidates_of: dict[_Likeness, list[_Candidate]] = {}
        self._families: list[Family] = []
        self._unheld: list[Unheld] = []
        self._meetings = Meetings()

    def made(self) -> Plan:
        undecided = []
        parts_of: dict[_Likeness, list[_Part] | None] = {}
        for stretch in self._stretches():
            likeness = stretch.likeness
            if likeness not in parts_of:
                self._candidates_of[likeness] = list(self._candidates(likeness))
                parts_of[likeness] = self._only_parts(likeness)
            parts = parts_of[likeness]
            if parts is None:
                undecided.append(stretch)
            else:
                self._take(stretch, parts)
        for stretch in undecided:  # now it is known which sources are read anyway
            for each in stretch.split(len(self._candidates_of[stretch.likeness])):
                self._take(each, self._chosen_parts(each.likeness))
        self._families.sort(key=lambda family: (family.first.reader_region, family.first.reader_offset, family.source))
        return Plan(tuple(self._families), tuple(self._unheld))

    # --------------------------------------------------------------------------------------------- who has what

    def _held(self) -> tuple[list[_Forms], list[tuple[int, ...]]]:
        """For each tensor of the reader's catalogue: arrangement and form of the sources' pieces of it, and which pieces."""
        catalogue = self._reader.catalogue
        wanted = bytearray(len(catalogue.names))
        for tensor in self._reader.arrangement.tensors:
            wanted[tensor] = 1
        forms: list[_Forms] = [()] * len(catalogue.names)  # tuples: most are shared, and none costs the garbage collector
        pieces: list[tuple[int, ...]] = [()] * len(catalogue.names)
        more: dict[int, list[tuple[tuple[int, int], int]]] = {}  # of tensors with several pieces: all but the first
        for number, arrangement in enumerate(self._arrangements):
            numbers = numbers_in(arrangement.catalogue, self._reader.catalogue)
            alone: list[_Forms] = [((number, form),) for form in range(len(arrangement.forms))]
            for piece, (theirs, form) in enumerate(zip(arrangement.tensors, arrangement.form_of, strict=True)):
                tensor = theirs if numbers is None else numbers[theirs]
                if tensor >= 0 and wanted[tensor] and forms[tensor]:
                    more.setdefault(tensor, []).append(((number, form), piece))
                elif tensor >= 0 and wanted[tensor]:
                    forms[tensor], pieces[tensor] = alone[form], (piece,)
        for tensor, rest in more.items():
            forms[tensor] += tuple([form for form, _ in rest])
            pieces[tensor] += tuple([piece for _, piece in rest])
        return forms, pieces

    def _stretches(self) -> Iterator[_Stretch]:
        forms, held_pieces = self._held()
        mine = self._reader.arrangement
        shared = mine.tied
        held: dict[_Forms, int] = {}  # numbered once for each tensor, since it may be long
        held_of = [held.setdefault(each, len(held)) for each in forms]
        numbers: dict[tuple[int, int], int] = {}  # of the likenesses
        number_of = [
            numbers.setdefault((form, held_of[t]), len(numbers)) for t, form in zip(mine.tensors, mine.form_of, strict=True)
        ]
        groups: list[list[int]] = [[] for _ in numbers]  # like pieces
        for piece, number in enumerate(number_of):
            if piece not in shared:  # else the same bytes in the same memory: they are read once
                groups[number].append(piece)
        for pieces in filter(None, groups):
            likeness = _Likeness(mine.form_of[pieces[0]], forms[mine.tensors[pieces[0]]])
            self._meetings.spend(len(pieces) * len(likeness.held) // PLACES_PER_MEETING)
            found = list(self._equally_far(likeness, pieces, held_pieces))
            if 3 * len(found) > len(pieces) > 1:
                # What alternates, such as gate and up, is told apart by the piece before: each is equally far from its next.
                after: dict[int, list[int]] = {}
                for piece in pieces:
                    after.setdefault(number_of[piece - 1] if piece else -1, []).append(piece)
                found = [stretch for each in after.values() for stretch in self._equally_far(likeness, each, held_pieces)]
            if likeness.held and len(found) > MANY:
                # One side has its tensors in another order. If that is the reader, and by text (1, 10, 100, 101, ...), the
                # source's order has half as many stretches.
                theirs = self._in_order_of_source(likeness, pieces, held_pieces)
                found = min(found, list(self._equally_far(likeness, theirs, held_pieces)), key=len)
            yield from found

    def _in_order_of_source(self, likeness: _Likeness, pieces: list[int], held_pieces: list[tuple[int, ...]]) -> list[int]:
        """The same pieces as the first source has them."""
        tensors, its = self._reader.arrangement.tensors, self._arrangements[likeness.held[0][0]]

        def place(piece: int) -> tuple[int, int]:
            held, *_ = held_pieces[tensors[piece]]
            return its.regions[held], its.offsets[held]

        return sorted(pieces, key=place)

    def _equally_far(self, likeness: _Likeness, pieces: list[int], held_pieces: list[tuple[int, ...]]) -> Iterator[_Stretch]:
        """Of these like pieces, those that follow each other at one distance, at the reader and at the sources."""
        mine = self._reader.arrangement
        if len(pieces) == 1:  # columns of one number each would cost far more than the numbers
            its = [mine.regions[pieces[0]], mine.offsets[pieces[0]]]
            for held, (number, _) in zip(held_pieces[mine.tensors[pieces[0]]], likeness.held, strict=True):
                its += (self._arrangements[number].regions[held], self._arrangements[number].offsets[held])
            yield _Stretch(likeness, pieces, tuple(its), (0,) * len(its))
            return
        columns = [[mine.regions[piece] for piece in pieces], [mine.offsets[piece] for piece in pieces]]
        theirs = [held_pieces[mine.tensors[piece]] for piece in pieces]
        for column, (number, _) in enumerate(likeness.held):
            arrangement = self._arrangements[number]
            its = [held[column] for held in theirs]
            columns += [list(map(arrangement.regions.__getitem__, its)), list(map(arrangement.offsets.__getitem__, its))]
        places = list(zip(*columns, strict=True))
        steps = [tuple(map(sub, after, before)) for before, after in pairwise(places)]
        first = 0
        while first < len(pieces):
            end = first + 1
            while end < len(pieces) and steps[end - 1] == steps[first]:
                end += 1
            step = steps[first] if end - first > 1 else (0,) * len(columns)
            yield _Stretch(likeness, pieces[first:end], places[first], step)
            first = end

    # --------------------------------------------------------------------------------------------- what is taken

    def _candidates(self, likeness: _Likeness) -> Iterator[_Candidate]:
        _, box, _ = self._reader.geometry[likeness.form]
        for column, (number, form) in enumerate(likeness.held):
            self._meetings.spend(len(self._of_arrangement[number]))
            for source in self._of_arrangement[number]:
                _, theirs, _ = self._sources[source].geometry[form]
                if (common := meet(box, theirs)) is not None:
                    yield _Candidate(source, column, common)

    def _only_parts(self, likeness: _Likeness) -> list[_Part] | None:
        """What is taken, where it does not matter in which order the sources are asked; None where it does."""
        _, box, _ = self._reader.geometry[likeness.form]
        candidates = self._candidates_of[likeness]
        left = [box]
        for candidate in candidates:
            taken, left = taken_out(left, candidate.common, self._meetings)
            if sum(map(volume, taken)) < volume(candidate.common):
                return None
        return [self._part(likeness, candidate, candidate.common) for candidate in candidates]

    def _chosen_parts(self, likeness: _Likeness) -> list[_Part]:
        def rank(candidate: _Candidate) -> tuple[bool, int, int]:
            source = candidate.source
            return source not in self._in_use, self._given[source], (source - self._turn) % len(self._sources)

        _, box, _ = self._reader.geometry[likeness.form]
        parts: list[_Part] = []
        left = [box]
        for candidate in sorted(self._candidates_of[likeness], key=rank):
            if not left:
                break
            taken, left = taken_out(left, candidate.common, self._meetings)
            parts += [self._part(likeness, candidate, common) for common in taken]
        return parts

    def _part(self, likeness: _Likeness, candidate: _Candidate, common: Box) -> _Part:
        kind, mine, to = self._reader.geometry[likeness.form]
        _, form = likeness.held[candidate.column]
        _, theirs, by = self._sources[candidate.source].geometry[form]
        source_offset, source_steps = within(common, theirs, by)
        reader_offset, reader_steps = within(common, mine, to)
        steps = zip(source_steps, reader_steps, strict=True)
        loops, run = folded(
            [Loop(times, at_source, at_reader) for (times, at_source), (_, at_reader) in steps], kind.itemsize
        )
        nbytes = volume(common) * kind.itemsize
        return _Part(candidate.source, candidate.column, source_offset, reader_offset, loops, run, nbytes)

    def _take(self, stretch: _Stretch, parts: list[_Part]) -> None:
        region, offset, *held = stretch.places
        region_step, offset_step, *held_steps = stretch.steps
        length = len(stretch.pieces)
        steps = [Step(*each, region_step, offset_step) for each in zip(held_steps[::2], held_steps[1::2], strict=True)]
        for source, column, source_offset, reader_offset, loops, run, nbytes in parts:
            its, at = held[2 * column : 2 * column + 2]
            first = Cell(its, at + source_offset, region, offset + reader_offset, loops, run)
            self._families.append(joined(Family(source, length, first, steps[column])))
            self._given[source] += nbytes * length
            self._in_use.add(source)
        kind, box, _ = self._reader.geometry[stretch.likeness.form]
        if sum(part.nbytes for part in parts) < volume(box) * kind.itemsize:
            self._miss(stretch)

    def _miss(self, stretch: _Stretch) -> None:
        kind, box, _ = self._reader.geometry[stretch.likeness.form]
        commons = [candidate.common for candidate in self._candidates_of[stretch.likeness]]
        boxes = left_over(box, commons, self._meetings)
        for piece in stretch.pieces:
            name = self._reader.catalogue.names[self._reader.arrangement.tensors[piece]]
            self._unheld += [Unheld(name, each, volume(each) * kind.itemsize) for each in boxes]
