"""Notes what a model's loader reads of the published tensors, and what it writes to parameters,
while it runs on tensors without memory.

Responsible for these notes, one by one. Not responsible for what follows from them (`recording`).
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub.errors import RegistrationError, shown, some
from tensorhub.integrations.recorded_boxes import (
    Index,
    NotABox,
    Root,
    boxes,
    key,
    overlap,
    places_of,
)

Specs = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype, without "torch.", and shape, by name

_aten = torch.ops.aten
# of what they are given they take no element
LIKE = {
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
APPENDING = {_aten.cat.default, _aten.constant_pad_nd.default}


class Unrecordable(RegistrationError):
    """The loader did something that says nothing about what it would have done."""


@dataclass
class Written:
    """The writes to one parameter so far. `copied`, `numbers`: the places of what comes from a
    published tensor, and of what does not, by the tensor that was handed over last; `joined`: how
    many numbers of the former were appended to such a tensor.
    """

    # by place: of two copies to one place the later one stays
    pairs: dict[Any, tuple[Index, str, Index, tuple[int, ...]]] = field(default_factory=dict)
    fills: list[tuple[tuple[slice | int, ...], float]] = field(default_factory=list)
    copied: dict[str, list[Index]] = field(default_factory=lambda: defaultdict(list))
    numbers: dict[str, list[Index]] = field(default_factory=lambda: defaultdict(list))
    joined: dict[str, int] = field(default_factory=dict)
    needs: dict[str, None] = field(default_factory=dict)
    reason: str = ""

    @property
    def places(self) -> list[Index]:
        return [each for of in (self.copied, self.numbers) for its in of.values() for each in its]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`written`: by parameter. `touched`: the published tensors that the loader looked at; `reads`:
    the parts of them that it used, None for one that is no box, without those of `known`; `casts`:
    each with its own dtype and the parameter's.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], known: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.current: str | None = None  # the published tensor that was handed over last
        # so that no storage is another one under an address that was used
        self._kept: list[torch.Tensor] = []
        # by storage: several may share one
        self._parameters: dict[int, list[Root]] = defaultdict(list)
        self._published: dict[int, Root] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # of published tensors
        # storages that were computed: of which tensors, and how many numbers were appended
        self._made_of: dict[int, dict[str, None]] = defaultdict(dict)
        self._appended: dict[int, int] = {}
        self._made_by_cast: dict[int, torch.dtype] = {}  # from which dtype
        self.written: dict[str, Written] = defaultdict(Written)
        self.touched: dict[str, None] = {}
        self.reads: dict[str, list[Index] | None] = {}
        self.casts: dict[str, tuple[str, str]] = {}
        self.place: tuple[int, ...] | None = None  # the shape looked at last, for this tensor
        for name, parameter in parameters.items():
            root = Root(
                name,
                tuple(parameter.shape),
                int(parameter.storage_offset()),
                parameter.is_contiguous(),
            )
            self._parameters[_storage(parameter)].append(root)
            self._kept.append(parameter)

    def feed(self, names: Sequence[str], published: Specs) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            dtype, shape = published[name]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self._published[_storage(tensor)] = Root(name, tuple(shape), 0)
            self._dtypes[name] = tensor.dtype
            self._kept.append(tensor)
            self.current, self.place = name, None
            yield name, tensor

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter has the memory that it had."""
        return _storage(parameter) in self._parameters

    # ----------------------------------------------------------------------------------------------
    # what the loader does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        given = [
            *zip(schema, args, strict=False),
            *((each, kwargs[each.name]) for each in schema if each.name in kwargs),
        ]
        written = [
            tensor
            for argument, value in given
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value)
        ]
        roots = [root for tensor in written for root in self._roots(tensor)]
        read = [
            tensor
            for argument, value in given
            for tensor in _tensors(value)
            if not any(tensor is w for w in written)
        ]
        if roots:
            return self._write(func, args, kwargs, written, roots, read)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and _storage(result) in self._parameters:
            self.place = tuple(result.shape)
        of = [] if func in LIKE else [*read, *written]
        self._trace(func, [*written, *_tensors(result)], of)
        return result

    def _roots(self, tensor: torch.Tensor) -> list[Root]:
        """The parameters that a view may touch."""
        found = self._parameters.get(_storage(tensor), [])
        if len(found) < 2 or not tensor.numel():
            return found
        first = tensor.storage_offset()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return [
            root
            for root in found
            if root.offset <= last and first < root.offset + math.prod(root.shape)
        ]

    def _trace(self, func: Any, made: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        storages = {_storage(each) for each in made}
        self._read(each for each in of if _storage(each) not in storages)  # else it is a view
        names = dict.fromkeys(name for tensor in of for name in self._names(tensor))
        for tensor in made:
            key = _storage(tensor)
            self._kept.append(tensor)
            if names and key not in self._published and key not in self._parameters:
                self._made_of[key].update(names)
                if func in APPENDING:
                    self._appended[key] = tensor.numel() - sum(
                        each.numel() - self._appended.get(_storage(each), 0)
                        for each in of
                        if self._names(each)
                    )
                if func is _aten._to_copy.default and _storage(of[0]) in self._published:
                    self._made_by_cast[key] = of[0].dtype

    def _read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note which parts of published tensors are used."""
        for tensor in tensors:
            root = self._published.get(_storage(tensor))
            if root is None or not tensor.numel() or root.name in self.known:
                continue
            places = self.reads.setdefault(root.name, [])
            try:
                if tensor.dtype.itemsize != self._dtypes[root.name].itemsize:
                    raise NotABox("it is read as something else")
                found = places_of(root, tensor)
            except NotABox:
                places = self.reads[root.name] = None
            if places is not None:
                places += [each for each in found if each not in places[-1:]]

    def _names(self, tensor: torch.Tensor) -> list[str]:
        """The published tensors that `tensor` consists of."""
        key = _storage(tensor)
        if key in self._published:
            self.touched[self._published[key].name] = None
            return [self._published[key].name]
        if key in self._parameters:
            return [name for root in self._roots(tensor) for name in self.written[root.name].needs]
        return list(self._made_of.get(key, ()))

    def _write(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        written: Any,
        roots: list[Root],
        read: list[torch.Tensor],
    ) -> Any:
        """A parameter is written: noted, and not done."""
        target: torch.Tensor = written[0]
        if len(written) != 1 or not func._schema.returns or func._schema.name.endswith("_out"):
            which = some([repr(root.name) for root in roots])
            raise Unrecordable(
                f"load_weights cannot be recorded at {shown(self.current)}: {func} writes {which}"
            )
        if not target.numel():
            return target
        self._read(read)
        names = dict.fromkeys(name for tensor in read for name in self._names(tensor))
        for root in roots:
            self.written[root.name].needs.update(names)
        if len(roots) == 1 and roots[0].is_contiguous:
            with contextlib.suppress(NotABox):
                self._cover(roots[0], target, read, is_copied=bool(names))
        if len(roots) > 1:
            reason = f"{func} writes several parameters that share memory"
        elif not roots[0].is_contiguous:
            reason = "the parameter is not contiguous"
        elif func is _aten.copy_.default:
            reason = self._copy(roots[0], target, args[1])
        elif func in (_aten.zero_.default, _aten.fill_.Scalar):
            reason = self._fill(roots[0], target, 0 if func is _aten.zero_.default else args[1])
        else:
            reason = f"{func}"
        if reason:
            of = list(map(repr, names))
            for root in roots:
                done = self.written[root.name]
                done.reason = (
                    done.reason or f"{reason}, of {some(of) if of else 'no published tensor'}"
                )
        return target

    def _cover(
        self, parameter: Root, target: torch.Tensor, read: list[torch.Tensor], *, is_copied: bool
    ) -> None:
        """Note which elements are written, in whatever way, and which of them with numbers."""
        done, of = self.written[parameter.name], self.current or ""
        places = (done.copied if is_copied else done.numbers)[of]
        for place in places_of(parameter, target):
            if not any(key(place) == key(each) for each in places[-1:]):
                places.append(place)
        if appended := sum(self._appended.get(_storage(each), 0) for each in read):
            done.joined[of] = done.joined.get(of, 0) + appended

    def _copy(self, parameter: Root, to: torch.Tensor, of: torch.Tensor) -> str:
        """Note a copy; or why it is not a copy of elements as they are."""
        root, names = self._published.get(_storage(of)), self._names(of)
        was = self._made_by_cast.get(_storage(of), of.dtype)
        for name in names if was != to.dtype else ():
            if root is not None or self._dtypes[name] == was:
                self.casts[name] = _name(was), _name(to.dtype)
        if root is None:
            return "it is computed" if not of.is_floating_point() or names else "it is a constant"
        if to.dtype != of.dtype:
            return "cast from {} to {}".format(*self.casts[root.name])
        if to.shape != of.shape:
            of = of.expand(to.shape)  # raises as the copy would
        done = self.written[parameter.name]
        loops = tuple(zip(to.shape, to.stride(), of.stride(), strict=True))
        start = int(to.storage_offset()) - parameter.offset, int(of.storage_offset())
        try:
            for (place, _), (view, order) in boxes(loops, start, (parameter, root)):
                done.pairs[key(place)] = place, root.name, view, order
        except NotABox as reason:
            return f"{reason}"
        return ""

    def _fill(self, parameter: Root, target: torch.Tensor, value: float) -> str:
        done = self.written[parameter.name]
        try:
            places = places_of(parameter, target)
        except NotABox as reason:
            return f"{reason}"
        if any(overlap(place, pair[0]) for place in places for pair in done.pairs.values()):
            return "it is filled with a number after it was copied"
        done.fills += [(place, value) for place in places]
        return ""


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _name(dtype: torch.dtype) -> str:
    return f"{dtype}".removeprefix("torch.")
