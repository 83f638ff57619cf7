"""A handle's host copy, as `runtime.host_copies` has it: made by the first prefetch, freed after an update, closed first.

Not responsible for copies that the coordinator orders: see `worker`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tensorhub.errors import StateError, TensorHubError
from tensorhub.messages import ErrorInfo
from tensorhub.types import HandleState, Medium, OpKind, Purpose, Selector, host_group
from tensorhub.worker.calls import CloseCall, FillCall, RefuseCall, ReleaseCall, SetAsideCall, TakeBackCall

if TYPE_CHECKING:
    from tensorhub.testing.handle import Asked, Handle


class Prefetched:
    """The host copy of one handle, if it has one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.copy: Handle | None = None
        self._frees = False  # what it holds is to be given back, once its call has ended
        self._closing: tuple[float, bool] | None = None  # how its handle is to be closed, once what it held is set aside

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
            self._go_on(self.copy)

    def close(self, timeout_s: float, *, abandon: bool = False) -> None:
        """Close the handle with its copy. That is set aside first, so that an error leaves both as they were."""
        if self.copy is None:
            self._handle.close(timeout_s, abandon=abandon)
        elif self._closing is None:
            self._closing = timeout_s, abandon
            self._go_on(self.copy)

    def handle_over(self) -> None:
        """The handle is closed, or was refused: so ends its copy."""
        if self.copy is not None:
            self._go_on(self.copy)

    def handle_ended(self, asked: Asked) -> None:
        """A call of the handle has ended."""
        if self._handle.member.state is HandleState.CLOSED:
            self._closing = None
            self.handle_over()
        elif isinstance(asked.what, CloseCall):
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
        elif self._closing is not None and self._closing[1]:
            self._close_handle()
        elif self._closing is not None:
            copy.call(SetAsideCall(), self._closing[0])
        else:
            self._frees = False
            copy.call(ReleaseCall())

    def copy_ended(self, copy: Handle, asked: Asked) -> None:
        """A call of the copy has ended."""
        if copy.member.state is HandleState.CLOSED:
            self._drop(copy)
        elif self._handle.member.state is HandleState.CLOSED or self._handle not in self._handle.worker.handles:
            self._go_on(copy)
        elif isinstance(asked.what, SetAsideCall):
            if asked.error is None:
                self._close_handle()
            else:
                self._stay()
        elif self._frees or self._closing is not None:
            self._go_on(copy)

    def _close_handle(self) -> None:
        handle = self._handle
        assert self._closing is not None
        timeout_s, abandon = self._closing
        if handle.idle:
            handle.close(timeout_s, abandon=abandon)
        else:
            self._stay()

    def _stay(self) -> None:
        """The handle is not closed: its copy holds what it held."""
        self._closing = None
        if self.copy is not None and self.copy.idle:
            self.copy.call(TakeBackCall())

    def _drop(self, copy: Handle) -> None:
        copy.worker.drop(copy)
        self.copy = None
