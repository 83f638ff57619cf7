"""A handle's close with the host copies that end with it, as `runtime.host_copies` has it.

What was prefetched for it, and with a caller's last handle what its worker retains, is set aside first, each with its own
leave; `prefetching` takes it back if the close fails, and ends it otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorhub.types import HandleState
from tensorhub.worker.calls import CloseCall, SetAsideCall

if TYPE_CHECKING:
    from tensorhub.testing.handle import Asked, Handle


class Closing:
    """One such close, until the handle is closed or stays."""

    def __init__(
        self, handle: Handle, copies: list[Handle], aside: list[Handle], timeout_s: float, *, abandon: bool
    ) -> None:
        self.handle = handle
        self._copies = copies  # those still to be set aside
        self._aside = aside
        self._timeout_s = timeout_s
        self._abandon = abandon

    def go_on(self) -> bool:
        """Take one step, after each of which it is asked again. False: it has failed."""
        while self._copies:
            copy, asked = self._copies[0], self._copies[0].asked
            if copy.member.state is HandleState.CLOSED or copy not in copy.worker.handles:
                self._copies.pop(0)
            elif copy.member.running is not None:
                if asked is not None and not isinstance(asked.what, CloseCall):  # else it goes anyway, with its own leave
                    copy.cancel("its handle was closed")
                return True
            elif asked is not None and not asked.done:
                return True  # its call has ended, and is about to be asked what comes next
            elif self._abandon:
                self._copies.pop(0)
            else:
                self._aside.append(copy)
                copy.call(SetAsideCall(), self._timeout_s)
                return True
        if not self.handle.idle or self.handle.member.state is HandleState.CLOSED:
            return False
        self.handle.close(self._timeout_s, abandon=self._abandon)
        return True

    def copy_ended(self, copy: Handle, asked: Asked) -> bool:
        """A call of a copy has ended. False: the close has failed."""
        if not self._copies or self._copies[0] is not copy:
            return True
        if isinstance(asked.what, SetAsideCall):
            if asked.error is not None:
                return False
            self._copies.pop(0)
        return self.go_on()
