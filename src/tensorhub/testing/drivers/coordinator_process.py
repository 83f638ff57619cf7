"""The coordinator's process in virtual time: its deadlines, its store, how it dies and comes
back.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub.coordinator import Action, Persist, Persisted, PersistFailed, Tick
from tensorhub.coordinator.entities import Worker
from tensorhub.testing.drivers.injecting import Injector
from tensorhub.testing.drivers.timeline import Process, Timeline
from tensorhub.testing.sim.network import COORDINATOR
from tensorhub.testing.sim.rendering import show
from tensorhub.testing.sim.world import World


class CoordinatorProcess:
    """`died`: called when its connections break."""

    def __init__(
        self, world: World, timeline: Timeline, faults: Injector, died: Callable[[], None]
    ) -> None:
        self._world = world
        self._timeline = timeline
        self._faults = faults
        self._died = died
        self._tick_at: float | None = None
        self._dies = False  # in the midst of what it has to do
        self._stored_at = 0.0  # when the store is done with what it has

    # -- its steps

    @property
    def runs(self) -> bool:
        return self._timeline.coordinator.alive

    def gets_out(self, actions: list[Action]) -> list[Action]:
        """Those of a step's actions that it comes to."""
        if not self._timeline.coordinator.alive:
            return []
        heard = self._faults.cuts_short(actions)
        self._dies = len(heard) < len(actions)
        return heard

    def stepped(self) -> None:
        """A step is over."""
        coordinator = self._world.coordinator
        coordinator.check_touched()
        if any(not isinstance(about, Worker) for about in coordinator.cluster.noted):
            coordinator.check_waits()  # what only renews leases lets no call go on
        if self._dies:
            self._dies = False
            self._faults.was_cut_short()
        else:
            self.tick_soon()

    def tick_soon(self) -> None:
        """Wake it at its next deadline."""
        due = self._world.coordinator.next_deadline()
        if due is not None and (self._tick_at is None or due < self._tick_at):
            self._tick_at = due
            self._timeline.at(
                max(due, self._timeline.now), self._timeline.coordinator, self._tick, self._tick_at
            )

    def _tick(self, due: float) -> None:
        if self._tick_at != due:
            return
        self._tick_at = None
        wanted = self._world.coordinator.next_deadline()
        if wanted is not None and wanted <= self._timeline.now:
            self._world.step(Tick())
        else:
            self.tick_soon()

    # -- its store

    def to_be_stored(self, persist: Persist) -> None:
        """This is written, after what came before it."""
        timeline = self._timeline
        self._stored_at = max(self._stored_at, timeline.now) + self._faults.store_s()
        timeline.at(self._stored_at, timeline.coordinator, self._stored, persist)

    def hurry_store(self) -> None:
        """It is fast again: what waits for it is written now."""
        self._stored_at = self._timeline.now
        for persist in list(self._world.unstored.values()):
            self.to_be_stored(persist)

    def _stored(self, persist: Persist) -> None:
        world = self._world
        if world.unstored.pop(persist.record, None) is None:
            return  # it was written sooner
        if self._faults.store_fails():
            world.note(f"the store fails: {show(persist.entry)}")
            world.step(PersistFailed(persist.record, "disk full"))
        else:
            world.note(f"stored {show(persist.entry)}")
            world.keep(persist.entry)
            world.step(Persisted(persist.record))

    # -- its end

    def crash(self, *, kept: bool, down_s: float, lost: bool = False) -> None:
        """It dies, and is back after `down_s`. `kept`: running writes become durable. `lost`: all
        its state is gone.
        """
        self._world.note(f"the coordinator dies; kept={kept}")
        self._timeline.coordinator.alive = False
        self._world.coordinator_died(kept=kept)
        if lost:
            self._world.note("its state is lost")
            self._world.lose_state()
        self._died()
        self._timeline.after(down_s, None, self._restart)

    def _restart(self) -> None:
        self._world.note("the coordinator is back")
        self._timeline.coordinator = Process(COORDINATOR)
        self._world.start_coordinator()
        self._tick_at, self._stored_at = None, self._timeline.now
        self.tick_soon()
