"""What a reader says its tensors are made of: views of global tensors, and places in its own.

    q, k, v = (source(f"layers.0.{n}_proj.weight") for n in "qkv")
    sources = {
        "layers.0.qkv": [q[0:2048], k[0:512], v[0:512]],                 # a list concatenates along dimension 0
        "embed": [(at[0:128256], source("embed_tokens.weight"))],        # padding behind it stays as it is
        "experts.w13": [(at[e, 0:1408], source(f"experts.{e}.gate.weight")) for e in range(8)],
    }

A view takes integer indices, slices with positive steps, and permutations: what it takes is a box
of the global tensor, with its dimensions in some order. Nothing is clamped: an index that does not
exist is an error. The shape of the global tensor may be unknown when a view is made. Then indices
are kept as they were written, and are looked at when the shape is known.

Entries of `sources=` are read once, when tensors are registered (`entries_of`).

Responsible for the notation, and for its errors. Not responsible for bytes (`pieces`).
"""  # noqa: E501 - lines as they are typed

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Final, NamedTuple, TypeAlias

from tensorhub import errors
from tensorhub.errors import RegistrationError
from tensorhub.layouts.boxes import Box, Span, span, whole
from tensorhub.model.dtypes import INT_MAX
from tensorhub.model.manifest import DIMENSIONS_MAX, name_fault
from tensorhub.types import as_integer

_SLICES = "take integers, slices with a positive step (`[0:2048, ::2]`) and `...`"


class _Slice(NamedTuple):
    start: int | None
    stop: int | None
    step: int

    def __repr__(self) -> str:
        ends = (
            f"{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}"
        )
        return ends if self.step == 1 else f"{ends}:{self.step}"


class _Index(NamedTuple):
    items: tuple[int | _Slice | EllipsisType, ...]

    def __repr__(self) -> str:
        return f"[{', '.join('...' if item is ... else repr(item) for item in self.items)}]"


@dataclass(frozen=True, slots=True)  # no tuple: it would equal an index of its numbers
class _Permutation:
    dimensions: tuple[int, ...] | None  # None: `.T`

    def __repr__(self) -> str:
        return (
            ".T" if self.dimensions is None else f".permute({', '.join(map(str, self.dimensions))})"
        )


class Taken(NamedTuple):
    """A box of a tensor, and the tensor's dimensions in the view, in its order. All other
    dimensions have one index.
    """

    box: Box
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([self.box[dimension].size for dimension in self.order])


