"""The public API without `async`: for trainers and tools that have no event loop.

Every name mirrors one of `tensorhub`'s, with equal arguments, results and errors; see there. Each call blocks its own
thread only, and several threads may call at once (one call at a time on one handle). It may be used in a process that
also runs an event loop, from its other threads or between its steps. Ctrl-C in a call cancels it: nothing of it keeps
running, and the handle's `state` gives the state of the memory.

Responsible for blocking instead of suspending; there is no second implementation.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from tensorhub import conversion as _conversion
from tensorhub.api import embedded as _embedded, hub as _async
from tensorhub.api.fetched import Fetched
from tensorhub.api.opening import Unpicklable, close_after, wrong_use
from tensorhub.api.watcher import Watcher as AsyncWatcher
from tensorhub.api.weights import BeforeWrite, Weights as AsyncWeights
from tensorhub.model.read_plan import ReadPlan
from tensorhub.protocol.secret import resolve_token
from tensorhub.runtime.loop_thread import BlockingMode, finish_blocking as _finish
from tensorhub.types import LATEST, FetchReport, HandleState, Location, ModelInfo, Options, Selector, VersionInfo, WorkerView

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ConvertedWeights", "Coordinator", "Hub", "Watcher", "Weights", "connect", "register_converted", "serve"]

_NOT_ASYNC = "tensorhub.sync has no event loop: write `{0} = sync.{1}(...)`, or `{0} = await tensorhub.{1}(...)`"


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | bytes | os.PathLike[str] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    options: Options | None = None,
) -> Coordinator:
    """Run a coordinator until its `close()`, the end of its `with` block, or the interpreter's exit; see
    `tensorhub.serve`.
    """
    secret, token = resolve_token(token), None  # what this frame has, a traceback with locals shows
    return Coordinator(_finish(_embedded.serving(host, port, secret, state_dir, options)(BlockingMode())))


def connect(
    address: str | Sequence[str],
    *,
    name: str | None = None,
    location: Location | None = None,
    token: str | bytes | os.PathLike[str] | None = None,
    transports: Sequence[str] | None = None,
    prefetch: bool = False,
    options: Options | None = None,
) -> Hub:
    """Join a cluster as a worker until the hub's `close()`, the end of its `with` block, or the interpreter's exit; see
    `tensorhub.connect`.
    """
    secret, token = resolve_token(token), None  # what this frame has, a traceback with locals shows
    joins = _async.joining(address, name, location, secret, transports, options, prefetch)
    return Hub(_finish(joins(BlockingMode())))


class Coordinator(Unpicklable):
    """A coordinator embedded in this process; see `tensorhub.Coordinator`. Made by `serve`. `with` closes it at the end."""

    def __init__(self, coordinator: _embedded.Coordinator) -> None:
        self._coordinator = coordinator

    def __repr__(self) -> str:
        return f"<sync {self._coordinator!r}>"

    @property
    def address(self) -> str:
        """What `connect` takes: "tcp://host:port"."""
        return self._coordinator.address

    def close(self) -> None:
        """End it."""
        _finish(self._coordinator.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _finish(close_after(self._coordinator, error))

    if not TYPE_CHECKING:
        __await__ = __aenter__ = wrong_use(_NOT_ASYNC.format("coordinator", "serve"))
        __aexit__ = None


class Hub(Unpicklable):
    """A worker's view of its cluster; see `tensorhub.Hub`. Made by `connect`. `with hub:` closes it at the end."""

    def __init__(self, hub: _async.Hub) -> None:
        self._hub = hub

    def __repr__(self) -> str:
        return f"<sync {self._hub!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _finish(close_after(self._hub, error))

    if not TYPE_CHECKING:
        __await__ = __aenter__ = wrong_use(_NOT_ASYNC.format("hub", "connect"))
        __aexit__ = None

    @property
    def name(self) -> str:
        """This worker's name."""
        return self._hub.name

    def register(
        self,
        model: str,
        tensors: nn.Module | Mapping[str, Any],
        *,
        group: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        spot: bool = False,
        sources: Mapping[str, object] | Callable[[str], object] | None = None,
        partial: bool = False,
    ) -> Weights:
        """Register tensors in place as one rank's weights; see `tensorhub.Hub.register`."""
        register = self._hub.register(
            model,
            tensors,
            group=group,
            rank=rank,
            world_size=world_size,
            spot=spot,
            sources=sources,
            partial=partial,
        )
        return Weights(_finish(register))

    def newest(self, model: str) -> VersionInfo | None:
        """The newest version that this worker has heard of, without I/O; see `tensorhub.Hub.newest`."""
        return self._hub.newest(model)

    def wait_for(self, model: str, *, at_least: int, timeout: float | None = None) -> VersionInfo:
        """The newest version, once it is `at_least`; see `tensorhub.Hub.wait_for`."""
        return _finish(self._hub.wait_for(model, at_least=at_least, timeout=timeout))

    def watch(self, model: str) -> Watcher:
        """Iterate over newest versions; see `tensorhub.Hub.watch`."""
        return Watcher(self._hub.watch(model))

    def retain(self, model: str, *, latest: int, timeout: float | None = None) -> None:
        """Keep the newest `latest` versions of a model fetchable; see `tensorhub.Hub.retain`."""
        _finish(self._hub.retain(model, latest=latest, timeout=timeout))

    def pin(self, model: str, version: int, timeout: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Keep one version fetchable for the length of the block; see `tensorhub.Hub.pin`."""
        return _Block(self._hub.pin(model, version, timeout))

    def rollback(self, model: str, *, to: int, timeout: float | None = None) -> None:
        """Begin a new lineage of a model after version `to`; see `tensorhub.Hub.rollback`."""
        _finish(self._hub.rollback(model, to=to, timeout=timeout))

    @overload
    def describe(
        self,
        model: str,
        timeout: float | None = None,
        *,
        version: int | None = None,
        after: WorkerView | str | None = None,
        limit: int | None = None,
    ) -> ModelInfo: ...
    @overload
    def describe(
        self, model: None = None, timeout: float | None = None, *, limit: int | None = None
    ) -> tuple[ModelInfo, ...]: ...
    def describe(
        self,
        model: str | None = None,
        timeout: float | None = None,
        *,
        version: int | None = None,
        after: WorkerView | str | None = None,
        limit: int | None = None,
    ) -> ModelInfo | tuple[ModelInfo, ...]:
        """What the coordinator knows of one model, or (None) of all; see `tensorhub.Hub.describe`."""
        ask: Any = self._hub.describe  # the overloads tell one model from all
        found: ModelInfo | tuple[ModelInfo, ...] = _finish(ask(model, timeout, version=version, after=after, limit=limit))
        return found

    def fetch(
        self,
        model: str,
        selector: Selector = LATEST,
        *,
        rank: int | None = 0,
        names: str | Sequence[str] | None = None,
        device: object = "cpu",
        timeout: float | None = None,
    ) -> Fetched:
        """Allocate the tensors of a version and fill them; see `tensorhub.Hub.fetch`."""
        fetch = self._hub.fetch(model, selector, rank=rank, names=names, device=device, timeout=timeout)
        return _finish(fetch)

    def plan(
        self,
        model: str,
        tensors: nn.Module | Mapping[str, Any] | None = None,
        selector: Selector = LATEST,
        *,
        rank: int = 0,
        world_size: int = 1,
        sources: Mapping[str, object] | Callable[[str], object] | None = None,
        partial: bool = False,
        names: str | Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> ReadPlan:
        """The transfer plan of one rank of a layout for a version; see `tensorhub.Hub.plan`."""
        layout = {"rank": rank, "world_size": world_size, "sources": sources, "partial": partial, "names": names}
        return _finish(self._hub.plan(model, tensors, selector, timeout=timeout, **layout))  # type: ignore[arg-type]

    def close(self) -> None:
        """Close every handle and leave the cluster; returns when that is done. The end of a block does it too."""
        _finish(self._hub.close())


class Watcher(Unpicklable):
    """Newest versions of one model, conflated. Iterate with `for`; ends when the hub is closed."""

    def __init__(self, watcher: AsyncWatcher) -> None:
        self._watcher = watcher

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> VersionInfo:
        try:
            return _finish(self._watcher.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


class Weights(Unpicklable):
    """One rank's registered memory; see `tensorhub.Weights`. Made by `Hub.register`."""

    def __init__(self, weights: AsyncWeights) -> None:
        self._weights = weights

    def __repr__(self) -> str:
        return f"<sync {self._weights!r}>"

    @property
    def model(self) -> str:
        return self._weights.model

    @property
    def version(self) -> int | None:
        """The version that the memory holds; None unless ready or draining."""
        return self._weights.version

    @property
    def state(self) -> HandleState:
        """empty, filling, ready, draining, torn, in_doubt or closed."""
        return self._weights.state

    def publish(self, version: int, timeout: float | None = None) -> VersionInfo:
        """Promise that the memory is immutable, as `version`; see `tensorhub.Weights.publish`."""
        return _finish(self._weights.publish(version, timeout))

    def unpublish(self, timeout: float | None = None) -> None:
        """Take the promise back; see `tensorhub.Weights.unpublish`."""
        _finish(self._weights.unpublish(timeout))

    def mutate(self, version: int, timeout: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Unpublish if published, run the body, publish as `version`; see `tensorhub.Weights.mutate`."""
        return _Block(self._weights.mutate(version, timeout))

    def replicate(self, selector: Selector = LATEST, timeout: float | None = None) -> FetchReport:
        """Fill the memory with a version; see `tensorhub.Weights.replicate`."""
        return _finish(self._weights.replicate(selector, timeout))

    def update(
        self,
        selector: Selector = LATEST,
        *,
        at_least: int | None = None,
        before_write: Callable[[VersionInfo], object] | None = None,
        staged: bool = False,
        timeout: float | None = None,
    ) -> FetchReport:
        """Replace what the memory holds by a version; see `tensorhub.Weights.update`. `before_write` is a plain function,
        called in this thread.
        """
        hook = _as_async(before_write) if callable(before_write) else before_write
        update = self._weights.update(selector, at_least=at_least, before_write=hook, staged=staged, timeout=timeout)
        return _finish(update)

    def prefetch(self, selector: Selector = LATEST, timeout: float | None = None) -> FetchReport:
        """Fill host memory with a version while the current one stays in use; see `tensorhub.Weights.prefetch`."""
        return _finish(self._weights.prefetch(selector, timeout))

    def close(self, abandon: bool = False) -> None:
        """Unpublish the version and give the registration up; see `tensorhub.Weights.close`."""
        _finish(self._weights.close(abandon))


class _Block:
    """A block of the async API as a plain one."""

    def __init__(self, block: contextlib.AbstractAsyncContextManager[None]) -> None:
        self._block = block

    def __enter__(self) -> None:
        _finish(self._enter())

    async def _enter(self) -> None:
        await self._block.__aenter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return _finish(self._leave(kind, error, trace))

    async def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)


def _as_async(function: Callable[[VersionInfo], object]) -> BeforeWrite:
    text = (
        "before_write of tensorhub.sync is a plain function, and nobody would await this one: write `def`, not `async def`"
    )
    if inspect.iscoroutinefunction(function):
        raise TypeError(text)

    async def before_write(info: VersionInfo) -> None:
        made = function(info)
        if inspect.iscoroutine(made):
            made.close()
            raise TypeError(text)

    return before_write


def register_converted(
    hub: Hub,
    model: str,
    conversion: _conversion.Conversion,
    *,
    group: str,
    rank: int = 0,
    world_size: int = 1,
    buffers: int = 2,
) -> ConvertedWeights:
    """Register buffers for a converted copy of the weights; see `tensorhub.conversion.register_converted`."""
    asked = hub._hub, model, conversion, group, rank, world_size, buffers
    return ConvertedWeights(_finish(_conversion.registering(*asked, in_thread=False)))


class ConvertedWeights(Unpicklable):
    """One rank's converted copies; see `tensorhub.conversion.ConvertedWeights`. Made by `register_converted`."""

    def __init__(self, weights: _conversion.ConvertedWeights) -> None:
        self._weights = weights

    def __repr__(self) -> str:
        return f"<sync {self._weights!r}>"

    @property
    def version(self) -> int | None:
        """The newest version that a buffer holds."""
        return self._weights.version

    def publish(self, version: int, timeout: float | None = None) -> _conversion.ConversionReport:
        """Convert the present weights in this thread, and publish the copy."""
        return _finish(self._weights.publish(version, timeout))

    def close(self, abandon: bool = False) -> None:
        """Take back all versions and deregister."""
        _finish(self._weights.close(abandon))
