"""A worker's copies in host memory: prefetched ones beside its handles, retention copies that the
coordinator orders, seeds.

Each copy is a handle of its own, with a registration and a `Member`. Events in, actions out: every
input returns the actions that follow, in order. A caller's request ends with `FinishRequest`, under
the number of the request.

Theory of operation. All copies are filled in one way, whatever they are for (`Purpose`): the
coordinator knows the copy, the copy's turn has come, there is room for it in the budget, and then
its handle makes a fill call. That fill copies the chunks that other memory of this worker has, and
reads the rest from other workers. The purpose decides which copy makes room (`worker.budget`), and
when a copy ends:

- A prefetched copy is released once an update has used it, and is filled again later. It ends with
  its handle.
- A retention copy ends when the coordinator needs it no more, or with the caller's last handle: the
  process may end then.
- A seed is filled again with each version, and ends with the worker.

A task of several steps is a procedure (`worker.procedures`). A procedure takes a copy's turn before
it fills, releases or closes the copy, so no fill begins in the midst of a release. One procedure at
a time makes room, by releasing copies that are outranked. A close of a handle first closes the
copies that end with the handle, each with its own leave (R5). If a copy must stay, the close fails,
and the handle is unchanged.

Responsible for which copies exist, and for how much memory they may take. Not responsible for the
content of a copy (the copy's `Member` is), nor for its readers (to the coordinator a copy is an
ordinary holder). Not responsible for memory: `take` and `freed` say when memory is taken and given
back. Nor for time, which is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tensorhub.errors import (
    CoordinatorUnavailable,
    OperationTimeout,
    RetentionError,
    StateError,
    TensorHubError,
)
from tensorhub.machine import InvariantBroken
from tensorhub.messages import CopyRefused, DropCopy, ErrorInfo, MakeCopy
from tensorhub.model.manifest import Manifest
from tensorhub.types import (
    LATEST,
    FetchReport,
    HandleState,
    Medium,
    OpKind,
    Purpose,
    Selector,
    VersionInfo,
    host_group,
)
from tensorhub.worker.budget import Budget
from tensorhub.worker.calls import Call, CloseCall, FillCall, RefuseCall, ReleaseCall, Say
from tensorhub.worker.host_copy_actions import (
    AskManifest,
    BeginCall,
    CancelCall,
    CopyAction,
    DropHandle,
    FinishRequest,
    LogEvent,
    StartHandle,
)
from tensorhub.worker.member import Member
from tensorhub.worker.procedures import Cancelled, Procedure, Procedures, Steps, Turns
from tensorhub.worker.registration_session import Shard


@dataclass(eq=False, slots=True)
class Copy:
    """One host copy."""

    shard: Shard
    handle: str = ""  # the registration of the handle that it is prefetched for
    # the coordinator has answered its registration: it has it, or `refusal` says why not
    is_known: bool = False
    refusal: Exception | None = None
    nbytes: int = 0  # of memory that it had when its last call ended
    fills: int = 0  # that were begun
    is_filling: bool = False
    turn: Turns = field(default_factory=Turns)  # to fill, release or close it

    @property
    def ident(self) -> str:
        """The registration of this copy."""
        return self.shard.registration


@dataclass(eq=False, slots=True)
class Attempt:
    """A call of a handle that was begun here, until it has ended; or a question, of no
    registration.
    """

    number: int
    registration: str = ""
    call: Call | None = None
    is_over: bool = False
    result: FetchReport | bytes | None = None
    error: Exception | None = None


class HostCopies:
    """`idents` makes registrations that were never made before. Inputs about a registration that is
    not known (any more), or about a call or question that is over, change nothing.
    """

    def __init__(self, bytes_max: int, op_timeout_s: float, idents: Callable[[], str]) -> None:
        self.budget = Budget(bytes_max)
        self._op_timeout_s = op_timeout_s
        self._idents = idents
        self._procedures = Procedures(self._procedure_ended)
        self._now = 0.0
        self._actions: list[CopyAction] = []  # to be carried out, in order
        self._members: dict[str, Member] = {}  # of all handles of this worker, by registration
        self._copies: dict[str, Copy] = {}  # by their own registration
        self._attempts: dict[int, Attempt] = {}  # that run, by number
        self._numbers = count(1)
        self._room = Turns()  # one after the other: the procedure that makes room takes it
        self._ordered: dict[str, Procedure] = {}  # retention copies that are being made, by id
        self._closing: list[str] = []  # registrations of handles that their callers are closing
        self._has_closed = False  # a caller has closed one
        self._is_stopped = False  # the worker closes

    def __repr__(self) -> str:
        return (
            f"<HostCopies: {len(self._copies)}, {len(self._procedures)} under way, {self.budget!r}>"
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not len(self._procedures)

    def copy_of(self, registration: str) -> str | None:
        """The registration of this handle's prefetched copy."""
        copy = self._prefetched(registration)
        return copy.ident if copy is not None else None

    def _prefetched(self, registration: str) -> Copy | None:
        return next((copy for copy in self._copies.values() if copy.handle == registration), None)

    def _is_closed(self, registration: str) -> bool:
        member = self._members.get(registration)
        return member is None or member.state is HandleState.CLOSED

    @property
    def _is_spot(self) -> bool:
        """Whether any of its registrations is: then this process may go at any time."""
        return any(member.shard.spot and member.shard.serves for member in self._members.values())

    def _act(self, action: CopyAction) -> None:
        self._actions.append(action)

    def _begin(self, steps: Steps[Any], now: float, request: int | None = None) -> list[CopyAction]:
        self._procedures.begin(steps, request)
        return self._go_on(now)

    def _go_on(self, now: float) -> list[CopyAction]:
        """The actions that follow from the newest input."""
        self._now = now
        self._procedures.go_on(now)
        actions, self._actions = self._actions, []
        return actions

    def _procedure_ended(
        self, procedure: Procedure, report: FetchReport | None, error: Exception | None
    ) -> None:
        if procedure.request is not None:
            cancelled = isinstance(error, Cancelled)
            error = StateError("the call was cancelled by its caller") if cancelled else error
            self._act(FinishRequest(procedure.request, report, error))
        elif error is not None:
            raise error

    # -------------------------------------------------------------------------------------------
    # inputs: requests

    def prefetch(
        self, request: int, member: Member, selector: Selector, timeout_s: float, now: float
    ) -> list[CopyAction]:
        """Fill this handle's host copy with a version, in place of what it held."""
        return self._begin(self._prefetch(member, selector, timeout_s), now, request)

    def seed(
        self, request: int, info: VersionInfo, shard: int, timeout_s: float, now: float
    ) -> list[CopyAction]:
        """Have this worker's seed of that shard of the model hold its newest version; the first
        time, make the seed.
        """
        return self._begin(self._seed(info, shard, timeout_s), now, request)

    def close(
        self, request: int, member: Member, timeout_s: float, now: float, *, abandon: bool = False
    ) -> list[CopyAction]:
        """Close a handle with the host copies that end with it."""
        return self._begin(self._close(member, timeout_s, abandon=abandon), now, request)

    def make_room(
        self, request: int, ident: str, purpose: Purpose, nbytes: int, now: float
    ) -> list[CopyAction]:
        """Reserve so many bytes for `ident`, once those that it outranks are gone. StateError:
        there is no room for it.
        """
        return self._begin(self._make_room(ident, purpose, nbytes), now, request)

    def cancel(self, request: int, now: float) -> list[CopyAction]:
        """The caller of that request has given up: the request finishes once nothing of it runs."""
        self._procedures.cancel(request)
        return self._go_on(now)

    def stop(self) -> None:
        """The worker closes: nothing is begun any more that no caller asks for."""
        self._is_stopped = True

    # ------------------------------------------------------------------------------------ inputs:
    # handles and their memory

    def began(self, member: Member) -> None:
        """A handle was made: a caller's, or what StartHandle asked for."""
        self._members[member.shard.registration] = member

    def answered(
        self, registration: str, refusal: Exception | None, now: float
    ) -> list[CopyAction]:
        """The coordinator has it, or not: `refusal`."""
        copy = self._copies.get(registration)
        if copy is not None:
            copy.is_known, copy.refusal = True, refusal
        return self._go_on(now)

    def call_ended(
        self,
        number: int,
        now: float,
        *,
        report: FetchReport | None = None,
        error: Exception | None = None,
        nbytes: int = 0,
    ) -> list[CopyAction]:
        """The call of a BeginCall is over. `nbytes`: of host memory that its handle has now."""
        attempt = self._attempts.get(number)
        copy = self._copies.get(attempt.registration) if attempt is not None else None
        if copy is not None:
            copy.nbytes = nbytes
        return self._ended(number, report, error, now)

    def manifest_came(self, number: int, encoded: bytes, now: float) -> list[CopyAction]:
        return self._ended(number, encoded, None, now)

    def manifest_failed(self, number: int, error: Exception, now: float) -> list[CopyAction]:
        return self._ended(number, None, error, now)

    def _ended(
        self, number: int, result: FetchReport | bytes | None, error: Exception | None, now: float
    ) -> list[CopyAction]:
        attempt = self._attempts.pop(number, None)
        if attempt is not None:
            attempt.is_over, attempt.result, attempt.error = True, result, error
        return self._go_on(now)

    def take(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        """Memory is about to be taken, maybe of another size than was reserved: versions may
        differ. StateError: no room.
        """
        self.budget.reserve(ident, purpose, nbytes)

    def freed(self, ident: str, now: float) -> list[CopyAction]:
        """The memory of a copy, or of a staged update, was given back."""
        self.budget.free(ident)
        copy = self._copies.get(ident)
        if copy is not None:
            copy.nbytes = 0
            is_made = copy.shard.purpose is Purpose.RETENTION and ident not in self._ordered
            if is_made and not self._is_closed(ident):
                self._drop(copy)  # it was ordered out
        return self._go_on(now)

    def end_prefetch(
        self, registration: str, now: float, *, frees: bool = False
    ) -> list[CopyAction]:
        """An update of this handle has copied the chunks that the handle's copy has; both would
        read the rest. `frees`: the update is done, so the copy is released, in the background
        (R10).
        """
        copy = self._prefetched(registration)
        if copy is None:
            return []
        if not frees:
            self._cancel_fill(copy)
            return self._go_on(now)
        if self._is_stopped or self.budget.reservation(copy.ident) is None:
            return []
        return self._begin(self._release_quietly(copy, copy.fills), now)

    def _cancel_fill(self, copy: Copy) -> None:
        """End the fill that runs on a copy, unless its rank has voted: then all of the version is
        there.
        """
        member = self._members.get(copy.ident)
        for attempt in (
            self._attempts.values() if member is not None and not member.has_voted else ()
        ):
            if attempt.registration == copy.ident and isinstance(attempt.call, FillCall):
                error = StateError(
                    f"{copy.shard.title}: an update has taken what was prefetched so far",
                    retryable=True,
                )
                self._act(CancelCall(attempt.number, copy.ident, error))

    def ended(self, registration: str, now: float) -> list[CopyAction]:
        """A handle is no more: a copy that was made for the handle ends too."""
        self._members.pop(registration, None)
        gone, copy = self._copies.pop(registration, None), self._prefetched(registration)
        if gone is not None:
            gone.is_known = True
            gone.refusal = gone.refusal or StateError(
                f"{gone.shard.title} was given up", retryable=True
            )
        if copy is not None:
            self._drop(copy)
        return self._go_on(now)

    # ----------------------------------------------------------------------------------- inputs:
    # the coordinator, and time

    def ordered(self, order: MakeCopy, now: float) -> list[CopyAction]:
        """The coordinator wants a copy."""
        if order.copy in self._copies or order.copy in self._ordered:
            return []  # said again
        if self._is_stopped or self._process_ends:
            return [Say(CopyRefused(order.copy, "this worker closes"))]
        self._ordered[order.copy] = self._procedures.begin(self._make_ordered(order))
        return self._go_on(now)

    def dropped(self, order: DropCopy, now: float) -> list[CopyAction]:
        """The coordinator needs it no more."""
        making, copy = self._ordered.get(order.copy), self._copies.get(order.copy)
        if making is not None:
            making.is_cancelled = True
        elif copy is not None and not self._is_stopped:
            return self._begin(self._end_quietly(copy), now)
        return self._go_on(now)

    def next_deadline(self) -> float | None:
        return self._procedures.next_deadline()

    def tick(self, now: float) -> list[CopyAction]:
        """Waits that are overdue end."""
        return self._go_on(now)

    # ----------------------------------------------------------------------------------------------
    # what copies are for

    def _prefetch(
        self, member: Member, selector: Selector, timeout_s: float
    ) -> Steps[FetchReport | None]:
        shard = member.shard
        manifest = shard.manifest
        assert manifest is not None
        if member.state is HandleState.CLOSED:
            raise StateError(f"{shard.title} is closed; register again")
        if shard.registration in self._closing:
            raise StateError(f"{shard.title} is being closed")
        member.report_loss()
        copy = self._prefetched(shard.registration)
        if copy is not None and copy.refusal is not None and not copy.is_filling:
            # a coordinator that has come back did not take it: it may take another
            self._drop(copy)
            copy = None
        if copy is None:
            if shard.world_size == 1:  # no other rank has to hear of it: before anything is said
                self._check_possible(manifest.region_bytes)
            group, ident = host_group(shard.group), self._idents()
            of_host = replace(
                shard, registration=ident, group=group, medium=Medium.HOST, purpose=Purpose.PREFETCH
            )
            copy = self._start(of_host, shard.registration)
        return (
            yield from self._fill(
                copy, FillCall(OpKind.PREFETCH, selector), manifest.region_bytes, timeout_s
            )
        )

    def _check_possible(self, nbytes: int) -> None:
        """Raise StateError if there is no room for so many bytes to be prefetched."""
        if not self.budget.bytes_max:
            raise StateError("prefetch() needs host memory: set Options.host_memory_bytes")
        self.budget.plan("", Purpose.PREFETCH, nbytes)

    def _seed(self, info: VersionInfo, shard: int, timeout_s: float) -> Steps[FetchReport | None]:
        manifest = yield from self._manifest(info, shard, timeout_s)
        mine = [each for each in self._copies.values() if each.shard.purpose is Purpose.SEED]
        copy = next(
            (each for each in mine if (each.shard.model, each.shard.number) == (info.model, shard)),
            None,
        )
        if copy is None:
            self.budget.plan("", Purpose.SEED, manifest.region_bytes)
            ident = self._idents()
            copy = self._start(
                _one_shard(ident, f"seed/{ident}", info, shard, manifest, Purpose.SEED, spot=False)
            )
        return (
            yield from self._fill(
                copy, FillCall(OpKind.PREFETCH, LATEST), manifest.region_bytes, timeout_s
            )
        )

    def _make_ordered(self, order: MakeCopy) -> Steps[None]:
        reason = ""
        try:
            yield from self._retain(order)
        except TensorHubError as error:
            reason = str(error)
        except Cancelled:
            reason = "it was not needed any more, or this worker closes"
        finally:
            del self._ordered[order.copy]
        copy, member = self._copies.get(order.copy), self._members.get(order.copy)
        if reason:
            self._act(LogEvent("copy_refused", order.copy, reason, is_warning=True))
            self._act(Say(CopyRefused(order.copy, reason[:1000])))
        # or it was ordered out meanwhile
        if copy is not None and (reason or member is None or member.content is None):
            self._drop(copy)

    def _retain(self, order: MakeCopy) -> Steps[None]:
        info, timeout_s = order.version, self._op_timeout_s
        manifest = yield from self._manifest(info, order.shard, timeout_s)
        going = (
            self._members.get(each)
            for each in self.budget.plan(order.copy, Purpose.RETENTION, manifest.region_bytes)
        )
        contents = (member.content for member in going if member is not None)
        if any(
            content is not None and content.version.content_id == info.content_id
            for content in contents
        ):
            raise StateError(
                "there is room for it in the place of its source only, "
                "which has to stay until it is made"
            )
        group = f"copy/{order.copy}"
        of_host = _one_shard(
            order.copy, group, info, order.shard, manifest, Purpose.RETENTION, spot=self._is_spot
        )
        copy = self._start(of_host)
        yield from self._fill(
            copy, FillCall(OpKind.REPLICATE, info.version), manifest.region_bytes, timeout_s
        )
        made = self._members.get(order.copy)
        if (
            made is not None
            and made.content is not None
            and made.content.version.content_id != info.content_id
        ):
            raise StateError(
                f"version {info.version} of {info.model!r} is another one by now", retryable=True
            )

    # ----------------------------------------------------------------------------------------------
    # the life of a copy

    def _start(self, shard: Shard, handle: str = "") -> Copy:
        """A new copy."""
        copy = self._copies[shard.registration] = Copy(shard, handle)
        self._act(StartHandle(shard))
        return copy

    def _fill(
        self, copy: Copy, call: FillCall, nbytes: int, timeout_s: float
    ) -> Steps[FetchReport | None]:
        """Fill a copy, once the coordinator knows it, its turn has come, and there is room."""
        if copy.is_filling:
            text = (
                f"{copy.shard.title}: a prefetch is still running on this handle; one prefetch "
                f"at a time"
            )
            raise StateError(text, retryable=True)
        copy.is_filling, until = True, self._now + timeout_s
        try:
            yield from self._until_known(copy, timeout_s)
            yield from self._take_turn(copy, nbytes, timeout_s)
            try:
                copy.fills += 1
                return (yield from self._call(copy.ident, call, max(0.0, until - self._now)))
            finally:
                copy.turn.give_back()
        except TensorHubError as error:
            error.memory = "intact"  # the caller's memory was not torn
            raise
        finally:
            copy.is_filling = False
            if not copy.nbytes:  # nothing of it was begun, or the handle itself holds that version
                self.budget.free(copy.ident)

    def _until_known(self, copy: Copy, timeout_s: float) -> Steps[None]:
        """Goes on when the coordinator knows it; raises, and it is dropped, if that does not
        come.
        """
        text = f"{copy.shard.title}: the coordinator did not answer within {timeout_s:g} s"
        try:
            with self._procedures.current.within(
                self._now + timeout_s, lambda: CoordinatorUnavailable(text)
            ):
                yield lambda: copy.is_known
            if copy.refusal is not None:
                raise copy.refusal
        except Exception:
            self._drop(copy)
            raise

    def _take_turn(self, copy: Copy, nbytes: int, timeout_s: float) -> Steps[None]:
        """Have the copy's turn, and room for it. Both may have to wait for readers of memory that
        is being given back.
        """
        text = (
            f"{copy.shard.title}: no host memory within {timeout_s:g} s: what it held before, "
            f"or what has to make room, "
        )
        late = f"{text}is still being read; try again"
        with self._procedures.current.within(self._now + timeout_s, lambda: OperationTimeout(late)):
            yield from copy.turn.take()
            try:
                if copy.ident not in self._copies:
                    raise StateError(f"{copy.shard.title}: its handle was closed")
                if self.budget.reservation(copy.ident) is None:
                    yield from self._take_room(copy, nbytes, timeout_s)
            except BaseException:
                copy.turn.give_back()
                raise

    def _take_room(self, copy: Copy, nbytes: int, timeout_s: float) -> Steps[None]:
        """Without room the call ends on all ranks: each rank would wait for this rank until its
        deadline.
        """
        try:
            if copy.shard.purpose is Purpose.PREFETCH:
                self._check_possible(nbytes)
            yield from self._make_room(copy.ident, copy.shard.purpose, nbytes)
        except TensorHubError as error:
            if copy.shard.world_size > 1:
                with suppress(TensorHubError):
                    yield from self._call(copy.ident, RefuseCall(ErrorInfo.of(error)), timeout_s)
            raise

    def _make_room(self, ident: str, purpose: Purpose, nbytes: int) -> Steps[None]:
        """See `make_room`."""
        yield from self._room.take()
        try:
            asked = set[str]()
            # Planned again each time: during the wait for one copy, further copies may have given
            # their room back.
            while others := [
                other for other in self.budget.plan(ident, purpose, nbytes) if other not in asked
            ]:
                other = others[0]
                asked.add(other)
                copy = self._copies.get(other)
                if copy is not None:
                    self._act(
                        LogEvent(
                            "copy_evicted",
                            other,
                            f"{nbytes} bytes are needed for another's {purpose.value}",
                        )
                    )
                    error = StateError(
                        "its host memory is needed for something that comes first", retryable=True
                    )
                    yield from self._end_call(other, error)
                    # else a fill may have its turn, and wait for this room
                    if self.budget.reservation(other) is not None:
                        yield from self._release(copy)
            self.budget.reserve(ident, purpose, nbytes)
        finally:
            self._room.give_back()

    def _release(self, copy: Copy, wanted: Callable[[], bool] = lambda: True) -> Steps[None]:
        """Give a copy's memory back, once its readers are moved or fenced; if that is still wanted
        when its turn comes.
        """
        yield from copy.turn.take()
        try:
            if wanted() and self.budget.reservation(copy.ident) is not None:
                yield from self._give_back(copy, ReleaseCall(), self._op_timeout_s)
        finally:
            copy.turn.give_back()

    def _release_quietly(self, copy: Copy, fills: int) -> Steps[None]:
        """`fills`: a fill that was begun later is for another version, and goes on."""
        try:
            yield from self._end_call(
                copy.ident, StateError("an update has taken what was prefetched", retryable=True)
            )
            yield from self._release(copy, lambda: copy.fills == fills)
        except RetentionError as error:
            self._act(LogEvent("copy_must_stay", copy.ident, str(error)))
        except TensorHubError as error:
            self._act(LogEvent("copy_not_released", copy.ident, str(error), is_warning=True))

    def _end(self, copy: Copy, timeout_s: float) -> Steps[None]:
        """Close a copy, with its own leave. A call that runs on it ends first."""
        yield from copy.turn.take()
        try:
            yield from self._give_back(copy, CloseCall(), timeout_s)
        finally:
            copy.turn.give_back()
        if copy.ident in self._copies:
            self._drop(copy)

    def _give_back(
        self, copy: Copy, call: ReleaseCall | CloseCall, timeout_s: float
    ) -> Steps[None]:
        """Make this call on a copy. A copy that ends meanwhile, as after a rollback, has no memory
        any more.
        """
        if not self._is_closed(copy.ident):
            try:
                yield from self._call(copy.ident, call, timeout_s)
            except TensorHubError:
                if copy.ident in self._copies:
                    raise

    def _end_quietly(self, copy: Copy) -> Steps[None]:
        try:
            yield from self._end(copy, self._op_timeout_s)
        except TensorHubError as error:
            self._act(LogEvent("copy_not_ended", copy.ident, str(error), is_warning=True))

    def _drop(self, copy: Copy) -> None:
        """Give a copy up. The coordinator need not agree."""
        self._copies.pop(copy.ident, None)
        self._act(DropHandle(copy.ident))

    # ----------------------------------------------------------------------------------------------
    # a handle's end

    @property
    def _process_ends(self) -> bool:
        """Whether a caller has closed a handle, or is about to, and none is left: this process may
        end at any time.
        """
        used = (
            m for m in self._members.values() if m.shard.serves and m.shard.purpose is Purpose.USE
        )
        mine = {m.shard.registration for m in used if m.state is not HandleState.CLOSED}
        return (self._has_closed or bool(self._closing)) and mine <= set(self._closing)

    def _close(self, member: Member, timeout_s: float, *, abandon: bool) -> Steps[None]:
        registration, until = member.shard.registration, self._now + timeout_s
        self._closing.append(registration)
        try:
            if not abandon:
                yield from self._close_copies(self._prefetched(registration), until)
            if member.state is not HandleState.CLOSED:
                yield from self._call(registration, CloseCall(abandon), max(0.0, until - self._now))
            if not abandon:  # the handle may have become the last one meanwhile
                yield from self._close_copies(None, until)
        finally:
            self._closing.remove(registration)
            self._has_closed = self._has_closed or member.state is HandleState.CLOSED

    def _close_copies(self, prefetched: Copy | None, until: float) -> Steps[None]:
        """Close the copies that end with a handle. A copy that is being made is made by another
        worker instead.
        """
        ending = [prefetched] if prefetched is not None else []
        if self._process_ends and not self._is_spot:
            making = dict(self._ordered)
            for each in making.values():
                each.is_cancelled = True
            yield lambda: not making.keys() & self._ordered.keys()
            ending += [
                copy for copy in self._copies.values() if copy.shard.purpose is Purpose.RETENTION
            ]
        for copy in ending:
            yield from self._end_call(copy.ident, StateError("its handle was closed"))
            yield from self._end(copy, max(0.0, until - self._now))

    # ----------------------------------------------------------------------------------------------
    # calls and questions

    def _call(self, registration: str, call: Call, timeout_s: float) -> Steps[FetchReport | None]:
        """Begin a call and wait for its end; cancelling ends it as soon as may be, and leaves
        nothing running.
        """
        attempt = self._attempt(registration, call)
        self._act(BeginCall(attempt.number, registration, call, timeout_s))
        try:
            yield lambda: attempt.is_over
        except Cancelled:
            # other ranks and the log see it
            error = StateError("the call was cancelled by its caller")
            yield from self._end_attempt(attempt, error)
            raise
        if attempt.error is not None:
            raise attempt.error
        assert not isinstance(attempt.result, bytes)
        return attempt.result

    def _end_call(self, registration: str, error: StateError) -> Steps[None]:
        """End the running call, if there is one, with `error`; goes on when nothing of it runs any
        more.
        """
        for attempt in [
            each for each in self._attempts.values() if each.registration == registration
        ]:
            yield from self._end_attempt(attempt, error)

    def _end_attempt(self, attempt: Attempt, error: StateError) -> Steps[None]:
        if not attempt.is_over:
            self._act(CancelCall(attempt.number, attempt.registration, error))
            yield lambda: attempt.is_over

    def _attempt(self, registration: str = "", call: Call | None = None) -> Attempt:
        attempt = Attempt(next(self._numbers), registration, call)
        self._attempts[attempt.number] = attempt
        return attempt

    def _manifest(self, info: VersionInfo, shard: int, timeout_s: float) -> Steps[Manifest]:
        attempt = self._attempt()
        self._act(AskManifest(attempt.number, info, shard, timeout_s))
        what = f"manifest of shard {shard} of version {info.version} of {info.model!r}"
        text = f"{what}: the coordinator did not answer within {timeout_s:g} s"
        try:
            with self._procedures.current.within(
                self._now + timeout_s, lambda: OperationTimeout(text)
            ):
                yield lambda: attempt.is_over
        finally:
            self._attempts.pop(attempt.number, None)
        if attempt.error is not None:
            raise attempt.error
        assert isinstance(attempt.result, bytes)
        return Manifest.decode(attempt.result)

    # ----------------------------------------------------------------------------------------------
    # checks

    def check_invariants(self) -> None:
        """Raise InvariantBroken if copies, budget and procedures disagree."""
        self.budget.check_invariants()
        for ident, copy in self._copies.items():
            if copy.nbytes and self.budget.reservation(ident) is None:
                raise InvariantBroken(
                    f"{self!r}: {ident} has {copy.nbytes} bytes of "
                    "host memory that were not reserved"
                )
        left = (
            self._attempts
            or self._ordered
            or any(copy.is_filling for copy in self._copies.values())
        )
        if left and not len(self._procedures):
            raise InvariantBroken(
                f"{self!r}: nothing is under way, and there is {self._attempts}, {self._ordered}"
            )


def _one_shard(
    registration: str,
    group: str,
    info: VersionInfo,
    shard: int,
    manifest: Manifest,
    purpose: Purpose,
    *,
    spot: bool,
) -> Shard:
    """A copy of one shard is a group of its own, whatever the layout of its version. (It says of no
    layout that it is its own, unless that is not the published one.)
    """
    return Shard(
        registration=registration,
        model=info.model,
        group=group,
        rank=0,
        world_size=1,
        spot=spot,
        layout_id="",
        manifest=manifest,
        number=shard,
        medium=Medium.HOST,
        purpose=purpose,
    )