@dataclass(frozen=True, slots=True)
class View:
    """A part of the global tensor `name`; made by `source`. `shape`: of that whole tensor, None if
    it is not known yet.
    """

    name: str
    shape: tuple[int, ...] | None = None
    _steps: tuple[_Index | _Permutation, ...] = field(default=())

    __iter__ = None  # else Python would index it with 0, 1, 2, ... without end

    def __getitem__(self, index: Any) -> View:
        return self._then(_index(index, self))

    def permute(self, *dimensions: int) -> View:
        """Its dimensions in another order, as torch's `permute`."""
        given = tuple([as_integer(each) for each in dimensions])
        if any(each is None for each in given):
            raise RegistrationError(
                f"{self}.permute: give the numbers of dimensions, e.g. `.permute(1, 0)`"
            )
        return self._then(_Permutation(tuple([each for each in given if each is not None])))

    @property
    def T(self) -> View:  # noqa: N802 (torch's name)
        """Of two dimensions, the second first."""
        return self._then(_Permutation(None))

    def _then(self, step: _Index | _Permutation) -> View:
        made = View(self.name, self.shape, (*self._steps, step))
        if self.shape is not None:
            made.select(self.shape)  # raises at the caller's own line
        return made

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for views that take equal parts, of any tensors."""
        return self.shape, self._steps

    def select(self, shape: Sequence[int]) -> Taken:
        """The view's box of a tensor of this shape. RegistrationError, with advice, if that is
        impossible.
        """
        selection = Taken(whole(shape), tuple(range(len(shape))))
        for number, step in enumerate(self._steps):
            so_far = View(self.name, None, self._steps[:number])
            selection = (
                _take(selection, step, so_far)
                if isinstance(step, _Index)
                else _permute(selection, step, so_far)
            )
        return selection

    def __repr__(self) -> str:
        return f"source({errors.shown(self.name)})" + "".join(map(repr, self._steps))


def source(name: str, shape: Sequence[int] | None = None) -> View:
    """The whole global tensor of this name, to take parts of.

    `shape`: of the global tensor. A reader need not give it, since the publication says it. A
    publisher gives it, to say what part of which tensor its memory holds. RegistrationError: this
    is no name, or no shape.
    """
    if fault := name_fault(name):
        raise RegistrationError(f"source({errors.shown(name)}): {fault}")
    if shape is None:
        return View(name)
    try:
        sizes = tuple([-1 if (found := as_integer(size)) is None else found for size in shape])
    except TypeError:
        sizes = (-1,)
    if len(sizes) > DIMENSIONS_MAX or any(not 0 <= size <= INT_MAX for size in sizes):
        raise RegistrationError(
            f"source({errors.shown(name)}, shape={errors.shown(shape)}): a shape is up to "
            f"{DIMENSIONS_MAX} sizes, each from "
            "0 to 2**63 - 1"
        )
    return View(name, sizes)


# --------------------------------------------------------------------------------------------------
# places


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a registered tensor, before its shape is known; made by `at[...]`."""

    _index: _Index

    def select(self, shape: Sequence[int]) -> Taken:
        """Which part of a tensor of this shape it is. RegistrationError, with what to write, if
        there is no such part.
        """
        return _take(Taken(whole(shape), tuple(range(len(shape)))), self._index, at)

    def __repr__(self) -> str:
        return f"at{self._index!r}"


class _At:
    def __getitem__(self, index: Any) -> Place:
        return Place(_index(index, "at"))

    def __repr__(self) -> str:
        return "at"


at: Final = _At()


# ----------------------------------------------------------------------------------------------
# entries of sources=

# A place of a registered tensor, and the view that it holds. Without places, the views follow each
# other along dimension 0.
Entry: TypeAlias = tuple[tuple[Place | None, View], ...]
Sources: TypeAlias = Mapping[str, object] | Callable[[str], object]  # as a caller gives them


def entries_of(names: Iterable[str], sources: Sources | None) -> tuple[dict[str, Entry], list[str]]:
    """The present entries of the tensors of these names, and all their faults. A callable is called
    once for each name: it may be the caller's code.
    """
    found: dict[str, Entry] = {}
    faults: list[str] = []
    entry_of = sources if callable(sources) else (sources or {}).get
    unknown = {} if sources is None or callable(sources) else dict.fromkeys(sources)
    for name in names:
        unknown.pop(name, None)
        given = entry_of(name)
        if given is None:
            continue
        entry = _entry(given)
        if entry is None:
            faults.append(
                f"sources of {errors.shown(name)}: give a view (`source(...)`), a list of views, "
                f"which are concatenated "
                f"along dimension 0, or a list of pairs `[(at[0:2048], view), ...]`, not "
                f"{errors.shown(given)}"
            )
        else:
            found[name] = entry
    faults += [
        f"sources names {errors.shown(name)}, and no tensor of that name is registered"
        for name in unknown
    ]
    return found, faults


def _entry(given: object) -> Entry | None:
    if isinstance(given, View):
        return ((None, given),)
    if not isinstance(given, list | tuple):
        return None
    if all(isinstance(each, View) for each in given):
        return tuple([(None, view) for view in given])
    pairs = [each for each in given if isinstance(each, tuple | list) and len(each) == 2]
    if len(pairs) < len(given) or not all(
        isinstance(p, Place) and isinstance(v, View) for p, v in pairs
    ):
        return None
    return tuple([(place, view) for place, view in pairs])


def without_shape(entries: Mapping[str, Entry]) -> dict[str, str]:
    """The tensors that have a view without a global shape, each with the name of the viewed
    tensor.
    """
    found: dict[str, str] = {}
    for name, entry in entries.items():
        for _, view in entry:
            if view.shape is None:
                found.setdefault(name, view.name)
    return found


