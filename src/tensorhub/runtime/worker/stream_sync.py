"""The caller's queued GPU work comes first: the library shows or writes memory only behind it
(R14).

The caller's thread marks the end of its queue when it calls. The library's loop waits for the mark.
Not responsible for the library's own copies, each of which is waited for where it is made.
"""

from __future__ import annotations

import anyio

from tensorhub.cuda.device import Device, Mark
from tensorhub.errors import OperationTimeout

PAUSE_S = (0.0001, 0.005)  # between two looks, first and last


class StreamSync:
    """Of one handle. `note` is called by its caller's threads, the rest in the library's."""

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._mark: Mark | None = None

    def __repr__(self) -> str:
        return f"<StreamSync on {self._device.name if self._device is not None else 'no device'}>"

    def note(self) -> None:
        """All that the calling thread has queued so far comes before what the library does next."""
        if self._device is not None:
            self._mark = self._device.stream_sync()

    async def done(self, timeout_s: float | None = None) -> None:
        """Return when the mark is reached. OperationTimeout; None: the caller has a deadline.
        StateError: the device has failed.
        """
        mark, pause_s = self._mark, PAUSE_S[0]
        if mark is None:
            return
        with anyio.move_on_after(timeout_s):
            while not mark.is_reached:
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])
            self._mark = None if self._mark is mark else self._mark
            return
        device = self._device.name if self._device is not None else ""
        raise OperationTimeout(
            f"what was queued on {device} before this call is not done after {timeout_s:g} s: it "
            f"comes first, since it may "
            "write these tensors"
        )
