"""One seed's run: simulated users call while things go wrong; then all faults end, every call must,
and all must converge.

`run` has two phases: users call and faults happen, until there were enough events; then all faults
end, every call must, and every user must be able to publish and to fetch (G7). The calls of users
are in `drivers.users`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from tensorhub.errors import StateError
from tensorhub.machine import counting_transitions
from tensorhub.testing.coverage import judged
from tensorhub.testing.drivers.healing import Healing
from tensorhub.testing.drivers.injecting import has_standby
from tensorhub.testing.drivers.parts import Whole
from tensorhub.testing.drivers.timed import TimedCluster
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.drivers.users import Users
from tensorhub.testing.drivers.virtual import VirtualLoop
from tensorhub.testing.running import RunningCluster, running
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.faults import CHANGES, KINDS_LEAST, Fault
from tensorhub.testing.sim.layouts import draw_layouts
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.testing.sim.sites import MODELS_DRAWN, draw_sites
from tensorhub.types import Options

SEED_VARIABLE = "TENSORHUB_SEED"
EVENTS_LEAST = 1000  # of a seed that is to have all of these
VERSIONS_LEAST = 3  # that are published in each seed
GIVEN_UP = 100  # times as many events as were asked for: nothing more comes of this seed
ON_DISK = 0.15  # of all seeds have the product's store, too
DIGESTS_OFF = 0.2  # of all seeds with one layout and no archive
CLOCKS_DRAWN = 0.2  # of all seeds: the coordinator's clock drifts
# Within the margin of a lease: 1.6 leases of a worker, less a jump of 0.2, are longer than one of a
# coordinator.
CLOCK_RATES = (0.8, 1.4)
WORKERS_CLOCKS_DRAWN = 0.2  # of all seeds without an archive: each worker's clock drifts
WORKERS_CLOCK_RATES = (0.75, 1.05)
READERS_DRAWN = 0.1  # of all seeds: more read-only sessions than there may be
READ_ONLY_MAX = 2
LARGE_DRAWN = 0.005  # of all seeds with one layout and no archive: groups of one of these sizes
LARGE_GROUPS = (16, 32, 64)
ASKED_BEFORE_S = 3.0  # things still go wrong, while fills run that have to end well


@dataclass(frozen=True)
class SeedReport:
    """What one seed's run did. Can be pickled."""

    seed: int
    events: int  # messages, chunks and timers that were delivered
    groups: int
    versions: int  # whose publish has returned
    faults: Counter[str] = field(default_factory=Counter)  # by kind: that really happened
    transitions: Counter[str] = field(default_factory=Counter)  # like "replica: filling -> ready"
    paths: Counter[str] = field(default_factory=Counter)  # ways of recovery that were really taken
    demands: Counter[str] = field(default_factory=Counter)  # how often each was judged
    end_hash: str = ""  # of everything that happened, in its order


