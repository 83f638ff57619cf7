"""Records which parts of published tensors a model's `load_weights` copies to which parameters,
without any weight.

The loader runs on tensors of torch's meta device. Each view of such a tensor still has the storage
of the whole tensor, an offset and strides, and so has each view of a parameter. So every copy shows
which elements go where, whatever chain of `narrow`, `chunk`, `view` and `transpose` came before.
Such copies are not executed: they are recorded as entries of `sources=`. A parameter that is
computed (by a cast, a sum, a `contiguous()`) is listed by name, with the reason.

Responsible for that record, for any framework with loaders that copy in torch. Not responsible for
an update, which reads into the parameters by `sources=`.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorhub import at, source
from tensorhub.errors import ManifestMismatch, RegistrationError, shown, some
from tensorhub.integrations.recorded_boxes import (
    Index,
    NotABox,
    Root,
    any_overlap,
    boxes,
    count,
    key,
    less,
    overlap,
    places_of,
)
from tensorhub.layouts.views import Place, Taken, View

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Specs = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype, without "torch.", and shape, by name

REFUSED_MAX = 100  # names in an error
PIECES_MAX = 10_000  # of what is filled and not copied to

_aten = torch.ops.aten


@dataclass
class Recording:
    """`sources`: an entry for each parameter that consists of copies alone. `filled`: places that
    the loader fills with a number and copies nothing to, such as padding. `computed`: all other
    parameters that were written, each with the reason. `needs`: the published tensors that any part
    of a parameter comes from, also in `computed`. `unread`: published tensors that the loader left
    alone. `refused`: published tensors that it refuses, each with the reason. `gaps`: parameters of
    which so many elements were not written. `casts`: published tensors that are cast, each with
    their own dtype and the parameter's.
    """

    sources: dict[str, list[tuple[Place, View]]] = field(default_factory=dict)
    filled: list[tuple[str, tuple[slice | int, ...], float]] = field(default_factory=list)
    computed: dict[str, str] = field(default_factory=dict)
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)
    casts: dict[str, tuple[str, str]] = field(default_factory=dict)

    def fill_numbers(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write what comes from no published tensor, such as padding."""
        for name, place, value in self.filled:
            if name in tensors:
                tensors[name].data[place] = value

    def has_numbers(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether that is there."""
        return all(
            bool((tensors[name][place] == value).all())
            for name, place, value in self.filled
            if name in tensors
        )

    def gap(self, name: str, elements: int, usual: Iterable[str]) -> str:
        """Why a parameter is not whole. `usual`: the tensors that it came from before."""
        has = self.needs.get(name, ())
        lost = [repr(each) for each in usual if each not in has]
        return (
            f"{elements} elements come from no published tensor"
            + (f"; missing: {some(lost)}" if lost else "")
            + (f"; there are: {some(list(map(repr, has)))}" if has else "")
        )

    def make(self, name: str, into: torch.Tensor, published: Mapping[str, torch.Tensor]) -> None:
        """Write a parameter that consists of copies alone, as `sources` and `filled` say it."""
        for place, view in self.sources[name]:
            _part(into, place).copy_(_part(published[view.name], view))
        self.fill_numbers({name: into})


def record(
    load: Loader,
    parameters: Mapping[str, torch.Tensor],
    published: Specs,
    usual: Specs | None = None,
) -> Recording:
    """What `load` does with published tensors of these names, dtypes and shapes. No parameter is
    written.

    `parameters`: where the loader writes, on any device, meta included. `usual`: what it was given
    before, for errors. Raises ManifestMismatch (names that the loader refuses, all listed),
    RegistrationError (it does what cannot be recorded; the tensor is named).
    """
    found = record_known(load, parameters, published, usual)
    if found.refused:
        raise _refusal(found.refused)
    return found


def record_known(
    load: Loader,
    parameters: Mapping[str, torch.Tensor],
    published: Specs,
    usual: Specs | None = None,
) -> Recording:
    """As `record`, of the published tensors that the loader does not refuse; the others are in
    `Recording.refused`. Raises ManifestMismatch only where these cannot be told apart.
    """
    refused: dict[str, str] = {}
    said_before: set[str] = set()
    while True:
        recorder = _Recorder(parameters)
        wanted = [name for name in published if name not in refused]
        try:
            with recorder, torch.no_grad():
                load(recorder.feed(wanted, published))
        except _Unrecordable:
            raise
        except Exception as error:
            name, said = recorder.current, f"{error}" or type(error).__name__
            if (
                isinstance(error, NotImplementedError | TypeError)
                or "meta tensor" in said
                or name is None
            ):
                text = (
                    f"load_weights cannot be recorded at {shown(name)}: "
                    f"{type(error).__name__}: {said}"
                )
                raise RegistrationError(
                    f"{text}; does it need values, where there are none?"
                ) from error
            is_refused = said not in said_before or _refuses(load, parameters, name, published)
            if name in refused or not is_refused or len(refused) == REFUSED_MAX:
                break
            said_before.add(said)
            refused[name] = f"{said}{recorder.misfit(name, published, usual or {})}"
        else:
            resized = {
                name: _differing(published[name][1], usual[name][1])
                for name in wanted
                if usual and name in usual
                if math.prod(published[name][1]) != math.prod(usual[name][1])
            }
            return recorder.finish(parameters, wanted, refused | resized)
    raise _refusal(refused)


def _differing(has: tuple[int, ...], usual: tuple[int, ...]) -> str:
    """A loader may cut a tensor that is too large, and say nothing."""
    return f"its shape is {has}, and that of the engine's checkpoint {usual}"


def _refuses(
    load: Loader, parameters: Mapping[str, torch.Tensor], name: str, published: Specs
) -> bool:
    """Whether it refuses this tensor alone: a loader that reads ahead fails after a later one."""
    try:
        with _Recorder(parameters) as recorder, torch.no_grad():
            load(recorder.feed([name], published))
    except Exception:
        return True
    return False


def _refusal(refused: Mapping[str, str]) -> ManifestMismatch:
    differences = tuple(f"{name!r}: {reason}" for name, reason in refused.items())
    text = f"load_weights refuses {len(refused)} published tensor(s): "
    return ManifestMismatch(text + some(differences, "; ", REFUSED_MAX), differences=differences)


class _Unrecordable(RegistrationError):
    """The loader did something that says nothing about what it would have done."""


@dataclass
class _Written:
    """The writes to one parameter so far."""

    # by place: of two copies to one place the later one stays
    pairs: dict[Any, tuple[Index, str, Index, tuple[int, ...]]] = field(default_factory=dict)
    fills: list[tuple[tuple[slice | int, ...], float]] = field(default_factory=list)
    places: list[tuple[slice | int, ...]] = field(default_factory=list)  # of all writes
    needs: dict[str, None] = field(default_factory=dict)
    reason: str = ""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: str | None = None  # the published tensor that was handed over last
        # so that no storage is another one under an address that was used
        self._kept: list[torch.Tensor] = []
        # by storage: several may share one
        self._parameters: dict[int, list[Root]] = defaultdict(list)
        self._published: dict[int, Root] = {}
        # storages that were computed: of which tensors
        self._made_of: dict[int, dict[str, None]] = defaultdict(dict)
        self._written: dict[str, _Written] = defaultdict(_Written)
        self._touched: dict[str, None] = {}
        self._casts: dict[str, tuple[str, str]] = {}
        self._place: tuple[int, ...] | None = None  # that was looked at last, for this tensor
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
            self._kept.append(tensor)
            self.current, self._place = name, None
            yield name, tensor

    def misfit(self, name: str, published: Specs, usual: Specs) -> str:
        """The shapes of a tensor that was just refused, and of what it is for, if they differ."""
        has, place = published[name][1], self._place
        if name in usual:
            return f": {_differing(has, usual[name][1])}" if usual[name][1] != has else ""
        is_other = place is not None and place != has
        return f": its shape is {has}, and that of its place {place}" if is_other else ""

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
            self._place = tuple(result.shape)
        self._trace([*written, *_tensors(result)], [*read, *written])
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

    def _trace(self, made: list[torch.Tensor], of: list[torch.Tensor]) -> None:
        names = dict.fromkeys(name for tensor in of for name in self._names(tensor))
        for tensor in made:
            key = _storage(tensor)
            self._kept.append(tensor)
            if names and key not in self._published and key not in self._parameters:
                self._made_of[key].update(names)

    def _names(self, tensor: torch.Tensor) -> list[str]:
        """The published tensors that `tensor` consists of."""
        key = _storage(tensor)
        if key in self._published:
            self._touched[self._published[key].name] = None
            return [self._published[key].name]
        if key in self._parameters:
            return [name for root in self._roots(tensor) for name in self._written[root.name].needs]
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
            raise _Unrecordable(
                f"load_weights cannot be recorded at {shown(self.current)}: {func} writes {which}"
            )
        if not target.numel():
            return target
        if len(roots) == 1 and roots[0].is_contiguous:
            with contextlib.suppress(NotABox):
                self._cover(roots[0], target)
        names = dict.fromkeys(name for tensor in read for name in self._names(tensor))
        for root in roots:
            self._written[root.name].needs.update(names)
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
                done = self._written[root.name]
                done.reason = (
                    done.reason or f"{reason}, of {some(of) if of else 'no published tensor'}"
                )
        return target

    def _cover(self, parameter: Root, target: torch.Tensor) -> None:
        """Note which elements are written, in whatever way."""
        places = self._written[parameter.name].places
        for place in places_of(parameter, target):
            if not any(key(place) == key(each) for each in places[-1:]):
                places.append(place)

    def _copy(self, parameter: Root, to: torch.Tensor, of: torch.Tensor) -> str:
        """Note a copy; or why it is not a copy of elements as they are."""
        root = self._published.get(_storage(of))
        if root is None:
            return (
                "it is computed"
                if not of.is_floating_point() or self._names(of)
                else "it is a constant"
            )
        if to.dtype != of.dtype:
            cast = self._casts[root.name] = _name(of.dtype), _name(to.dtype)
            return "cast from {} to {}".format(*cast)
        if to.shape != of.shape:
            try:
                of = of.expand(to.shape)
            except RuntimeError as error:
                raise _Unrecordable(
                    f"{root.name!r} does not fit {parameter.name!r}: {error}"
                ) from error
        done = self._written[parameter.name]
        loops = tuple(zip(to.shape, to.stride(), of.stride(), strict=True))
        start = int(to.storage_offset()) - parameter.offset, int(of.storage_offset())
        try:
            for (place, _), (view, order) in boxes(loops, start, (parameter, root)):
                done.pairs[key(place)] = place, root.name, view, order
        except NotABox as reason:
            return f"{reason}"
        return ""

    def _fill(self, parameter: Root, target: torch.Tensor, value: float) -> str:
        done = self._written[parameter.name]
        try:
            places = places_of(parameter, target)
        except NotABox as reason:
            return f"{reason}"
        if any(overlap(place, pair[0]) for place in places for pair in done.pairs.values()):
            return "it is filled with a number after it was copied"
        done.fills += [(place, value) for place in places]
        return ""

    # ----------------------------------------------------------------------------------------------
    # the record

    def finish(
        self,
        parameters: Mapping[str, torch.Tensor],
        published: Sequence[str],
        refused: dict[str, str],
    ) -> Recording:
        unread = tuple(name for name in published if name not in self._touched)
        recording = Recording(unread=unread, refused=refused, casts=self._casts)
        for name, parameter in parameters.items():
            if _storage(parameter) not in self._parameters:
                raise _Unrecordable(f"load_weights gives parameter {name!r} another memory")
            done = self._written.get(name)
            if done is None or not (done.reason or done.pairs or done.fills):
                recording.gaps[name] = parameter.numel()
                continue
            recording.needs[name] = tuple(done.needs)
            with contextlib.suppress(NotABox):
                if gap := parameter.numel() - _written(done.places):
                    recording.gaps[name] = gap
            places = [pair[0] for pair in done.pairs.values()]
            if not done.reason and any_overlap(places):
                done.reason = "places are copied to twice"
            try:
                filled = [(name, *each) for each in _padding(done.fills, places)]
            except NotABox as reason:
                done.reason = done.reason or f"{reason}"
            if done.reason:
                recording.computed[name] = done.reason
                continue
            recording.filled += filled
            if done.pairs:
                recording.sources[name] = [
                    (at[place], _view(whole, view, order))
                    for place, whole, view, order in done.pairs.values()
                ]
        return recording


def _written(places: Sequence[Index]) -> int:
    """How many elements any of these boxes has."""
    if not any_overlap(places):
        return sum(map(count, places))
    apart: list[Index] = []
    for place in places:
        new = [place]
        for before in apart:
            new = [piece for each in new for piece in less(each, before)]
        apart += new
    return sum(map(count, apart))


def _padding(
    fills: Sequence[tuple[Index, float]], places: Sequence[Index]
) -> Iterator[tuple[Index, float]]:
    """What is filled, less what is copied to."""
    for fill, value in fills:
        left = [fill]
        for place in places:
            left = [piece for each in left for piece in less(each, place)]
            if len(left) > PIECES_MAX:
                raise NotABox("what is filled falls into too many pieces")
        yield from ((piece, value) for piece in left)


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


def _view(name: str, index: tuple[slice | int, ...], order: tuple[int, ...]) -> View:
    view = source(name)[index]
    return view if order == tuple(sorted(order)) else view.permute(*order)


def _part(tensor: torch.Tensor, part: Place | View) -> torch.Tensor:
    taken: Taken = part.select(tuple(tensor.shape))
    box = tensor[tuple(slice(each.start, each.last + 1, each.step) for each in taken.box)]
    left = [each for each in range(tensor.dim()) if each not in taken.order]
    whole = box.permute((*taken.order, *left))  # perhaps of no dimension
    return whole.reshape(whole.shape[: len(taken.order)]) if left else whole
