"""Memories that fill, and the flows that fill them.

Theory of operation. A memory has its bytes from the first one on. A flow into it goes on where it
is, and runs at its max-min share. Of a source that still fills, a reader has what the source had a
*lag* ago: one chunk, since chunks are passed on when they are whole, and what comes in the time
that a hop takes. A reader that has come so near *follows*: it gets no more than its source gets. A
reader that is nearer, since its previous source was farther, waits. So the pipelining of a chain is
in the rates alone, and events are few: a flow begins, comes near, or ends.

Responsible for what each memory has at which time. Not responsible for the choice of sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from tensorhub.flows.network import Network
from tensorhub.testing.flow.timeline import Timeline

NEAR_BYTES = 1.0  # so near is at the same place
NEAR_SHARE = 1e-9  # of all bytes; the same


def _nothing() -> None:
    pass


@dataclass(eq=False, slots=True)
class Memory:
    """One worker's bytes of one version. `full`: called when it has all of them."""

    owner: str
    nbytes: float
    full: Callable[[], None] = _nothing
    have: float = 0.0  # as of `as_of`
    as_of: float = 0.0
    rate: float = 0.0  # that of all flows into it
    is_whole: bool = False
    is_gone: bool = False  # nobody reads it any more
    inflows: dict[Flow, None] = field(default_factory=dict)
    outflows: dict[Flow, None] = field(default_factory=dict)
    looked: int = 0  # how often it was planned when it is full; older plans do not count

    @property
    def near(self) -> float:
        return NEAR_BYTES + NEAR_SHARE * self.nbytes


@dataclass(eq=False, slots=True)
class Flow:
    """From one memory into another. `broken`: called when its source is gone. `lag`: so many bytes
    behind a source that fills.
    """

    source: Memory
    reader: Memory
    path: tuple[int, ...]
    lag: float
    broken: Callable[[], None]
    is_open: bool = False
    rate: float = 0.0
    carried: float = 0.0  # as of its reader's `as_of`
    began: float = inf  # when its first bytes came
    last: float = 0.0  # when the newest came
    looked: int = 0

    def __repr__(self) -> str:
        return f"<Flow {self.source.owner} -> {self.reader.owner} {self.rate:.3g}/s>"


@dataclass(frozen=True, slots=True)
class Edge:
    """A flow that has ended: its source, its reader, and the bytes that it carried."""

    source: str
    reader: str
    nbytes: float
    ended_s: float