class SimulatedCluster(TimedCluster):
    """One seed's cluster. `run` raises GuaranteeBroken, which ends with a line that reproduces
    it.
    """

    users: Users

    def __init__(
        self,
        seed: int,
        *,
        faults: Collection[Fault] | None = None,
        events: int = 1000,
        options: Options | None = None,
        part: Whole | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """`faults`: the kinds that may be drawn; None: all. `events`: how many are delivered at
        least under faults. `options`: the coordinator's, and times of all connections; None: drawn.
        `part`, on its `timeline`: what of the run is run; None: all of it.
        """
        disk = Random(f"disk {seed}")
        on_disk = disk.random() < ON_DISK
        super().__init__(seed, faults, options, events, timeline, disk if on_disk else None)
        if on_disk and not has_standby(self.injector.plan):
            # it leaves files that are cut in the midst of a write
            self.injector.plan.make_frequent(Fault.COORDINATOR)
        self.part = self.injector.part = part or Whole()
        self.faults_until: int | None = None  # so many events, once there were enough
        self.options_given = options
        self.events_least = events
        sites = draw_sites(seed)
        self.injector.parts_sites = sites.parted
        layouts = draw_layouts(seed, self.chunks)
        archive = Random(f"archive {seed}") if sites.archives and not layouts else None
        is_plain = not (layouts or sites.archives) and CHANGES.isdisjoint(self.allowed or ())
        if Random(f"digests off {seed}").random() < DIGESTS_OFF and is_plain:
            self.manifest = make_manifest(self.chunks)
            self.injector.plan.leave_out(CHANGES)
        models = Random(f"two models {seed}")
        has_two = models.random() < MODELS_DRAWN and archive is None
        its = archive, models if has_two else None, self.part
        self.users = Users(self, self.timeline, layouts, sites.seeders, *its)
        clock = Random(f"drift of {seed}")
        if clock.random() < CLOCKS_DRAWN:
            self.clock_rate = clock.uniform(*CLOCK_RATES)
        if archive is None and Random(f"drift of workers {seed}").random() < WORKERS_CLOCKS_DRAWN:
            self.users.clock_rate = lambda name: Random(f"clock of {name}, {seed}").uniform(
                *WORKERS_CLOCK_RATES
            )
        readers = Random(f"read-only sessions {seed}")
        if readers.random() < READERS_DRAWN:
            self.users.readers, self.read_only_max = readers, READ_ONLY_MAX
            self.coordinator.cluster.read_only.sessions_max = READ_ONLY_MAX
            # they alone find older copies of the state by what they are told
            self.injector.plan.make_frequent(Fault.OLDER_STATE)
        large = Random(f"large groups {seed}")
        if large.random() < LARGE_DRAWN and not (layouts or archive):
            self.users.world_size = large.choice(LARGE_GROUPS)
        self.users.differed = lambda: self.injector.happens(Fault.DIFFER)
        self.users.lacks_versions = self._lacks_versions
        self.populate(self.users)

    def run(self) -> None:
        """Both phases. Raises GuaranteeBroken, or whatever a machine raises, with the reproduction
        line at its end.
        """
        try:
            self.run_phases()
        except Exception as error:
            raise GuaranteeBroken(self.report(error, self.command)) from error

    def run_phases(self) -> None:
        """As `run`, and raises what was raised."""
        self.begin()
        while not self._is_enough():
            self.take_event()
        self.faults_until = self.timeline.events
        healing = self.healing()
        healing.ask()
        self.run_until(lambda: False, ASKED_BEFORE_S)
        self.end_faults()
        healing.run()

    def begin(self) -> None:
        """Users call and things go wrong from now on, as events are taken."""
        self.users.begin()
        self.injector.begin()

    def end_faults(self) -> None:
        """No fault happens any more, and no user begins a call."""
        self.injector.end()
        self.users.end()

    def healing(self) -> Healing:
        """The demand that every call ends, and that every user can publish and fetch (G7)."""
        return Healing(self, self.users)

    def _is_enough(self) -> bool:
        """Whether there was enough of everything that a seed stands for. (Of some kinds of faults,
        it may be that no more can happen, or nothing be published; and fewer events need not be
        enough.)
        """
        events = self.timeline.events
        if self.part.until is not None:
            return events >= self.part.until
        if events < self.events_least:
            return False
        full = not self._lacks_versions() and len(self.injector.happened) >= KINDS_LEAST
        wants_all = self.allowed is None and self.events_least >= EVENTS_LEAST
        return full or events >= (GIVEN_UP if wants_all else 4) * self.events_least

    def _lacks_versions(self) -> bool:
        """Whether there were events enough, and too few versions came of them."""
        is_late = self.timeline.events >= self.events_least
        return is_late and len(self.users.published) < VERSIONS_LEAST

    @property
    def command(self) -> str:
        """What runs this seed again."""
        allowed = self.allowed
        faults = "" if allowed is None else f" --faults {','.join(allowed)}"
        return f"tensorhub simulate --seed {self.seed}{faults} --events {self.events_least}"

    # -- under somebody's own code

    def running(
        self, *, spared: Collection[str] = (), seconds_max: float = 3600.0
    ) -> contextlib.AbstractAsyncContextManager[RunningCluster]:
        """Run as an async context manager, under a caller's own code instead of simulated users:
        see `RunningCluster`.

        Faults of this cluster's kinds happen, as the seed draws them (those that only a user can
        commit are left out). `spared`: names of workers that never crash, nor are preempted, by
        chance. `seconds_max`: virtual seconds after which code that does not end is given up
        (StateError).

        Leaving the block ends all faults, closes what was started, and checks everything once more.
        Raises GuaranteeBroken, StateError (the loop's time is not virtual, a kind of fault that
        only a user can commit).
        """
        return running(self.seed, self.allowed, self.options_given, spared, seconds_max)


def run_seed(
    seed: int, *, faults: Collection[Fault] | None = None, events: int = 1000
) -> SeedReport:
    """Run one seed to its end.

    `faults`: the kinds that may be drawn; None: all. `events`: how many are delivered at least
    while faults happen. Raises GuaranteeBroken, with the last lines of the trace, and at the end
    one line that runs this seed again.
    """
    return reported(SimulatedCluster(seed, faults=faults, events=events))


def reported(cluster: SimulatedCluster) -> SeedReport:
    """Run it, and say what it did."""
    before = judged()
    with counting_transitions() as transitions:
        cluster.run()
    return SeedReport(
        seed=cluster.seed,
        events=cluster.timeline.events,
        groups=len(cluster.users.groups),
        versions=len(cluster.users.published),
        faults=Counter({str(kind): times for kind, times in cluster.injector.happened.items()}),
        transitions=transitions,
        paths=cluster.timeline.paths,
        demands=judged() - before,
        end_hash=cluster.end_hash,
    )


def simulate(
    main: Callable[[RunningCluster], Awaitable[object]],
    *,
    seeds: Iterable[int] = range(100),
    faults: Collection[Fault] | None = None,
    options: Options | None = None,
    spared: Collection[str] = (),
    seconds_max: float = 3600.0,
    backend: str = "asyncio",
) -> list[str]:
    """Run `await main(cluster)` once for each seed, in virtual time; returns the end hashes.

    `faults`: the kinds that may be drawn; None: all but those that only a user can commit; ():
    none. `options`: the coordinator's; None: drawn. `spared`, `seconds_max`: see
    `SimulatedCluster.running`. `backend`: "asyncio" or "trio". With TENSORHUB_SEED in the
    environment only that seed is run.

    Raises what `main` raises, or GuaranteeBroken, with a note that says how to run this seed again.
    """
    only = os.environ.get(SEED_VARIABLE)
    hashes = []
    for seed in seeds if only is None else [int(only)]:
        cluster = SimulatedCluster(seed, faults=faults, options=options)
        try:
            hashes.append(_run(partial(_one, main, cluster, spared, seconds_max), backend))
        except Exception as error:
            error.add_note(f"reproduce: {SEED_VARIABLE}={seed} {_command()}")
            raise
    return hashes


async def _one(
    main: Callable[[RunningCluster], Awaitable[object]],
    simulated: SimulatedCluster,
    spared: Collection[str],
    seconds_max: float,
) -> str:
    async with simulated.running(spared=spared, seconds_max=seconds_max) as cluster:
        await main(cluster)
    return cluster.end_hash


def _run(function: Callable[[], Any], backend: str) -> Any:
    if backend == "trio":
        trio: Any = importlib.import_module("trio")
        clock = importlib.import_module("trio.testing").MockClock(autojump_threshold=0)
        return trio.run(function, clock=clock)
    if backend != "asyncio":
        raise StateError(f"backend={backend!r}: give 'asyncio' or 'trio'")
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(function())


def _command() -> str:
    """The running program: a test, or another."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return f"python -m pytest '{test}'" if test else f"python {' '.join(sys.argv)}"
