"""The elements that a view of a tensor has, as boxes of that tensor; and what boxes have in common.

Responsible for that arithmetic, on shapes and strides alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

# length, stride in the parameter, stride in the published tensor
Loops = tuple[tuple[int, int, int], ...]
Index = tuple[slice | int, ...]

ENTRIES_MAX = 100_000  # pairs of a place and a view that one copy may fall into


class NotABox(Exception):
    """A copy whose elements are no boxes of both tensors."""


@dataclass(frozen=True)
class Root:
    """A parameter, or a published tensor: one contiguous block of a storage."""

    name: str
    shape: tuple[int, ...]
    offset: int  # of its first element in its storage
    is_contiguous: bool = True

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


# an index of a tensor; which of its dimensions is each dimension of the place
_Side = tuple[Index, tuple[int, ...]]


def boxes(
    loops: Loops, start: tuple[int, int], roots: tuple[Root, Root]
) -> Iterator[tuple[_Side, _Side]]:
    """The elements that loops go through in two tensors, as equal boxes of both: a place in one, a
    view of the other.
    """
    split = _split(tuple(loop for loop in loops if loop[0] > 1), start, roots)
    dims = [tuple(_dimension(loop[1 + side], roots[side]) for loop in split) for side in (0, 1)]
    unrolled = _unrolled(split, dims)
    if math.prod(split[each][0] for each in unrolled) > ENTRIES_MAX:
        raise NotABox("it falls into too many pieces")
    kept = [each for each in range(len(split)) if each not in unrolled]
    for steps in product(*(range(split[each][0]) for each in unrolled)):
        sides = []
        for side, root in enumerate(roots):
            begin = start[side] + sum(
                step * split[each][1 + side] for step, each in zip(steps, unrolled, strict=True)
            )
            index: list[slice | int] = []
            for dimension, (size, stride) in enumerate(zip(root.shape, root.strides, strict=True)):
                first, begin = divmod(begin, stride) if size and stride else (0, begin)
                loop = next((each for each in kept if dims[side][each] == dimension), None)
                if loop is None:
                    index.append(first)
                    continue
                count, step = split[loop][0], split[loop][1 + side] // stride
                if first + (count - 1) * step >= size:
                    raise NotABox("it crosses rows")
                index.append(slice(first, first + (count - 1) * step + 1, step))
            sides.append(tuple(index))
        place_dims = sorted(kept, key=lambda each: dims[0][each])
        view_dims = sorted(kept, key=lambda each: dims[1][each])
        yield (sides[0], ()), (sides[1], tuple(view_dims.index(each) for each in place_dims))


def _split(loops: Loops, start: tuple[int, int], roots: tuple[Root, Root]) -> Loops:
    """`loops`, each within one dimension of either tensor: a loop over several dimensions becomes
    several.
    """
    done: list[tuple[int, int, int]] = []
    left = list(loops)
    while left:
        size, *strides = left.pop(0)
        for side, stride in enumerate(strides):
            if stride <= 0:
                raise NotABox("elements are repeated")
            root = roots[side]
            dimension = _dimension(stride, root)
            room = root.shape[dimension] * root.strides[dimension]
            if (size - 1) * stride < room - start[side] % room:
                continue
            inner = room // stride
            if room % stride or size % inner or start[side] % room >= stride:
                raise NotABox("it crosses rows")
            left[:0] = [(size // inner, *(inner * each for each in strides)), (inner, *strides)]  # type: ignore[list-item]
            break
        else:
            done.append((size, strides[0], strides[1]))
    return tuple(done)


def _dimension(stride: int, root: Root) -> int:
    """Along which dimension a loop of this stride goes."""
    for dimension, (size, unit) in enumerate(zip(root.shape, root.strides, strict=True)):
        if size > 1 and stride >= unit:
            if stride % unit:
                raise NotABox("it goes diagonally")
            return dimension
    raise NotABox("it has no dimension to go along")


def _unrolled(loops: Loops, dims: Sequence[Sequence[int]]) -> list[int]:
    """The loops to write out, so that each dimension of either tensor has one loop at most; the
    shorter ones.
    """
    out: list[int] = []
    for side in dims:
        of: dict[int, list[int]] = defaultdict(list)
        for loop, dimension in enumerate(side):
            if loop not in out:
                of[dimension].append(loop)
        for several in of.values():
            out += sorted(several, key=lambda each: loops[each][0])[:-1]
    return sorted(out)


def _range(item: slice | int) -> range:
    return (
        range(item.start, item.stop, item.step)
        if isinstance(item, slice)
        else range(item, item + 1)
    )


def count(index: Index) -> int:
    return math.prod(len(_range(item)) for item in index)


def around(indexes: Sequence[Index]) -> tuple[int, ...]:
    """The shape of the smallest box around these."""
    return tuple(
        max(each[-1] for each in ranges) + 1 - min(each[0] for each in ranges)
        for ranges in zip(*(map(_range, index) for index in indexes), strict=True)
    )


def key(index: Index) -> tuple[object, ...]:
    return tuple(_range(item) for item in index)


def places_of(parameter: Root, target: torch.Tensor) -> list[Index]:
    """The boxes of a parameter that `target` is a view of."""
    loops = tuple(
        (size, stride, stride) for size, stride in zip(target.shape, target.stride(), strict=True)
    )
    offset = int(target.storage_offset()) - parameter.offset
    found = boxes(loops, (offset, offset), (parameter, parameter))
    return [place for (place, _), _ in found]


def less(box: Index, other: Index) -> Iterator[Index]:
    """The parts of a box that are outside of another one."""
    if not overlap(box, other):
        yield box
        return
    core: list[slice | int] = list(box)
    for dimension, (mine, its) in enumerate(zip(map(_range, box), map(_range, other), strict=True)):
        if mine.step != 1 or its.step != 1:
            raise NotABox("what is filled is copied to in strides")
        first, last = max(mine.start, its.start), min(mine.stop, its.stop)
        for part in (slice(mine.start, first, 1), slice(last, mine.stop, 1)):
            if part.start < part.stop:
                yield (*core[:dimension], part, *core[dimension + 1 :])
        core[dimension] = slice(first, last, 1)


def overlap(one: Index, other: Index) -> bool:
    """Whether two boxes share an element; True where two steps make that hard to say."""
    for a, b in zip(map(_range, one), map(_range, other), strict=True):
        if a[-1] < b[0] or b[-1] < a[0] or (a.step == b.step and (a[0] - b[0]) % a.step):
            return False
    return True


def any_overlap(places: Sequence[Index]) -> bool:
    ordered = sorted(places, key=lambda place: [_range(item)[0] for item in place])
    for number, place in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if place and _range(other[0])[0] > _range(place[0])[-1]:
                break
            if overlap(place, other):
                return True
    return False