class Transfers:
    """All memories and flows of a run."""

    def __init__(self, timeline: Timeline, capacities: list[float]) -> None:
        self._timeline = timeline
        self._network: Network[Flow] = Network(capacities)
        self._touched: dict[Memory, None] = {}
        self.carried = [0.0] * len(capacities)  # over each link, in all
        self.edges: list[Edge] = []

    # -- what others say

    def open(
        self,
        source: Memory,
        reader: Memory,
        path: tuple[int, ...],
        lag: float,
        after_s: float,
        broken: Callable[[], None],
    ) -> Flow:
        """A flow that can begin so many seconds from now."""
        flow = Flow(source, reader, path, lag, broken)
        source.outflows[flow] = reader.inflows[flow] = None

        def opened() -> None:
            flow.is_open = True
            self._touched[reader] = None

        if source.is_gone:
            self._timeline.after(after_s, broken)
        else:
            self._timeline.after(after_s, opened)
        return flow

    def close(self, flow: Flow) -> None:
        if flow not in flow.reader.inflows:
            return
        self.advance(flow.reader)
        self._pause(flow)
        del flow.reader.inflows[flow], flow.source.outflows[flow]
        flow.is_open = False
        self._touched[flow.reader] = None
        if flow.carried > 0:
            self.edges.append(
                Edge(flow.source.owner, flow.reader.owner, flow.carried, self._timeline.now)
            )

    def end(self, memory: Memory) -> None:
        """It is overwritten, or lost."""
        memory.is_gone = True
        for flow in list(memory.inflows):
            self.close(flow)
        for flow in list(memory.outflows):
            self.close(flow)
            self._timeline.after(0.0, flow.broken)

    def put(self, memory: Memory, have: float) -> None:
        """So much is there without a flow."""
        memory.have, memory.as_of = have, self._timeline.now
        memory.is_whole = have >= memory.nbytes
        self._touched[memory] = None

    def advance(self, memory: Memory) -> None:
        """Have it as it is now."""
        now = self._timeline.now
        seconds = now - memory.as_of
        if seconds <= 0:
            return
        memory.as_of = now
        if not memory.rate:
            return
        memory.have = min(memory.nbytes, memory.have + memory.rate * seconds)
        for flow in memory.inflows:
            if flow.rate:
                came = flow.rate * seconds
                flow.carried += came
                flow.last = now
                for link in flow.path:
                    self.carried[link] += came

    # -- after each moment

    def settle(self) -> None:
        """Give flows their shares, and plan the next events."""
        replan: dict[Memory, None] = {}
        while self._touched:
            touched, self._touched = self._touched, {}
            for memory in touched:
                for flow in (*memory.inflows, *memory.outflows):
                    self._place(flow)
            replan.update(touched)
            for flow in self._network.settle():
                self.advance(flow.reader)
                self._set_rate(flow, self._network.rates[flow])
                self._touched[flow.reader] = None
        for memory in replan:
            self._plan_full(memory)
            for flow in (*memory.inflows, *memory.outflows):
                self._plan_near(flow)

    def _ahead(self, flow: Flow) -> float:
        """How many bytes its source has for its reader."""
        source, reader = flow.source, flow.reader
        self.advance(source)
        self.advance(reader)
        return (source.nbytes if source.is_whole else source.have - flow.lag) - reader.have

    def _place(self, flow: Flow) -> None:
        """It runs freely, follows its source, or waits for it."""
        if not flow.is_open or flow.reader.is_whole:
            self._pause(flow)
            return
        ahead, near = self._ahead(flow), flow.reader.near
        feeds = tuple(each for each in flow.source.inflows if each in self._network)
        if ahead > near or flow.source.is_whole:
            self._run(flow, None)
        elif ahead >= -near and feeds:
            self._run(flow, feeds)
        else:
            self._pause(flow)

    def _run(self, flow: Flow, feeds: tuple[Flow, ...] | None) -> None:
        if flow not in self._network:
            self._network.add(flow, flow.path)
            flow.began = min(flow.began, self._timeline.now)
            self._fed_changed(flow.reader)
        self._network.follow(flow, feeds)

    def _pause(self, flow: Flow) -> None:
        if flow in self._network:
            self.advance(flow.reader)
            self._set_rate(flow, 0.0)
            self._network.remove(flow)
            self._fed_changed(flow.reader)

    def _fed_changed(self, memory: Memory) -> None:
        """Flows that follow this memory's flows follow different flows from now on."""
        if memory.outflows:
            self._touched[memory] = None

    @staticmethod
    def _set_rate(flow: Flow, rate: float) -> None:
        flow.rate = rate
        flow.reader.rate = sum(each.rate for each in flow.reader.inflows)

    def _plan_full(self, memory: Memory) -> None:
        memory.looked += 1
        if memory.is_whole or memory.is_gone or not memory.rate:
            return
        looked = memory.looked

        def full() -> None:
            if memory.looked == looked:
                self._is_full(memory)

        self._timeline.after(max(0.0, memory.nbytes - memory.have) / memory.rate, full)

    def _is_full(self, memory: Memory) -> None:
        self.advance(memory)
        memory.have, memory.is_whole = memory.nbytes, True
        self._touched[memory] = None
        memory.full()

    def _plan_near(self, flow: Flow) -> None:
        """When it comes near its source, or its source gets ahead of it."""
        flow.looked += 1
        if not flow.is_open or flow.source.is_whole or flow.reader.is_whole:
            return
        ahead, nearing = self._ahead(flow), flow.reader.rate - flow.source.rate
        if not ahead * nearing > 0 or abs(ahead) <= flow.reader.near:
            return
        looked = flow.looked

        def near() -> None:
            if flow.looked == looked:
                self._touched[flow.reader] = None

        self._timeline.after(ahead / nearing, near)
