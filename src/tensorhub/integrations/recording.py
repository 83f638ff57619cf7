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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tensorhub import at, source
from tensorhub.errors import ManifestMismatch, RegistrationError, shown, some
from tensorhub.integrations.recorded_boxes import Index, NotABox, any_overlap, around, count, less
from tensorhub.integrations.recorder import Recorder, Specs, Unrecordable
from tensorhub.layouts.views import Place, Taken, View

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

# numbers that a cast changes little: all others are codes, which mean nothing in another dtype
PLAIN_DTYPES = {"float64", "float32", "bfloat16", "float16"}
REFUSED_MAX = 100  # names in an error
PIECES_MAX = 10_000  # of what is filled and not copied to


@dataclass(frozen=True)
class Parts:
    """What is read of a published tensor of this shape, if anything."""

    of: tuple[int, ...]
    places: tuple[Index, ...] = ()


@dataclass(frozen=True)
class Padding:
    """A number fills so many elements of a published tensor's place in this parameter."""

    parameter: str
    elements: int
    place: tuple[int, ...]  # its shape


@dataclass
class Recording:
    """`sources`: an entry for each parameter that consists of copies alone. `filled`: places that
    the loader fills with a number and copies nothing to, such as padding. `computed`: all other
    parameters that were written, each with the reason. `needs`: the published tensors that any part
    of a parameter comes from, also in `computed`. `unread`: published tensors that the loader left
    alone. `refused`: published tensors that it refuses, each with the reason. `gaps`: parameters of
    which so many elements were not written. `casts`: published tensors that are cast, each with
    their own dtype and the parameter's.

    Of published tensors whose shapes are not the usual ones: `parts`, what is read of those that
    are not read as wholes; `padded`, those whose place is larger.
    """

    sources: dict[str, list[tuple[Place, View]]] = field(default_factory=dict)
    filled: list[tuple[str, tuple[slice | int, ...], float]] = field(default_factory=list)
    computed: dict[str, str] = field(default_factory=dict)
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    gaps: dict[str, int] = field(default_factory=dict)
    casts: dict[str, tuple[str, str]] = field(default_factory=dict)
    parts: dict[str, Parts] = field(default_factory=dict)
    padded: dict[str, Padding] = field(default_factory=dict)

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

    def miscast(self, usual: Specs) -> dict[str, str]:
        """Published tensors whose numbers the loader's cast would spoil: each with the reason.
        `usual`: what it was given before.
        """
        return {
            name: f"it is {has}, and the engine's parameter {wants}"
            for name, (has, wants) in self.casts.items()
            if not PLAIN_DTYPES.issuperset((has, wants)) and usual.get(name, ("",))[0] != has
        }

    def too_small(self, specs: Specs, checked: Collection[str]) -> dict[str, str]:
        """Published tensors that do not fill their place, each with the reason. `checked`:
        parameters that are padded whatever the shape is, which their loader checks.
        """
        return {
            name: f"its shape is {specs[name][1]}, which is too small: {each.elements} elements of "
            f"its place {each.place} on a rank (in {each.parameter!r}) would come from no "
            f"published tensor, and no checkpoint of the engine's says that this is right"
            for name, each in self.padded.items()
            if each.parameter not in checked
        }

    def make(self, name: str, into: torch.Tensor, published: Mapping[str, torch.Tensor]) -> None:
        """Write a parameter that consists of copies alone, as `sources` and `filled` say it."""
        for place, view in self.sources[name]:
            _part(into, place).copy_(_part(published[view.name], view))
        self.fill_numbers({name: into})


def left_out(ranks: Sequence[Mapping[str, Parts]]) -> dict[str, str]:
    """Published tensors that all ranks together read only a part of, each with the reason, given
    `Recording.parts` of each rank.
    """
    found = {}
    for name, its in ranks[0].items():
        if all(name in parts for parts in ranks):
            places = [place for parts in ranks for place in parts[name].places]
            if places and _extent(places) < math.prod(its.of):
                found[name] = f"its shape is {its.of}, and the engine reads {around(places)} of it"
    return found


