"""Boxes of indices: which part of a global tensor a piece of memory holds.

A `Span` is some indices of one dimension, equally far apart; a box has a span for each dimension.
Parts that a slice with a step takes are boxes as well. Boxes are met (intersected) and taken out of
one another exactly.

Responsible for the arithmetic of indices. Not responsible for memory (`pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple

from tensorhub.errors import ManifestMismatch

FRAGMENTS_MAX = 2**16  # fragments of one box, after boxes were taken out of it
MEETINGS_MAX = 2**23  # of two boxes, in one check or plan: some ten seconds


class Span(NamedTuple):
    """The `size` indices start, start + step, ... of one dimension. The step is positive; that of
    fewer than two indices is 1.
    """

    start: int
    size: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.start + (self.size - 1) * self.step

    def take(self, inner: Span) -> Span:
        """Of these indices, those at the positions of `inner`, which lie within."""
        return span(self.start + inner.start * self.step, inner.size, inner.step * self.step)


Box = tuple[Span, ...]


def span(start: int, size: int, step: int = 1) -> Span:
    return Span(start, size, step if size > 1 else 1)


def whole(shape: Sequence[int]) -> Box:
    return tuple([Span(0, size) for size in shape])


def volume(box: Box) -> int:
    """How many elements it has; a tensor without dimensions has one."""
    return prod([each.size for each in box])


def shown(box: Box) -> str:
    """As it would be written behind the tensor's name."""
    if not box:
        return "[...]"
    return f"[{', '.join(_slice(each) for each in box)}]"


def _slice(each: Span) -> str:
    return f"{each.start}:{each.last + 1}" + (f":{each.step}" if each.step != 1 else "")


# --------------------------------------------------------------------------------------------------
# meeting


def meet(one: Box, other: Box) -> Box | None:
    """The elements that both have, if there are any. Both are of one tensor."""
    found = []
    for a, b in zip(one, other, strict=True):
        common = _meet(a, b)
        if common is None:
            return None
        found.append(common)
    return tuple(found)


def _meet(a: Span, b: Span) -> Span | None:
    if a == b:
        return a if a.size else None
    if a.step == b.step == 1:
        start = max(a.start, b.start)
        size = min(a.start + a.size, b.start + b.size) - start
        return Span(start, size) if size > 0 else None
    if not (a.size and b.size):
        return None
    # The first number that is both a.start modulo a.step and b.start modulo b.step (the Chinese
    # remainder theorem).
    common = gcd(a.step, b.step)
    if (b.start - a.start) % common:
        return None
    modulus = b.step // common
    step = a.step * modulus
    first = (
        a.start
        + (b.start - a.start) // common * pow(a.step // common, -1, modulus) % modulus * a.step
    )
    least = max(a.start, b.start)
    if first < least:
        first += -(-(least - first) // step) * step
    size = (min(a.last, b.last) - first) // step + 1
    return span(first, size, step) if size > 0 else None


# --------------------------------------------------------------------------------------------------
# taking out


def without(box: Box, inner: Box) -> Iterator[Box]:
    """The rest of `box` without `inner`, a part of it, as boxes that do not overlap."""
    for dimension, (outer_span, inner_span) in enumerate(zip(box, inner, strict=True)):
        for rest in _without(outer_span, inner_span):
            yield (*inner[:dimension], rest, *box[dimension + 1 :])


def _without(outer: Span, inner: Span) -> Iterator[Span]:
    step = outer.step
    if before := (inner.start - outer.start) // step:
        yield span(outer.start, before, step)
    if after := (outer.last - inner.last) // step:
        yield span(inner.last + step, after, step)
    # of the outer indices, between two of the inner ones
    skipped = inner.step // step - 1 if inner.size > 1 else 0
    gaps = inner.size - 1
    if min(skipped, gaps) > FRAGMENTS_MAX:
        raise _too_many()
    if skipped <= gaps:
        for nth in range(1, skipped + 1):
            yield span(inner.start + nth * step, gaps, inner.step)
    else:
        for nth in range(gaps):
            yield span(inner.start + nth * inner.step + step, skipped, step)


class Meetings:
    """How many pairs of boxes one check or plan may compare. A publisher decides how boxes are cut,
    and a reader's thread would compare all pairs of 2**16 boxes for hours.
    """

    def __init__(self) -> None:
        self._left = MEETINGS_MAX

    def spend(self, count: int) -> None:
        """ManifestMismatch: there are no more."""
        self._left -= count
        if self._left < 0:
            raise ManifestMismatch(
                f"the tensors are cut so that more than {MEETINGS_MAX} "
                "pairs of parts would be compared"
            )


def taken_out(left: Sequence[Box], box: Box, meetings: Meetings) -> tuple[list[Box], list[Box]]:
    """The parts of `left` within `box`, and the rest of `left`. ManifestMismatch: too many
    fragments, or too many meetings.
    """
    meetings.spend(len(left))
    taken: list[Box] = []
    rest: list[Box] = []
    for fragment in left:
        common = meet(fragment, box)
        if common is None:
            rest.append(fragment)
        else:
            taken.append(common)
            rest.extend(without(fragment, common))
        if len(rest) > FRAGMENTS_MAX:
            raise _too_many()
    return taken, rest


def left_over(box: Box, taken: Iterable[Box], meetings: Meetings | None = None) -> list[Box]:
    """The rest of `box` without `taken`, which may overlap. ManifestMismatch: as `taken_out`."""
    meetings = meetings or Meetings()
    left = [box] if volume(box) else []
    for each in taken:
        if not left:
            break
        _, left = taken_out(left, each, meetings)
    return left


def _too_many() -> ManifestMismatch:
    return ManifestMismatch(
        f"a tensor is cut into more than {FRAGMENTS_MAX} fragments; use slices with smaller steps"
    )


def overlapping(boxes: Sequence[Box], meetings: Meetings | None = None) -> tuple[int, int] | None:
    """The numbers of two boxes that share an element, if any do. All are of one tensor.
    ManifestMismatch: that would be too many meetings.
    """
    meetings = meetings or Meetings()
    if len(boxes) < 2:
        return None
    by = max(range(len(boxes[0])), key=lambda d: len({box[d].start for box in boxes}), default=None)
    if by is None:
        return 0, 1
    open_boxes: list[int] = []  # with indices of dimension `by` that may go on
    for number in sorted(
        (n for n, box in enumerate(boxes) if volume(box)), key=lambda n: boxes[n][by].start
    ):
        start = boxes[number][by].start
        meetings.spend(len(open_boxes))
        open_boxes = [each for each in open_boxes if boxes[each][by].last >= start]
        for each in open_boxes:
            if meet(boxes[each], boxes[number]) is not None:
                return min(each, number), max(each, number)
        open_boxes.append(number)
    return None
