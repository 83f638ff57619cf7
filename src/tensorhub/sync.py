"""The public API without `async`: for trainers and tools that have no event loop.

Every name mirrors one of `tensorhub`'s, with equal arguments, results and errors, and has its
documentation. Each call blocks its own thread only, and several threads may call at once (one call
at a time on one handle). It may be used in a process that also runs an event loop, from its other
threads or between its steps. Ctrl-C in a call cancels the call: nothing of the call keeps running,
and the handle's `state` gives the state of the memory.

Responsible for blocking instead of suspending; there is no second implementation. The methods are
made of the async ones, with their types.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    overload,
)

from tensorhub import conversion as _conversion
from tensorhub.api import (
    archiving as _archiving,
    embedded as _embedded,
    hub as _hub,
    stamping as _stamping,
    watcher as _watcher,
    weights as _weights,
)
from tensorhub.api.opening import AsyncClosable, Opening, Unpicklable, close_after
from tensorhub.errors import InvalidType
from tensorhub.model.stamps import Stamp
from tensorhub.observed import ClusterEvent
from tensorhub.protocol.secret import resolve_token
from tensorhub.runtime.loop_thread import finish_blocking as _finish
from tensorhub.types import (
    LATEST,
    FetchReport,
    HandleState,
    ModelInfo,
    Selector,
    VersionInfo,
    WorkerView,
)

__all__ = [
    "Archive",
    "ConvertedWeights",
    "Coordinator",
    "Hub",
    "Watcher",
    "Weights",
    "archive",
    "check_stamp",
    "connect",
    "register_converted",
    "serve",
]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
C = TypeVar("C", bound=AsyncClosable)


class _Facade(Unpicklable, Generic[T]):
    """The blocking form of one object of the async API."""

    def __init__(self, of: T) -> None:
        self._async = of

    def __repr__(self) -> str:
        return f"<sync {self._async!r}>"


def _making(
    call: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], made: Callable[[R], S]
) -> Callable[Concatenate[_Facade[Any], P], S]:
    """The blocking form of a call of the async API; `made` gives the blocking form of its
    result.
    """

    @functools.wraps(call)
    def blocking(facade: _Facade[Any], /, *given: P.args, **named: P.kwargs) -> S:
        return made(_finish(call(facade._async, *given, **named)))

    return blocking


def _blocking(
    call: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Facade[Any], P], R]:
    return _making(call, lambda result: result)


def _opening(call: Callable[P, Opening[C]], made: Callable[[C], S]) -> Callable[P, S]:
    """The blocking form of a call that opens something."""

    @functools.wraps(call)
    def opened(*given: P.args, **named: P.kwargs) -> S:
        named["token"] = resolve_token(named.get("token"))  # type: ignore[arg-type]  # a traceback with locals shows it
        return made(call(*given, **named).finish_blocking())

    return opened


class _Opened(_Facade[C]):
    """What has a `close()`; a `with` block calls it at the end."""

    _call: ClassVar[str]  # by which it is opened

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _finish(close_after(self._async, error))

    if not TYPE_CHECKING:

        def __await__(self):
            its, call = type(self).__name__.lower(), self._call
            text = f"write `{its} = sync.{call}(...)`, or `{its} = await tensorhub.{call}(...)`"
            raise TypeError(f"tensorhub.sync has no event loop: {text}")

        __aenter__ = __await__
        __aexit__ = None


class Coordinator(_Opened[_embedded.Coordinator]):
    """A coordinator embedded in this process; see `tensorhub.Coordinator`. Made by `serve`. `with`
    closes it at the end.
    """

    _call = "serve"

    @property
    def address(self) -> str:
        """What `connect` takes: "tcp://host:port"."""
        return self._async.address

    @property
    def leading(self) -> bool:
        """Whether it serves; else it stands by."""
        return self._async.leading

    @property
    def http_url(self) -> str | None:
        """Of its HTTP endpoint and dashboard; None without `Options.http`."""
        return self._async.http_url

    close = _blocking(_embedded.Coordinator.close)


class Weights(_Facade[_weights.Weights]):
    """One rank's registered memory; see `tensorhub.Weights`. Made by `Hub.register`."""

    @property
    def model(self) -> str:
        return self._async.model

    @property
    def version(self) -> int | None:
        """The version that the memory holds; None unless ready or draining."""
        return self._async.version

    @property
    def state(self) -> HandleState:
        """empty, filling, ready, draining, torn, in_doubt or closed."""
        return self._async.state

    def stamp(self) -> Stamp:
        """Which content is in the memory at this moment; see `tensorhub.Weights.stamp`."""
        return self._async.stamp()

    publish = _blocking(_weights.Weights.publish)
    unpublish = _blocking(_weights.Weights.unpublish)
    replicate = _blocking(_weights.Weights.replicate)
    prefetch = _blocking(_weights.Weights.prefetch)
    close = _blocking(_weights.Weights.close)

    def mutate(
        self, version: int, timeout: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Unpublish if published, run the body, publish as `version`; see
        `tensorhub.Weights.mutate`.
        """
        return _Block(self._async.mutate(version, timeout))

    def update(
        self,
        selector: Selector = LATEST,
        *,
        at_least: int | None = None,
        before_write: Callable[[VersionInfo], object] | None = None,
        staged: bool = False,
        timeout: float | None = None,
    ) -> FetchReport:
        """Replace what the memory holds by a version; see `tensorhub.Weights.update`.
        `before_write` is a plain function, called in this thread.
        """
        hook = _as_async(before_write) if callable(before_write) else before_write
        update = self._async.update(
            selector, at_least=at_least, before_write=hook, staged=staged, timeout=timeout
        )
        return _finish(update)


class Watcher(_Facade[_watcher.Watcher]):
    """Newest versions of one model, conflated. Iterate with `for`; ends when the hub is closed."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> VersionInfo:
        try:
            return _finish(self._async.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


class Hub(_Opened[_hub.Hub]):
    """A worker's view of its cluster; see `tensorhub.Hub`. Made by `connect`. `with hub:` closes it
    at the end.
    """

    _call = "connect"

    @property
    def name(self) -> str:
        """This worker's name."""
        return self._async.name

    @property
    def http_url(self) -> str | None:
        """Of this worker's HTTP endpoint; None without `Options.http`."""
        return self._async.http_url

    register = _making(_hub.Hub.register, Weights)
    wait_for = _blocking(_hub.Hub.wait_for)
    retain = _blocking(_hub.Hub.retain)
    rollback = _blocking(_hub.Hub.rollback)
    fetch = _blocking(_hub.Hub.fetch)
    plan = _blocking(_hub.Hub.plan)
    explain = _blocking(_hub.Hub.explain)
    close = _blocking(_hub.Hub.close)

    def newest(self, model: str) -> VersionInfo | None:
        """The newest version that this worker has heard of, without I/O; see
        `tensorhub.Hub.newest`.
        """
        return self._async.newest(model)

    def watch(self, model: str) -> Watcher:
        """Iterate over newest versions; see `tensorhub.Hub.watch`."""
        return Watcher(self._async.watch(model))

    def events(
        self,
        *,
        follow: bool = False,
        after: int | ClusterEvent | None = None,
        timeout: float | None = None,
    ) -> Iterator[ClusterEvent]:
        """Iterate over what has happened in the cluster; see `tensorhub.Hub.events`."""
        events = self._async.events(follow=follow, after=after, timeout=timeout)
        while True:
            try:
                event = _finish(_awaited(events.__anext__()))
            except StopAsyncIteration:
                return
            yield event

    def pin(
        self, model: str, version: int, timeout: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Keep one version fetchable for the length of the block; see `tensorhub.Hub.pin`."""
        return _Block(self._async.pin(model, version, timeout))

    if TYPE_CHECKING:

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
        def describe(self, *given: Any, **named: Any) -> Any: ...
    else:
        describe = _blocking(_hub.Hub.describe)


class Archive(_Opened[_archiving.Archive]):
    """An archive of a model; see `tensorhub.Archive`. Made by `archive`. `with` closes it at the
    end.
    """

    _call = "archive"

    @property
    def versions(self) -> tuple[_archiving.ArchivedVersion, ...]:
        """What is archived, ascending by number."""
        return self._async.versions

    wait_for = _blocking(_archiving.Archive.wait_for)
    close = _blocking(_archiving.Archive.close)


def archive(
    hub: Hub,
    model: str,
    url: str,
    *,
    every: int = 1,
    keep: int | None = None,
    keep_every: int = 0,
    serve: bool = False,
    take_over: bool = False,
) -> Archive:
    """Keep versions of a model in object storage, and serve them; see `tensorhub.archive`."""
    opening = _archiving.archive(
        hub._async,
        model,
        url,
        every=every,
        keep=keep,
        keep_every=keep_every,
        serve=serve,
        take_over=take_over,
    )
    return Archive(opening.finish_blocking())


def check_stamp(
    stamp: Stamp, where: Hub | Archive | str, timeout: float | None = None
) -> VersionInfo:
    """The version that a stamp names; see `tensorhub.check_stamp`."""
    if isinstance(where, Hub):
        return _finish(_stamping.check_stamp(stamp, where._async, timeout))
    of = where._async if isinstance(where, Archive) else where
    return _stamping.check_archived(stamp, of, timeout)


class _Block:
    """A block of the async API as a plain one."""

    def __init__(self, block: contextlib.AbstractAsyncContextManager[None]) -> None:
        self._block = block

    def __enter__(self) -> None:
        _finish(_awaited(self._block.__aenter__()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return _finish(_awaited(self._block.__aexit__(kind, error, trace)))


async def _awaited(coroutine: Awaitable[R]) -> R:
    return await coroutine


def _as_async(function: Callable[[VersionInfo], object]) -> _weights.BeforeWrite:
    text = (
        "before_write of tensorhub.sync is a plain function, and nobody would await this one: "
        "write `def`, not `async def`"
    )
    if inspect.iscoroutinefunction(function):
        raise InvalidType(text)

    async def before_write(info: VersionInfo) -> None:
        made = function(info)
        if inspect.iscoroutine(made):
            made.close()
            raise InvalidType(text)

    return before_write


class ConvertedWeights(_Facade[_conversion.ConvertedWeights]):
    """One rank's converted copies; see `tensorhub.conversion.ConvertedWeights`. Made by
    `register_converted`.
    """

    @property
    def version(self) -> int | None:
        """The newest version that a buffer holds."""
        return self._async.version

    def stamp(self) -> Stamp:
        """The stamp of the newest version that a buffer holds."""
        return self._async.stamp()

    publish = _blocking(_conversion.ConvertedWeights.publish)
    close = _blocking(_conversion.ConvertedWeights.close)


serve = _opening(_embedded.serve, Coordinator)
connect = _opening(_hub.connect, Hub)
register_converted = _making(_conversion.register_converted, ConvertedWeights)