def record(
    load: Loader,
    parameters: Mapping[str, torch.Tensor],
    published: Specs,
    usual: Specs | None = None,
) -> Recording:
    """What `load` does with published tensors of these names, dtypes and shapes. No parameter is
    written.

    `parameters`: where the loader writes, on any device, meta included. `usual`: what it was given
    before, of the same shapes. Raises RegistrationError (it does what cannot be recorded; the
    tensor is named), ManifestMismatch (tensors that it refuses cannot be told apart).
    """
    usual = usual or {}
    known = {name for name in published if name in usual and usual[name][1] == published[name][1]}
    refused: dict[str, str] = {}
    said_before: set[str] = set()
    while True:
        recorder = Recorder(parameters, known)
        wanted = [name for name in published if name not in refused]
        try:
            with recorder, torch.no_grad():
                load(recorder.feed(wanted, published))
        except Unrecordable:
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
            refused[name] = f"{said}{_misfit(name, published, usual, recorder.place)}"
        else:
            resized = {
                name: _differing(published[name][1], usual[name][1])
                for name in wanted
                if name in usual
                if math.prod(published[name][1]) != math.prod(usual[name][1])
            }
            return _finish(recorder, parameters, wanted, published, refused | resized)
    differences = tuple(f"{name!r}: {reason}" for name, reason in refused.items())
    raise ManifestMismatch(
        f"load_weights refuses {len(refused)} published tensor(s), and perhaps others: "
        f"{some(differences, '; ', REFUSED_MAX)}",
        differences=differences,
    )


def _differing(has: tuple[int, ...], usual: tuple[int, ...]) -> str:
    """A loader may cut a tensor that is too large, and say nothing."""
    return f"its shape is {has}, and that of the engine's checkpoint {usual}"


def _misfit(name: str, published: Specs, usual: Specs, place: tuple[int, ...] | None) -> str:
    """The shapes of a tensor that was just refused, and of what it is for, if they differ."""
    has = published[name][1]
    if name in usual:
        return f": {_differing(has, usual[name][1])}" if usual[name][1] != has else ""
    if place is None:
        return ""
    # with tensor parallelism a wrong shape may be that of the place on one rank
    its_place = f", and that of its place {place}" if place != has else ""
    return f": its shape is {has}{its_place}"


def _refuses(
    load: Loader, parameters: Mapping[str, torch.Tensor], name: str, published: Specs
) -> bool:
    """Whether it refuses this tensor alone: a loader that reads ahead fails after a later one."""
    try:
        with Recorder(parameters) as recorder, torch.no_grad():
            load(recorder.feed([name], published))
    except Exception:
        return True
    return False


def _finish(
    recorder: Recorder,
    parameters: Mapping[str, torch.Tensor],
    wanted: Sequence[str],
    published: Specs,
    refused: dict[str, str],
) -> Recording:
    recording = Recording(
        unread=tuple(name for name in wanted if name not in recorder.touched),
        refused=refused,
        casts=recorder.casts,
        parts=dict(_parts_read(recorder, wanted, published)),
        padded=dict(_padded(recorder, published)),
    )
    for name, parameter in parameters.items():
        if not recorder.has(parameter):
            raise Unrecordable(f"load_weights gives parameter {name!r} another memory")
        done = recorder.written.get(name)
        if done is None or not (done.reason or done.pairs or done.fills):
            recording.gaps[name] = parameter.numel()
            continue
        recording.needs[name] = tuple(done.needs)
        with contextlib.suppress(NotABox):
            if gap := parameter.numel() - _extent(done.places):
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


def _parts_read(
    recorder: Recorder, wanted: Sequence[str], published: Specs
) -> Iterator[tuple[str, Parts]]:
    for name in wanted:
        places = recorder.reads.get(name, [])
        if name in recorder.known or places is None:
            continue
        if _extent(places) < math.prod(published[name][1]):
            yield name, Parts(published[name][1], tuple(places))


def _padded(recorder: Recorder, published: Specs) -> Iterator[tuple[str, Padding]]:
    for parameter, done in recorder.written.items():
        copied = [place for places in done.copied.values() for place in places]
        for name in {**done.numbers, **done.joined}:
            if name in recorder.known or (name in recorder.reads and name not in done.needs):
                continue  # it has nothing to do with what was written
            elements = done.joined.get(name, 0)
            with contextlib.suppress(NotABox):
                numbers = [(place, 0.0) for place in done.numbers.get(name, ())]
                elements += _extent([place for place, _ in _padding(numbers, copied)])
            if elements:
                places = [*done.copied.get(name, ()), *done.numbers.get(name, ())]
                dims = len(published[name][1])  # one of several experts has more
                yield name, Padding(parameter, elements, around(places)[-dims:])


def _extent(places: Sequence[Index]) -> int:
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


def _view(name: str, index: tuple[slice | int, ...], order: tuple[int, ...]) -> View:
    view = source(name)[index]
    return view if order == tuple(sorted(order)) else view.permute(*order)


def _part(tensor: torch.Tensor, part: Place | View) -> torch.Tensor:
    taken: Taken = part.select(tuple(tensor.shape))
    box = tensor[tuple(slice(each.start, each.last + 1, each.step) for each in taken.box)]
    left = [each for each in range(tensor.dim()) if each not in taken.order]
    whole = box.permute((*taken.order, *left))  # perhaps of no dimension
    return whole.reshape(whole.shape[: len(taken.order)]) if left else whole
