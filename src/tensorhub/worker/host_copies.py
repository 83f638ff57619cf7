"""A worker's copies in host memory: prefetched ones beside its handles, retention copies that the
coordinator orders, seeds.

Each copy is a handle of its own, with a registration and a `Member`. Events in, actions out: every
input returns the actions that follow, in order. A caller's request ends with `FinishRequest`, under
the number of the request.

Theory of operation. All copies are filled in one way, whatever they are for (`Purpose`): the
copy's turn has come, there is room for it in the budget, and then its handle makes a fill call,
which waits until the coordinator knows the copy. That fill copies the chunks that other memory of
this worker has, and reads the rest from other workers. The purpose decides which copy makes room
(`worker.budget`), and when a copy ends:

- A prefetched copy is released once an update has used it, and is filled again later. It ends with
  its handle.
- A retention copy ends when the coordinator needs it no more, or with the caller's last handle: the
  process may end then.
- A seed is filled again with each version, and ends with the worker.
- A copy of an archived version is not filled, but adopted: it has its content at once, and is
  loaded as readers ask for it. What is loaded gives way to every other copy. It ends with the
  worker.

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
from functools import partial
from itertools import count
from typing import Any

from tensorhub.errors import OperationTimeout, RetentionError, StateError, TensorHubError
from tensorhub.machine import demand
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
    Unload,
)
from tensorhub.worker.member import Member
from tensorhub.worker.member_memory import Content
from tensorhub.worker.procedures import Cancelled, Procedure, Procedures, Steps, Turns
from tensorhub.worker.registration_session import Shard


@dataclass(eq=False, slots=True)
class Copy:
    """One host copy, from its order or its first request until it is given up."""

    shard: Shard
    handle: str = ""  # the registration of the handle that it is prefetched for
    # fills it, or waits for what comes first: its manifest, its turn, room
    filling: Procedure | None = None
    turn: Turns = field(default_factory=Turns)  # to fill, release or close it

    @property
    def ident(self) -> str:
        """The registration of this copy."""
        return self.shard.registration

    @property
    def nbytes(self) -> int:
        """The memory that it needs, once its manifest is known."""
        assert self.shard.manifest is not None
        return self.shard.manifest.region_bytes


@dataclass(eq=False, slots=True)
class Attempt:
    """A call of a handle that was begun here; or a question, of no registration."""

    number: int
    registration: str
    call: Call | None
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
        self._attempts: dict[int, Attempt] = {}  # those that run, by number
        self._numbers = count(1)
        self._room = Turns()  # one after the other: the procedure that makes room takes it
        self._closing: list[str] = []  # registrations of handles that their callers are closing
        self._has_closed = False  # a caller has closed one
        self.is_stopped = False  # the worker closes

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

    def _held(self, ident: str) -> str | None:
        """The id of the content that this registration holds."""
        member = self._members.get(ident)
        content = member.content if member is not None else None
        return content.version.content_id if content is not None else None

    def _is_closed(self, registration: str) -> bool:
        member = self._members.get(registration)
        return member is None or member.state is HandleState.CLOSED

    @property
    def _is_spot(self) -> bool:
        """Whether any of its registrations is: then this process may go at any time."""
        return any(member.shard.spot and member.shard.serves for member in self._members.values())

    def _act(self, action: CopyAction) -> None:
        self._actions.append(action)

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

    # ----------------------------------------------------------------------------------------------
    # inputs

    def begin(self, steps: Steps[Any], now: float, request: int | None = None) -> list[CopyAction]:
        """Begin `prefetch`, `seed`, `close` or `make_room`, which a caller requests."""
        self._procedures.begin(steps, request)
        return self._go_on(now)

    def cancel(self, request: int, now: float) -> list[CopyAction]:
        """The caller of that request has given up: the request finishes once nothing of it runs."""
        self._procedures.cancel(request)
        return self._go_on(now)

    def stop(self) -> None:
        """The worker closes: nothing is begun any more that no caller asks for."""
        self.is_stopped = True

    def began(self, member: Member) -> None:
        """A handle was made: a caller's, or what StartHandle asked for."""
        self._members[member.shard.registration] = member

    def call_ended(
        self,
        number: int,
        now: float,
        *,
        result: FetchReport | bytes | None = None,
        error: Exception | None = None,
    ) -> list[CopyAction]:
        """The call of a BeginCall is over, or the question of an AskManifest is answered."""
        attempt = self._attempts.pop(number, None)
        if attempt is not None:
            attempt.result, attempt.error = result, error
        return self._go_on(now)

    def take(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        """Memory is about to be taken, in place of what `ident` had. It may have another size than
        was reserved: versions may differ. StateError: no room.
        """
        try:
            self.budget.reserve(ident, purpose, nbytes, taken=True)
        except StateError:
            self.budget.free(ident)
            raise

    def freed(self, ident: str, now: float) -> list[CopyAction]:
        """The memory of a copy, or of a staged update, was given back."""
        self.budget.free(ident)
        copy = self._copies.get(ident)
        ends = copy is not None and copy.shard.purpose in (Purpose.RETENTION, Purpose.ARCHIVE)
        if copy is not None and ends and not (copy.filling or self._is_closed(ident)):
            self._drop(copy)  # it was ordered out
        return self._go_on(now)

    def adopted(self, shard: Shard) -> None:
        """That copy of an archived version is about to be made."""
        self._copies[shard.registration] = Copy(shard)

    def unloaded(self, ident: str, now: float) -> list[CopyAction]:
        """What was loaded of an archived version was given back. The copy stays."""
        self.budget.free(ident)
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
        if self.is_stopped or self.budget.reservation(copy.ident) is None:
            return []
        steps = self._release_prefetched(copy)
        return self.begin(self._quietly(steps, copy, "copy_not_released"), now)

    def _cancel_fill(self, copy: Copy) -> None:
        """End the fill that runs on a copy, unless its rank has voted: then all of the version is
        there.
        """
        member = self._members.get(copy.ident)
        if member is None or member.has_voted:
            return
        error = StateError(
            f"{copy.shard.title}: an update has taken what was prefetched so far", retryable=True
        )
        for attempt in self._attempts.values():
            if attempt.registration == copy.ident and isinstance(attempt.call, FillCall):
                self._act(CancelCall(attempt.number, copy.ident, error))

    def ended(self, registration: str, now: float) -> list[CopyAction]:
        """A handle is no more: a copy that was made for the handle ends too."""
        self._members.pop(registration, None)
        self.budget.take_back(registration)
        if self._copies.pop(registration, None) is not None:
            self.budget.free(registration)  # room that it has taken since its memory was given back
        copy = self._prefetched(registration)
        if copy is not None:
            self._drop(copy)
        return self._go_on(now)

    def ordered(self, order: MakeCopy, now: float) -> list[CopyAction]:
        """The coordinator wants a copy."""
        if order.copy in self._copies:
            return []  # said again
        if self.is_stopped or self._process_ends:
            return [Say(CopyRefused(order.copy, "this worker closes"))]
        copy = Copy(
            _one_shard(
                order.copy, f"copy/{order.copy}", order.version, order.shard, Purpose.RETENTION
            )
        )
        self._copies[order.copy] = copy
        copy.filling = self._procedures.begin(self._retain(copy, order.version))
        return self._go_on(now)

    def dropped(self, order: DropCopy, now: float) -> list[CopyAction]:
        """The coordinator needs it no more."""
        copy = self._copies.get(order.copy)
        if copy is not None and copy.filling is not None:
            copy.filling.is_cancelled = True
        elif copy is not None and not self.is_stopped:
            steps = self._end(copy, self._op_timeout_s)
            return self.begin(self._quietly(steps, copy, "copy_not_ended"), now)
        return self._go_on(now)

    def next_deadline(self) -> float | None:
        return self._procedures.next_deadline()

    def tick(self, now: float) -> list[CopyAction]:
        """Waits that are overdue end."""
        return self._go_on(now)

    # ----------------------------------------------------------------------------------------------
    # what copies are for

    def prefetch(
        self, member: Member, selector: Selector, timeout_s: float
    ) -> Steps[FetchReport | None]:
        """Fill this handle's host copy with a version, in place of what it held."""
        shard = member.shard
        if member.state is HandleState.CLOSED:
            raise StateError(f"{shard.title} is closed; register again")
        if shard.registration in self._closing:
            raise StateError(f"{shard.title} is being closed")
        member.report_loss()
        copy = self._prefetched(shard.registration)
        if copy is None:
            copy = self._copy_beside(shard)
            if shard.world_size == 1:  # no other rank has to hear of it: before anything is said
                self.budget.plan("", Purpose.PREFETCH, copy.nbytes)
            self._start(copy)
        return (yield from self._fill(copy, FillCall(OpKind.PREFETCH, selector), timeout_s))

    def _copy_beside(self, shard: Shard) -> Copy:
        of_host = replace(
            shard,
            registration=self._idents(),
            group=host_group(shard.group),
            medium=Medium.HOST,
            purpose=Purpose.PREFETCH,
        )
        return Copy(of_host, shard.registration)

    def refuse(self, member: Member, error: ErrorInfo, timeout_s: float) -> Steps[None]:
        """This rank makes no prefetch, because of `error`: the other ranks' prefetch ends, too."""
        shard = member.shard
        if member.state is HandleState.CLOSED or shard.registration in self._closing:
            return
        copy = self._prefetched(shard.registration)
        if copy is None:
            self._start(copy := self._copy_beside(shard))
        elif copy.filling is not None:
            return  # the error is of a second prefetch
        yield from self._call(copy.ident, RefuseCall(error), timeout_s)

    def seed(
        self, info: VersionInfo, shard: int, timeout_s: float, selector: Selector = LATEST
    ) -> Steps[FetchReport | None]:
        """Have this worker's seed of that shard of the model hold its newest version, or the one
        that `selector` means; the first time, make the seed.
        """
        manifest = yield from self._manifest(info, shard, timeout_s)
        ident = self._idents()
        copy = self._seed_of(info.model, shard) or Copy(
            _one_shard(ident, f"seed/{ident}", info, shard, Purpose.SEED)
        )
        copy.shard = replace(copy.shard, manifest=manifest)
        if copy.ident not in self._copies:
            self.budget.plan("", Purpose.SEED, copy.nbytes)
            self._start(copy)
        return (yield from self._fill(copy, FillCall(OpKind.PREFETCH, selector), timeout_s))

    def _seed_of(self, model: str, shard: int) -> Copy | None:
        mine = (copy for copy in self._copies.values() if copy.shard.purpose is Purpose.SEED)
        return next((c for c in mine if (c.shard.model, c.shard.number) == (model, shard)), None)

    def seeded(self, info: VersionInfo, shard: int) -> tuple[str, Content] | None:
        """The registration and content of the seed of that shard, if it holds that version."""
        copy = self._seed_of(info.model, shard)
        content = self._members[copy.ident].content if copy is not None else None
        if copy is None or content is None or content.version.content_id != info.content_id:
            return None
        return copy.ident, content

    def remove(self, ident: str, timeout_s: float) -> Steps[None]:
        """End the copy of an archived version, with its own leave. RetentionError: it must stay."""
        copy = self._copies.get(ident)
        if copy is not None:
            yield from self._end(copy, timeout_s)

    def _retain(self, copy: Copy, info: VersionInfo) -> Steps[None]:
        """Make the copy that the coordinator has ordered, or refuse it."""
        reason = ""
        try:
            yield from self._make(copy, info)
        except TensorHubError as error:
            reason = str(error)
        except Cancelled:
            reason = "it was not needed any more, or this worker closes"
        finally:
            copy.filling = None
        if reason:
            self._act(LogEvent("copy_refused", copy.ident, reason, is_warning=True))
            self._act(Say(CopyRefused(copy.ident, reason[:1000])))
        # or it was ordered out meanwhile
        if copy.ident in self._copies and (reason or self._held(copy.ident) is None):
            self._drop(copy)

    def _make(self, copy: Copy, info: VersionInfo) -> Steps[None]:
        timeout_s = self._op_timeout_s
        manifest = yield from self._manifest(info, copy.shard.number, timeout_s)
        copy.shard = replace(copy.shard, manifest=manifest, spot=self._is_spot)
        going = self.budget.plan(copy.ident, Purpose.RETENTION, copy.nbytes)
        if info.content_id in map(self._held, going):
            raise StateError(
                "there is room for it in the place of its source only, "
                "which has to stay until it is made"
            )
        self._start(copy)
        yield from self._fill(copy, FillCall(OpKind.REPLICATE, info.version), timeout_s)
        if self._held(copy.ident) not in (None, info.content_id):
            raise StateError(
                f"version {info.version} of {info.model!r} is another one by now", retryable=True
            )

    # ----------------------------------------------------------------------------------------------
    # the life of a copy

    def _start(self, copy: Copy) -> None:
        self._copies[copy.ident] = copy
        self._act(StartHandle(copy.shard))

    def _fill(self, copy: Copy, call: FillCall, timeout_s: float) -> Steps[FetchReport | None]:
        """Fill a copy, once its turn has come and there is room. The call itself waits until the
        coordinator knows the copy.
        """
        if copy.filling not in (None, self._procedures.current):
            text = (
                f"{copy.shard.title}: a prefetch is still running on this handle; one prefetch "
                f"at a time"
            )
            raise StateError(text, retryable=True)
        copy.filling, until = self._procedures.current, self._now + timeout_s
        late = (
            f"{copy.shard.title}: no host memory within {timeout_s:g} s: what it held before, "
            f"or what has to make room, is still being read; try again"
        )
        try:
            with copy.turn.line() as has_turn:
                with copy.filling.within(until, lambda: OperationTimeout(late)):
                    yield has_turn
                    yield from self._take_room(copy, timeout_s)
                return (yield from self._call(copy.ident, call, max(0.0, until - self._now)))
        except TensorHubError as error:
            error.memory = "intact"  # the caller's memory was not torn
            raise
        finally:
            copy.filling = None
            member = self._members.get(copy.ident)
            if member is not None and not member.is_registered:
                self._drop(copy)
            self.budget.free(copy.ident, if_taken=False)

    def _take_room(self, copy: Copy, timeout_s: float) -> Steps[None]:
        """Without room the call ends on all ranks: each rank would wait for this rank until its
        deadline.
        """
        if copy.ident not in self._copies:
            raise StateError(f"{copy.shard.title}: its handle was closed")
        if self.budget.reservation(copy.ident) is not None:
            return
        try:
            yield from self.make_room(copy.ident, copy.shard.purpose, copy.nbytes)
        except TensorHubError as error:
            if copy.shard.world_size > 1:
                with suppress(TensorHubError):
                    yield from self._call(copy.ident, RefuseCall(ErrorInfo.of(error)), timeout_s)
            raise

    def make_room(self, ident: str, purpose: Purpose, nbytes: int) -> Steps[None]:
        """Reserve so many bytes for `ident`, once those that it outranks are gone. StateError:
        there is no room for it.
        """
        with self._room.line() as has_turn:
            yield has_turn
            asked = set[str]()
            # Planned again each time: during the wait for one copy, further copies may have given
            # their room back.
            while others := [
                other for other in self.budget.plan(ident, purpose, nbytes) if other not in asked
            ]:
                asked.add(others[0])
                copy = self._copies.get(others[0])
                if copy is not None and copy.shard.purpose is Purpose.ARCHIVE:
                    self._act(Unload(copy.ident, in_turn=purpose is Purpose.ARCHIVE))
                    yield partial(self._is_without_room, copy.ident)
                elif copy is None:  # it was given up, and its memory is being given back
                    yield partial(self._is_without_room, others[0])
                else:
                    reason = f"{nbytes} bytes are needed for another's {purpose.value}"
                    self._act(LogEvent("copy_evicted", copy.ident, reason))
                    error = StateError(
                        "its host memory is needed for something that comes first", retryable=True
                    )
                    yield from self._release(copy, error)
            if purpose is Purpose.ARCHIVE and ident not in self._copies:
                raise StateError("the copy that room was made for has ended", retryable=True)
            self.budget.reserve(ident, purpose, nbytes)

    def _is_without_room(self, ident: str) -> bool:
        return self.budget.reservation(ident) is None

    def _release(self, copy: Copy, error: StateError) -> Steps[None]:
        """Give a copy's memory back, once its readers are moved or fenced. The call that runs on it
        ends first, with `error`.
        """
        yield from self._end_call(copy.ident, error)
        if self.budget.reservation(copy.ident) is None:
            return  # its next fill may have its turn, and wait for this room
        with copy.turn.line() as has_turn:
            yield has_turn
            if self.budget.reservation(copy.ident) is not None:
                yield from self._give_back(copy, ReleaseCall(), self._op_timeout_s)

    def _release_prefetched(self, copy: Copy) -> Steps[None]:
        before = copy.filling
        error = StateError("an update has taken what was prefetched", retryable=True)
        yield from self._end_call(copy.ident, error)
        # a fill that was begun later is for another version, and goes on
        if copy.filling in (None, before):
            yield from self._release(copy, error)

    def _end(self, copy: Copy, timeout_s: float) -> Steps[None]:
        """Close a copy, with its own leave. A call that runs on it ends first."""
        with copy.turn.line() as has_turn:
            yield has_turn
            yield from self._give_back(copy, CloseCall(), timeout_s)
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

    def _quietly(self, steps: Steps[None], copy: Copy, event: str) -> Steps[None]:
        """Log `event` where no caller waits for the error. It is no failure that a copy must
        stay.
        """
        try:
            yield from steps
        except TensorHubError as error:
            fails = not isinstance(error, RetentionError)
            self._act(LogEvent(event, copy.ident, str(error), is_warning=fails))

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

    def close(self, member: Member, timeout_s: float, *, abandon: bool = False) -> Steps[None]:
        """Close a handle with the host copies that end with it."""
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
            kept = [c for c in self._copies.values() if c.shard.purpose is Purpose.RETENTION]
            for copy in kept:
                if copy.filling is not None:
                    copy.filling.is_cancelled = True
            yield lambda: not any(copy.filling for copy in kept)
            ending += kept
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
            report: FetchReport | None = yield from self._result(attempt)
            return report
        except Cancelled:
            # other ranks and the log see it
            error = StateError("the call was cancelled by its caller")
            yield from self._end_attempt(attempt, error)
            raise

    def _end_call(self, registration: str, error: StateError) -> Steps[None]:
        """End the running call, if there is one, with `error`; goes on when nothing of it runs any
        more.
        """
        for attempt in [*self._attempts.values()]:
            if attempt.registration == registration:
                yield from self._end_attempt(attempt, error)

    def _end_attempt(self, attempt: Attempt, error: StateError) -> Steps[None]:
        if attempt.number in self._attempts:
            self._act(CancelCall(attempt.number, attempt.registration, error))
            yield lambda: attempt.number not in self._attempts

    def _attempt(self, registration: str = "", call: Call | None = None) -> Attempt:
        attempt = Attempt(next(self._numbers), registration, call)
        self._attempts[attempt.number] = attempt
        return attempt

    def _result(self, attempt: Attempt) -> Steps[Any]:
        yield lambda: attempt.number not in self._attempts
        if attempt.error is not None:
            raise attempt.error
        return attempt.result

    def _manifest(self, info: VersionInfo, shard: int, timeout_s: float) -> Steps[Manifest]:
        attempt = self._attempt()
        self._act(AskManifest(attempt.number, info, shard, timeout_s))
        what = f"manifest of shard {shard} of version {info.version} of {info.model!r}"
        text = f"{what}: the coordinator did not answer within {timeout_s:g} s"
        try:
            with self._procedures.current.within(
                self._now + timeout_s, lambda: OperationTimeout(text)
            ):
                return Manifest.decode((yield from self._result(attempt)))
        finally:
            self._attempts.pop(attempt.number, None)

    # ----------------------------------------------------------------------------------------------
    # checks

    def check_invariants(self) -> None:
        """Raise InvariantBroken if budget and procedures disagree with what is under way."""
        self.budget.check_invariants()
        filling = [copy.ident for copy in self._copies.values() if copy.filling is not None]
        is_idle = not self._attempts and not filling
        demand(is_idle or len(self._procedures) > 0, "what is filled is under way", self)


def _one_shard(
    registration: str, group: str, info: VersionInfo, shard: int, purpose: Purpose
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
        spot=False,
        layout_id="",
        manifest=None,  # not known yet
        number=shard,
        medium=Medium.HOST,
        purpose=purpose,
    )
