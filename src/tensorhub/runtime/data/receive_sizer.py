"""How fast bytes come from one source, and so how many bytes one call shall receive.

Other readers get a call's bytes only when the call has returned. So a call receives what comes in a few milliseconds: over
a slow link one chunk, over a fast one so much that calls cost little.

Responsible for these figures. Not responsible for calls, threads and books (`lanes`).
"""

from __future__ import annotations

from tensorhub.scheduler.links import FlowMeter
from tensorhub.transport.streaming_digest import SMALL_BYTES, GilWatch

FIRST_BYTES = 2**16  # received by the first call
CACHED_BYTES = SMALL_BYTES  # by any call at the most, in small pieces, while the source goes on sending
LARGE_BYTES = 64 * 2**20  # as FIRST_BYTES, where small pieces do not pay
OFFER_S = 0.005  # what comes in so much time is received by one call
CONTENDED_S = 0.05  # as OFFER_S, where each call costs a switch interval


class ReceiveSizer:
    """How many bytes each call of one lane receives; the lane's lock guards it."""

    def __init__(self) -> None:
        self.call_bytes = FIRST_BYTES  # what the next call receives
        self.transfer_s = 0.0  # of all calls, from their first bytes on
        self.verify_s = 0.0
        self.meter = FlowMeter()
        self._gil = GilWatch()

    def arrived(self, nbytes: int, transfer_s: float, verify_s: float, now: float, *, is_digested: bool) -> None:
        """A call has brought so many bytes, which were there at `now`."""
        self.transfer_s += transfer_s
        self.verify_s += verify_s
        self._gil.digested(nbytes, verify_s)
        most = LARGE_BYTES if self._gil.is_contended or not is_digested else CACHED_BYTES
        in_time = nbytes * (CONTENDED_S if self._gil.is_contended else OFFER_S) / max(transfer_s, 1e-6)
        self.call_bytes = min(most, 4 * max(nbytes, FIRST_BYTES), int(in_time))
        self.meter.arrived(nbytes, now)

    def __repr__(self) -> str:
        return f"<ReceiveSizer of {self.meter!r}, {self.call_bytes} by the next call>"
