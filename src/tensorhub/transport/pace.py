"""How fast whole chunks come from each source, and how fast deltas are applied: whether a reader
asks a source for deltas.

A delta pays where the link is slower than the codec. Both rates are measured as they are used. The
codec's rate is for one thread, and so is the link's: each thread has a connection of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from tensorhub.types import Incarnation

CODEC_RATE = 2.0 * 2**30  # bytes/s of whole chunks, until it is measured
# of the codec's rate: the encoder's share, and what a choice costs that is wrong
WORTH = 0.7
SOURCES_MAX = 4096  # that are remembered
SHARE_OF_NEWS = 0.25  # of a new measurement
LEAST_BYTES = 2**20  # of a measurement: a smaller one tells nothing of the link


class Paces:
    """Those of one worker. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codec_rate = CODEC_RATE
        self._rates: OrderedDict[Incarnation, float] = OrderedDict()

    def prefers_deltas(self, source: Incarnation, full_rate: float) -> bool:
        """Whether deltas come sooner than whole chunks. `full_rate`: see `ReadRight`."""
        with self._lock:
            return self._rates.get(source, full_rate) < WORTH * self._codec_rate

    def came(self, source: Incarnation, nbytes: int, seconds: float) -> None:
        """Whole chunks have come in so much time."""
        if nbytes < LEAST_BYTES or seconds <= 0:
            return
        with self._lock:
            known = self._rates.pop(source, None)
            self._rates[source] = _mixed(known, nbytes / seconds)
            if len(self._rates) > SOURCES_MAX:
                self._rates.popitem(last=False)

    def applied(self, nbytes: int, seconds: float) -> None:
        """Deltas of chunks of so many bytes were applied."""
        if nbytes < LEAST_BYTES or seconds <= 0:
            return
        with self._lock:
            self._codec_rate = _mixed(self._codec_rate, nbytes / seconds)


def _mixed(known: float | None, new: float) -> float:
    return new if known is None else known + SHARE_OF_NEWS * (new - known)
