"""The close of a handle, with the host copies that end with it (R5).

The handle's prefetched copy ends with it. The worker's retention copies end with the caller's last handle, since the process
may end then. The copies are set aside first, each with its own leave. So an error leaves all of them as they were.

Responsible for that order, and for whether this process may end at any time. Not responsible for leaves: each copy's
`Member` asks for its own.
"""

from __future__ import annotations

from contextlib import suppress

from tensorhub.errors import StateError, TensorHubError
from tensorhub.types import HandleState, Purpose
from tensorhub.worker.calls import CloseCall, SetAsideCall, TakeBackCall
from tensorhub.worker.copy_pool import Copy, CopyPool
from tensorhub.worker.member import Member
from tensorhub.worker.procedures import Procedure, Steps


class Closings:
    """One worker's. `prefetched`: copies by the registration of their handle; `ordered`: those that are made now, by id."""

    def __init__(self, pool: CopyPool, prefetched: dict[str, Copy], ordered: dict[str, Procedure]) -> None:
        self._pool = pool
        self._prefetched = prefetched
        self._ordered = ordered
        self._closing: list[str] = []  # registrations of handles that their callers are closing
        self._has_closed = False  # a caller has closed one

    @property
    def process_ends(self) -> bool:
        """Whether a caller has closed a handle, or is about to, and none is left: this process may end at any time."""
        used = (member for member in self._pool.members.values() if member.shard.serves)
        mine = (member for member in used if member.shard.purpose is Purpose.USE and member.state is not HandleState.CLOSED)
        return (self._has_closed or bool(self._closing)) and {m.shard.registration for m in mine} <= set(self._closing)

    def close(self, member: Member, timeout_s: float, *, abandon: bool) -> Steps[None]:
        pool, registration = self._pool, member.shard.registration
        until, ending, aside = pool.now + timeout_s, list[Copy](), list[Copy]()
        mine = object()  # this close: another one of this handle may run, too
        self._closing.append(registration)
        try:
            try:
                yield from self._add_ending(registration, ending, abandon=abandon)
                for copy in ending:
                    copy.ends.add(mine)
                    yield from pool.end_call(copy.ident, StateError("its handle was closed"))
                    if not abandon:
                        yield from copy.turn.take()
                        aside.append(copy)
                        is_over = member.state is HandleState.CLOSED  # by another close, which ends its copies now
                        if not (is_over or pool.is_closed(copy.ident)):
                            yield from pool.call(copy.ident, SetAsideCall(), max(0.0, until - pool.now))
                if member.state is not HandleState.CLOSED:
                    yield from pool.call(registration, CloseCall(abandon), max(0.0, until - pool.now))
            except Exception:
                with pool.procedures.current.shielded():
                    yield from self._take_back(member, aside)
                raise
            for copy in ending:
                if not pool.is_closed(copy.ident):
                    with suppress(TensorHubError):  # it is dropped, then
                        yield from pool.call(copy.ident, CloseCall(abandon=True), timeout_s)
        finally:
            self._end(member, ending, mine)
            for copy in aside:
                copy.turn.give_back()

    def _add_ending(self, registration: str, ending: list[Copy], *, abandon: bool) -> Steps[None]:
        """Which copies end with the handle. What is being made is made elsewhere."""
        prefetched, copies = self._prefetched.get(registration), self._pool.copies
        if prefetched is not None:
            ending.append(prefetched)
        if self.process_ends and not abandon and not self._pool.is_spot:
            making = dict(self._ordered)
            for each in making.values():
                each.is_cancelled = True
            yield lambda: not making.keys() & self._ordered.keys()
            ending += [copy for copy in copies.values() if copy.shard.purpose is Purpose.RETENTION]

    def _take_back(self, member: Member, aside: list[Copy]) -> Steps[None]:
        """What was set aside holds again what it held, unless the handle is closed."""
        for copy in reversed(aside):
            if member.state is not HandleState.CLOSED:
                with suppress(TensorHubError):  # it may have ended meanwhile
                    yield from self._pool.call(copy.ident, TakeBackCall(), self._pool.op_timeout_s)

    def _end(self, member: Member, ending: list[Copy], mine: object) -> None:
        registration = member.shard.registration
        self._closing.remove(registration)
        is_closed = member.state is HandleState.CLOSED
        if is_closed:
            self._has_closed = True
            self._prefetched.pop(registration, None)
        for copy in ending:
            copy.ends.discard(mine)
            if is_closed and copy.ident in self._pool.copies:
                self._pool.drop(copy)
