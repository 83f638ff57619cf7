"""A reading: the reader's chunks, and which strips of which published shards hold the bytes of
each.

    Reading                chunk 0: strips of the reader's regions          places[0]
                           chunk 1: ...                                     places[1]
      Part of class 0      its chunks 0, 1, 4 of the reader's grid          chunks = (0, 1, 4)
        Selection          chunk 0: strips of the published regions         its bytes, in the selection's order
                           chunk 1: ...
      Part of class 2      ...

A chunk has bytes of one shard class only. It is made of whole cells where they fit; cells that are
longer are cut at rows, or else within a run. Small cells share a chunk. Chunks are numbered in the
order of their first byte in the reader's memory. All this follows from the publication and the
reader's coordinates alone, so all holders of one layout have equal numbers.

A selection is a request to a source: it names bytes of one published shard, and nothing of the
reader. So versions of equal layouts, and readers of one part, have equal selections. Its name is a
hash of its canonical encoding.

Responsible for these values, for the encoding, and for reading hostile selections at no more cost
than their bounds allow. Not responsible for transfer plans (`plan`), nor for moving bytes.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, islice
from math import prod
from operator import mul, sub
from typing import Any, NamedTuple, TypeAlias

from tensorhub.errors import ProtocolError, RegistrationError
from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.columns import (
    Column,
    column,
    count_and_sum,
    expect,
    pack,
    pack_all,
    split_all,
    unpack_all,
)
from tensorhub.layouts.plan import STILL, Loops, Row, plan
from tensorhub.layouts.publication import Publication, ShardClass
from tensorhub.layouts.published import ID_MAX, Published
from tensorhub.messages.reading import SELECTION_BYTES_MAX
from tensorhub.model.manifest import (
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    DIMENSIONS_MAX,
    Chunk,
    Digest,
    Manifest,
    TensorSpec,
    id_of,
)
from tensorhub.model.strips import Around, Strip, beyond, shortest

FORM = 1
_WHAT = "selection"
STRIPS_MAX = 2**18  # of one selection; each chunk has one at least
CELLS_MAX = 2**21  # of one selection, in all its strips
CHUNK_CELLS_MAX = 2**14  # what a source does for each cell of a chunk, it does at once
RUNS_MAX = 2**22  # of one chunk
_COLUMNS = (
    "strips",
    "regions",
    "offsets",
    "region steps",
    "offset steps",
    "lengths",
    "loops",
    "runs",
    "times",
    "bytes apart",
)


# a strip, at less cost for the garbage collector
_Row: TypeAlias = tuple[int, int, int, int, int, Around, int]


class _Chunks(Sequence[tuple[Strip, ...]]):
    """The chunks that columns tell of, each made when it is asked for: as tuples they would take
    far more memory.
    """

    def __init__(self, found: Sequence[Column]) -> None:
        self.columns = found
        self._counts, *self._per_strip, self._runs, self._times, self._apart = found
        self._first = column(accumulate(self._counts, initial=0))
        self._first_loop = column(accumulate(self._per_strip[-1], initial=0))

    @classmethod
    def of(cls, chunks: Sequence[Sequence[_Row]]) -> _Chunks:
        if isinstance(chunks, _Chunks):
            return chunks
        strips = list(chain.from_iterable(chunks))
        loops = [strip[5] for strip in strips]
        found: tuple[Iterable[int], ...] = (
            map(len, chunks),
            [strip[0] for strip in strips],
            [strip[1] for strip in strips],
            _unsigned([strip[2] for strip in strips]),
            _unsigned([strip[3] for strip in strips]),
            [strip[4] for strip in strips],
            map(len, loops),
            [strip[6] for strip in strips],
            [times for each in loops for times, _ in each],
            [apart for each in loops for _, apart in each],
        )
        return cls(list(map(column, found)))

    @cached_property
    def packed(self) -> list[bytes]:
        return list(map(pack, self.columns))

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, chunk: Any) -> Any:
        if isinstance(chunk, slice):
            return tuple([self[each] for each in range(*chunk.indices(len(self)))])
        if not 0 <= chunk < len(self):
            raise IndexError(f"there is no chunk {chunk} of {len(self)}")
        return tuple(map(self._strip, range(self._first[chunk], self._first[chunk + 1])))

    def _strip(self, number: int) -> Strip:
        region, offset, region_step, offset_step, length, loops = [
            each[number] for each in self._per_strip
        ]
        first = self._first_loop[number]
        around = tuple(
            [(self._times[loop], self._apart[loop]) for loop in range(first, first + loops)]
        )
        return Strip(
            region,
            offset,
            _signed(region_step),
            _signed(offset_step),
            length,
            around,
            self._runs[number],
        )

    def __iter__(self) -> Iterator[tuple[Strip, ...]]:
        regions, offsets, region_steps, offset_steps, lengths, loop_counts = self._per_strip
        loops = zip(self._times, self._apart, strict=True)
        around = (tuple(islice(loops, count)) for count in loop_counts)
        steps = map(_signed, region_steps), map(_signed, offset_steps)
        strips = map(Strip, regions, offsets, *steps, lengths, around, self._runs)
        return (tuple(islice(strips, count)) for count in self._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Selection:
    """What a reader of another layout takes of one published shard. `chunks[i]`: the strips of
    chunk i, in the order of the reader's memory.

    `of`: the id of that shard's coordinates. Without it, what one reader takes of two shards would
    often have one id.
    """

    chunks: Sequence[tuple[Strip, ...]]
    of: str = ""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple([sum([strip.nbytes for strip in chunk]) for chunk in self.chunks])

    @cached_property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @cached_property
    def _encoded(self) -> bytes:
        return pack_all(FORM, [self.of], _Chunks.of(self.chunks).packed)

    def encode(self) -> bytes:
        """The canonical encoding of this selection: equal selections have equal bytes."""
        return self._encoded

    @cached_property
    def selection_id(self) -> str:
        return id_of(self._encoded)

    @classmethod
    def decode(cls, blob: bytes) -> Selection:
        """The selection that `blob` encodes; ProtocolError, naming the fault, for anything else."""
        count_max = 4 * STRIPS_MAX  # loops are the most
        (of,), found = unpack_all(
            _WHAT, FORM, 1, _COLUMNS, blob, bytes_max=SELECTION_BYTES_MAX, count_max=count_max
        )
        expect(
            len(of) <= ID_MAX and of.isprintable(), _WHAT, "it is of a shard that has no such name"
        )
        sizes = tuple(_checked_sizes(found))
        made = cls(_Chunks(found), of)
        made.__dict__.update(_encoded=blob, sizes=sizes)
        return made

    @staticmethod
    def parts_said(blob: bytes) -> int:
        """How many strips, cells and loops it says, before memory is taken: what `decode` and
        `fault` cost grows with them. ProtocolError: it says nothing of the kind.
        """
        _, packed = split_all(_WHAT, FORM, 1, _COLUMNS, blob, bytes_max=SELECTION_BYTES_MAX)
        counts = {
            name: count_and_sum(_WHAT, data) for name, data in zip(_COLUMNS, packed, strict=True)
        }
        return (
            max([count for count, _ in counts.values()]) + counts["lengths"][1] + counts["times"][0]
        )

    def fault(self, region_sizes: Sequence[int]) -> str | None:
        """The first thing that is not within regions of these sizes. Nothing is expanded."""
        for number, chunk in enumerate(self.chunks):
            if any(beyond(strip, region_sizes) for strip in chunk):
                return f"chunk {number} is not within the shard's memory"
        return None


@dataclass(frozen=True, slots=True)
class Part:
    """The reads of one shard class. The chunks of `selection` are number `chunks[0]`, `chunks[1]`,
    ... of the reader.

    `shard`: the first of the class' `ranks`, which names it.
    """

    shard: int
    ranks: tuple[int, ...]
    selection: Selection
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """`places[i]`: the reader's chunk i, in its own regions. `sizes[i]`: its bytes. `counts[i]`: of
    how many cells it is made, and of how many runs, each of which is contiguous at both ends. Each
    chunk is in one part.
    """

    places: Sequence[tuple[Strip, ...]]
    sizes: tuple[int, ...]
    parts: tuple[Part, ...]
    counts: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


NOTHING = Reading((), (), ())


@dataclass(frozen=True)
class ReshardedManifest(Manifest):
    """A manifest with the chunks of a reading: a rank of a layout other than the published one
    fills and holds it.

    Its tensors and regions are those of the rank's own manifest, or of the manifest of the first
    group of its layout, so that all holders of that layout agree on the regions. Its chunks are
    those of the reading, and their digests are made by the publisher's algorithm. Memory, pulls and
    the machines of a worker take either manifest.

    `grid`: names the publication (`of`), the rank and where its pieces lie (`lies`), from all of
    which the reading follows.
    """

    reading: Reading = NOTHING
    grid: str = ""
    lies: Coordinates | None = None
    of: Published | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The reads of each shard class."""
        return self.reading.parts

    def chunks_of(self, shard: int, selection_id: str) -> tuple[int, ...] | None:
        """Which chunks those of that selection of that class are here, in its order. None: nothing
        is read so.
        """
        found = (
            part
            for part in self.parts
            if (part.shard, part.selection.selection_id) == (shard, selection_id)
        )
        return next((part.chunks for part in found), None)

    @cached_property
    def nbytes(self) -> int:
        """What a whole read moves. Padding is not read."""
        return self.reading.nbytes

    @cached_property
    def chunk_count(self) -> int:
        return len(self.reading.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.reading.sizes

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        raise TypeError("chunks of a resharded manifest are not contiguous: use `places`")

    def places(self, chunk: int) -> tuple[Strip, ...]:
        return self.reading.places[chunk]

    @property
    def grid_id(self) -> str:
        return self.grid

    def tensors_in(self, chunk: int) -> tuple[str, ...]:
        """The names of the tensors that have bytes in this chunk."""
        strips = self.reading.places[chunk]
        found: list[str] = []
        for region in dict.fromkeys(region for strip in strips for region, _ in strip.cells()):
            tensors: Sequence[TensorSpec] = self.by_region[region]
            if len({tensor.offset for tensor in tensors}) > 1:  # tiny tensors, packed
                runs = [
                    (at, at + strip.run)
                    for strip in strips
                    for of, at in strip.places()
                    if of == region
                ]
                tensors = [
                    t
                    for t in tensors
                    if any(at < t.offset + t.nbytes and t.offset < end for at, end in runs)
                ]
            found += [tensor.name for tensor in tensors]
        return tuple(found)


def parts_of(manifest: Manifest) -> tuple[Part, ...]:
    """The reads of each shard class; empty for the published layout."""
    return manifest.parts if isinstance(manifest, ReshardedManifest) else ()


def counts_of(manifest: Manifest) -> Sequence[tuple[int, int]]:
    """Of how many cells and runs each chunk is made; nothing, where the layout is the published
    one.
    """
    return manifest.reading.counts if isinstance(manifest, ReshardedManifest) else ()


def resharded(
    manifest: Manifest,
    digest: Digest,
    chunk_bytes: int,
    reading: Reading,
    grid: str,
    lies: Coordinates | None = None,
    of: Published | None = None,
) -> ReshardedManifest:
    """This manifest's tensors and regions, in the chunks of this reading."""
    own = (
        manifest.tensors,
        manifest.regions,
        chunk_bytes,
        digest,
        manifest.layout_id,
        manifest.metadata,
    )
    return ReshardedManifest(*own, reading, grid, lies, of)


def publication_in(manifest: Manifest) -> Published | None:
    """What it is read from, where the layout is not the published one."""
    return manifest.of if isinstance(manifest, ReshardedManifest) else None


def reading_of(publication: Publication, reader: Coordinates, *, chunk_bytes: int) -> Reading:
    """This reader's reading, in chunks of at most `chunk_bytes`. Readers of equal coordinates have
    equal readings.

    ManifestMismatch: it wants bytes that were not published. RegistrationError: that would be too
    many chunks or strips.
    """
    classes = publication.classes
    made = plan(reader, [each.coordinates for each in classes], turn=reader.turn)
    chunks: list[tuple[_Batch, list[int]]] = []
    found: list[tuple[ShardClass, Selection, list[int]]] = []
    known: dict[tuple[tuple[_Row, ...], ...], _Chunks] = {}
    for source in made.needs:
        batches = sorted(_batches(made.rows(source), chunk_bytes), key=_first_byte)
        its, numbers = classes[source], list[int]()
        taken = tuple([batch.taken for batch in batches])
        # else equal to another shard's, as where like tensors are cut alike
        if (theirs := known.get(taken)) is None:
            theirs = known[taken] = _Chunks.of(taken)
        selection = Selection(theirs, its.coordinates.coordinates_id)
        _refuse_too_long(selection)
        found.append((its, selection, numbers))
        chunks += [(batch._replace(taken=()), numbers) for batch in batches]
    if len(chunks) > CHUNKS_MAX:
        raise RegistrationError(
            f"{len(chunks)} chunks are more than {CHUNKS_MAX}; a larger chunk_bytes makes fewer"
        )
    chunks.sort(key=lambda chunk: _first_byte(chunk[0]))
    for number, (_, numbers) in enumerate(chunks):
        numbers.append(number)
    return Reading(
        _Chunks.of([batch.places for batch, _ in chunks]),
        tuple([batch.nbytes for batch, _ in chunks]),
        tuple(
            [
                Part(its.ranks[0], its.ranks, selection, tuple(numbers))
                for its, selection, numbers in found
            ]
        ),
        tuple([(batch.cells, batch.runs) for batch, _ in chunks]),
    )


def _refuse_too_long(selection: Selection) -> None:
    _, strips, _, _, _, lengths, _, _, loops, _ = _Chunks.of(selection.chunks).columns
    most = max(len(strips), len(loops) // 4) > STRIPS_MAX or sum(lengths) > CELLS_MAX
    if most or len(selection.encode()) > SELECTION_BYTES_MAX:
        raise RegistrationError(
            f"what is read of one rank has {len(strips)} patterns of {sum(lengths)} parts, which "
            f"is more than one request "
            "can say: register fewer tensors together, or tensors that are cut more alike"
        )


# --------------------------------------------------------------------------------------------------
# batches


class _Form(NamedTuple):
    """What cells have in common that differ in where they begin only. Loops and run at either end:
    as few and as long as can be.
    """

    nbytes: int
    runs: int
    at_reader: tuple[Around, int]
    at_source: tuple[Around, int]


@lru_cache(maxsize=1024)
def _form(loops: Loops, run: int) -> _Form:
    around = [loop[0] for loop in loops]
    reader = shortest(
        Strip(0, 0, 0, 0, 1, tuple([(times, apart) for times, _, apart in loops]), run)
    )
    source = shortest(
        Strip(0, 0, 0, 0, 1, tuple([(times, apart) for times, apart, _ in loops]), run)
    )
    return _Form(
        prod(around) * run, prod(around), (reader.loops, reader.run), (source.loops, source.run)
    )


class _Batch(NamedTuple):
    """One chunk."""

    places: tuple[_Row, ...]  # at the reader
    taken: tuple[_Row, ...]  # at the source
    nbytes: int
    cells: int
    runs: int


def _first_byte(batch: _Batch) -> tuple[int, ...]:
    return batch.places[0][:2]


def _batches(families: Iterable[Row], chunk_bytes: int) -> Iterator[_Batch]:
    """The cells of one source in chunks. `families`: in the order of the reader's memory."""
    batch: list[tuple[_Row, _Row]] = []
    room, runs, cells = chunk_bytes, RUNS_MAX, CHUNK_CELLS_MAX
    for mine, at_reader, its, at_source, length, step, loops, run in _short(families, chunk_bytes):
        its_step, source_step, my_step, reader_step = step
        cell_bytes, cell_runs, (my_loops, my_run), (its_loops, its_run) = _form(loops, run)
        at = 0
        while at < length:
            count = min(length - at, room // cell_bytes, runs // cell_runs, cells)
            if not count:
                yield _in_order(batch, chunk_bytes - room, CHUNK_CELLS_MAX - cells, RUNS_MAX - runs)
                batch, room, runs, cells = [], chunk_bytes, RUNS_MAX, CHUNK_CELLS_MAX
                continue
            place = _row(
                mine + at * my_step,
                at_reader + at * reader_step,
                my_step,
                reader_step,
                count,
                my_loops,
                my_run,
            )
            taken = _row(
                its + at * its_step,
                at_source + at * source_step,
                its_step,
                source_step,
                count,
                its_loops,
                its_run,
            )
            batch.append((place, taken))
            room -= count * cell_bytes
            runs -= count * cell_runs
            cells -= count
            at += count
    if batch:
        yield _in_order(batch, chunk_bytes - room, CHUNK_CELLS_MAX - cells, RUNS_MAX - runs)


def _in_order(batch: list[tuple[_Row, _Row]], nbytes: int, cells: int, runs: int) -> _Batch:
    # the rest of a family that began in the chunk before
    if len(batch) > 1 and batch[0][0][:2] > batch[1][0][:2]:
        batch.sort(key=lambda both: both[0][:2])
    return _Batch(
        tuple([place for place, _ in batch]),
        tuple([taken for _, taken in batch]),
        nbytes,
        cells,
        runs,
    )


def _short(rows: Iterable[Row], chunk_bytes: int) -> Iterator[Row]:
    """The blocks of `rows` in rows with blocks that fit a chunk."""
    for row in rows:
        (
            mine,
            at_reader,
            its,
            at_source,
            length,
            (its_step, source_step, my_step, reader_step),
            loops,
            run,
        ) = row
        form = _form(loops, run)
        if form.nbytes <= chunk_bytes and form.runs <= RUNS_MAX:
            yield row
            continue
        for n in range(length):
            begin = (
                mine + n * my_step,
                at_reader + n * reader_step,
                its + n * its_step,
                at_source + n * source_step,
            )
            yield from _cut((*begin, 1, STILL, loops, run), min(chunk_bytes, RUNS_MAX * run))


def _cut(row: Row, nbytes_max: int) -> Iterator[Row]:
    """The bytes of one block in order, in blocks of at most `nbytes_max`: of whole runs where those
    fit, else of parts of a run.
    """
    mine, at_reader, its, at_source, _, _, loops, run = row
    nbytes = prod([times for times, _, _ in loops]) * run
    if nbytes <= nbytes_max:
        yield row
    elif not loops:
        for at in range(0, run, nbytes_max):
            yield mine, at_reader + at, its, at_source + at, 1, STILL, (), min(nbytes_max, run - at)
    else:
        (count, source, reader), *inner = loops
        at_once = max(1, nbytes_max * count // nbytes)
        for at in range(0, count, at_once):
            times = min(at_once, count - at)
            around = ((times, source, reader), *inner) if times > 1 else tuple(inner)
            begin = mine, at_reader + at * reader, its, at_source + at * source
            yield from _cut((*begin, 1, STILL, around, run), nbytes_max)


def _row(
    region: int,
    offset: int,
    region_step: int,
    offset_step: int,
    length: int,
    loops: Around,
    run: int,
) -> _Row:
    """The shortest strip. `loops`: which are the fewest."""
    if length == 1:
        return region, offset, 0, 0, 1, loops, run
    if region_step:
        return region, offset, region_step, offset_step, length, loops, run
    region, offset, _, offset_step, length, loops, run = shortest(
        Strip(region, offset, 0, offset_step, length, loops, run)
    )
    return region, offset, 0, offset_step, length, loops, run


# --------------------------------------------------------------------------------------------------
# encoding


def _unsigned(steps: Iterable[int]) -> list[int]:
    """Columns have no negative numbers: 0, -1, 1, -2, ... are 0, 1, 2, 3, ..."""
    return [2 * step if step >= 0 else -2 * step - 1 for step in steps]


def _signed(number: int) -> int:
    return number // 2 if number % 2 == 0 else -(number // 2) - 1


def _checked_sizes(found: Sequence[Column]) -> list[int]:
    """Bytes of the chunks that these columns tell of. ProtocolError: they are none, of whatever
    memory.
    """
    (
        counts,
        regions,
        offsets,
        region_steps,
        offset_steps,
        lengths,
        loop_counts,
        runs,
        times,
        apart,
    ) = found
    per_strip = (regions, offsets, region_steps, offset_steps, lengths, loop_counts, runs)
    expect(
        len({len(each) for each in per_strip}) == 1, _WHAT, "the columns tell of different strips"
    )
    expect(len(regions) <= STRIPS_MAX, _WHAT, f"it has more than {STRIPS_MAX} strips")
    expect(
        min(counts, default=1) > 0 and sum(counts) == len(regions),
        _WHAT,
        "the chunks' strips do not add up",
    )
    expect(len(times) == len(apart) == sum(loop_counts), _WHAT, "the loops do not add up")
    expect(
        max(loop_counts, default=0) <= DIMENSIONS_MAX,
        _WHAT,
        f"a strip has more than {DIMENSIONS_MAX} loops",
    )
    expect(min(min(lengths, default=1), min(runs, default=1)) > 0, _WHAT, "a strip is empty")
    expect(min(times, default=2) > 1, _WHAT, "a loop goes round less than twice")
    expect(sum(lengths) <= CELLS_MAX, _WHAT, f"it has more than {CELLS_MAX} cells")
    steps = zip(lengths, region_steps, offset_steps, strict=True)
    expect(
        not any(length == 1 and (r or o) for length, r, o in steps),
        _WHAT,
        "a strip of one cell has a step",
    )
    rest = iter(times)
    runs_of = (
        list(map(mul, lengths, [prod(islice(rest, count)) for count in loop_counts]))
        if times
        else lengths
    )
    sizes = _summed(counts, map(mul, runs_of, runs))
    for what, found_max, most in (
        ("bytes", sizes, CHUNK_BYTES_MAX),
        ("cells", _summed(counts, lengths), CHUNK_CELLS_MAX),
        ("runs", _summed(counts, runs_of), RUNS_MAX),
    ):
        if max(found_max, default=0) > most:
            number = next(number for number, each in enumerate(found_max) if each > most)
            raise ProtocolError(f"bad selection: chunk {number} has more than {most} {what}")
    return sizes


def _summed(counts: Iterable[int], each: Iterable[int]) -> list[int]:
    """The sums of so many numbers at a time."""
    sums = list(accumulate(each, initial=0))
    ends = [sums[end] for end in accumulate(counts)]
    return list(map(sub, ends, [0, *ends]))
