"""Pieces: which part of which global tensor lies where in a rank's memory.

    global tensor "w" (4, 6)         a rank's region 3, from byte 64 on
    . . . . . .                      row pitch 16: 2 bytes for each element, and 10 of padding
    . a b c . .                      a b c - - - - -
    . d e f . .          ◄────►      d e f - - - - -
    . . . . . .

    Piece("w", Kind("bfloat16", (4, 6)), box=(Span(1, 2), Span(1, 3)), region=3, offset=64, strides=(16, 2))

A piece has a span of indices and a stride in bytes for each dimension of the *global* tensor. So
one form says all that may lie in place: parts, fused and stacked tensors, interleaved rows,
padding, row pitch, transposed memory. What a rank holds is a list of pieces, and so is what a
reader wants.

Responsible for making pieces of a rank's tensors: whole ones, rank-local ones, sharded ones, and
tensors with an entry in `sources=`. Not responsible for where DTensors keep their parts
(`sharding`), nor for encoding (`arrangement`).
"""  # noqa: E501 - lines as they are typed

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from operator import le
from typing import NamedTuple, TypeAlias

from tensorhub import errors
from tensorhub.errors import RegistrationError
from tensorhub.layouts.boxes import Box, overlapping, span, volume, whole
from tensorhub.layouts.catalogue import Kind
from tensorhub.layouts.sharding import Sharding
from tensorhub.layouts.views import Entry, Place, Taken, View, at
from tensorhub.model.dtypes import ITEMSIZE, Quantization
from tensorhub.model.manifest import Manifest, TensorSpec

# the global shape of the tensor of a name, if there is one
ShapeOf: TypeAlias = Callable[[str], tuple[int, ...] | None]


class Piece(NamedTuple):
    """`strides`: bytes between neighbours of the box, for each dimension of the global tensor."""

    name: str
    kind: Kind
    box: Box
    region: int
    offset: int
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return volume(self.box) * self.kind.itemsize

    @property
    def is_of_none(self) -> bool:
        """Whether the global tensor has no elements: no rank holds a byte of it, but a fetch of the
        whole model includes it.
        """
        return 0 in self.kind.shape


