"""How fast whole chunks come from each source, and how fast its deltas are applied: whether a
reader asks a source for deltas.

A delta pays where the link is slower than the codec. Both rates are measured as they are used, and
by source: one that sends deltas that take long costs no other source its readers' trust. The
codec's rate is for one thread, and so is the link's: each thread has a connection of its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict

from tensorhub import deltas
from tensorhub.types import Incarnation

CODEC_RATE = 2.0 * 2**30  # bytes/s of whole chunks, until it is measured
# of the codec's rate: the encoder's share, and what a choice costs that is wrong
WORTH = 0.7
SOURCES_MAX = 4096  # that are remembered
SHARE_OF_NEWS = 0.25  # of a new measurement
LEAST_BYTES = 2**20  # of a measurement: a smaller one tells nothing of the link

# what `rate_here` measures: a bf16 chunk of so many bytes, of which one word in so many changes
MEASURED_BYTES = 8 * 2**20
WORDS_PER_CHANGE = 64
MEASURED_TIMES = 5


def rate_here() -> float:
    """How fast this process' thread applies deltas, in bytes/s of whole chunks: the best of a few
    times. Takes some tenths of a second. StateError: the extra is not installed.
    """
    rng = random.Random(0)
    chunk = bytearray(rng.randbytes(MEASURED_BYTES))
    new, words = bytearray(chunk), MEASURED_BYTES // 2
    for word in rng.sample(range(words), words // WORDS_PER_CHANGE):
        new[2 * word] ^= 1
    frame = deltas.encode(memoryview(chunk), memoryview(new), 2)
    assert frame is not None
    seconds = []
    for _ in range(MEASURED_TIMES):
        began = time.perf_counter()
        deltas.apply([frame], memoryview(chunk))
        seconds.append(time.perf_counter() - began)
    return MEASURED_BYTES / min(seconds)


class Paces:
    """Those of one worker. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codec_rates: OrderedDict[Incarnation, float] = OrderedDict()
        self._rates: OrderedDict[Incarnation, float] = OrderedDict()

    def prefers_deltas(self, source: Incarnation, full_rate: float) -> bool:
        """Whether deltas come sooner than whole chunks. `full_rate`: see `ReadRight`."""
        with self._lock:
            codec_rate = self._codec_rates.get(source, CODEC_RATE)
            return self._rates.get(source, full_rate) < WORTH * codec_rate

    def came(self, source: Incarnation, nbytes: int, seconds: float) -> None:
        """Whole chunks have come in so much time."""
        self._note(self._rates, source, nbytes, seconds, None)

    def applied(self, source: Incarnation, nbytes: int, seconds: float) -> None:
        """Its deltas of chunks of so many bytes were applied."""
        self._note(self._codec_rates, source, nbytes, seconds, CODEC_RATE)

    def _note(
        self,
        rates: OrderedDict[Incarnation, float],
        source: Incarnation,
        nbytes: int,
        seconds: float,
        otherwise: float | None,
    ) -> None:
        if nbytes < LEAST_BYTES or seconds <= 0:
            return
        new = nbytes / seconds
        with self._lock:
            known = rates.pop(source, otherwise)
            rates[source] = new if known is None else known + SHARE_OF_NEWS * (new - known)
            if len(rates) > SOURCES_MAX:
                rates.popitem(last=False)
