"""The public API without `async`: for trainers and tools that have no event loop.

Every name mirrors one of `tensorhub`'s, with the same arguments, results and errors; see there. Each call blocks its own
thread only, and several threads may call at once (one call at a time on one handle). It may be used in a process that
also runs an event loop, from its other threads or between its steps. Ctrl-C in a call cancels it: nothing of it keeps
running, and the handle's `state` says what the memory is.

Responsible for blocking instead of suspending; there is no second implementation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from tensorhub import hub as _async
from tensorhub.fetched import Fetched
from tensorhub.protocol.secret import resolve_token
from tensorhub.runtime.loop_thread import BlockingSide, finish_blocking as _finish
from tensorhub.types import LATEST, FetchReport, HandleState, Location, ModelInfo, Options, Selector, VersionInfo
from tensorhub.watcher import Watcher as AsyncWatcher
from tensorhub.weights import BeforeWrite, Weights as AsyncWeights

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Coordinator", "Hub", "Watcher", "Weights", "connect", "serve"]

Coordinator = _async.Coordinator
A = TypeVar("A")
T = TypeVar("T")


class _Block(Generic[A, T]):
    """An async context manager as a plain one."""

    def __init__(self, block: contextlib.AbstractAsyncContextManager[A], wrap: Callable[[A], T]) -> None:
        self._block = block
        self._wrap = wrap

    def __enter__(self) -> T:
        return self._wrap(_finish(_enter(self._block)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return _finish(_leave(self._block, kind, error, trace))


async def _enter(block: contextlib.AbstractAsyncContextManager[A]) -> A:
    return await block.__aenter__()


async def _leave(
    block: contextlib.AbstractAsyncContextManager[A],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> bool | None:
    return await block.__aexit__(kind, error, trace)


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    token: str | bytes | os.PathLike[str] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    ha: object = None,
    tls: object = None,
    options: Options | None = None,
) -> contextlib.AbstractContextManager[Coordinator]:
    """Run a coordinator for the length of the block; see `tensorhub.serve`."""
    _async.refuse_unbuilt(ha=ha, tls=tls)
    block = _async.serve_on(BlockingSide(), host, port, resolve_token(token), state_dir, options or Options())
    return _Block(block, lambda coordinator: coordinator)


def connect(
    address: str | Sequence[str],
    *,
    name: str | None = None,
    location: Location | None = None,
    token: str | bytes | os.PathLike[str] | None = None,
    transports: Sequence[str] | None = None,
    tls: object = None,
    prefetch: bool = False,
    options: Options | None = None,
) -> contextlib.AbstractContextManager[Hub]:
    """Join a cluster as a worker for the length of the block; see `tensorhub.connect`."""
    _async.refuse_unbuilt(tls=tls)
    side, here = BlockingSide(), location or Location()
    block = _async.connect_on(side, address, name, here, resolve_token(token), transports, options or Options(), prefetch)
    return _Block(block, Hub)


class Hub:
    """A worker's view of its cluster; see `tensorhub.Hub`. Made by `connect`."""

    def __init__(self, hub: _async.Hub) -> None:
        self._hub = hub

    def __repr__(self) -> str:
        return f"<sync {self._hub!r}>"

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
    ) -> Weights:
        """Register tensors in place as one rank's weights; see `tensorhub.Hub.register`."""
        register = self._hub.register(model, tensors, group=group, rank=rank, world_size=world_size, spot=spot)
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

    @contextlib.contextmanager
    def pin(self, model: str, version: int, timeout: float | None = None) -> Iterator[None]:
        """Keep one version fetchable for the length of the block; see `tensorhub.Hub.pin`."""
        with _Block(self._hub.pin(model, version, timeout), lambda nothing: nothing):
            yield

    def rollback(self, model: str, *, to: int, timeout: float | None = None) -> None:
        """Begin a new lineage of a model after version `to`; see `tensorhub.Hub.rollback`."""
        _finish(self._hub.rollback(model, to=to, timeout=timeout))

    @overload
    def describe(self, model: str, timeout: float | None = None) -> ModelInfo: ...
    @overload
    def describe(self, model: None = None, timeout: float | None = None) -> tuple[ModelInfo, ...]: ...
    def describe(self, model: str | None = None, timeout: float | None = None) -> ModelInfo | tuple[ModelInfo, ...]:
        """What the coordinator knows of one model, or (None) of all; see `tensorhub.Hub.describe`."""
        if model is None:
            return _finish(self._hub.describe(None, timeout))
        return _finish(self._hub.describe(model, timeout))

    def fetch(
        self,
        model: str,
        selector: Selector = LATEST,
        *,
        rank: int = 0,
        names: str | Sequence[str] | None = None,
        device: object = "cpu",
        timeout: float | None = None,
    ) -> Fetched:
        """Allocate the tensors of a version and fill them; see `tensorhub.Hub.fetch`."""
        fetch = self._hub.fetch(model, selector, rank=rank, names=names, device=device, timeout=timeout)
        return _finish(fetch)

    def close(self) -> None:
        """Close every handle and leave the cluster; the end of the block does it too."""
        _finish(self._hub.close())


class Watcher:
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


class Weights:
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

    @contextlib.contextmanager
    def mutate(self, version: int, timeout: float | None = None) -> Iterator[None]:
        """Unpublish if published, run the body, publish as `version`; see `tensorhub.Weights.mutate`."""
        with _Block(self._weights.mutate(version, timeout), lambda nothing: nothing):
            yield

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
        hook = None if before_write is None else _as_async(before_write)
        update = self._weights.update(selector, at_least=at_least, before_write=hook, staged=staged, timeout=timeout)
        return _finish(update)

    def prefetch(self, selector: Selector = LATEST, timeout: float | None = None) -> FetchReport:
        """Fill host memory with a version while the current one stays in use; see `tensorhub.Weights.prefetch`."""
        return _finish(self._weights.prefetch(selector, timeout))

    def close(self, abandon: bool = False) -> None:
        """Withdraw what is published and give the registration up; see `tensorhub.Weights.close`."""
        _finish(self._weights.close(abandon))


def _as_async(function: Callable[[VersionInfo], object]) -> BeforeWrite:
    async def before_write(info: VersionInfo) -> None:
        function(info)

    return before_write
