"""The catalogue: which tensors a version is made of, whatever the layout. Names, dtypes and global
shapes, once for all ranks.

Many tensors are alike: the experts of a mixture have few shapes. So a catalogue is a list of names,
a short list of kinds, and for each name the number of its kind.

A rank's plain tensor without a description is *rank-local*: it is known to be one rank's, but its
place in a whole tensor is unknown. Its kind says how many ranks there are (`ranks`), and its shape
has one more dimension in front: the rank. So what rank 3 holds is the box [3:4, ...] of it, which
only rank 3 of an equal layout reads. Rank-local tensors of one name and different shapes are
different tensors.

Responsible for the value and its canonical encoding. Not responsible for the ranks' parts
(`arrangement`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from tensorhub.errors import ManifestMismatch, ProtocolError, RegistrationError, some
from tensorhub.layouts.columns import Column, column, expect, pack_all, unpack_all
from tensorhub.model.dtypes import (
    ITEMSIZE,
    ZERO_POINT_MIN,
    Quantization,
    quantization_fault,
    shape_fault,
)
from tensorhub.model.manifest import (
    DIMENSIONS_MAX,
    ENCODED_BYTES_MAX,
    TENSORS_MAX,
    id_of,
    name_fault,
)

FORM = 1
KINDS_MAX = 2**16
RANKS_MAX = 2**20
_COLUMNS = (
    "name lengths",
    "kinds",
    "dtypes",
    "dimensions",
    "sizes",
    "ranks",
    "scales",
    "zero points",
)


class Kind(NamedTuple):
    """What tensors of one kind have in common. `shape`: of the global tensor. `ranks`: 0, or of how
    many ranks it is local.
    """

    dtype: str
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    ranks: int = 0

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        if self.ranks:
            return f"{self.dtype} {self.shape[1:]}, local to each of {self.ranks} ranks"
        scale = f" (scale, zero point) {self.quantization}" if self.quantization else ""
        return f"{self.dtype} {self.shape}{scale}"


@dataclass(frozen=True)
class Catalogue:
    """Tensor number i is `names[i]`, of kind `kinds[kind_of[i]]`. No two are of one name, unless
    they are rank-local.
    """

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    kind_of: Column

    @cached_property
    def number_of(self) -> dict[tuple[str, Kind | None], int]:
        """By the name and None; a rank-local tensor by the name and its kind."""
        locals_ = [kind if kind.ranks else None for kind in self.kinds]
        return {
            (name, locals_[kind]): n
            for n, (name, kind) in enumerate(zip(self.names, self.kind_of, strict=True))
        }

    @cached_property
    def local_names(self) -> frozenset[str]:
        """Of the rank-local tensors."""
        return frozenset([name for name, kind in self.number_of if kind is not None])

    def kind(self, number: int) -> Kind:
        return self.kinds[self.kind_of[number]]

    def find(self, name: str, kind: Kind | None = None) -> int | None:
        """The number of the tensor of this name; with a rank-local kind: of that kind."""
        return self.number_of.get((name, kind if kind is not None and kind.ranks else None))

    @cached_property
    def _encoded(self) -> bytes:
        return _encode(self)

    def encode(self) -> bytes:
        """The canonical encoding of this catalogue: equal catalogues have equal bytes."""
        return self._encoded

    @cached_property
    def catalogue_id(self) -> str:
        return id_of(self._encoded)

    @classmethod
    def decode(cls, blob: bytes) -> Catalogue:
        """The catalogue that `blob` encodes; ProtocolError, naming the fault, for anything else."""
        catalogue = _decode(blob)
        if fault := _fault(catalogue):
            raise ProtocolError(f"bad catalogue: {fault}")
        if catalogue.encode() != blob:
            raise ProtocolError("bad catalogue: this is not the one encoding of what it says")
        return catalogue


def catalogue_of(tensors: Iterable[tuple[str, Kind]]) -> Catalogue:
    """Of these tensors, in their order; one that is there again is left out. RegistrationError,
    with every fault: one name is said to be of two kinds, or something cannot be a tensor.
    """
    found: dict[tuple[str, Kind | None], Kind] = {}
    faults = []
    for name, kind in tensors:
        known = found.setdefault((name, kind if kind.ranks else None), kind)
        if known != kind:
            faults.append(f"tensor {name!r} is said to be {known} and {kind}")
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(found.values()))}
    made = Catalogue(
        tuple([name for name, _ in found]),
        tuple(kinds),
        column([kinds[kind] for kind in found.values()]),
    )
    if not faults and (fault := _fault(made)):
        faults.append(fault)
    if faults:
        raise RegistrationError(
            f"{len(faults)} fault(s) in what the tensors are:\n  " + "\n  ".join(faults)
        )
    if len(made.encode()) > ENCODED_BYTES_MAX:
        raise RegistrationError(
            f"these tensors take more than {ENCODED_BYTES_MAX} bytes to describe"
        )
    return made


def merged(of_ranks: Mapping[int, Catalogue]) -> Catalogue:
    """What the ranks of one group describe together: each knows only its own tensors.

    ManifestMismatch, with every difference: two of them say different things of one tensor.
    """
    first: dict[str, int] = {}
    for rank, each in of_ranks.items():
        first.setdefault(each.catalogue_id, rank)
    distinct = {rank: of_ranks[rank] for rank in first.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))

    def said() -> Iterator[tuple[int, str, Kind]]:
        for rank, each in distinct.items():
            yield from (
                (rank, name, each.kinds[k])
                for name, k in zip(each.names, each.kind_of, strict=True)
            )

    try:
        return catalogue_of((name, kind) for _, name, kind in said())
    except RegistrationError as error:
        known: dict[str, tuple[int, Kind]] = {}
        unlike = [
            f"tensor {name!r} is {known[name][1]} on rank "
            f"{known[name][0]}, and {kind} on rank {rank}"
            for rank, name, kind in said()
            if not kind.ranks and known.setdefault(name, (rank, kind))[1] != kind
        ]
        text = some(unlike, "; ") if unlike else error
        raise ManifestMismatch(
            f"the ranks' tensors do not make one model: {text}", differences=tuple(unlike)
        ) from None


def numbers_in(theirs: Catalogue, mine: Catalogue) -> list[int] | None:
    """For each tensor of `theirs`, its number in `mine`, -1 if that has no tensor of this name and
    kind; None: they are equal.
    """
    if theirs is mine or theirs.catalogue_id == mine.catalogue_id:
        return None
    numbers = {kind: number for number, kind in enumerate(mine.kinds)}
    # the number of each kind of theirs among mine
    equal = [numbers.get(kind, -1) for kind in theirs.kinds]
    locals_ = [kind if kind.ranks else None for kind in theirs.kinds]
    found = []
    for name, kind in zip(theirs.names, theirs.kind_of, strict=True):
        at = mine.number_of.get((name, locals_[kind]), -1)
        found.append(at if at >= 0 and mine.kind_of[at] == equal[kind] else -1)
    return found


# --------------------------------------------------------------------------------------------------
# encoding


def _encode(catalogue: Catalogue) -> bytes:
    kinds = catalogue.kinds
    dtypes = {
        name: number for number, name in enumerate(dict.fromkeys(kind.dtype for kind in kinds))
    }
    quantizations = [kind.quantization or (0.0, ZERO_POINT_MIN) for kind in kinds]
    columns = (
        map(len, catalogue.names),
        catalogue.kind_of,
        [dtypes[kind.dtype] for kind in kinds],
        [len(kind.shape) for kind in kinds],
        [size for kind in kinds for size in kind.shape],
        [kind.ranks for kind in kinds],
        [struct.unpack("<Q", struct.pack("<d", scale))[0] for scale, _ in quantizations],
        [point - ZERO_POINT_MIN for _, point in quantizations],
    )
    return pack_all(FORM, ["".join(catalogue.names), " ".join(dtypes)], columns)


def _decode(blob: bytes) -> Catalogue:
    what = "catalogue"
    # no more dimensions than this: each kind has a name at least
    count_max = min(TENSORS_MAX, DIMENSIONS_MAX * len(blob))
    found = unpack_all(
        what, FORM, 2, _COLUMNS, blob, bytes_max=ENCODED_BYTES_MAX, count_max=count_max
    )
    (names, words), (lengths, kind_of, dtypes, dimensions, sizes, ranks, scales, points) = found
    known = words.split(" ")
    expect(
        len(lengths) == len(kind_of) <= TENSORS_MAX,
        what,
        f"the columns disagree, or tell of more than {TENSORS_MAX} tensors",
    )
    expect(
        len({len(each) for each in (dtypes, dimensions, ranks, scales, points)}) == 1,
        what,
        "the columns of kinds disagree",
    )
    expect(len(dtypes) <= KINDS_MAX, what, f"there are more than {KINDS_MAX} kinds")
    expect(max(kind_of, default=-1) < len(dtypes), what, "a tensor's kind is not there")
    expect(sum(lengths) == len(names), what, "the names' lengths do not add up")
    expect(sum(dimensions) == len(sizes), what, "the dimensions do not add up")
    expect(max(dtypes, default=-1) < len(known), what, "a kind's dtype is not listed")
    kinds, at = [], 0
    for dtype, count, local, scale, point in zip(
        dtypes, dimensions, ranks, scales, points, strict=True
    ):
        quantization = (
            (struct.unpack("<d", struct.pack("<Q", scale))[0], point + ZERO_POINT_MIN)
            if scale or point
            else None
        )
        kinds.append(Kind(known[dtype], tuple(sizes[at : at + count]), quantization, local))
        at += count
    ends = list(accumulate(lengths, initial=0))
    return Catalogue(tuple([names[a:b] for a, b in pairwise(ends)]), tuple(kinds), kind_of)


# --------------------------------------------------------------------------------------------------
# checking


def _fault(catalogue: Catalogue) -> str | None:
    """The first thing that makes this no catalogue, whether it was built here or came from a
    socket.
    """
    if len(catalogue.names) > TENSORS_MAX or len(catalogue.kinds) > KINDS_MAX:
        return f"there are more than {TENSORS_MAX} tensors, or more than {KINDS_MAX} kinds of them"
    for kind in catalogue.kinds:
        if fault := _kind_fault(kind):
            return f"a tensor of kind {kind}: {fault}"
    if len(set(catalogue.kinds)) != len(catalogue.kinds) or set(range(len(catalogue.kinds))) != set(
        catalogue.kind_of
    ):
        return "a kind is there twice, or no tensor is of it"
    for name in catalogue.names:
        if not (0 < len(name) <= 512 and name.isascii()) and (fault := name_fault(name)):
            return f"tensor {name[:64]!r}: {fault}"
    if len(catalogue.number_of) != len(catalogue.names):
        return "two tensors have one name"
    return None


def _kind_fault(kind: Kind) -> str | None:
    if kind.dtype not in ITEMSIZE:
        return f"dtype {kind.dtype[:64]!r} is unknown to this version of TensorHub"
    if len(kind.shape) > DIMENSIONS_MAX:
        return f"{len(kind.shape)} dimensions are more than {DIMENSIONS_MAX}"
    if kind.ranks > RANKS_MAX or (kind.ranks and kind.shape[:1] != (kind.ranks,)):
        return f"it is local to {kind.ranks} ranks, of at most {RANKS_MAX}"
    return shape_fault(kind.shape, kind.dtype) or quantization_fault(kind.dtype, kind.quantization)
