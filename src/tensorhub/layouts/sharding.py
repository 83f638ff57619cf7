"""How a DTensor is cut: which indices of each dimension a rank's local part has, in which order.

A placement on a mesh cuts what the placements before it have left. `Shard` keeps one part of that,
as `torch.chunk` makes them: the first ones full, the last ones smaller or empty. `_StridedShard`
first cuts it into `split_factor` parts, and keeps one part of each. So a rank's indices may be
several runs: 13 rows on a mesh of 3 x 2, with `_StridedShard(0, split_factor=2)` and `Shard(0)`,
are the rows 6 and 11 on rank (2, 0). `Replicate` cuts nothing, and a rank's coordinate on such a
mesh dimension makes no difference: HSDP's replicas come out equal.

FSDP2 over tensor parallelism has those placements, and something else in its memory where sizes do
not divide: it cuts the local part of tensor parallelism again, so that rank (2, 0) has row 6 alone.
(Seen with torch 2.13; `full_tensor()` agrees with the memory.) So both readings of a
`_StridedShard` are made, and the local part's shape decides; if it cannot, the tensor is refused.

Responsible for those runs. They depend on the placements alone, so `cut` is plain arithmetic;
`sharding_of` reads the placements off a DTensor. Not responsible for its memory. torch is never
imported here: a caller with a DTensor has imported it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from tensorhub.errors import RegistrationError
from tensorhub.layouts.boxes import Span, span

RUNS_MAX = 2**16  # of one dimension


class Cut(NamedTuple):
    """Part number `part` of `parts` of dimension `dimension`; of each of `split` parts of it, where
    that is not 1.
    """

    dimension: int
    parts: int
    part: int
    split: int = 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """The global `shape`, and for each dimension the runs of indices that the rank has, in the
    order of its local part.
    """

    shape: tuple[int, ...]
    runs: tuple[tuple[Span, ...], ...]

    def fault(self, local: Sequence[int]) -> str | None:
        """Why a local part of this shape is not what the placements say; None if it is."""
        expected = tuple([sum(run.size for run in runs) for runs in self.runs])
        if tuple(local) == expected:
            return None
        return (
            f"its local part has shape {tuple(local)}, and its placements say {expected}: it "
            f"was not made by distributing"
        )

    def placed_runs(self) -> list[list[tuple[int, Span]]]:
        """For each dimension its runs, each with the local index that it begins at."""
        found = []
        for runs in self.runs:
            at, placed = 0, []
            for run in runs:
                placed.append((at, run))
                at += run.size
            found.append(placed)
        return found


def cut(shape: Sequence[int], cuts: Sequence[Cut]) -> Sharding:
    """One rank's part after these cuts, in order."""
    runs: list[list[Span]] = [[Span(0, size)] if size else [] for size in shape]
    for each in cuts:
        runs[each.dimension] = _cut(runs[each.dimension], each)
    return Sharding(tuple(shape), tuple([tuple(its) for its in runs]))


def _cut(runs: list[Span], by: Cut) -> list[Span]:
    kept: list[Span] = []
    for start, stop in _parts(sum(run.size for run in runs), by.split):
        size = -(-(stop - start) // by.parts)
        first, end = min(stop, start + by.part * size), min(stop, start + (by.part + 1) * size)
        _append(kept, runs, first, end)
        if len(kept) > RUNS_MAX:
            raise RegistrationError(f"a dimension is cut into more than {RUNS_MAX} runs")
    return kept


def _parts(size: int, parts: int) -> list[tuple[int, int]]:
    """As `torch.chunk` cuts so many indices; parts without an index are left out."""
    each = -(-size // parts)
    return [(at, min(size, at + each)) for at in range(0, size, each)] if each else []


def _append(kept: list[Span], runs: list[Span], first: int, end: int) -> None:
    """Of the indices in `runs`, one run after another, those from position `first` to `end`."""
    at = 0
    for run in runs:
        low, high = max(first, at), min(end, at + run.size)
        if low < high:
            start = run.start + low - at
            if kept and kept[-1].start + kept[-1].size == start:
                kept[-1] = span(kept[-1].start, kept[-1].size + high - low)
            else:
                kept.append(span(start, high - low))
        at += run.size


# ------------------------------------------------------------------------------------------------
# torch's DTensors


def is_dtensor(value: object) -> bool:
    return all(hasattr(value, name) for name in ("to_local", "placements", "device_mesh"))


def sharding_of(dtensor: Any) -> Sharding | None:
    """What this rank has of it; None if the rank is not on its mesh. RegistrationError: it cannot
    be registered, and why.
    """
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    shape = tuple([int(size) for size in dtensor.shape])
    cuts = []
    for placement, parts, part in zip(dtensor.placements, mesh.shape, coordinate, strict=True):
        kind = type(placement).__name__
        if kind in ("Shard", "_StridedShard"):
            split = int(placement.split_factor) if kind == "_StridedShard" else 1
            cuts.append(Cut(placement.dim % len(shape), int(parts), int(part), split))
        elif placement.is_partial():
            raise RegistrationError(
                "it is a DTensor with a Partial placement: each rank has a summand, and nobody the "
                "tensor; register "
                "`.redistribute(placements=[Shard(0)])` of it, or Replicate()"
            )
        elif kind != "Replicate":
            raise RegistrationError(
                f"it is a DTensor with a placement that is unknown here ({placement!r}); register "
                "`.redistribute(placements=[Shard(0)])` of it"
            )
    return _as_the_memory_says(shape, cuts, tuple(dtensor.to_local().shape))


def _as_the_memory_says(
    shape: tuple[int, ...], cuts: Sequence[Cut], local: tuple[int, ...]
) -> Sharding:
    """The interpretation of a `_StridedShard`, of two, that fits this local part."""
    readings = list(dict.fromkeys([cut(shape, cuts), cut(shape, _inner_first(cuts))]))
    fitting = [reading for reading in readings if reading.fault(local) is None]
    if len(fitting) > 1:
        runs = " or ".join(
            str([[*range(run.start, run.start + run.size)] for run in each.runs[0]])
            for each in fitting
        )
        raise RegistrationError(
            f"it is a DTensor whose sizes do not divide, and its placements do not tell which "
            f"indices it has ({runs} of "
            "dimension 0); make the sizes divide, or say it with sources="
        )
    if not fitting:
        raise RegistrationError(f"it is a DTensor, and {readings[0].fault(local)}")
    return fitting[0]


def _inner_first(cuts: Sequence[Cut]) -> list[Cut]:
    """As FSDP2 cuts: what a `_StridedShard` makes room for comes first, and is cut again. As given
    where it makes room for something else.
    """
    inner = [each for each in cuts if each.split == 1]
    outer = [each for each in cuts if each.split != 1]
    for each in outer:
        after = cuts[cuts.index(each) + 1 :]
        if each.split != prod(
            [its.parts for its in after if its.dimension == each.dimension and its.split == 1]
        ):
            return list(cuts)
    return [*inner, *(each._replace(split=1) for each in reversed(outer))]
