"""The processes of coordinators in virtual time: their deadlines, their store, how they die, and
how another one takes over.

One process leads. A former leader that was stopped, or whose clock is wrong, may run beside it
until it notices (`split`): by its own clock, or when its store refuses a write. A process that is
cut off from its store for long steps down before its lease is over.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from tensorhub.coordinator import Action, Persist, PersistFailed, Tick
from tensorhub.coordinator.entities import Worker
from tensorhub.testing.drivers.injecting import Injector
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.network import COORDINATOR, STANDBY, Process
from tensorhub.testing.sim.rendering import show
from tensorhub.testing.sim.terms import Deposed, Term
from tensorhub.testing.sim.world import World

PARTED = 0.4  # of the workers have lost their connection when another one leads
CHECKED_EVERY = 4  # steps
BEGINS_ANEW_S = 0.1
NOTICES_S = 0.2  # at most: from waking up until it has looked at its clock by itself


class CoordinatorProcess:
    """`died`: called when the connections of a term break."""

    def __init__(
        self, world: World, timeline: Timeline, faults: Injector, died: Callable[[Term], None]
    ) -> None:
        self._world = world
        self._timeline = timeline
        self._faults = faults
        self._died = died
        self._dies = False  # in the midst of what it has to do
        self._steps = 0  # that did more than renew a lease
        world.term.party = timeline.coordinator

    # -- its steps

    def leads(self, term: Term) -> bool:
        if not term.party.alive:
            return False
        if self._is_over(term):
            self.step_down(term, "its lease is over")
            return False
        return True

    def _is_over(self, term: Term) -> bool:
        """By its own clock."""
        return self._timeline.now >= term.lease_ends

    def gets_out(self, actions: list[Action]) -> list[Action]:
        """Those of a step's actions that it comes to."""
        heard = self._faults.cuts_short(actions)
        self._dies = len(heard) < len(actions)
        return heard

    def stepped(self, term: Term) -> None:
        """A step is over."""
        core = term.core
        core.check_touched()
        # what only renews leases lets no call go on
        if any(not isinstance(about, Worker) for about in core.cluster.noted):
            self._steps += 1
            if self._steps % CHECKED_EVERY == 0:  # a call that nothing wakes still waits then
                core.check_waits()
        if self._dies:
            self._dies = False
            self._faults.was_cut_short()
        else:
            self.tick_soon(term)

    def tick_soon(self, term: Term | None = None) -> None:
        """Wake it at its next deadline."""
        term = term or self._world.term
        due = term.core.next_deadline()
        if due is not None and (term.tick_at is None or due < term.tick_at):
            term.tick_at = due
            self._timeline.at(
                max(self._world.when(due), self._timeline.now), term.party, self._tick, term, due
            )

    def _tick(self, term: Term, due: float) -> None:
        if term.tick_at != due:
            return
        term.tick_at = None
        wanted = term.core.next_deadline()
        if wanted is not None and wanted <= self._world.clock:
            self._world.step(Tick(), term)
        else:
            self.tick_soon(term)

    # -- its store

    def to_be_stored(self, persist: Persist, term: Term) -> None:
        """This is written, after what came before it."""
        timeline = self._timeline
        term.stored_at = max(term.stored_at, timeline.now) + self._faults.store_s()
        if not term.is_cut_off:
            timeline.at(term.stored_at, term.party, self._stored, persist, term)

    def hurry_store(self) -> None:
        """It is fast again: what waits for it is written now."""
        self._world.term.stored_at, self._world.term.unheard_until = self._timeline.now, 0.0
        for persist in list(self._world.unstored.values()):
            self.to_be_stored(persist, self._world.term)

    def _stored(self, persist: Persist, term: Term) -> None:
        world, record = self._world, persist.record
        is_early = self._timeline.now < term.unheard_until
        # one writer writes them, and hears of them, in their order
        is_next = persist is next(iter(term.unstored.values()), None)
        if not is_next or term.is_cut_off or is_early:
            return  # it was written sooner; or it will be asked for again
        if record not in term.durable:
            if self._faults.store_fails():
                del term.unstored[record]
                world.note(f"the store fails: {show(persist.entry)}")
                world.step(PersistFailed(record, "disk full"), term)
                return
            is_durable = self._faults.store_doubts()
            try:
                if is_durable is not None:
                    if is_durable:
                        world.keep(persist.entry, term)
                    self._is_in_doubt(persist, term)
                    return
                world.keep(persist.entry, term)
            except Deposed as error:
                world.took("deposed: a write was refused")
                self.step_down(term, str(error))
                return
            world.note(f"stored {show(persist.entry)}")
            late_s = self._faults.reply_s()
            if late_s:
                world.note(f"{term} does not hear so")
                self._reply_is_lost(persist, term, late_s)
                return
        world.persisted(persist, term)

    def _reply_is_lost(self, persist: Persist, term: Term, late_s: float) -> None:
        """It tries again, in vain at first, and so learns that the entry is durable."""
        term.durable.add(persist.record)
        term.unheard_until = term.stored_at = max(term.stored_at, self._timeline.now + late_s)
        self._timeline.at(term.stored_at, term.party, self._stored, persist, term)
        for each in [each for each in term.unstored.values() if each is not persist]:
            self.to_be_stored(each, term)  # in their order, after that

    def _is_in_doubt(self, persist: Persist, term: Term) -> None:
        """This write has failed, and may be durable: another term finds out."""
        self._world.note(f"whether the store has it is unknown: {show(persist.entry)}")
        self.step_down(term, "whether its store has the last write is unknown")
        if term is self._world.term:
            down_s = self._timeline.random.choice((0.01, 0.3, 3.0))
            self._timeline.after(down_s, None, self._lead, term, False)

    # -- its end

    def crash(
        self,
        *,
        kept: float,
        down_s: float,
        lost: bool = False,
        elsewhere: bool = False,
        forgets: int = 0,
    ) -> None:
        """It dies, and is back after `down_s`, or (`elsewhere`) another one on another machine.
        `kept`: that share of the running writes becomes durable. `lost`: all its state is gone.
        `forgets`: its state is an older copy, without so many of the last entries.
        """
        world, term = self._world, self._world.term
        world.note(f"the coordinator dies; kept={kept}")
        term.party.alive = False
        world.coordinator_died(kept=kept)
        if (lost or forgets) and world.former is not None:
            self.step_down(world.former, "its store is gone")
        if lost:
            world.note("its state is lost")
            world.lose_state()
        elif forgets:
            world.note(f"its state is an older copy, without the last {forgets} entries")
            world.take_older_state(max(0, len(world.store) - forgets))
        self._died(term)
        self._timeline.after(down_s, None, self._lead, term, elsewhere)

    def split(self, *, lease_s: float, stops_s: float, believes_s: float) -> bool:
        """Another one leads when the lease of this one is over. Until then it is stopped
        (`stops_s`), or cut off from its store. It goes on for `believes_s` too long, by a clock
        that is wrong. False: it can not be.
        """
        world, term, now = self._world, self._world.term, self._timeline.now
        party = term.party
        if world.former is not None or not party.alive or term.lease_ends < inf:
            return False
        term.lease_ends, term.is_cut_off = now + lease_s + believes_s, not stops_s
        term.is_clock_wrong = believes_s > 0
        party.stopped_until = max(party.stopped_until, now + stops_s)
        world.note(
            f"{term} is {f'stopped for {stops_s:.3f} s' if stops_s else 'cut off from the store'}, "
            f"its lease of {lease_s:.3f} s ends, it believes in it for {believes_s:.3f} s more"
        )
        self._timeline.at(term.lease_ends, party, self._notice, term)
        for worker in list(world.workers.values()):  # some come to its successor, and come back
            for when_s in (lease_s, lease_s + believes_s / 2):
                if self._timeline.random.random() < PARTED:
                    self._timeline.after(when_s, worker, worker.disconnect)
        self._timeline.after(lease_s, None, self._lead, term, True)
        return True

    def _notice(self, term: Term) -> None:
        """It looks at its clock by itself, perhaps after other things that have happened when it
        was stopped.
        """
        late_s = self._timeline.random.uniform(0.0, NOTICES_S)
        late_s = late_s if self._timeline.now > term.lease_ends else 0.0
        self._timeline.after(late_s, term.party, self.step_down, term, "it looks at its clock")

    def step_down(self, term: Term, why: str) -> None:
        """A leader ends its sessions, and forgets all that it knows."""
        world = self._world
        if not term.party.alive:
            return
        world.note(f"{term} steps down: {why}")
        if "welcomed in epoch" in why:
            world.took("deposed: a worker knew its successor")
        world.took("stepped down in time" if term is world.term else "stepped down late")
        term.party.alive = False
        if term is world.former:
            world.former = None
            world.was_late = term.party if term.is_clock_wrong else None
        self._died(term)

    def begin_anew(self, term: Term, why: str) -> None:
        """Its state is an older copy: the next term is of a new cluster."""
        if term.party.alive:
            self.step_down(term, why)
            self._world.took("began anew on an older state")
            self._world.become_new_cluster()
            self._timeline.after(BEGINS_ANEW_S, None, self._lead, term, False)

    def _lead(self, after: Term, elsewhere: bool) -> None:
        """Another one leads, or the same one again."""
        world, timeline = self._world, self._timeline
        if world.term is not after:
            return  # it has died, and yet another one leads
        name = after.party.name
        if elsewhere:
            name = STANDBY if name == COORDINATOR else COORDINATOR
            left = [each for each in after.unstored if each not in after.durable]
            if left:  # some writes come to the store without their writer
                for record in left[: round(timeline.random.random() * len(left))]:
                    world.keep(after.unstored[record].entry)
                    after.durable.add(record)
        if after.party.alive:
            world.former = after
            world.guarantees.history.deposed()
        world.note(f"a coordinator leads on {name}, beside {world.former}")
        timeline.coordinator = Process(name)
        world.start_coordinator(timeline.coordinator)
        after.is_cut_off = False  # what it writes is refused
        for persist in list(after.unstored.values()) if world.former is not None else ():
            self.to_be_stored(persist, after)
        self.tick_soon()

    def heal(self) -> None:
        """No former leader goes on, and no leader is cut off."""
        former, now = self._world.former, self._timeline.now
        if former is not None:
            former.lease_ends = now
            self._timeline.at(now, former.party, self.step_down, former, "faults are over")
        self.hurry_store()
