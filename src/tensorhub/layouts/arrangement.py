"""The arrangement and the coordinates: what a rank holds, as its peers hear it.

A rank's pieces are written in three parts, each named by a hash of its content, so that what ranks
have in common travels once:

    Catalogue     names, dtypes, global shapes          "layers.0.q" is bfloat16 (4096, 4096)   once per publication
    Arrangement   per piece: tensor, which box, where   tensor 0: box 0, region 0, offset 0     usually equal on all ranks
    Coordinates   the boxes                             box 0 is [512:1024, 0:4096]             a short list for each rank

The coordinates name their arrangement, and the arrangement names its catalogue. So ranks with one
coordinates id hold equal bytes in equal places: they are one shard class. Boxes are few, because
tensors of one kind are cut alike.

Two pieces are of one *form* if their kind, their box and their strides are equal. Checks and plans
go by forms: each form is worked out once, for any number of tensors.

Responsible for these values and their one encoding. Not responsible for what several ranks hold
together (`publication`).
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tensorhub.errors import ManifestMismatch, ProtocolError, RegistrationError
from tensorhub.layouts.boxes import Box, Span, shown
from tensorhub.layouts.catalogue import Catalogue, Kind, catalogue_of
from tensorhub.layouts.columns import Column, column, expect, pack_all, unpack_all
from tensorhub.layouts.pieces import Piece, packed
from tensorhub.model.dtypes import INT_MAX
from tensorhub.model.manifest import DIMENSIONS_MAX, ENCODED_BYTES_MAX, TENSORS_MAX, id_of

FORM = 1
PIECES_MAX = TENSORS_MAX
BOXES_MAX = 2**16
_ARRANGEMENT = (
    "tensors",
    "boxes",
    "regions",
    "offsets",
    "strides",
    "dimensions of strides",
    "bytes of strides",
)
_COORDINATES = ("dimensions", "starts", "sizes", "steps")


class Form(NamedTuple):
    """Numbers: of the kind in the catalogue, of the box in the coordinates; 0 for packed strides,
    or 1 + that of the strides.
    """

    kind: int
    box: int
    strides: int


@dataclass(frozen=True)
class Arrangement:
    """Piece number i is of tensor `tensors[i]`, holds box `boxes[i]`, and begins at byte
    `offsets[i]` of region `regions[i]`.

    `strides[i]`: 0 if its memory is contiguous in the order of the tensor's dimensions, else 1 + a
    number in `stride_sets`.
    """

    catalogue: Catalogue
    tensors: Column
    boxes: Column
    regions: Column
    offsets: Column
    strides: Column
    stride_sets: tuple[tuple[int, ...], ...]

    @cached_property
    def forms(self) -> dict[Form, int]:
        """Each form with its number, in order of first use."""
        kinds = self.catalogue.kind_of
        found = dict.fromkeys(
            zip(map(kinds.__getitem__, self.tensors), self.boxes, self.strides, strict=True)
        )
        return {Form(*each): number for number, each in enumerate(found)}

    @cached_property
    def form_of(self) -> Column:
        """The number of each piece's form."""
        forms, kinds = self.forms, self.catalogue.kind_of
        pieces = zip(map(kinds.__getitem__, self.tensors), self.boxes, self.strides, strict=True)
        return column(map(forms.__getitem__, pieces))  # type: ignore[arg-type]  # a Form is the tuple of its numbers

    @cached_property
    def tied(self) -> frozenset[int]:
        """The pieces that lie where an earlier piece of their form lies: equal bytes of another
        tensor.
        """
        if len(set(self.regions)) == len(self.regions):
            return frozenset()
        seen: set[tuple[int, int, int]] = set()
        found = []
        for piece, place in enumerate(zip(self.regions, self.offsets, self.form_of, strict=True)):
            if place in seen:
                found.append(piece)
            seen.add(place)
        return frozenset(found)

    @cached_property
    def box_count(self) -> int:
        return max(self.boxes, default=-1) + 1

    @cached_property
    def _encoded(self) -> bytes:
        columns = (
            self.tensors,
            self.boxes,
            self.regions,
            self.offsets,
            self.strides,
            [len(each) for each in self.stride_sets],
            [stride for each in self.stride_sets for stride in each],
        )
        return pack_all(FORM, [self.catalogue.catalogue_id], columns)

    def encode(self) -> bytes:
        return self._encoded

    @cached_property
    def arrangement_id(self) -> str:
        return id_of(self._encoded)

    @classmethod
    def decode(cls, blob: bytes, catalogue: Catalogue) -> Arrangement:
        """The arrangement of this catalogue that `blob` encodes; ProtocolError, naming the fault,
        for anything else.
        """
        what = "arrangement"
        (of,), found = unpack_all(
            what, FORM, 1, _ARRANGEMENT, blob, bytes_max=ENCODED_BYTES_MAX, count_max=PIECES_MAX
        )
        expect(of == catalogue.catalogue_id, what, "it is of another catalogue")
        tensors, boxes, regions, offsets, strides, dimensions, flat = found
        expect(
            len({len(each) for each in found[:5]}) == 1,
            what,
            "the columns tell of different pieces",
        )
        expect(
            max(tensors, default=-1) < len(catalogue.names),
            what,
            "a tensor is not in the catalogue",
        )
        expect(max(boxes, default=-1) < BOXES_MAX, what, f"there are more than {BOXES_MAX} boxes")
        expect(
            max(regions, default=-1) < PIECES_MAX, what, f"there are more than {PIECES_MAX} regions"
        )
        expect(
            max(strides, default=0) <= len(dimensions) <= BOXES_MAX,
            what,
            "a piece's strides are not there, or there are too many",
        )
        expect(sum(dimensions) == len(flat), what, "the strides' dimensions do not add up")
        made = cls(
            catalogue, tensors, boxes, regions, offsets, strides, tuple(_rows(dimensions, flat))
        )
        for kind, _, its in made.forms:
            fits = not its or len(made.stride_sets[its - 1]) == len(catalogue.kinds[kind].shape)
            expect(fits, what, "strides have other dimensions than their tensor")
        made.__dict__["_encoded"] = blob  # columns have one encoding only
        return made


