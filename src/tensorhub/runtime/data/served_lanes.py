"""The lanes that serve readers, and which readers there is room for: connections are bounded in
all, and by reader.

Read-only readers have half of all places at most. Where places are short, a lane whose reader keeps
its connection for later makes room first. Next, a read with several connections gives up one
connection: its other connections bring the chunks (`transport.parallel`).

Not responsible for what a lane may read (`serving`), nor for its thread (`acceptor`). Callers hold
the owner's lock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from threading import Condition

from tensorhub.transport.owner import Lane
from tensorhub.types import READ_ONLY, Incarnation

# after which a lane that was asked nothing more is taken for kept, where places are short
REST_S = 0.25


class ServedLanes(set[Lane]):
    """Those of one owner. `changed`: its lock, which is notified when a lane is stopped."""

    def __init__(self, changed: Condition) -> None:
        super().__init__()
        self._changed = changed

    def stop(self, lane: Lane) -> None:
        """Have it end soon."""
        lane.is_stopped = True
        lane.connection.shutdown()
        self._changed.notify_all()

    def admit(self, lane: Lane, reader: Incarnation, readers_max: int, of_one_max: int) -> str:
        """This lane's peer has proved to be that reader: "", it is served from now on; else why
        not.
        """
        served = [each for each in self if each.reader is not None and not each.is_stopped]
        of_one = [each for each in served if each.reader == reader]
        read_only = [each for each in served if each.is_read_only]
        at_cap = reader.startswith(READ_ONLY) and len(read_only) >= max(1, readers_max // 2)
        among = read_only if at_cap else served
        if len(of_one) >= of_one_max:
            if not (self._stop_resting(of_one) or self._stop_further(of_one, 0)):
                return (
                    f"{of_one_max} connections of this reader are served here already (half of "
                    f"Options.readers_max): "
                    "let some fetches end first"
                )
        elif (at_cap or len(served) >= readers_max) and not (
            self._stop_resting(among) or self._stop_further(among, len(of_one))
        ):
            kind, cap = (
                ("read-only connections", "half of Options")
                if at_cap
                else ("connections", "Options")
            )
            return (
                f"{len(among)} {kind} are served here already ({cap}.readers_max): try again, "
                f"or elsewhere"
            )
        lane.reader, lane.rests_from = reader, time.monotonic()
        return ""

    def _stop_resting(self, lanes: Sequence[Lane]) -> bool:
        """End the lane that has rested longest, kept by its reader for later; False if every lane
        may be in use.
        """
        resting = [(each.rests_from, each) for each in lanes if each.rests_from is not None]
        since, lane = min(resting, key=lambda each: each[0], default=(0.0, None))
        if lane is None or time.monotonic() - since < REST_S:
            return False
        self.stop(lane)
        return True

    def _stop_further(self, lanes: Sequence[Lane], has: int) -> bool:
        """End one of the read that has most connections, for a reader that has so many; False: none
        has two more.
        """
        of = Counter((each.reader, each.lease) for each in lanes if each.lease)
        most, count = max(of.items(), key=lambda each: each[1], default=(None, 0))
        if count < has + 2:
            return False
        self.stop(next(each for each in lanes if (each.reader, each.lease) == most))
        return True
