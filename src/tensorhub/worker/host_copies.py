"""A worker's copies in host memory: prefetched ones beside its handles, retention copies that the coordinator orders, seeds.

Each copy is a handle of its own, with a registration and a `Member`. Events in, actions out: every input returns what is to
be done, in order. What somebody has asked for ends with `FinishRequest`, under the number that it came with.

Theory of operation. What takes several steps is a procedure (`worker.procedures`), made of the steps of `CopyPool`. A
procedure takes a copy's turn before it fills or releases the copy, so no fill begins in the midst of a release. One
procedure at a time makes room in the budget, by releasing copies that are outranked.

The prefetched copy of a handle ends with the handle. The worker's retention copies end with the caller's last handle, since
the process may end then. A close of the handle closes these copies first, each with its own leave (R5). If a copy must stay,
the close fails, and the handle is as it was.

Responsible for which copies there are, and for how much memory they may take (`worker.budget`). Not responsible for what
they hold (each copy's `Member` is), nor for who reads them (the coordinator is: to it copies are ordinary holders). Not
responsible for memory: `take` and `freed` say when it is taken and given back. Nor for time, which is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tensorhub.errors import OperationTimeout, RetentionError, StateError, TensorHubError, VersionUnavailable
from tensorhub.machine import InvariantBroken
from tensorhub.manifest import Manifest
from tensorhub.messages import CopyRefused, DropCopy, ErrorInfo, MakeCopy
from tensorhub.types import LATEST, FetchReport, HandleState, Medium, OpKind, Purpose, Selector, VersionInfo, host_group
from tensorhub.worker.budget import Budget
from tensorhub.worker.calls import Call, CloseCall, CopyCall, FillCall, LocalCopy, RefuseCall, Say
from tensorhub.worker.copy_pool import Copy, CopyPool
from tensorhub.worker.host_copy_actions import CopyAction, EndCopysPrefetch, FinishRequest, LogEvent
from tensorhub.worker.member import Member
from tensorhub.worker.procedures import Cancelled, Procedure, Procedures, Steps
from tensorhub.worker.registration_session import Shard


class HostCopies:
    """`idents` makes registrations that nobody ever made before. Inputs about a registration that is not known (any more),
    or about a call or question that is over, change nothing.
    """

    def __init__(self, bytes_max: int, op_timeout_s: float, idents: Callable[[], str]) -> None:
        self._idents = idents
        self._pool = CopyPool(bytes_max, op_timeout_s, Procedures(self._procedure_ended))
        self._in_files: set[str] = set()  # handles whose bytes are read by calls of the kernel only (see FileMemory)
        self._prefetched: dict[str, Copy] = {}  # by the registration of the handle that they are for
        self._ordered: dict[str, Procedure] = {}  # retention copies that are being made, by id
        self._closing: list[str] = []  # registrations of handles that their callers are closing
        self._has_closed = False  # a caller has closed one
        self._is_stopped = False  # the worker closes

    def __repr__(self) -> str:
        return f"<HostCopies: {len(self._pool.copies)}, {len(self._pool.procedures)} under way, {self.budget!r}>"

    @property
    def budget(self) -> Budget:
        return self._pool.budget

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not len(self._pool.procedures)

    def copy_of(self, registration: str) -> str | None:
        """The registration of what was prefetched for this handle."""
        copy = self._prefetched.get(registration)
        return copy.ident if copy is not None else None

    def _begin(self, steps: Steps[Any], now: float, request: int | None = None) -> list[CopyAction]:
        self._pool.procedures.begin(steps, request)
        return self._go_on(now)

    def _go_on(self, now: float) -> list[CopyAction]:
        """What follows of what has just come."""
        pool = self._pool
        pool.now = now
        self._pool.procedures.go_on(now)
        actions, pool.actions = pool.actions, []
        return actions

    def _procedure_ended(self, procedure: Procedure, report: FetchReport | None, error: Exception | None) -> None:
        if procedure.request is not None:
            cancelled = isinstance(error, Cancelled)
            error = StateError("the call was cancelled by its caller") if cancelled else error
            self._pool.act(FinishRequest(procedure.request, report, error))
        elif error is not None:
            raise error

    # ------------------------------------------------------------------------------------------- inputs: what is asked for

    def prefetch(self, request: int, member: Member, selector: Selector, timeout_s: float, now: float) -> list[CopyAction]:
        """Fill this handle's host copy with a version, in place of what it held."""
        return self._begin(self._prefetch(member, selector, timeout_s), now, request)

    def seed(self, request: int, info: VersionInfo, shard: int, timeout_s: float, now: float) -> list[CopyAction]:
        """Have this worker's seed of that shard of the model hold its newest version; the first time, make the seed."""
        return self._begin(self._seed(info, shard, timeout_s), now, request)

    def close(
        self, request: int, member: Member, timeout_s: float, now: float, *, abandon: bool = False
    ) -> list[CopyAction]:
        """Close a handle with the host copies that end with it."""
        return self._begin(self._close(member, timeout_s, abandon=abandon), now, request)

    def make_room(self, request: int, ident: str, purpose: Purpose, nbytes: int, now: float) -> list[CopyAction]:
        """Reserve so many bytes for `ident`, once those that it outranks are gone. StateError: there is no room for it."""
        return self._begin(self._pool.make_room(ident, purpose, nbytes), now, request)

    def cancel(self, request: int, now: float) -> list[CopyAction]:
        """Nobody wants that any more: it finishes once nothing of it runs."""
        self._pool.procedures.cancel(request)
        return self._go_on(now)

    def stop(self) -> None:
        """The worker closes: nothing is begun any more that no caller asks for."""
        self._is_stopped = True

    # ------------------------------------------------------------------------------------ inputs: handles and their memory

    def began(self, member: Member, *, in_file: bool = False) -> None:
        """A handle was made: a caller's, or what StartHandle asked for. `in_file`: its memory is a file."""
        self._pool.members[member.shard.registration] = member
        if in_file:
            self._in_files.add(member.shard.registration)

    def answered(self, registration: str, refusal: Exception | None, now: float) -> list[CopyAction]:
        """The coordinator has it, or not: `refusal`."""
        copy = self._pool.copies.get(registration)
        if copy is not None:
            copy.is_known, copy.refusal = True, refusal
        return self._go_on(now)

    def call_ended(
        self, number: int, now: float, *, report: FetchReport | None = None, error: Exception | None = None, nbytes: int = 0
    ) -> list[CopyAction]:
        """What BeginCall asked for is over. `nbytes`: of host memory that its handle has now."""
        self._pool.call_ended(number, nbytes)
        self._pool.ended(number, report, error)
        return self._go_on(now)

    def manifest_came(self, number: int, encoded: bytes, now: float) -> list[CopyAction]:
        self._pool.ended(number, encoded, None)
        return self._go_on(now)

    def manifest_failed(self, number: int, error: Exception, now: float) -> list[CopyAction]:
        self._pool.ended(number, None, error)
        return self._go_on(now)

    def take(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        """Memory is about to be taken, maybe of another size than was reserved: versions may differ. StateError: no room."""
        self.budget.reserve(ident, purpose, nbytes)

    def freed(self, ident: str, now: float) -> list[CopyAction]:
        """Memory was given back, a copy's or what was staged."""
        self.budget.free(ident)
        copy = self._pool.copies.get(ident)
        if copy is not None:
            copy.nbytes = 0
            is_made = copy.shard.purpose is Purpose.RETENTION and ident not in self._ordered
            if is_made and not self._pool.is_closed(ident):
                self._pool.drop(copy)  # it was ordered out
        return self._go_on(now)

    def end_prefetch(self, registration: str, now: float) -> list[CopyAction]:
        """An update of this handle has taken what its copy has got so far."""
        copy = self._prefetched.get(registration)
        if copy is not None:
            self._pool.act(EndCopysPrefetch(copy.ident))
        return self._go_on(now)

    def free_prefetch(self, registration: str, now: float) -> list[CopyAction]:
        """An update of this handle is done: its copy is released, in the background (R10)."""
        copy = self._prefetched.get(registration)
        if copy is None or self._is_stopped or self.budget.reservation(copy.ident) is None:
            return []
        return self._begin(self._release_quietly(copy, copy.fills), now)

    def ended(self, registration: str, now: float) -> list[CopyAction]:
        """A handle is no more: what was made for it ends too."""
        self._in_files.discard(registration)
        self._pool.members.pop(registration, None)
        gone, copy = self._pool.copies.pop(registration, None), self._prefetched.pop(registration, None)
        if gone is not None:
            gone.is_known, gone.refusal = (
                True,
                gone.refusal or StateError(f"{gone.shard.title} was given up", retryable=True),
            )
        self._forget_prefetched(registration)
        if copy is not None:
            self._pool.drop(copy)
        return self._go_on(now)

    def _forget_prefetched(self, ident: str) -> None:
        for registration in [each for each, copy in self._prefetched.items() if copy.ident == ident]:
            del self._prefetched[registration]

    # ----------------------------------------------------------------------------------- inputs: the coordinator, and time

    def ordered(self, order: MakeCopy, now: float) -> list[CopyAction]:
        """The coordinator wants a copy."""
        if order.copy in self._pool.copies or order.copy in self._ordered:
            return []  # said again
        if self._is_stopped or self._process_ends:
            return [Say(CopyRefused(order.copy, "this worker closes"))]
        source = self._pool.members.get(order.registration)
        self._ordered[order.copy] = self._pool.procedures.begin(self._make_ordered(order, source))
        return self._go_on(now)

    def dropped(self, order: DropCopy, now: float) -> list[CopyAction]:
        """The coordinator needs it no more."""
        making, copy = self._ordered.get(order.copy), self._pool.copies.get(order.copy)
        if making is not None:
            making.is_cancelled = True
        elif copy is not None and not self._is_stopped:
            return self._begin(self._end_ordered(copy), now)
        return self._go_on(now)

    def next_deadline(self) -> float | None:
        return self._pool.procedures.next_deadline()

    def tick(self, now: float) -> list[CopyAction]:
        """What has waited long enough ends."""
        return self._go_on(now)

    # ---------------------------------------------------------------------------------------------------- prefetch and seed

    def _prefetch(self, member: Member, selector: Selector, timeout_s: float) -> Steps[FetchReport | None]:
        shard = member.shard
        manifest = shard.manifest
        assert manifest is not None
        if member.state is HandleState.CLOSED:
            raise StateError(f"{shard.title} is closed; register again")
        if shard.registration in self._closing:
            raise StateError(f"{shard.title} is being closed")
        member.report_loss()
        copy = self._prefetched.get(shard.registration)
        if copy is not None and copy.refusal is not None and not copy.filling:
            self._pool.drop(copy)  # a coordinator that has come back did not take it: it may take another
            copy = None
        if copy is None:
            if shard.world_size == 1:  # nobody else has to hear of it: before anything is said
                self._check_possible(manifest.region_bytes)
            group, ident = host_group(shard.group), self._idents()
            of_host = replace(shard, registration=ident, group=group, medium=Medium.HOST, purpose=Purpose.PREFETCH)
            copy = self._prefetched[shard.registration] = self._pool.start(of_host)
            try:
                yield from self._pool.known(copy, timeout_s)
            except Exception:
                self._forget_prefetched(copy.ident)
                raise
        return (yield from self._refill(copy, selector, manifest.region_bytes, timeout_s))

    def _check_possible(self, nbytes: int) -> None:
        """Raise StateError if there is no room for so many bytes to be prefetched."""
        if not self.budget.bytes_max:
            raise StateError("prefetch() needs host memory: set Options.host_memory_bytes")
        self.budget.plan("", Purpose.PREFETCH, nbytes)

    def _seed(self, info: VersionInfo, shard: int, timeout_s: float) -> Steps[FetchReport | None]:
        manifest = yield from self._pool.manifest(info, shard, timeout_s)
        mine = [each for each in self._pool.copies.values() if each.shard.purpose is Purpose.SEED]
        copy = next((each for each in mine if (each.shard.model, each.shard.number) == (info.model, shard)), None)
        if copy is None:
            self.budget.plan("", Purpose.SEED, manifest.region_bytes)
            ident = self._idents()
            of_host = _one_shard(ident, f"seed/{ident}", info, shard, manifest, Purpose.SEED, spot=False)
            copy = self._pool.start(of_host)
            yield from self._pool.known(copy, timeout_s)
        return (yield from self._refill(copy, LATEST, manifest.region_bytes, timeout_s))

    def _refill(self, copy: Copy, selector: Selector, nbytes: int, timeout_s: float) -> Steps[FetchReport | None]:
        if copy.filling:
            text = f"{copy.shard.title}: a prefetch is still running on this handle; one prefetch at a time"
            raise StateError(text, retryable=True)
        copy.filling, until = True, self._pool.now + timeout_s
        try:
            yield from self._take_turn(copy, nbytes, timeout_s)
            try:
                copy.fills += 1
                call, left_s = FillCall(OpKind.PREFETCH, selector), max(0.0, until - self._pool.now)
                return (yield from self._pool.call(copy.ident, call, left_s))
            finally:
                copy.turn.give_back()
        except TensorHubError as error:
            error.memory = "intact"  # what was torn is not the caller's
            raise
        finally:
            copy.filling = False
            if not copy.nbytes:  # nothing of it was begun, or the handle itself holds that version
                self.budget.free(copy.ident)

    def _take_turn(self, copy: Copy, nbytes: int, timeout_s: float) -> Steps[None]:
        """Have the copy's turn, and room for it. Both may have to wait for readers of what is being given back."""
        text = f"{copy.shard.title}: no host memory within {timeout_s:g} s: what it held before, or what has to make room, "
        late = f"{text}is still being read; try again"
        with self._pool.procedures.current.within(self._pool.now + timeout_s, lambda: OperationTimeout(late)):
            yield from copy.turn.take()
            try:
                if copy.ident not in self._pool.copies:
                    raise StateError(f"{copy.shard.title}: its handle was closed")
                if self.budget.reservation(copy.ident) is None:
                    yield from self._take_room(copy, nbytes, timeout_s)
            except BaseException:
                copy.turn.give_back()
                raise

    def _take_room(self, copy: Copy, nbytes: int, timeout_s: float) -> Steps[None]:
        """Where there is none, the other ranks' calls end, too: they would wait for this one until their deadlines."""
        try:
            if copy.shard.purpose is Purpose.PREFETCH:
                self._check_possible(nbytes)
            yield from self._pool.make_room(copy.ident, copy.shard.purpose, nbytes)
        except TensorHubError as error:
            if copy.shard.world_size > 1:
                with suppress(TensorHubError):
                    yield from self._pool.call(copy.ident, RefuseCall(ErrorInfo.of(error)), timeout_s)
            raise

    def _release_quietly(self, copy: Copy, fills: int) -> Steps[None]:
        """`fills`: what was begun later is for another version, and goes on."""
        try:
            yield from self._pool.end_call(copy.ident, StateError("an update has taken what was prefetched", retryable=True))
            yield from self._pool.give_back(copy, lambda: copy.fills == fills)
        except RetentionError as error:
            self._pool.act(LogEvent("copy_must_stay", copy.ident, str(error)))
        except TensorHubError as error:
            self._pool.act(LogEvent("copy_not_released", copy.ident, str(error), is_warning=True))

    # ---------------------------------------------------------------------------------------------------- retention copies

    def _make_ordered(self, order: MakeCopy, source: Member | None) -> Steps[None]:
        reason = ""
        try:
            yield from self._make(order, source)
        except TensorHubError as error:
            reason = str(error)
        except Cancelled:
            reason = "it was not needed any more, or this worker closes"
        finally:
            del self._ordered[order.copy]
        copy, member = self._pool.copies.get(order.copy), self._pool.members.get(order.copy)
        if reason:
            self._pool.act(LogEvent("copy_refused", order.copy, reason, is_warning=True))
            self._pool.act(Say(CopyRefused(order.copy, reason[:1000])))
        if copy is not None and (reason or member is None or member.content is None):  # or it was ordered out meanwhile
            self._pool.drop(copy)

    def _make(self, order: MakeCopy, source: Member | None) -> Steps[None]:
        pool, info, timeout_s = self._pool, order.version, self._pool.op_timeout_s
        held = source.content if source is not None else None
        if held is not None and held.version.content_id != info.content_id:
            held = None
        if order.registration and held is None:
            raise VersionUnavailable(f"version {info.version} is not held by {order.registration!r} any more")
        if held is not None:
            manifest = held.manifest
        else:
            manifest = yield from pool.manifest(info, order.shard, timeout_s, order.manifest_id)
        if order.registration in self.budget.plan(order.copy, Purpose.RETENTION, manifest.region_bytes):
            raise StateError("there is room for it in the place of its source only, which has to stay until it is made")
        yield from pool.make_room(order.copy, Purpose.RETENTION, manifest.region_bytes)
        group, spot = f"copy/{order.copy}", pool.is_spot
        of_host = _one_shard(order.copy, group, info, order.shard, manifest, Purpose.RETENTION, spot=spot)
        of_host = replace(of_host, layout_id=order.layout_id)
        yield from pool.known(pool.start(of_host), timeout_s)
        if held is not None and order.registration not in self._in_files:
            call: Call = CopyCall(held.version, manifest, LocalCopy(order.registration, held.generation))
        else:
            call = FillCall(OpKind.REPLICATE, info.version)
        yield from pool.call(order.copy, call, timeout_s)
        made = pool.members.get(order.copy)
        if made is not None and made.content is not None and made.content.version.content_id != info.content_id:
            raise VersionUnavailable(f"version {info.version} of {info.model!r} is another one by now")

    def _end_ordered(self, copy: Copy) -> Steps[None]:
        """A call that runs on it has its time: mostly it is this same one, ordered before its worker was taken for lost."""
        while copy.ident in self._pool.calls:
            yield lambda: copy.ident not in self._pool.calls
        if self._pool.is_closed(copy.ident):
            return
        try:
            yield from self._pool.call(copy.ident, CloseCall(), self._pool.op_timeout_s)
        except TensorHubError as error:
            self._pool.act(LogEvent("copy_not_ended", copy.ident, str(error), is_warning=True))

    # ----------------------------------------------------------------------------------------------------- a handle's end

    @property
    def _process_ends(self) -> bool:
        """Whether a caller has closed a handle, or is about to, and none is left: this process may end at any time."""
        used = (m for m in self._pool.members.values() if m.shard.serves and m.shard.purpose is Purpose.USE)
        mine = {m.shard.registration for m in used if m.state is not HandleState.CLOSED}
        return (self._has_closed or bool(self._closing)) and mine <= set(self._closing)

    def _close(self, member: Member, timeout_s: float, *, abandon: bool) -> Steps[None]:
        pool, registration, until = self._pool, member.shard.registration, self._pool.now + timeout_s
        self._closing.append(registration)
        try:
            if not abandon:
                yield from self._close_copies(self._prefetched.get(registration), until)
            if member.state is not HandleState.CLOSED:
                yield from pool.call(registration, CloseCall(abandon), max(0.0, until - pool.now))
            if not abandon:  # the handle may have become the last one meanwhile
                yield from self._close_copies(None, until)
        finally:
            self._closing.remove(registration)
            self._has_closed = self._has_closed or member.state is HandleState.CLOSED

    def _close_copies(self, prefetched: Copy | None, until: float) -> Steps[None]:
        """Close the copies that end with a handle. A copy that is being made is made by another worker instead."""
        pool, ending = self._pool, [prefetched] if prefetched is not None else []
        if self._process_ends and not pool.is_spot:
            making = dict(self._ordered)
            for each in making.values():
                each.is_cancelled = True
            yield lambda: not making.keys() & self._ordered.keys()
            ending += [copy for copy in pool.copies.values() if copy.shard.purpose is Purpose.RETENTION]
        for copy in ending:
            yield from pool.end_call(copy.ident, StateError("its handle was closed"))
            yield from copy.turn.take()
            try:
                if not pool.is_closed(copy.ident):
                    yield from pool.call(copy.ident, CloseCall(), max(0.0, until - pool.now))
            finally:
                copy.turn.give_back()
            pool.drop(copy)

    # ------------------------------------------------------------------------------------------------------------- checks

    def check_invariants(self) -> None:
        """Raise InvariantBroken if the copies and what is known of them disagree."""
        pool = self._pool
        self.budget.check_invariants()
        for ident, copy in pool.copies.items():
            if copy.nbytes and self.budget.reservation(ident) is None:
                raise InvariantBroken(f"{self!r}: {ident} has {copy.nbytes} bytes of host memory that were not reserved")
        left = pool.calls or pool.attempts or self._ordered or any(copy.filling for copy in pool.copies.values())
        if left and not len(self._pool.procedures):
            raise InvariantBroken(f"{self!r}: nothing is under way, and there is {pool.calls}, {self._ordered}")


def _one_shard(
    registration: str, group: str, info: VersionInfo, shard: int, manifest: Manifest, purpose: Purpose, *, spot: bool
) -> Shard:
    """A copy of one shard is a group of its own, whatever the layout of its version. (It says of no layout that it is its
    own, unless that is not the published one.)
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