@dataclass(frozen=True)
class Coordinates:
    """Which box of its tensors each piece of an arrangement is, on one rank. `boxes[i]` is box
    number i.
    """

    arrangement: Arrangement
    boxes: tuple[Box, ...]

    @property
    def catalogue(self) -> Catalogue:
        return self.arrangement.catalogue

    @cached_property
    def _encoded(self) -> bytes:
        flat = [each for box in self.boxes for each in box]
        columns = (map(len, self.boxes), *([each[n] for each in flat] for n in range(3)))
        return pack_all(FORM, [self.arrangement.arrangement_id], columns)

    def encode(self) -> bytes:
        return self._encoded

    @cached_property
    def coordinates_id(self) -> str:
        """Ranks of one id are one shard class. It also names, with all it refers to, how a rank's
        part of the model lies.
        """
        return id_of(self._encoded)

    @classmethod
    def decode(cls, blob: bytes, arrangement: Arrangement) -> Coordinates:
        """The coordinates for this arrangement that `blob` encodes; ProtocolError, naming the
        fault, for anything else.
        """
        what = "coordinates"
        count_max = min(BOXES_MAX * DIMENSIONS_MAX, TENSORS_MAX)
        (of,), found = unpack_all(
            what, FORM, 1, _COORDINATES, blob, bytes_max=ENCODED_BYTES_MAX, count_max=count_max
        )
        expect(of == arrangement.arrangement_id, what, "they are of another arrangement")
        dimensions, starts, sizes, steps = found
        expect(
            len(dimensions) == arrangement.box_count,
            what,
            "they have other boxes than the arrangement speaks of",
        )
        expect(
            sum(dimensions) == len(starts) == len(sizes) == len(steps),
            what,
            "the boxes' dimensions do not add up",
        )
        spans = map(Span, starts, sizes, steps)
        made = cls(
            arrangement, tuple([tuple([next(spans) for _ in range(count)]) for count in dimensions])
        )
        if fault := made.fault():
            raise ProtocolError(f"bad coordinates: {fault}")
        made.__dict__["_encoded"] = blob
        return made

    # ----------------------------------------------------------------------------------------------
    # what it says

    @cached_property
    def turn(self) -> int:
        """The number of its part of the first tensor that is cut, among parts of that size: like
        ranks have other numbers, and ranks of equal coordinates have equal numbers.
        """
        return next(
            (
                each.start // each.size
                for box in self.boxes
                for each in box
                if each.start and each.size
            ),
            0,
        )

    @cached_property
    def geometry(self) -> tuple[tuple[Kind, Box, tuple[int, ...]], ...]:
        """Of each form, by its number: the kind, the box, and its strides in bytes."""
        found = []
        for kind_number, box_number, strides in self.arrangement.forms:
            kind, box = self.catalogue.kinds[kind_number], self.boxes[box_number]
            sizes = [each.size for each in box]
            its = (
                self.arrangement.stride_sets[strides - 1]
                if strides
                else packed(sizes, kind.itemsize)
            )
            found.append((kind, box, its))
        return tuple(found)

    def pieces(self) -> Iterator[Piece]:
        a = self.arrangement
        for tensor, form, region, offset in zip(
            a.tensors, a.form_of, a.regions, a.offsets, strict=True
        ):
            kind, box, strides = self.geometry[form]
            yield Piece(self.catalogue.names[tensor], kind, box, region, offset, strides)

    @property
    def form_sizes(self) -> list[int]:
        """Bytes of a piece of each form."""
        return [Piece("", kind, box, 0, 0, strides).nbytes for kind, box, strides in self.geometry]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all pieces; tied tensors count each time."""
        return sum(map(self.form_sizes.__getitem__, self.arrangement.form_of))

    def fault(self) -> str | None:
        """The first thing that makes these no coordinates of their arrangement."""
        farthest = max(self.arrangement.offsets, default=0)
        for kind_number, box_number, _ in self.arrangement.forms:
            kind, box = self.catalogue.kinds[kind_number], self.boxes[box_number]
            if len(box) != len(kind.shape):
                return f"box {box_number} has {len(box)} dimensions, and is of a tensor {kind}"
            for its, size in zip(box, kind.shape, strict=True):
                if not (
                    its.size > 0
                    and its.step > 0
                    and (its.step == 1 or its.size > 1)
                    and its.last < size
                ):
                    return f"box {shown(box)} is not within a tensor {kind}, or empty"
        for kind, box, strides in self.geometry:
            extent = (
                sum((each.size - 1) * stride for each, stride in zip(box, strides, strict=True))
                + kind.itemsize
            )
            if farthest + extent > INT_MAX:
                return f"box {shown(box)} may end 2**63 bytes behind the beginning of its region"
        return None


# --------------------------------------------------------------------------------------------------
# building


def arrange(pieces: Iterable[Piece], catalogue: Catalogue | None = None) -> Coordinates:
    """These pieces, which are in the memory of one rank, in their order; those without bytes are in
    the catalogue only.

    `catalogue`: the publication's, for a reader; None: one of these tensors alone.
    ManifestMismatch, with every difference: the publication has no such tensor, or another kind of
    it. RegistrationError: no coordinates can say this.
    """
    pieces = list(pieces)
    if catalogue is None:
        catalogue = catalogue_of((piece.name, piece.kind) for piece in pieces)
    boxes: dict[tuple[Kind, Box], int] = {}
    stride_sets: dict[tuple[int, ...], int] = {}
    # the numbers of the box and of the strides
    forms: dict[tuple[Kind, Box, tuple[int, ...]], tuple[int, int]] = {}
    rows: dict[tuple[int, ...], None] = {}
    unlike: dict[tuple[str, Kind], None] = {}
    for piece in pieces:
        if not piece.nbytes:
            continue
        tensor = catalogue.find(piece.name, piece.kind)
        if tensor is None or catalogue.kind(tensor) != piece.kind:
            unlike[piece.name, piece.kind] = None
            continue
        key = piece.kind, piece.box, piece.strides
        form = forms.get(key)
        if form is None:
            strides = _strides(piece)
            number = stride_sets.setdefault(strides, len(stride_sets) + 1) if strides else 0
            form = forms[key] = boxes.setdefault(key[:2], len(boxes)), number
        rows[tensor, form[0], piece.region, piece.offset, form[1]] = None
    if unlike:
        found = tuple([_difference(name, kind, catalogue) for name, kind in unlike])
        raise ManifestMismatch(
            f"{len(found)} difference(s):\n  " + "\n  ".join(found), differences=found
        )
    columns = (
        [column(each) for each in zip(*rows, strict=True)]
        if rows
        else [column(()) for _ in range(5)]
    )
    tensors, box_numbers, regions, offsets, strides_of = columns
    arrangement = Arrangement(
        catalogue, tensors, box_numbers, regions, offsets, strides_of, tuple(stride_sets)
    )
    made = Coordinates(arrangement, tuple([box for _, box in boxes]))
    if (
        max(len(rows), max(regions, default=-1) + 1) > PIECES_MAX
        or max(len(boxes), len(stride_sets)) > BOXES_MAX
    ):
        raise RegistrationError(
            f"there are more than {PIECES_MAX} pieces or regions, or more than {BOXES_MAX} "
            f"different boxes"
        )
    if fault := made.fault():
        raise RegistrationError(f"these tensors cannot be one rank's: {fault}")
    return made


def _strides(piece: Piece) -> tuple[int, ...]:
    """Empty for contiguous memory, dimensions with one index aside; else the strides, 0 for such
    dimensions.
    """
    sizes = [each.size for each in piece.box]
    matter = [
        (stride, dense)
        for stride, dense, size in zip(
            piece.strides, packed(sizes, piece.kind.itemsize), sizes, strict=True
        )
        if size > 1
    ]
    if all(stride == dense for stride, dense in matter):
        return ()
    return tuple(
        [stride if size > 1 else 0 for stride, size in zip(piece.strides, sizes, strict=True)]
    )


def _difference(name: str, kind: Kind, catalogue: Catalogue) -> str:
    """Why a reader cannot have a tensor of this name and kind from this publication."""
    number = catalogue.find(name, kind)
    if number is not None:
        return f"tensor {name!r} is {catalogue.kind(number)} at the source and {kind} at the reader"
    if catalogue.find(name) is not None:
        return (
            f"tensor {name!r} is a plain tensor on one of the reader's {kind.ranks} ranks, so it "
            f"is not known which part of "
            f"the published one it is: say so with sources={{{name!r}: source({name!r})[...]}}"
        )
    if name in catalogue.local_names:
        return (
            f"tensor {name!r} is local to the source's ranks, so only the same rank of an equal "
            f"layout can read it: let the "
            "source say what its tensors hold, with sources= or DTensors"
        )
    return f"tensor {name!r} is unknown to the source"


def _rows(lengths: Column, flat: Column) -> Iterator[tuple[int, ...]]:
    at = 0
    for length in lengths:
        yield tuple(flat[at : at + length])
        at += length
