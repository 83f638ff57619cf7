"""Publishes a converted copy of a trainer's weights: cast (fp32 masters as bf16), fused, renamed,
or anything else.

    weights = await register_converted(hub, "actor", cast(model, torch.bfloat16), group="trainer", rank=r, world_size=n)
    ...
    report = await weights.publish(7)    # converts the present weights, publishes the copy, and says what that cost

The trainer's own tensors are not registered, so a step may overwrite them at any time. The copy is.
There are two of it (`buffers`), each registered as a group of its own, and they take turns. So
version 8 is written while version 7 is still being read, without a wait. Version 9 takes the memory
of version 7. As for any `mutate`, the remaining readers of version 7 move to other holders, or
version 9 waits for them for `Options.drain_grace_s` at most.

The price is memory: so many bytes of the copy, `buffers` times. Without it, register the trainer's
tensors themselves.

Responsible for the buffers' turns, and for the report. Not responsible for the conversion, nor for
publishing.
"""  # noqa: E501 - lines as they are typed

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tensorhub.api.hub import Hub
from tensorhub.api.opening import Unpicklable
from tensorhub.api.tools import tell_left_out
from tensorhub.api.weights import Weights
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    RegistrationError,
    StateError,
    TensorHubError,
    shown,
)
from tensorhub.layouts.views import Sources
from tensorhub.memory.describing import local_of
from tensorhub.memory.module_state import PLAIN
from tensorhub.memory.resolving import resolve, resolve_all
from tensorhub.model.stamps import Stamp
from tensorhub.runtime.loop_thread import CallerMode
from tensorhub.types import as_integer

if TYPE_CHECKING:
    import torch
    from torch import nn

Tensors: TypeAlias = Mapping[str, Any]
BUFFERS_MAX = 16
ANEW = "Close the converted weights, and register them anew"


@dataclass(frozen=True, slots=True)
class Conversion:
    """How the copy is made. Each call of `allocate` returns a new set of tensors. `convert` writes
    the present weights into the tensors of such a set; it does not replace them.

    `sources`: as in `Hub.register`, where the copy's tensors are parts or are fused; with shapes,
    since it is published.
    """

    allocate: Callable[[], Tensors]
    convert: Callable[[Tensors], object]
    sources: Sources | None = None
    # state of the module that is no tensor of it, with what it is
    left_out: Mapping[str, str] = field(default_factory=dict)