# --------------------------------------------------------------------------------------------------
# indexing


def _refused(what: object, given: object) -> str:
    """An index that cannot be taken, as it was written."""

    def written(item: object) -> str:
        if isinstance(item, slice):
            ends = (
                (item.start, item.stop) if item.step is None else (item.start, item.stop, item.step)
            )
            return ":".join("" if each is None else errors.shown(each) for each in ends)
        return "..." if item is ... else errors.shown(item)

    items = given[:DIMENSIONS_MAX] if isinstance(given, tuple) else (given,)
    return f"{what}[{', '.join(map(written, items))}]"


def _index(given: object, what: object) -> _Index:
    items: list[int | _Slice | EllipsisType] = []
    for item in given if isinstance(given, tuple) else (given,):
        if isinstance(item, slice):
            start, stop, step = (
                None if each is None else as_integer(each)
                for each in (item.start, item.stop, item.step)
            )
            if (start is None) != (item.start is None) or (stop is None) != (item.stop is None):
                raise RegistrationError(
                    f"{_refused(what, given)}: a slice is of integers; {_SLICES}"
                )
            if item.step is not None and (step is None or step < 1):
                raise RegistrationError(
                    f"{_refused(what, given)}: its step is {errors.shown(item.step)}; {_SLICES}"
                )
            items.append(_Slice(start, stop, step or 1))
        elif item is ...:
            items.append(item)
        elif (number := as_integer(item)) is not None:
            items.append(number)
        else:
            raise RegistrationError(
                f"{_refused(what, given)}: {errors.shown(item)} is no index here; {_SLICES}"
            )
    if sum(item is ... for item in items) > 1:
        raise RegistrationError(f"{_refused(what, given)}: `...` can stand there once")
    return _Index(tuple(items))


def _take(selection: Taken, index: _Index, so_far: View | _At) -> Taken:
    given = len(index.items) - index.items.count(...)
    missing = len(selection.order) - given
    if missing < 0:
        raise RegistrationError(
            f"{so_far}{index!r}: {given} indices, where there are {len(selection.order)} "
            f"dimensions "
            f"(shape {selection.shape}); leave out {-missing}"
        )
    items: list[int | _Slice] = []
    for item in index.items if ... in index.items else (*index.items, ...):
        if isinstance(item, int | _Slice):
            items.append(item)
        else:
            items += [_Slice(None, None, 1)] * missing
    box, order = list(selection.box), []
    for dimension, item in zip(selection.order, items, strict=True):
        taken = _one(item, box[dimension].size, so_far, index)
        box[dimension] = box[dimension].take(taken)
        if isinstance(item, _Slice):
            order.append(dimension)
    return Taken(tuple(box), tuple(order))


def _one(item: int | _Slice, size: int, so_far: View | _At, index: _Index) -> Span:
    """The positions that an index takes, of so many."""
    if isinstance(item, int):
        if not -size <= item < size:
            raise RegistrationError(
                f"{so_far}{index!r}: index {item} is out of range; the size there is {size}"
            )
        return Span(item % size, 1)
    start, stop = 0 if item.start is None else item.start, size if item.stop is None else item.stop
    start, stop = start + size * (start < 0), stop + size * (stop < 0)
    if not 0 <= start <= stop <= size:
        raise RegistrationError(
            f"{so_far}{index!r}: slice {item!r} is not within the size there, {size}; write at "
            f"most 0:{size}"
        )
    return span(start, -(-(stop - start) // item.step), item.step)


def _permute(selection: Taken, step: _Permutation, so_far: View | _At) -> Taken:
    count = len(selection.order)
    dimensions = step.dimensions
    if dimensions is None:
        if count != 2:
            raise RegistrationError(
                f"{so_far}.T: it has {count} dimensions, not 2; write `.permute(...)`"
            )
        dimensions = (1, 0)
    positive = [each + count * (each < 0) for each in dimensions]
    if sorted(positive) != list(range(count)):
        raise RegistrationError(
            f"{so_far}{step!r}: name each of its {count} dimensions (0 to {count - 1}) once"
        )
    return Taken(selection.box, tuple([selection.order[each] for each in positive]))
