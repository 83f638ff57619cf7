"""A transport within one process: it reads the owner's memory where that is, under the owner's own accesses.

For tests of what uses transports, and for simulations. Responsible for a channel that keeps every
rule of `transport.base` with no connection at all. Not responsible for finding owners: it is given
them, by incarnation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing

from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.accesses import Refusal, Wait
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.transport.base import Arrival, Channel, Cutter, Destination, Lacking, ReadFailure, ReadRight, Transport
from tensorhub.transport.owner import CannotServe, Lane
from tensorhub.types import Endpoint, Incarnation, Location

PATIENCE_S = 0.25
HAS_RUNS_MAX = 1024


class Loopback(Transport):
    """`owners`: those that can be read, as they are at each `open`."""

    name = "loopback"
    lanes = 1
    strides = True

    def __init__(self, owners: Mapping[Incarnation, SharedOwner]) -> None:
        self._owners = owners

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts: a source outside this process is not among the owners."""
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """See `Transport.open`."""
        owner = self._owners.get(right.incarnation)
        if owner is None:
            raise ReadFailure("unreachable", f"{right.incarnation} is not in this process")
        return _LoopbackChannel(owner, right, destination, cutter)


def _select(owner: SharedOwner, lane: Lane, right: ReadRight) -> str:
    """Have the owner know the right's selection; its name."""
    if right.selection is None:
        return ""
    name, blob = right.selection.selection_id, right.selection.encode()
    answer = owner.select(lane, right.registration, right.generation, name)
    if answer is False:
        owner.upload(lane, right.registration, name, len(blob), 0, blob)
        answer = owner.select(lane, right.registration, right.generation, name)
    if isinstance(answer, Refusal):
        raise ReadFailure("refused", answer.reason)
    return name


def _copy(memory: ChunkMemory, destination: Destination, chunk: int) -> None:
    if not destination.is_strided:
        destination.buffer(chunk)[:] = memory.buffer(chunk)
        return
    held, at = memoryview(b"".join([bytes(view) for views in memory.outgoing(chunk) for view in views])), 0
    with closing(destination.incoming(chunk)) as calls:
        for view in (view for views in calls for view in views):
            view[:] = held[at : at + view.nbytes]
            at += view.nbytes


class _LoopbackChannel:
    def __init__(self, owner: SharedOwner, right: ReadRight, destination: Destination, cutter: Cutter) -> None:
        self._owner = owner
        self._right = right
        self._destination = destination
        self._cutter = cutter
        self._asked: deque[tuple[int, ...]] = deque()  # what is left of each submitted batch; none is empty
        self._lane = Lane(self)
        owner.add_lane(self._lane)
        self._lane.reader = right.incarnation
        try:
            self._selection = _select(owner, self._lane, right)
        except BaseException:
            owner.remove_lane(self._lane)
            raise
        cutter.attach(lambda: owner.stop(self._lane))

    def shutdown(self) -> None:
        """See `Endable`: an access of this lane ends by itself, as it copies from memory to memory."""

    def submit(self, chunks: Sequence[int]) -> None:
        self._asked.append(tuple(chunks))

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        if not self._asked:
            return Arrival((), 0.0, 0.0)
        right, wanted = self._right, self._asked[0]
        terms = (self._lane, right.registration, right.generation, right.content_id)
        with self._owner.access(*terms, wanted, bytes_max, PATIENCE_S, self._selection) as answer:
            first_byte = time.perf_counter()
            match answer:
                case Refusal():
                    raise ReadFailure("lost" if self._lane.is_stopped else "refused", answer.reason)
                case Wait():
                    self._asked.popleft()
                    has = self._owner.has(right.registration, right.generation, HAS_RUNS_MAX, self._selection)
                    return Lacking(wanted, has)
                case _:
                    access, memory = answer
                    try:
                        named = self._owner.digests_of(access, memory)
                    except CannotServe as error:
                        raise ReadFailure("refused", str(error)) from error
                    for chunk in access.chunks:
                        _copy(memory, self._destination, chunk)
        self._asked.popleft()
        if access.rest:
            self._asked.appendleft(access.rest)
        return Arrival(named, first_byte - started, time.perf_counter() - first_byte)

    def close(self) -> None:
        self._cutter.detach()
        self._owner.remove_lane(self._lane)
