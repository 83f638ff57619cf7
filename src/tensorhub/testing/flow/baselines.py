"""Further ways to move weights over the simulated network, which an RL framework could pick
instead.

Each is as good as it can be. A sender keeps a version that is still being read, so that the trainer
need not wait for readers, and a pull goes on with that version. A pipelined broadcast passes pieces
on that are far smaller than our chunks. A paused generation goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tensorhub.testing.flow.topology import Place, worker_name
from tensorhub.testing.flow.transfers import Flow, Memory
from tensorhub.testing.flow.workload import Rollout, System, World

PIECE_BYTES = 2**19  # that a pipelined collective passes on
Ended = Callable[[], None]


class _Wires:
    """Reads between workers by name."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._ranks = world.scenario.ranks

    def places(self, group: str) -> list[Place]:
        return [
            self.world.topology.places[worker_name(group, rank, self._ranks)]
            for rank in range(self._ranks)
        ]

    def memory(self, place: Place, full: Ended = lambda: None, *, whole: bool = False) -> Memory:
        made = Memory(
            place.name, float(self.world.scenario.rank_bytes), full, as_of=self.world.timeline.now
        )
        if whole:
            self.world.transfers.put(made, made.nbytes)
        return made

    def read(self, source: Place, there: Memory, reader: Place, into: Memory) -> Flow:
        topology = self.world.topology
        opening_s = topology.opening_s(source, reader)
        path = topology.path(source, reader)
        return self.world.transfers.open(
            there, into, path, float(PIECE_BYTES), opening_s, lambda: None
        )

    def done_with(self, memory: Memory) -> None:
        for flow in list(memory.inflows):
            self.world.transfers.close(flow)


@dataclass(eq=False)
class _Copy:
    """One version at one group."""

    version: int
    memories: list[Memory]


