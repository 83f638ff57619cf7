"""One registered memory, as its caller sees it: publish, take back, fill. A bridge to the library's
own thread, no logic.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial, wraps
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar

from tensorhub.api.opening import Block, Unpicklable
from tensorhub.api.tracing import traced, tracing
from tensorhub.errors import (
    CoordinatorUnavailable,
    GroupAborted,
    InvalidType,
    InvalidValue,
    LeaseLost,
    MutabilityViolation,
    OperationTimeout,
    RegistrationError,
    StaleWeightsWarning,
    StateError,
    TensorHubError,
    shown,
    text_of,
)
from tensorhub.memory.regions import CallersMemory
from tensorhub.model.stamps import Stamp
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.runtime.worker.ports import ThreadPort
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.types import (
    LATEST,
    FetchReport,
    HandleState,
    OpKind,
    Selector,
    VersionInfo,
    check_flag,
    check_selector,
    check_version,
)
from tensorhub.worker.calls import FillCall

NAMES_SHOWN_MAX = 5  # in an error
REFUSAL_S = 5.0  # until the coordinator has been told that this rank makes no call
# each rank that it concerns is told by itself: none refuses another rank's call for it
OF_EACH_RANK = (LeaseLost, CoordinatorUnavailable, OperationTimeout)

_NO_STAMP: Mapping[HandleState, str] = {
    HandleState.EMPTY: "the memory holds no version: publish or update first",
    HandleState.FILLING: "a call is changing the memory: ask again when it has returned",
    HandleState.TORN: "the memory is torn, and its bytes are no version's: update() repairs it, "
    "and what was published is the caller's to write anew after unpublish()",
    HandleState.IN_DOUBT: "the outcome of the last call is not known yet: the next call waits for "
    "it",
    HandleState.CLOSED: "the registration has ended",
}

BeforeWrite = Callable[[VersionInfo], Awaitable[None]]


P = ParamSpec("P")
R = TypeVar("R")


def _tells_torn(
    call: Callable[Concatenate[Weights, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Weights, P], Coroutine[Any, Any, R]]:
    @wraps(call)
    async def telling(weights: Weights, /, *given: P.args, **named: P.kwargs) -> R:
        with weights._telling_torn():
            return await call(weights, *given, **named)

    return telling


class Weights(Unpicklable):
    """One rank's registered memory. Made by `Hub.register`.

    `publish`, `mutate`, `replicate`, `update` and `prefetch` raise RegistrationError, before they
    do anything, if the module or mapping has other tensors by now: see `Hub.register`. So do
    `replicate`, `update` and `prefetch` if a tensor is in memory that cannot be written, such as a
    read-only mapping of a file: that can be published only.
    """

    def __init__(
        self,
        handle: CallersHandle,
        memory: CallersMemory,
        worker: CallersWorker,
        thread: ThreadPort,
        *,
        keeps: object,
    ) -> None:
        """`keeps`: stays open as long as this handle is referenced."""
        self._keeps = keeps
        self._handle = handle
        self._memory = memory
        self._worker = worker
        self._thread = thread

    def __repr__(self) -> str:
        shard = self._handle.member.shard
        return (
            f"<Weights of {shard.model}/{shard.group}[{shard.rank}] {self.state.value} "
            f"version={self.version}>"
        )

    @property
    def model(self) -> str:
        """The model under which the memory is registered."""
        return self._handle.member.shard.model

    @property
    def version(self) -> int | None:
        """The version that the memory holds; None unless ready, draining, or published and torn."""
        return self._handle.member.version

    @property
    def state(self) -> HandleState:
        """empty, filling, ready, draining, torn, in_doubt or closed (each equals that string).

        Published memory that was seen to be written, replaced or freed is torn, until `unpublish`
        or `mutate` takes it back.
        """
        state, content = self._handle.member.state, self._handle.member.content
        return (
            HandleState.TORN
            if state is HandleState.READY and content is not None and content.spoiled
            else state
        )

    def stamp(self) -> Stamp:
        """Which content is in the memory at this moment: for a sample's metadata, say. No I/O; any
        thread may call it at any time.

        It never names content of which a byte is missing, or was overwritten by this library or
        within `mutate`. Bytes that stay the same while something is made: compare the stamp before
        with the one after.

        Raises StateError while no version is in place: the memory is empty, filling, torn, in
        doubt, or closed.
        """
        member = self._handle.member
        content = member.in_place
        if content is None or content.spoiled:
            raise self._nothing_in_place()
        info = content.version
        return Stamp(info.model, info.lineage, info.version, info.content_id, content.root)

    def _nothing_in_place(self) -> StateError:
        state = self.state
        if state not in _NO_STAMP:  # it holds a version, since a moment ago
            state = HandleState.FILLING
        text = f"stamp() of {self._handle.member.shard.title}: {_NO_STAMP[state]}"
        return StateError(text, retryable=state in (HandleState.FILLING, HandleState.IN_DOUBT))

    @tracing
    @_tells_torn
    async def publish(self, version: int, timeout: float | None = None) -> VersionInfo:
        """Promise that the memory is immutable, as `version`; returns when it is visible (all ranks
        have called).

        Raises VersionConflict (the number was used, or is not above the mark), StateError
        (published already, or torn: see `unpublish`), RegistrationError (a tensor was replaced or
        resized since it was registered), OperationTimeout, GroupAborted, CoordinatorUnavailable,
        LeaseLost (once, where the coordinator has come back without its state).
        """
        async with self._of_all_ranks(f"publish({shown(version)})"):
            version = check_version(version)
            self._check_publishable()
            self._memory.check_current()
            return await self._publish(version, timeout)

    @contextlib.asynccontextmanager
    async def _of_all_ranks(self, call: str) -> AsyncIterator[None]:
        """A call that the other ranks make, too: if this rank refuses it before it is said, the
        other ranks' call ends with that cause (G4).
        """
        member, is_busy = self._handle.member, self._handle.interpreter.is_busy
        before = member.group_calls
        try:
            yield
        except Exception as error:
            if member.group_calls == before and not is_busy and not isinstance(error, OF_EACH_RANK):
                retryable = error.retryable if isinstance(error, TensorHubError) else None
                reason = f"{call} raised {text_of(error)}"
                await self._refuse(reason, REFUSAL_S, retryable=retryable)
            raise

    async def _refuse(
        self,
        reason: str,
        timeout_s: float,
        *,
        retryable: bool | None = None,
        by: Callable[[GroupAborted, float], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """End the group's next call on all ranks, if the coordinator can be told in time. `by`:
        what tells it; None: the handle.
        """
        if self._handle.member.shard.world_size > 1:
            error = GroupAborted(reason[:1000], retryable=retryable)
            with contextlib.suppress(TensorHubError):
                await self._thread.call(by or self._handle.refuse, error, timeout_s)

    def _check_publishable(self) -> None:
        """RegistrationError: the regions have padding, which belongs to no version."""
        declared = self._handle.member.shard.declared
        if declared is not None and declared.strides:
            names = ", ".join(map(repr, islice(declared.strides, NAMES_SHOWN_MAX)))
            text = (
                f"{len(declared.strides)} tensor(s) have padded rows, which can be filled and "
                f"not published: {names}"
            )
            name, shape = next(
                (each.name, each.shape)
                for each in self._memory.descriptions
                if each.name in declared.strides
            )
            place = ", ".join([f"0:{size}" for size in shape])
            raise RegistrationError(
                f"{text}; register the tensors that they are parts of, and say in sources= which "
                f"part is published: "
                f"{{{name!r}: [(at[{place}], source({name!r}, shape={shape}))]}}; or "
                f"`.contiguous()` ones"
            )

    async def _publish(self, version: int, timeout: float | None) -> VersionInfo:
        self._handle.stream_sync.note()
        with self._memory.claim.publishing():
            return await self._thread.call(
                self._handle.publish, version, self._worker.timeout_s(timeout)
            )

    @_tells_torn
    async def unpublish(self, timeout: float | None = None) -> None:
        """Take the promise back; returns when the memory may be overwritten.

        Running readers are moved, or waited for within `drain_grace_s` and half the timeout, then
        fenced. Needs no reachable coordinator, but for a retained version: cut off, that stays
        until this worker's own lease is over. Of torn memory it says that the caller has written
        all of it anew, so that it can be published. Raises StateError (nothing is published),
        RetentionError (a retained version would be lost; it stays published), DrainTimeout (it is
        still being read when the time is up; it stays published), MutabilityViolation (it is taken
        back, but was written before), LeaseLost (it is the caller's already: the coordinator has
        given it up).
        """
        await self._thread.call(self._handle.unpublish, self._worker.timeout_s(timeout))

    def mutate(
        self, version: int, timeout: float | None = None
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Unpublish if published, run the body, publish as `version`. If the body raises, nothing
        is published.

        Readers wait while the body runs. Put only the writes into it, such as `optimizer.step()`;
        forward and backward read the weights, and belong before the block.

        The tensors and the number are checked first (RegistrationError, VersionConflict, with the
        memory as it was). Raises as `unpublish`, before the body (LeaseLost also where nothing is
        published; StateError where the memory is torn, or another registration of it holds a
        version), and as `publish`. If one rank's body or check raises, the other ranks' publish,
        after their bodies, ends with GroupAborted, and the number stays unused.

        StaleWeightsWarning: the body has apparently written none of the registered tensors; the
        version is still published. `Options.stale_weights="error"` makes it a StateError, as if the
        body had raised it.
        """
        return Block(self._mutate(version, timeout), "weights.mutate")

    @contextlib.contextmanager
    def _telling_torn(self) -> Iterator[None]:
        """Within the block runs a call: its error says so if the memory is torn when it ends."""
        try:
            yield
        except TensorHubError as error:
            if self.state is HandleState.TORN and error.memory == "intact":
                error.memory = "torn"
            raise

    @contextlib.asynccontextmanager
    async def _mutate(self, version: int, timeout: float | None) -> AsyncIterator[None]:
        call = f"mutate({shown(version)})"
        with self._telling_torn(), traced("mutate", self.model) as its:
            async with self._of_all_ranks(call):
                version = check_version(version)
                self._check_publishable()
                self._memory.check_current()
                self._memory.claim.check_write("mutate()")
                timeout_s = self._worker.timeout_s(timeout)
                check_number = partial(
                    self._worker.coordinator.check_number, self.model, version, timeout_s
                )
                await self._thread.call(self._handle.check_mutate, check_number)
            where = "unpublish() in"
            try:
                await self._thread.call(self._handle.begin_mutate, timeout_s)
                its.phase("unpublish")
                where = "the body of"
                is_unwritten = (
                    self._memory.watch() if self._worker.options.stale_weights != "ignore" else None
                )
                yield
                its.phase("body")
                where = "after its body,"
                self._memory.check_current()
                if is_unwritten is not None and is_unwritten():
                    self._tell_stale()
            except BaseException as error:
                if where != "unpublish() in":
                    title = self._handle.member.shard.title
                    error.add_note(f"{call} of {title} has published nothing")
                with self._thread.mode.shield():
                    await self._refuse(f"{where} {call} raised {text_of(error)}", timeout_s)
                raise
            async with self._of_all_ranks(call):
                its.ended(await self._publish(version, timeout))
            its.phase("publish")

    def _tell_stale(self) -> None:
        # Without the number: Python says an equal warning once for each place.
        title = self._handle.member.shard.title
        text = (
            f"mutate() of {title}: its body has written no registered tensor, so readers get the "
            f"bytes that were there "
            "before. Write into the registered ones. Register the module itself, so that a "
            "replaced tensor is named: a "
            "state_dict() keeps the old one. Options.stale_weights turns this off, or into an error"
        )
        if self._worker.options.stale_weights == "error":
            raise StateError(text)
        warnings.warn(text, StaleWeightsWarning, stacklevel=callers_level())

    @tracing
    @_tells_torn
    async def replicate(
        self, selector: Selector = LATEST, timeout: float | None = None
    ) -> FetchReport:
        """Fill the memory, which must hold no version, with a version.

        `selector`: a number; "latest", the newest version ever published, for which the call waits
        while it has no holder; "latest-1", the version before; or "available", the newest version
        that can be fetched now. "available" waits while no version was published; where no
        published version has a holder it raises VersionUnavailable at once. It counts complete
        copies of workers that the coordinator hears of, and the caller's own. It never replaces a
        version that a rank of the group holds by an older version.

        If the version that the call reads goes away, a call for a number fails. A call by selector
        is bound again, for the whole group, to the version that its selector names then, or waits
        for one until its deadline (`report.rebinds`).

        The ranks of a group call alike: each `replicate`, or `update` on those that hold a version,
        with one selector. A group's call ends at the earliest deadline of its ranks.

        Raises VersionUnavailable, ManifestMismatch (each difference named), IntegrityError (no
        source's bytes have their digests), StateError, OperationTimeout, GroupAborted,
        TransportUnavailable, RegistrationError, LeaseLost (both as `publish`).
        """
        async with self._of_all_ranks(f"replicate({shown(selector)})"):
            call = FillCall(OpKind.REPLICATE, check_selector(selector))
            self._memory.check_current()
            self._memory.check_writable()
            self._memory.claim.check_write()
            self._handle.stream_sync.note()
            return await self._thread.call(self._handle.fill, call, self._worker.timeout_s(timeout))

    @tracing
    @_tells_torn
    async def update(
        self,
        selector: Selector = LATEST,
        *,
        at_least: int | None = None,
        before_write: BeforeWrite | None = None,
        staged: bool = False,
        timeout: float | None = None,
    ) -> FetchReport:
        """Replace the version in memory by a version, or fill empty memory; `report.changed` is
        False if it holds that content already.

        `selector`: as `replicate`. `at_least` waits for that number (not with a number as
        selector). `before_write` is awaited here, in the caller's task, once version and source are
        certain and before the first byte changes; a call that is bound again (`replicate`) does not
        repeat it. Up to then an error leaves the old version published; after it the memory is
        torn. `staged`: the new version is filled into host memory first
        (`Options.host_memory_bytes`, else StateError), then `before_write` is awaited, and the
        memory is only overwritten once all ranks have all of it: an error leaves the old version
        published. Prefetched bytes are copied, not read. Raises as `replicate`, RetentionError (a
        retained version would be lost), DrainTimeout (the old version is still being read), both
        with it still published, MutabilityViolation (it was written; unpublish() first), and the
        errors of `before_write`.
        """
        async with self._of_all_ranks(f"update({shown(selector)})"):
            selector = check_selector(selector)
            if at_least is not None:
                at_least = check_version(at_least)
                if isinstance(selector, int):
                    raise InvalidValue(
                        f"update({selector}, at_least={at_least}): a number is that version alone; "
                        f"give at_least= with a selector, such as 'latest'"
                    )
            if before_write is not None and not callable(before_write):
                raise InvalidType(
                    f"before_write={shown(before_write)}: give a function "
                    "that takes the VersionInfo, or None"
                )
            if _returns_none(before_write):
                raise _not_async("returns None")
            check_flag("staged", staged)
            if staged and not self._worker.options.host_memory_bytes:
                raise StateError(
                    "update(staged=True) needs host memory: set Options.host_memory_bytes"
                )
            call = FillCall(
                OpKind.UPDATE, selector, at_least, hold=before_write is not None, staged=staged
            )

            def ask(info: VersionInfo) -> None:
                job.ask_caller(partial(self._run_hook, before_write, info))

            self._memory.check_current()
            self._memory.check_writable()
            if selector != self.version:  # else nothing is written
                self._memory.claim.check_write()
            self._handle.stream_sync.note()
            job = self._thread.job(self._handle.fill, call, self._worker.timeout_s(timeout), ask)
            return await self._thread.run_job(job)

    async def _run_hook(self, before_write: BeforeWrite | None, info: VersionInfo) -> None:
        problem: Exception | None = None
        try:
            if before_write is not None:
                made: object = before_write(info)
                if not inspect.isawaitable(made):
                    raise _not_async(f"returned {shown(made)}")
                await made
                self._memory.check_current()
                self._handle.stream_sync.note()
        except Exception as error:
            problem = error
        self._thread.post(partial(self._handle.hook_returned, problem))

    @tracing
    @_tells_torn
    async def prefetch(
        self, selector: Selector = LATEST, timeout: float | None = None
    ) -> FetchReport:
        """Fill host memory with a version (`selector`: as `replicate`), while the current one stays
        in use.

        All ranks of the group call it. It may run beside one other call of this handle. The copy
        serves other readers. The next `update` to that version copies the filled part, and frees
        the copy; an update to another version frees it, too. A second prefetch replaces the first.
        `report.changed` is False if the version is held already. Raises StateError (no
        `Options.host_memory_bytes`, or too few of them for the shard; the other ranks' calls end
        with GroupAborted), and as `replicate`; the tensors stay as they are.
        """
        copies, timeout_s = self._worker.copies, self._worker.timeout_s(timeout)
        try:
            selector = check_selector(selector)
            self._memory.check_current()
            self._memory.check_writable()
        except Exception as error:
            reason = f"prefetch({shown(selector)}) raised {text_of(error)}"
            await self._refuse(reason, REFUSAL_S, by=partial(copies.refuse, self._handle))
            raise
        return await self._thread.call(copies.prefetch, self._handle, selector, timeout_s)

    @_tells_torn
    async def close(self, abandon: bool = False) -> None:
        """Unpublish the version, as `unpublish` does, and give the registration up.

        With the last handle of this process (whatever it holds) the retained versions in its host
        memory are handed over to other workers, too, as the process may end then. (Leaving the hub
        does not wait: close the handles before.) There is no `timeout`: to hand a version over, or
        to wait for its readers, may take up to `Options.op_timeout_s`.

        Raises RetentionError (a retained version would be lost; `abandon` loses it) and
        DrainTimeout, both with everything unchanged, and MutabilityViolation (it is closed, but its
        tensors were written while they were published). For tensors that were replaced or freed
        there is only a log event (`published_memory_written`): closing is the remedy.
        """
        check_flag("abandon", abandon)
        close, is_moved = (
            partial(self._worker.copies.close, abandon=abandon),
            bool(self._memory.moved()),
        )
        with contextlib.suppress(*[MutabilityViolation] * is_moved):
            await self._thread.call(close, self._handle, self._worker.timeout_s(None))


def _returns_none(function: object) -> bool:
    """Whether it is a plain function that says so. (A wrapper has another function's words.)"""
    says = getattr(function, "__annotations__", {}).get("return", "")
    is_known = not (inspect.iscoroutinefunction(function) or hasattr(function, "__wrapped__"))
    return is_known and says in (None, "None")


def _not_async(does: str) -> InvalidType:
    return InvalidType(
        f"before_write is to be an async function, and this one {does}: write `async def`, "
        "and `await anyio.to_thread.run_sync(...)` for what blocks; without an event loop: "
        "tensorhub.sync"
    )


def callers_level() -> int:
    """How far up the stack, from this function's caller, the user's own code is: for
    `warnings.warn`.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "tensorhub",
        "contextlib",
    ):
        level, frame = level + 1, frame.f_back
    return level