@dataclass(frozen=True)
class Declaration:
    """A rank's registration: its rank in its group, and its caller's description of the tensors.

    `shardings`: of its DTensors, from `sharding_of`. `sources`: of `entries_of`. `partial`: the
    group may leave published bytes unread. `strides`: in bytes, of the tensors with padded rows;
    each has a region of its own.
    """

    rank: int = 0
    world_size: int = 1
    shardings: Mapping[str, Sharding | None] = field(default_factory=dict)
    sources: Mapping[str, Entry] = field(default_factory=dict)
    partial: bool = False
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class _Local(NamedTuple):
    """A registered tensor as it lies in a rank's memory. `strides`: in bytes, for each of its
    dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    region: int
    offset: int
    quantization: Quantization | None


def packed(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of contiguous memory, in bytes."""
    strides, stride = [], itemsize
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def within(part: Box, box: Box, strides: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
    """Where a part of a piece's box lies: how far behind its beginning, and for each dimension how
    many indices, how many bytes apart.
    """
    offset = 0
    steps = []
    for its, all_of_it, stride in zip(part, box, strides, strict=True):
        offset += (its.start - all_of_it.start) // all_of_it.step * stride
        steps.append((its.size, its.step // all_of_it.step * stride))
    return offset, steps


# ----------------------------------------------------------------------------------------------
# what a rank holds


def pieces_of(
    manifest: Manifest, declared: Declaration, shape_of: ShapeOf | None = None
) -> tuple[list[Piece], dict[str, str]]:
    """The pieces that this manifest's tensors hold, or are to be filled with; and each faulty
    tensor's fault, by name.

    A tensor with an entry in `sources` follows the entry; a tensor with an entry in `shardings` is
    its part of a DTensor. Any other is the whole tensor of its name if the rank is alone, and
    rank-local if not. `shape_of`: shapes by the publication; None for a publisher, whose views
    state them.
    """
    found: list[Piece] = []
    faults: dict[str, str] = {}
    resolved, begins = _Resolved(shape_of), list[int]()
    tensors = [_local(tensor, declared) for tensor in manifest.tensors]
    for tensor in tensors:
        begins.append(len(found))
        try:
            entry = declared.sources.get(tensor.name)
            if entry is not None:
                found += resolved.pieces(tensor, entry)
            elif tensor.name in declared.shardings:
                sharding = declared.shardings[tensor.name]
                found += () if sharding is None else _from_sharding(tensor, sharding)
            else:
                found.append(_as_it_is(tensor, declared))
        except RegistrationError as error:
            faults[tensor.name] = str(error)
    if shape_of is not None:
        faults |= _overwritten(
            tensors, [found[begin:end] for begin, end in pairwise((*begins, len(found)))]
        )
    return [piece for piece in found if piece.nbytes or piece.is_of_none], faults


def _local(tensor: TensorSpec, declared: Declaration) -> _Local:
    name, dtype, shape = tensor.name, tensor.dtype, tensor.shape
    strides = declared.strides.get(name) or packed(shape, ITEMSIZE[dtype])
    return _Local(name, dtype, shape, strides, tensor.region, tensor.offset, tensor.quantization)


def _overwritten(tensors: Sequence[_Local], pieces: Sequence[Sequence[Piece]]) -> dict[str, str]:
    """Tensors that share memory with another tensor, and are to be filled in other places of it.
    (If both are filled in equal places, `Publication.check_readers` compares the contents.)
    """
    first: dict[tuple[int, int], int] = {}
    faults = {}
    for number, tensor in enumerate(tensors):
        if not pieces[number]:
            continue
        other = first.setdefault((tensor.region, tensor.offset), number)
        if other != number and _footprint(pieces[other]) != _footprint(pieces[number]):
            faults[tensor.name] = (
                f"tensors {errors.shown(tensors[other].name)} and {errors.shown(tensor.name)} "
                f"share memory, and different "
                "parts of it are to be filled: fill both in the same "
                "places, or leave one alone (`[]`)"
            )
    return faults


def _footprint(pieces: Iterable[Piece]) -> set[object]:
    """Which bytes they take."""
    return {
        (
            piece.offset,
            frozenset(
                (its.size, stride)
                for its, stride in zip(piece.box, piece.strides, strict=True)
                if its.size > 1
            ),
        )
        for piece in pieces
        if piece.nbytes
    }


def _as_it_is(tensor: _Local, declared: Declaration) -> Piece:
    ranks = declared.world_size if declared.world_size > 1 else 0
    shape, box, strides = tensor.shape, whole(tensor.shape), tensor.strides
    if ranks:
        shape, box, strides = (ranks, *shape), (span(declared.rank, 1), *box), (0, *strides)
    kind = Kind(tensor.dtype, shape, tensor.quantization, ranks)
    return Piece(tensor.name, kind, box, tensor.region, tensor.offset, strides)


def _from_sharding(tensor: _Local, sharding: Sharding) -> Iterator[Piece]:
    """One piece, or several where the rank's indices of a dimension are no single run."""
    if fault := sharding.fault(tensor.shape):
        raise RegistrationError(f"tensor {errors.shown(tensor.name)}: {fault}")
    kind = Kind(tensor.dtype, sharding.shape, tensor.quantization)
    if 0 in sharding.shape:
        yield Piece(
            tensor.name, kind, whole(sharding.shape), tensor.region, tensor.offset, tensor.strides
        )
        return
    for runs in product(*sharding.placed_runs()):
        offset = tensor.offset + sum(
            at * stride for (at, _), stride in zip(runs, tensor.strides, strict=True)
        )
        yield Piece(
            tensor.name,
            kind,
            tuple([run for _, run in runs]),
            tensor.region,
            offset,
            tensor.strides,
        )


# --------------------------------------------------------------------------------------------------
# sources


class _Resolved:
    """Entries of `sources=`. Of 100,000 tensors most are alike, and so are their entries: each is
    worked out for the first of like tensors only.
    """

    def __init__(self, shape_of: ShapeOf | None) -> None:
        self._shape_of = shape_of
        # of each form, a tensor's offset and its pieces
        self._first: dict[Hashable, tuple[int, list[Piece]]] = {}

    def pieces(self, tensor: _Local, entry: Entry) -> Iterable[Piece]:
        """RegistrationError: the entry does not fit the tensor, or the published tensors."""
        shapes = [
            view.shape if self._shape_of is None else self._shape_of(view.name) for _, view in entry
        ]
        local = tensor.dtype, tensor.shape, tensor.strides, tensor.quantization
        form = *local, *[(place, view.form) for place, view in entry], *shapes
        if form not in self._first:
            found = _from_sources(tensor, entry, self._shape_of)
            self._first[form] = tensor.offset, found
            return found
        offset, first = self._first[form]
        return [
            Piece(
                view.name,
                its.kind,
                its.box,
                tensor.region,
                its.offset - offset + tensor.offset,
                its.strides,
            )
            for (_, view), its in zip(entry, first, strict=True)
        ]


def _from_sources(tensor: _Local, entry: Entry, shape_of: ShapeOf | None) -> list[Piece]:
    pairs = _placed(tensor, entry, shape_of)
    places = [_select(tensor, place, tensor.shape) for place, _ in pairs]
    if (both := overlapping([place.box for place in places])) is not None:
        one, other = (pairs[number] for number in both)
        raise RegistrationError(
            f"sources of {errors.shown(tensor.name)}: {one[0]} ({one[1]}) and {other[0]} "
            f"({other[1]}) overlap; each element "
            "of the tensor can have one source"
        )
    return [_put(tensor, place, *pair, shape_of) for place, pair in zip(places, pairs, strict=True)]


def _placed(tensor: _Local, entry: Entry, shape_of: ShapeOf | None) -> list[tuple[Place, View]]:
    """With a place for each view: a single view is the whole tensor, and views follow each other
    along dimension 0.
    """
    if len(entry) == 1 and entry[0][0] is None:
        return [(at[...], entry[0][1])]
    found, start = [], 0
    for place, view in entry:
        if place is not None:
            found.append((place, view))
            continue
        shape = _select(tensor, view, _shape(tensor, view, shape_of)).shape
        if not shape or shape[1:] != tensor.shape[1:]:
            raise RegistrationError(
                f"sources of {errors.shown(tensor.name)}: {view} has shape {shape}, and the "
                f"tensor's is {tensor.shape}; in "
                "a list, which concatenates along dimension 0, all other sizes are equal"
            )
        found.append((at[start : start + shape[0]], view))
        start += shape[0]
    if entry and entry[0][0] is None and start != tensor.shape[0]:
        raise RegistrationError(
            f"sources of {errors.shown(tensor.name)}: the list has {start} rows, and the tensor "
            f"{tensor.shape[0]}; where "
            "some rows are to stay as they are, write pairs `[(at[0:2048], view), ...]`"
        )
    return found


def _put(
    tensor: _Local, place: Taken, written: Place, view: View, shape_of: ShapeOf | None
) -> Piece:
    shape = _shape(tensor, view, shape_of)
    selection = _select(tensor, view, shape)
    if selection.shape != place.shape:
        where = "the tensor" if written == at[...] else f"its place {written}"
        raise RegistrationError(
            f"sources of {errors.shown(tensor.name)}: {view} has shape {selection.shape}, and "
            f"{where} has {place.shape}; "
            f"{_fitting(selection.shape, place.shape, shape)}"
        )
    offset = tensor.offset + sum(
        taken.start * stride for taken, stride in zip(place.box, tensor.strides, strict=True)
    )
    strides = [0] * len(shape)
    for dimension, its in zip(selection.order, place.order, strict=True):
        strides[dimension] = place.box[its].step * tensor.strides[its]
    kind = Kind(tensor.dtype, shape, tensor.quantization)
    return Piece(view.name, kind, selection.box, tensor.region, offset, tuple(strides))


def _fitting(view: tuple[int, ...], place: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """Advice for a view and a place of these shapes, of a tensor of shape `whole`."""
    if view == place[::-1]:
        transposed = "write `.T` behind the view, if that lies transposed in this memory"
        # most often the wrong dimension was cut
        if len(place) == len(whole) and all(map(le, place, whole)):
            return (
                f"take a part of the other dimension, such as "
                f"[{', '.join(f'0:{size}' for size in place)}]; or {transposed}"
            )
        return transposed
    if len(view) == len(place) and all(map(le, view, place)):
        part = ", ".join(f"0:{size}" for size in view)
        return f"where the rest is padding, write pairs: `[(at[{part}], view)]`"
    return "take a part of either that has the other's shape"


def _select(tensor: _Local, part: Place | View, shape: tuple[int, ...]) -> Taken:
    """The box that a part of an entry takes of a tensor of this shape; an error names the entry's
    tensor.
    """
    try:
        return part.select(shape)
    except RegistrationError as error:
        raise RegistrationError(f"sources of {errors.shown(tensor.name)}: {error}") from None


def _shape(tensor: _Local, view: View, shape_of: ShapeOf | None) -> tuple[int, ...]:
    published = shape_of(view.name) if shape_of is not None else view.shape
    if published is None:
        if shape_of is None:
            raise RegistrationError(
                f"sources of {errors.shown(tensor.name)}: a publisher says how large the whole "
                f"tensor is: "
                f"source({errors.shown(view.name)}, shape=...)"
            )
        raise RegistrationError(
            f"sources of {errors.shown(tensor.name)}: {errors.shown(view.name)} is not published"
        )
    if view.shape is not None and view.shape != published:
        raise RegistrationError(
            f"sources of {errors.shown(tensor.name)}: {errors.shown(view.name)} is said to have "
            f"shape {view.shape}, and it "
            f"is published with {published}"
        )
    return published
