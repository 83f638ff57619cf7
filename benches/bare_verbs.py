"""The baseline of rdma: the same bytes, read by a plain loop over pyverbs, and nothing else.

Work requests of 1 MiB, 16 at a time, each told of when it is done, as a textbook has them. `poll`:
the reader looks for completions again and again, and lets others run in between; else it sleeps
until the device says that there are some.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorhub.memory.addresses import address_of
from tensorhub.transport.rdma.messages import QueueCard
from tensorhub.transport.rdma.ports import usable_ports
from tensorhub.transport.rdma.queues import Fabric, Queue, ReaderQueue
from tensorhub.transport.rdma.verbs import register, verbs

PIECE_BYTES = 2**20
DEPTH = 16


class Place(NamedTuple):
    """A region of the source's memory."""

    address: int
    nbytes: int
    key: int


class BareSource:
    """Registers these regions, and lets readers in."""

    def __init__(self, regions: Sequence[memoryview]) -> None:
        self._fabric = Fabric(usable_ports())
        self._port = self._fabric.ports[0]
        self._device = self._fabric.device(self._port)
        self._regions = [
            register(self._device.domain, address_of(view), view.nbytes) for view in regions
        ]
        self._queues: list[Queue] = []
        found = zip(regions, self._regions, strict=True)
        self._places = [
            Place(address_of(view), view.nbytes, int(region.rkey)) for view, region in found
        ]

    def pair(self, theirs: QueueCard) -> tuple[QueueCard, list[Place]]:
        """What the reader with this end must know."""
        queue = Queue(self._device, self._port)
        queue.connect(theirs)
        self._queues.append(queue)
        return queue.card, self._places


class BareReader:
    """Reads from there into these views, again and again. It is to be paired first."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        fabric = Fabric(usable_ports())
        device = fabric.device(fabric.ports[0])
        self._kept = fabric, device
        self._queue = ReaderQueue(device, fabric.ports[0])
        self._views = views
        self._regions = [register(device.domain, address_of(view), view.nbytes) for view in views]
        self.card = self._queue.card
        self._pieces: list[tuple[int, int, int, int, int]] = []

    def pair(self, theirs: QueueCard, places: Sequence[Place]) -> None:
        self._queue.connect(theirs)
        for view, region, place in zip(self._views, self._regions, places, strict=True):
            here, there = address_of(view), place.address
            for offset in range(0, place.nbytes, PIECE_BYTES):
                nbytes = min(PIECE_BYTES, place.nbytes - offset)
                self._pieces.append(
                    (here + offset, int(region.lkey), there + offset, place.key, nbytes)
                )

    def read(self, poll: bool) -> None:
        """Read all of it."""
        completions, pair = self._queue._completions, self._queue._pair
        posted = done = 0
        while done < len(self._pieces):
            while posted < len(self._pieces) and posted - done < DEPTH:
                self._post(pair, posted)
                posted += 1
            count, found = completions.poll(DEPTH)
            if not count:
                if poll:
                    time.sleep(0)
                else:
                    self._sleep()
            if any(each.status for each in found):
                raise SystemExit(f"a bare read failed: status {[each.status for each in found]}")
            done += count

    def _post(self, pair: Any, number: int) -> None:
        v = verbs()
        here, here_key, there, there_key, nbytes = self._pieces[number]
        part = v.wr.SGE(here, nbytes, here_key)
        work = v.wr.SendWR(
            number,
            v.enums.IBV_WR_RDMA_READ,
            num_sge=1,
            sg=[part],
            send_flags=v.enums.IBV_SEND_SIGNALED,
        )
        work.set_wr_rdma(there_key, there)
        pair.post_send(work)
        work.close()
        part.close()

    def _sleep(self) -> None:
        """Until there is a completion; the caller looks once more in between, as it must after
        arming.
        """
        if not getattr(self, "_is_armed", False):
            self._queue.arm()
            self._is_armed = True
            return
        waiting = select.poll()
        waiting.register(self._queue.descriptor, select.POLLIN)
        waiting.poll(10_000)
        self._queue.take_event()
        self._is_armed = False