def cast(
    tensors: nn.Module | Tensors, dtype: torch.dtype, *, sources: Sources | None = None
) -> Conversion:
    """Each floating-point tensor in that dtype, and every other tensor as it is.

    `tensors`: as in `Hub.register`; looked up anew for each version. Of a DTensor only the local
    part is copied, and the copy is a DTensor with equal placements. Tied tensors are tied in the
    copy. `sources`: see `Conversion`.
    """
    import torch

    def kind(tensor: Any) -> torch.dtype:
        its: torch.dtype = tensor.dtype
        return dtype if its.is_floating_point else its

    def allocate() -> Tensors:
        made: dict[object, Any] = {}  # by view: tied tensors share one copy
        found = {}
        for name, tensor in resolve(tensors).items():
            local = local_of(tensor)
            key = _view_of(local) if local.numel() else name
            if key not in made:
                made[key] = torch.empty_like(tensor, dtype=kind(tensor), requires_grad=False)
            found[name] = made[key]
        return found

    def convert(target: Tensors) -> None:
        present = {name: local_of(tensor) for name, tensor in resolve(tensors).items()}
        copies = {name: local_of(tensor) for name, tensor in target.items()}
        shapes, theirs = (
            {name: tuple(t.shape) for name, t in each.items()} for each in (present, copies)
        )
        if shapes != theirs:
            names = sorted(
                name
                for name in shapes.keys() | theirs.keys()
                if shapes.get(name) != theirs.get(name)
            )
            raise RegistrationError(
                f"{len(names)} tensor(s) have come, gone or changed their shape since the copy was "
                f"registered: "
                f"{', '.join(map(repr, names[:10]))}. {ANEW}"
            )
        into: dict[int, tuple[Any, Any]] = {}  # tied tensors once
        untied = []
        for name, tensor in present.items():
            _, first = into.setdefault(id(target[name]), (copies[name], tensor))
            if _view_of(first) != _view_of(tensor):
                untied.append(name)
        if untied:
            raise RegistrationError(
                f"{len(untied)} tensor(s) were tied when the copy was registered, and are not any "
                f"more: {', '.join(map(repr, untied[:10]))}. {ANEW}"
            )
        with torch.no_grad():
            for copy, tensor in into.values():
                copy.copy_(tensor)

    resolved = resolve_all(tensors)
    left_out = resolved.left_out | dict.fromkeys(resolved.carried, PLAIN)
    return Conversion(allocate, convert, sources, left_out)


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What one publication cost.

    `nbytes`: of one buffer. `reclaim_s`: until a buffer was free, which is the wait for readers of
    an older version. `convert_s`: the conversion itself, on a GPU only until it is queued.
    `publish_s`: until all ranks had published.
    """

    version: int
    nbytes: int
    reclaim_s: float
    convert_s: float
    publish_s: float


async def register_converted(
    hub: Hub,
    model: str,
    conversion: Conversion,
    *,
    group: str,
    rank: int = 0,
    world_size: int = 1,
    buffers: int = 2,
) -> ConvertedWeights:
    """Allocate the buffers and register each as a group of its own, `group/0`, `group/1`, and so
    on.

    `buffers`: with `retain(latest=n)`, n + 1 buffers let a version be published without a wait.
    Raises as `Hub.register`.
    """
    if not isinstance(group, str):
        raise InvalidType(f"group={shown(group)}: give a string, the same on all ranks")
    count = as_integer(buffers)
    if count is None or not 2 <= count <= BUFFERS_MAX:
        raise InvalidValue(
            f"buffers={shown(buffers)}: give 2 to {BUFFERS_MAX}; with one, each publication waits "
            f"for its readers"
        )
    tell_left_out(conversion.left_out, model, hub._worker.options)
    made: list[_Buffer] = []
    try:
        for number in range(count):
            tensors = conversion.allocate()
            weights = await hub.register(
                model,
                tensors,
                group=f"{group}/{number}",
                rank=rank,
                world_size=world_size,
                sources=conversion.sources,
            )
            made.append(_Buffer(tensors, weights))
    except BaseException:
        for buffer in made:
            with contextlib.suppress(TensorHubError):
                await buffer.weights.close(abandon=True)
        raise
    return ConvertedWeights(conversion, made, hub._thread.mode)


@dataclass(frozen=True, slots=True)
class _Buffer:
    tensors: Tensors
    weights: Weights


class ConvertedWeights(Unpicklable):
    """One rank's converted copies. Made by `register_converted`."""

    def __init__(self, conversion: Conversion, buffers: list[_Buffer], mode: CallerMode) -> None:
        self._conversion = conversion
        self._buffers = buffers
        self._mode = mode

    def __repr__(self) -> str:
        versions = ", ".join(str(buffer.weights.version) for buffer in self._buffers)
        return f"<ConvertedWeights of {self._buffers[0].weights.model}, versions {versions}>"

    @property
    def version(self) -> int | None:
        """The newest version that a buffer holds."""
        return max(
            (v for buffer in self._buffers if (v := buffer.weights.version) is not None),
            default=None,
        )

    def stamp(self) -> Stamp:
        """The stamp of the newest version that a buffer holds; see `Weights.stamp`. Raises
        StateError if none holds one.
        """
        found: list[Stamp] = []
        for buffer in self._buffers:
            with contextlib.suppress(StateError):
                found.append(buffer.weights.stamp())
        if not found:
            return self._buffers[0].weights.stamp()  # raises why
        return max(found, key=lambda each: (each.lineage, each.version))

    async def publish(self, version: int, timeout: float | None = None) -> ConversionReport:
        """Convert the present weights into the buffer of the oldest version, and publish that. All
        ranks call it.

        The conversion runs in a thread where it is the CPU's work; the caller must not change the
        weights before this returns. Raises as `Weights.mutate`, and whatever the conversion raises;
        then nothing is published.
        """
        buffer = min(
            self._buffers,
            key=lambda each: -1 if each.weights.version is None else each.weights.version,
        )
        began = time.perf_counter()
        async with buffer.weights.mutate(version, timeout):
            reclaimed = time.perf_counter()
            convert = partial(self._conversion.convert, buffer.tensors)
            if any(getattr(tensor, "is_cuda", False) for tensor in buffer.tensors.values()):
                convert()  # a GPU's work is queued on the stream of the caller's thread
            else:
                await self._mode.off_loop(convert)
            converted = time.perf_counter()
        published = time.perf_counter()
        seconds = reclaimed - began, converted - reclaimed, published - converted
        return ConversionReport(version, _nbytes(buffer.tensors), *seconds)

    async def close(self, abandon: bool = False) -> None:
        """Take back all versions and deregister; see `Weights.close`."""
        for buffer in self._buffers:
            await buffer.weights.close(abandon)


def _view_of(local: Any) -> object:
    """Equal for tied tensors: they are one view of one memory."""
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def _nbytes(tensors: Tensors) -> int:
    distinct = {id(tensor): local_of(tensor) for tensor in tensors.values()}
    return sum(int(local.nbytes) for local in distinct.values())
