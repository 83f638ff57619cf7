"""The plan: which bytes a reader takes from which source.

    1. likeness      pieces of the reader are alike if they have equal forms, and if the sources
                     hold equal forms of their tensors: the reads of one of them are the reads of
                     all
    2. stretches     of like pieces, those with memory an equal distance apart, at the reader and at
      each source
    3. templates     for one of them: the reader's box is met with the sources' boxes, each byte
      taken once
    4. rows          a template's block, at the first piece of a stretch, and how far apart the rest
      are

A block is loops (times, stride at the source, stride at the reader) around segments that are
contiguous at both ends:

    for i in range(512):                                            one loop: 512 rows of a column slice
        reader[.. + i * 4096 : .. + run] = source[.. + i * 8192 : .. + run]

Loops are in the order of the reader's memory, the outermost first. That order is also the order of
the block's bytes, on the wire and for its digest. It is the row-major order of the tensor unless
the reader's memory is transposed.

A model of 100,000 tensors has a few dozen likenesses, so the geometry of step 3 costs nothing.
Steps 1 and 2 cost a few operations for each tensor.

Where several sources hold a byte (replicated tensors, key-value heads), those that are read anyway
come first, then those that give the least so far. `turn` decides between equals, so that like ranks
of a reading group do not all choose one source, while ranks of equal coordinates do: so their
selections are equal.

Responsible for the bytes that are read from each source. Not responsible for whether the sources
are a whole version (`publication`).
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter, sub
from typing import NamedTuple, TypeAlias

from tensorhub.errors import ManifestMismatch, some
from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.boxes import Box, Meetings, meet, shown, taken_out, volume
from tensorhub.layouts.columns import stretches
from tensorhub.layouts.pieces import within
from tensorhub.layouts.publication import Forms, Held

PLACES_PER_MEETING = 8  # that are looked at in the time that two boxes take to be met
MANY = 60  # stretches of like pieces: then it is worth to look for fewer

Loops: TypeAlias = tuple[tuple[int, int, int], ...]
# How far apart the blocks of a row begin: the source's region and offset, the reader's region and
# offset. May be negative.
Step: TypeAlias = tuple[int, int, int, int]
STILL: Step = (0, 0, 0, 0)

# Equal blocks, of 512 experts, say: where the first begins (the reader's region and offset, the
# source's), how many there are, how far apart, and their loops and run. A plain tuple: there are
# many, and of plain tuples of numbers the garbage collector looks at each only once.
Row: TypeAlias = tuple[int, int, int, int, int, Step, Loops, int]


@dataclass(frozen=True)
class Plan:
    """`needs`: bytes from each source that is read at all."""

    needs: Mapping[int, int]
    _taken: Mapping[int, Sequence[_Taken]]

    def rows(self, source: int) -> list[Row]:
        """What it gives, in the order of the reader's memory. Rows are made when they are asked
        for: of like tensors many sources give equal rows, which would be very many tuples.
        """
        return sorted(
            [row for taken in self._taken.get(source, ()) for row in taken.rows()],
            key=itemgetter(0, 1),
        )


def plan(reader: Coordinates, sources: Sequence[Coordinates], *, turn: int = 0) -> Plan:
    """What the reader takes from each of these sources. ManifestMismatch, with everything that no
    source has.
    """
    planning = _Planning(reader, sources, turn)
    made = planning.made()
    if planning.unheld:
        text = (
            f"{len(planning.unheld)} part(s) of the reader's tensors: {some(planning.unheld, '; ')}"
        )
        raise ManifestMismatch(text, differences=tuple(planning.unheld))
    return made


def folded(loops: Iterable[tuple[int, int, int]], run: int) -> tuple[Loops, int]:
    """Equivalent loops, as few as possible, with the longest runs: in the order of the reader's
    memory, each joined with the next inner loop where that ends at its next start.
    """
    found: list[tuple[int, int, int]] = []  # the innermost first
    for times, source, reader in sorted((each for each in loops if each[0] > 1), key=itemgetter(2)):
        inner, its_source, its_reader = found[-1] if found else (1, 0, 0)
        if not found and source == reader == run:
            run *= times
        elif found and (source, reader) == (inner * its_source, inner * its_reader):
            found[-1] = inner * times, its_source, its_reader
        else:
            found.append((times, source, reader))
    return tuple(reversed(found)), run


def neat(row: Row) -> Row:
    """The row's blocks, forward in the reader's memory. Neighbours coalesce: they become one block,
    where all lie in one region at either end, without gaps.
    """
    region, offset, its, at, length, (its_step, source_step, my_step, reader_step), loops, run = row
    if length > 1 and its_step == my_step == 0 and source_step > 0 < reader_step:
        return (
            region,
            offset,
            its,
            at,
            1,
            STILL,
            *folded([*loops, (length, source_step, reader_step)], run),
        )
    if (my_step, reader_step) >= (0, 0):
        return row
    n = length - 1
    begins = (
        region + n * my_step,
        offset + n * reader_step,
        its + n * its_step,
        at + n * source_step,
    )
    return *begins, length, (-its_step, -source_step, -my_step, -reader_step), loops, run


# --------------------------------------------------------------------------------------------------
# likeness


class _Likeness(NamedTuple):
    """The reader's form; for each of the sources' pieces of the tensor, the number of its
    arrangement, and its form there.
    """

    form: int
    held: Forms


class _Stretch(NamedTuple):
    """Like pieces of the reader. `places`: region and offset of the first of them; then those of
    each of the sources' pieces of its tensor. `steps`: how far apart those of the following pieces
    are.
    """

    pieces: list[int]
    places: tuple[int, ...]
    steps: tuple[int, ...]

    def split(self, count: int) -> Iterator[_Stretch]:
        """In so many of equal length, or fewer."""
        each = -(-len(self.pieces) // count)
        for at in range(0, len(self.pieces), each):
            places = tuple(
                [place + at * step for place, step in zip(self.places, self.steps, strict=True)]
            )
            yield self._replace(pieces=self.pieces[at : at + each], places=places)


class _Part(NamedTuple):
    """What one source gives of a likeness, counted from the beginnings of the pieces. `column`:
    which of the source's pieces.
    """

    source: int
    column: int
    source_offset: int
    reader_offset: int
    loops: Loops
    run: int
    nbytes: int


# A source's piece that has something of a likeness: the source, which of its pieces, and what both
# have.
_Candidate: TypeAlias = tuple[int, int, Box]


class _Taken(NamedTuple):
    """A part of like pieces. `begins`: of each stretch of them, where it begins at the reader and
    at the source, how many there are, and the step. `is_neat`: they go forward, and none coalesce.
    """

    part: _Part
    begins: list[tuple[int, int, int, int, int, Step]]
    is_neat: bool

    def rows(self) -> Iterable[Row]:
        _, _, there, here, loops, run, _ = self.part
        found = [
            (region, offset + here, its, at + there, length, step, loops, run)
            for region, offset, its, at, length, step in self.begins
        ]
        return found if self.is_neat else map(neat, found)


class _Lines:
    """Like pieces of the reader in some order, and their places (see `_Stretch`). `cuts`: those
    that follow each other at one distance, at the reader and at the sources: from which one to
    which.
    """

    def __init__(self, pieces: list[int], places: list[tuple[int, ...]]) -> None:
        self._pieces, self._places = pieces, places
        self._steps = [tuple(map(sub, after, before)) for before, after in pairwise(places)]
        self.cuts = list(stretches(self._steps, len(pieces)))

    def stretches(self) -> Iterator[_Stretch]:
        for first, end in self.cuts:
            place = self._places[first]
            yield _Stretch(
                self._pieces[first:end],
                place,
                self._steps[first] if end - first > 1 else (0,) * len(place),
            )


class _Planning:
    """One plan being made."""

    def __init__(self, reader: Coordinates, sources: Sequence[Coordinates], turn: int) -> None:
        self._reader = reader
        self._sources = sources
        self._turn = turn
        self._given = [0] * len(sources)  # bytes that each source gives so far
        self._held = Held(reader.catalogue, sources, reader.arrangement.tensors)
        self._taken: dict[int, list[_Taken]] = {}
        # a sentence for each part of a reader's tensor that no source has
        self.unheld: list[str] = []
        self._meetings = Meetings()

    def made(self) -> Plan:
        undecided = []
        for likeness, found in self._alike():
            candidates = list(self._candidates(likeness))
            if not self._take(likeness, candidates, found, in_any_order=True):
                undecided += [(likeness, candidates, stretch) for stretch in found]
        # now it is known which sources are read anyway
        for likeness, candidates, stretch in undecided:
            for each in stretch.split(len(candidates)):
                self._take(likeness, sorted(candidates, key=self._rank), [each], in_any_order=False)
        return Plan({source: self._given[source] for source in sorted(self._taken)}, self._taken)

    def _rank(self, candidate: _Candidate) -> tuple[bool, int, int]:
        source, _, _ = candidate
        return (
            source not in self._taken,
            self._given[source],
            (source - self._turn) % len(self._sources),
        )

    # ---------------------------------------------------------------------------------------------
    # who has what

    def _alike(self) -> Iterator[tuple[_Likeness, list[_Stretch]]]:
        forms, mine = self._held.forms, self._reader.arrangement
        shared = mine.tied
        held: dict[Forms, int] = {}  # numbered once for each tensor, since it may be long
        held_of = [held.setdefault(each, len(held)) for each in forms]
        numbers: dict[tuple[int, int], int] = {}  # of the likenesses
        number_of = [
            numbers.setdefault((form, held_of[t]), len(numbers))
            for t, form in zip(mine.tensors, mine.form_of, strict=True)
        ]
        groups: list[list[int]] = [[] for _ in numbers]  # like pieces
        for piece, number in enumerate(number_of):
            if piece not in shared:  # else a tied piece: its bytes are read once
                groups[number].append(piece)
        for pieces in filter(None, groups):
            likeness = _Likeness(mine.form_of[pieces[0]], forms[mine.tensors[pieces[0]]])
            self._meetings.spend(len(pieces) * len(likeness.held) // PLACES_PER_MEETING)
            places = self._places(likeness, pieces)
            lines = [_Lines(pieces, places)]
            if 3 * _count(lines) > len(pieces) > 1:
                # What alternates, such as gate and up, is told apart by the piece before: each is
                # equally far from its next.
                after: dict[int, tuple[list[int], list[tuple[int, ...]]]] = {}
                for piece, place in zip(pieces, places, strict=True):
                    its, theirs = after.setdefault(number_of[piece - 1] if piece else -1, ([], []))
                    its.append(piece)
                    theirs.append(place)
                lines = [_Lines(*each) for each in after.values()]
            if likeness.held and _count(lines) > MANY:
                # One side has its tensors in another order. If that is the reader, and by text (1,
                # 10, 100, 101, ...), the order of the first source has half as many stretches.
                order = sorted(range(len(pieces)), key=[place[2:4] for place in places].__getitem__)
                sorted_ = _Lines(
                    [pieces[number] for number in order], [places[number] for number in order]
                )
                lines = min(lines, [sorted_], key=_count)
            yield likeness, [stretch for each in lines for stretch in each.stretches()]

    def _places(self, likeness: _Likeness, pieces: list[int]) -> list[tuple[int, ...]]:
        mine, arrangements = self._reader.arrangement, self._held.arrangements
        theirs = [self._held.pieces[mine.tensors[piece]] for piece in pieces]
        if len(pieces) == 1:  # columns of one number each would cost far more than the numbers
            its = [mine.regions[pieces[0]], mine.offsets[pieces[0]]]
            for held, (number, _) in zip(theirs[0], likeness.held, strict=True):
                its += (arrangements[number].regions[held], arrangements[number].offsets[held])
            return [tuple(its)]
        columns = [map(mine.regions.__getitem__, pieces), map(mine.offsets.__getitem__, pieces)]
        for column, (number, _) in enumerate(likeness.held):
            arrangement = arrangements[number]
            held_there = [held[column] for held in theirs]
            columns += [
                map(each.__getitem__, held_there)
                for each in (arrangement.regions, arrangement.offsets)
            ]
        return list(zip(*columns, strict=True))

    # ---------------------------------------------------------------------------------------------
    # what is taken

    def _candidates(self, likeness: _Likeness) -> Iterator[_Candidate]:
        _, box, _ = self._reader.geometry[likeness.form]
        for column, source, theirs in self._held.boxes(likeness.held):
            self._meetings.spend(1)
            if (common := meet(box, theirs)) is not None:
                yield source, column, common

    def _part(self, likeness: _Likeness, source: int, column: int, common: Box) -> _Part:
        kind, mine, to = self._reader.geometry[likeness.form]
        _, form = likeness.held[column]
        _, theirs, by = self._sources[source].geometry[form]
        source_offset, source_steps = within(common, theirs, by)
        reader_offset, reader_steps = within(common, mine, to)
        steps = zip(source_steps, reader_steps, strict=True)
        loops, run = folded(
            [(times, apart, here) for (times, apart), (_, here) in steps], kind.itemsize
        )
        nbytes = volume(common) * kind.itemsize
        return _Part(source, column, source_offset, reader_offset, loops, run, nbytes)

    def _take(
        self,
        likeness: _Likeness,
        candidates: list[_Candidate],
        found: list[_Stretch],
        *,
        in_any_order: bool,
    ) -> bool:
        """Each byte from the first candidate that has it. False: nothing is taken, as it has to be
        `in_any_order`, and two have a byte.
        """
        kind, box, _ = self._reader.geometry[likeness.form]
        parts: list[_Part] = []
        left = [box]
        for source, column, common in candidates:
            taken, left = taken_out(left, common, self._meetings)
            is_whole = sum(map(volume, taken)) == volume(common)
            if in_any_order and not is_whole:
                return False
            parts += [
                self._part(likeness, source, column, each)
                for each in ([common] if is_whole else taken)
            ]
        length = sum([len(stretch.pieces) for stretch in found])
        begins = {
            column: sorted(_begins(found, column)) for column in {part.column for part in parts}
        }
        is_neat = {
            column: all(step == STILL or step[2] > 0 for *_, step in each)
            for column, each in begins.items()
        }
        for part in parts:
            taken_part = _Taken(part, begins[part.column], is_neat[part.column])
            self._taken.setdefault(part.source, []).append(taken_part)
            self._given[part.source] += part.nbytes * length
        for piece in (piece for stretch in found for piece in stretch.pieces if left):
            name = self._reader.catalogue.names[self._reader.arrangement.tensors[piece]]
            for each in left:
                self.unheld.append(
                    f"no source holds {name!r} {shown(each)} ({volume(each) * kind.itemsize} bytes)"
                )
        return True


def _count(lines: Iterable[_Lines]) -> int:
    """Of stretches."""
    return sum([len(each.cuts) for each in lines])


def _begins(
    found: Iterable[_Stretch], column: int
) -> Iterator[tuple[int, int, int, int, int, Step]]:
    its = 2 + 2 * column
    for pieces, places, steps in found:
        step = (steps[its], steps[its + 1], steps[0], steps[1]) if len(pieces) > 1 else STILL
        yield places[0], places[1], places[its], places[its + 1], len(pieces), step
