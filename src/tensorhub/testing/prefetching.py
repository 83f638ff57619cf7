"""A handle's host copy, as `runtime.host_copies` has it: made by the first prefetch, freed after an update, closed first.

Not responsible for copies that the coordinator orders: see `worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tensorhub.errors import StateError, TensorHubError
from tensorhub.messages import ErrorInfo
from tensorhub.testing.closing import Closing
from tensorhub.types import HandleState, Medium, OpKind, Purpose, Selector, host_group
from tensorhub.worker.calls import CloseCall, FillCall, RefuseCall, ReleaseCall, TakeBackCall

if TYPE_CHECKING:
    from tensorhub.testing.handle import Asked, Handle


class Prefetched:
    """The host copy of one handle, if it has one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.copy: Handle | None = None
        self._frees = False  # what it holds is to be given back, once its call has ended
        self._closing: Closing | None = None  # its handle's, with what ends with it
        self.aside: list[Handle] = []  # what was set aside for that

    def fill(self, selector: Selector, timeout_s: float) -> Asked:
        """Prefetch. Raises StateError while another call of the copy runs."""
        return self._have_copy().call(FillCall(OpKind.PREFETCH, selector), timeout_s)

    def refuse(self, error: TensorHubError, timeout_s: float) -> Asked:
        """Tell the other ranks that this one does not prefetch. Raises as `fill`."""
        return self._have_copy().call(RefuseCall(ErrorInfo.of(error)), timeout_s)

    def _have_copy(self) -> Handle:
        """Make it, the first time."""
        copy = self.copy
        if self._closing is not None or (copy is not None and not copy.idle):
            raise StateError("one prefetch at a time", retryable=True)
        if copy is not None and copy.registration_error is not None:
            self._drop(copy)
        if self.copy is None:
            shard, number = self._handle.shard, next(self._handle.cluster.registrations)
            of_host = replace(shard, registration=f"r{number}h", group=host_group(shard.group), medium=Medium.HOST)
            copy = self.copy = self._handle.worker.take(replace(of_host, purpose=Purpose.PREFETCH))
            copy.copy_of = self._handle
        assert copy is not None
        return copy

    def end(self) -> None:
        """An update has taken what the running prefetch has got so far."""
        if self.copy is not None:
            self.copy.apply(self.copy.member.end_prefetch(self._handle.cluster.now))

    def free(self) -> None:
        """An update is done: give up what is held, and what is being filled (R10)."""
        if self.copy is not None:
            self._frees = True
            if self._closing is None:
                self._go_on(self.copy)

    def close(self, timeout_s: float, *, abandon: bool = False) -> None:
        """Close the handle with what ends with it: see `closing`."""
        if self._closing is None:
            self._handle.worker.closing.append(self)
            self._closing = Closing(self._handle, self.ending(abandon=abandon), self.aside, timeout_s, abandon=abandon)
            if not self._closing.go_on():
                self._stay()

    def ending(self, *, abandon: bool) -> list[Handle]:
        """The copies that end with the handle, which is being closed."""
        worker, copies = self._handle.worker, [self.copy] if self.copy is not None else []
        if worker.ends and not abandon and not any(h.shard.spot and h.shard.serves for h in worker.handles):
            copies += [handle for handle in worker.handles if handle.shard.purpose is Purpose.RETENTION]
        return copies

    @property
    def handle(self) -> Handle:
        """Whose copy it is."""
        return self._handle

    @staticmethod
    def take_back(copy: Handle) -> None:
        """The handle is not closed: what was set aside for that is held again."""
        if copy.idle and copy.member.state is not HandleState.CLOSED:
            copy.call(TakeBackCall())

    @staticmethod
    def give_up(copy: Handle) -> None:
        """The handle is closed, and so ends what was set aside."""
        if copy.copy_of is None and copy.idle and copy.member.state is not HandleState.CLOSED:
            copy.dropped = True
            copy.close(abandon=True)

    def handle_over(self) -> None:
        """The handle is closed, or was refused: so ends its copy."""
        if self.copy is not None:
            self._go_on(self.copy)

    def handle_ended(self, asked: Asked) -> None:
        """A call of the handle has ended."""
        if self._handle.member.state is HandleState.CLOSED:
            if self._handle.shard.serves and self._handle.shard.purpose is Purpose.USE:
                self._handle.worker.has_closed = True
            if self._closing is not None:
                self._end(self.give_up)
            self.handle_over()
        elif isinstance(asked.what, CloseCall) and self._closing is not None:
            self._stay()

    def _go_on(self, copy: Handle) -> None:
        """One step, after each of which it is asked again."""
        handle, asked = self._handle, copy.asked
        is_over = handle.member.state is HandleState.CLOSED or handle not in handle.worker.handles
        if copy.member.running is not None:
            copy.cancel("its handle needs it no more")
        elif asked is not None and not asked.done:
            pass  # its call has ended, and is about to be asked what comes next
        elif is_over:
            copy.close(abandon=True)
        else:
            self._frees = False
            copy.call(ReleaseCall())

    def copy_ended(self, copy: Handle, asked: Asked) -> None:
        """A call of the copy has ended."""
        if copy.member.state is HandleState.CLOSED:
            self._drop(copy)
            return
        is_over = self._handle.member.state is HandleState.CLOSED or self._handle not in self._handle.worker.handles
        frees = self._frees and self._closing is None and not isinstance(asked.what, ReleaseCall)
        if is_over or frees:
            self._go_on(copy)

    def ending_copy_ended(self, copy: Handle, asked: Asked) -> None:
        """A call of a copy of this worker has ended, and perhaps the close waits for that."""
        if self._closing is not None and not self._closing.copy_ended(copy, asked):
            self._stay()

    def _stay(self) -> None:
        """The handle is not closed."""
        self._end(self.take_back)

    def _end(self, settle: Callable[[Handle], None]) -> None:
        """Its close is over."""
        self._handle.worker.closing.remove(self)
        self._closing, aside = None, list(self.aside)
        self.aside.clear()
        for copy in aside:
            settle(copy)

    def _drop(self, copy: Handle) -> None:
        copy.worker.drop(copy)
        self.copy = None