class Pull(System):
    """Every rollout reads the newest version from the trainer, when it is free."""

    def __init__(self, world: World, *, store: bool = False) -> None:
        self.name = "storage" if store else "pull"
        self._wires, self._world = _Wires(world), world
        self._server = "store-0" if store else "trainer-0"
        self._pushes = store
        self._newest = _Copy(0, [])
        self._reads: dict[Rollout, list[Memory]] = {}
        # for the first version
        self._waiting: dict[Rollout, tuple[Callable[[int], None], Ended]] = {}

    def put(self, version: int, done: Ended) -> None:
        """With a store: it is there when it is pushed. The trainer goes on when the push is
        over.
        """
        if not self._pushes:
            trainers = self._wires.places("trainer-0")
            self._newest = _Copy(
                version, [self._wires.memory(each, whole=True) for each in trainers]
            )
            self._world.timeline.after(0.0, done)
            self._announce()
            return
        left = self._world.scenario.ranks

        def pushed() -> None:
            nonlocal left
            left -= 1
            if not left:
                for memory in memories:
                    self._wires.done_with(memory)
                self._newest = _Copy(version, memories)
                self._world.timeline.after(0.0, done)
                self._announce()

        stores, trainers = self._wires.places(self._server), self._wires.places("trainer-0")
        memories = [self._wires.memory(each, pushed) for each in stores]
        for trainer, store, memory in zip(trainers, stores, memories, strict=True):
            self._wires.read(trainer, self._wires.memory(trainer, whole=True), store, memory)

    def _announce(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for rollout, (done, failed) in waiting.items():
            self.get(rollout, done, failed)
        assert self.workload is not None
        for rollout in self.workload.rollouts:
            if rollout.is_there:
                self.workload.announced(rollout)

    def go(self, rollout: Rollout) -> None:
        self._waiting.pop(rollout, None)
        for memory in self._reads.pop(rollout, ()):
            self._world.transfers.end(memory)

    def newest(self, rollout: Rollout) -> int:
        return self._newest.version

    def get(self, rollout: Rollout, done: Callable[[int], None], failed: Ended) -> None:
        newest = self._newest
        if not newest.version:
            self._waiting[rollout] = done, failed
            return
        left = self._world.scenario.ranks

        def full() -> None:
            nonlocal left
            left -= 1
            if not left:
                for memory in self._reads.pop(rollout, ()):
                    self._wires.done_with(memory)
                done(newest.version)

        readers = self._wires.places(rollout.name)
        memories = self._reads[rollout] = [self._wires.memory(each, full) for each in readers]
        for source, there, reader, into in zip(
            self._wires.places(self._server), newest.memories, readers, memories, strict=True
        ):
            self._wires.read(source, there, reader, into)


@dataclass(eq=False)
class _Round:
    """One broadcast."""

    version: int
    done: Ended
    # None: it was paused
    arrived: dict[Rollout, Callable[[int], None] | None] = field(default_factory=dict)
    runs: bool = False


class Broadcast(System):
    """A collective in a fixed group, which stops together: the trainer and all rollouts.

    It begins when every rollout's generation has ended. `pauses`: it pauses them at once instead.
    `pipelined`: each passes on pieces; else whole copies go down a binomial tree, from each node to
    one other at a time.
    """

    def __init__(self, world: World, *, pauses: bool = False, pipelined: bool = True) -> None:
        self.name = "broadcast" + "-pausing" * pauses + "-poor" * (not pipelined)
        self._wires, self._world = _Wires(world), world
        self._pauses, self._pipelined = pauses, pipelined
        self._round: _Round | None = None
        self._early: dict[Rollout, Callable[[int], None]] = {}  # arrived before the trainer

    def put(self, version: int, done: Ended) -> None:
        assert self.workload is not None
        self._round = _Round(version, done, dict(self._early))
        self._early.clear()
        for rollout in self.workload.rollouts:
            if self._pauses and rollout.held and rollout not in self._round.arrived:
                self.workload.pause(rollout)
                self._round.arrived[rollout] = None
            self.workload.announced(rollout)
        self._begin_if_all()

    def go(self, rollout: Rollout) -> None:
        raise NotImplementedError("a fixed group loses nobody")

    def newest(self, rollout: Rollout) -> int:
        return self._round.version if self._round is not None else rollout.held

    def get(self, rollout: Rollout, done: Callable[[int], None], failed: Ended) -> None:
        if self._round is None:
            self._early[rollout] = done
            return
        self._round.arrived[rollout] = done
        self._begin_if_all()

    def _begin_if_all(self) -> None:
        workload, current = self.workload, self._round
        if (
            workload is None
            or current is None
            or current.runs
            or len(current.arrived) < len(workload.rollouts)
        ):
            return
        current.runs = True
        order = sorted(
            workload.rollouts, key=lambda r: self._world.scenario.sites.index(r.hosts.site)
        )
        groups = ["trainer-0", *(rollout.name for rollout in order)]
        left = self._world.scenario.ranks * len(order)
        memories: list[Memory] = []

        def full() -> None:
            nonlocal left
            left -= 1
            if not left:
                for memory in memories:
                    self._wires.done_with(memory)
                self._over(current)

        for places in zip(*(self._wires.places(group) for group in groups), strict=True):
            memories += self._spread(list(places), full)

    def _spread(self, places: list[Place], full: Ended) -> Iterator[Memory]:
        """Spread one rank's bytes from the first place to all further places. The memories that
        fill.
        """
        here = [self._wires.memory(places[0], whole=True)]
        if self._pipelined:
            for number, place in enumerate(places[1:], 1):
                here.append(self._wires.memory(place, full))
                self._wires.read(places[number - 1], here[-2], place, here[-1])
            yield from here[1:]
            return
        for number, place in enumerate(places[1:], 1):
            here.append(self._wires.memory(place, lambda number=number: has(number)))  # type: ignore[misc]
        children = {number: list(_children(number, len(places))) for number in range(len(places))}

        def has(number: int) -> None:
            full()
            send(number)
            send(_parent(number))

        def send(number: int) -> None:
            """To the next one of its children."""
            if children[number]:
                child = children[number].pop(0)
                self._wires.read(places[number], here[number], places[child], here[child])

        send(0)
        yield from here[1:]

    def _over(self, current: _Round) -> None:
        assert self.workload is not None
        self._round = None
        for rollout, done in current.arrived.items():
            if done is None:
                self.workload.resume(rollout, current.version)
            else:
                done(current.version)
        self._world.timeline.after(0.0, current.done)


def _parent(number: int) -> int:
    """Of a binomial tree: without its lowest bit."""
    return number & (number - 1)


def _children(number: int, count: int) -> Iterator[int]:
    """The largest subtree first."""
    bit = number & -number if number else 1 << (count - 1).bit_length()
    while bit > 1:
        bit >>= 1
        if number + bit < count:
            yield number + bit
