"""The connections between workers and the coordinator in virtual time: messages on their way, and
messages that lie unread.

Also the connections themselves: the coordinator's ends, as `runtime.control.server` has them, and
the workers' ends, as `runtime.control.link` has them: a worker connects, beats, gives up, and
connects again. Not responsible for what messages mean, nor for faults: it asks `injecting` of each
thing that could be struck.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub.coordinator import DOOR, Connected, Disconnected, Received, Silent
from tensorhub.messages import (
    Dismissed,
    FromCoordinator,
    FromWorker,
    LeaveRequest,
    Prepared,
    Rollback,
)
from tensorhub.runtime.control.server import LAST_WORDS_S
from tensorhub.testing.drivers.injecting import Injector
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.network import Link, Process
from tensorhub.testing.sim.terms import Term
from tensorhub.testing.sim.worker import SimHandle, SimWorker
from tensorhub.testing.sim.world import World

# between two tries to connect: from soon, as `runtime.control.link` does it, to so late that much
# happens meanwhile
RECONNECT_S_FIRST = 0.05
RECONNECT_S_MAX = 2.0


class ControlNetwork:
    """The messages between workers and the coordinator, in virtual time."""

    def __init__(
        self, world: World, timeline: Timeline, faults: Injector, touch: Callable[[SimHandle], None]
    ) -> None:
        """`touch`: has a handle checked."""
        self._world = world
        # how long each waits before it tries again, on average
        self._waits_s: dict[SimWorker, float] = {}
        # the coordinator to which it connects just now
        self._dialled: dict[SimWorker, Process] = {}
        self._touch = touch
        self._timeline = timeline
        self._faults = faults
        self.latency_s = timeline.random.choice((0.0003, 0.003, 0.03))

    def latency(self) -> float:
        """Of one message."""
        return self.latency_s * (0.5 + self._timeline.random.random())

    def _blocked(self, worker: SimWorker, link: Link, *, up: bool) -> float:
        ends = (worker.name, link.party.name) if up else (link.party.name, worker.name)
        until = max(link.held_until, self._timeline.partitions.blocked_until(*ends))
        return until if until > self._timeline.now else 0.0

    def new_link(self, worker: SimWorker) -> Link:
        """The worker connects: the coordinator will see it, before anything that is said."""
        timeline = self._timeline
        link = Link(next(self._world.sessions), self._dialled.pop(worker, timeline.coordinator))
        link.up_due = timeline.now + self.latency()
        timeline.at(link.up_due, link.party, self._read, worker, link, self._accepted)
        return link

    # -- what lies unread at the coordinator

    def _read(self, worker: SimWorker, link: Link, act: Callable[[SimWorker, Link], None]) -> None:
        """The coordinator reads this at once, or after the earlier messages of that connection.
        Later messages of further connections may have been read before.
        """
        if not link.unread and self._faults.reads_at(worker) <= self._timeline.now:
            act(worker, link)
        else:
            link.unread += 1
            self._read_later(worker, link, act)

    def _read_later(
        self, worker: SimWorker, link: Link, act: Callable[[SimWorker, Link], None]
    ) -> None:
        timeline = self._timeline
        link.read_due = max(link.read_due, self._faults.reads_at(worker))
        timeline.at(link.read_due, link.party, self._read_now, worker, link, act)

    def _read_now(
        self, worker: SimWorker, link: Link, act: Callable[[SimWorker, Link], None]
    ) -> None:
        if self._faults.reads_at(worker) > self._timeline.now:
            self._read_later(worker, link, act)
            return
        link.unread -= 1
        act(worker, link)
        for handle in worker.handles:
            self._touch(handle)  # whoever is counted on for what is so old is found out

    def _accepted(self, worker: SimWorker, link: Link) -> None:
        term = self._world.term_at(link.party)
        if term is not None:
            term.links[link.session] = (worker, link)
            who = link.session, worker.incarnation, "worker"
            self._world.step(Connected(*who, read_only=worker.read_only), term)

    # -- up

    def said_up(self, worker: SimWorker, link: Link) -> None:
        """The last of `link.up` is on its way."""
        timeline = self._timeline
        if link.loses_up:
            link.up.pop()
            return
        link.up_due = max(link.up_due, timeline.now + self.latency())
        timeline.at(link.up_due, link.party, self._arrive_up, worker, link)

    def _arrive_up(self, worker: SimWorker, link: Link) -> None:
        timeline = self._timeline
        blocked = self._blocked(worker, link, up=True)
        if blocked:
            link.up_due = max(link.up_due, blocked)
            timeline.at(blocked, link.party, self._arrive_up, worker, link)
            return
        self._read(worker, link, self._hear)

    def _hear(self, worker: SimWorker, link: Link) -> None:
        message, term = link.up.popleft(), self._world.term_at(link.party)
        if term is None or link.session not in term.links or link.loses_up:
            return
        if self._faults.garbles(worker):
            self.close_session(worker, link)  # what is malformed costs its sender the connection
            return
        self._hand_over(worker, link, message, term)
        if self._faults.doubles(message):
            self._hand_over(worker, link, message, term)

    def _hand_over(self, worker: SimWorker, link: Link, message: FromWorker, term: Term) -> None:
        self._timeline.trace(worker.name, "->", message)
        if isinstance(message, Prepared):
            self._faults.voted(worker, message)
        elif isinstance(message, Rollback):
            self._faults.rolls_back()
        elif isinstance(message, LeaveRequest):
            self._faults.leaves(message.registration)
        self._world.step(Received(link.session, message), term)

    def looked_for(self, session: int, term: Term) -> None:
        """The coordinator asks what of this session lies unread. If nothing does, it is told so,
        after all of now, and if nothing has come meanwhile.
        """
        if self._has_nothing_unread(session, term):
            self._timeline.at(self._timeline.now, term.party, self._looked, session, term)

    def _has_nothing_unread(self, session: int, term: Term) -> bool:
        if session == DOOR:
            workers = self._world.workers.values()
            return not any(self._waits_at_door(worker, term) for worker in workers)
        _, link = term.links.get(session, (None, None))
        return link is None or not link.unread

    @staticmethod
    def _waits_at_door(worker: SimWorker, term: Term) -> bool:
        link = worker.link
        return (
            link is not None
            and link.unread > 0
            and link.party is term.party
            and term.joined.get(worker.incarnation) != link.session
        )

    def _looked(self, session: int, term: Term) -> None:
        if self._has_nothing_unread(session, term):
            self._world.step(Silent((session,)), term)

    def link_lost(self, worker: SimWorker, link: Link) -> None:
        """The worker's end is gone: the coordinator will notice after the messages on their way, if
        it can.
        """
        timeline = self._timeline
        self._faults.link_lost(link)
        link.up_due = max(link.up_due, timeline.now + self.latency())
        timeline.at(link.up_due, link.party, self._arrive_end, worker, link)

    def _arrive_end(self, worker: SimWorker, link: Link) -> None:
        blocked = self._blocked(worker, link, up=True)
        if blocked:
            self._timeline.at(blocked, link.party, self._arrive_end, worker, link)
        elif not link.loses_up:
            self._read(worker, link, lambda _, ended: self._over(ended))

    def _over(self, link: Link) -> None:
        term = self._world.term_at(link.party)
        if term is not None and term.links.pop(link.session, None) is not None:
            self._world.step(Disconnected(link.session), term)

    def close_session(self, worker: SimWorker, link: Link) -> None:
        """The coordinator's end breaks."""
        self._over(link)
        link.down.append(None)
        self.said_down(worker, link)

    # -- down

    def said_down(self, worker: SimWorker, link: Link) -> None:
        """The last of `link.down` is on its way."""
        timeline = self._timeline
        if link.down[-1] is None:  # closed once that can be said; soon, if it can not
            said_at = min(self._blocked(worker, link, up=False), timeline.now + LAST_WORDS_S)
            timeline.at(max(said_at, timeline.now) + self.latency(), link.party, self._over, link)
        if link.loses_down:
            link.down.pop()
            return
        link.down_due = max(link.down_due, timeline.now + self.latency())
        timeline.at(link.down_due, worker, self._arrive_down, worker, link)

    def _arrive_down(self, worker: SimWorker, link: Link) -> None:
        timeline = self._timeline
        blocked = self._blocked(worker, link, up=False)
        if blocked:
            link.down_due = max(link.down_due, blocked)
            timeline.at(blocked, worker, self._arrive_down, worker, link)
            return
        message = link.down.popleft()
        if worker.link is not link or link.loses_down:
            return
        if self._faults.garbles(worker):
            worker.disconnect()
            return
        if message is not None:
            timeline.trace(worker.name, "<-", message)
        self._received(worker, link, message)
        if message is not None and worker.link is link and self._faults.doubles(message):
            self._received(worker, link, message)

    def coordinator_died(self, term: Term) -> None:
        """Every connection to it breaks, also those that are being made."""
        timeline = self._timeline
        term.links.clear()
        for worker in list(self._world.workers.values()):
            link = worker.link
            if link is not None and worker.alive and link.party is term.party:
                timeline.after(self.latency(), worker, self._broken, worker, link)

    def _broken(self, worker: SimWorker, link: Link) -> None:
        blocked = self._blocked(worker, link, up=False)
        if blocked:
            self._timeline.at(blocked, worker, self._broken, worker, link)
        elif worker.link is link and not link.loses_down:
            worker.disconnect()

    # -- a worker's end

    def connect(self, worker: SimWorker) -> None:
        """Try to reach the coordinator, now and until it is reached."""
        timeline = self._timeline
        if worker.link is not None or not worker.alive:
            return
        there = [term.party for term in self._world.terms() if self._can_reach(worker, term.party)]
        if not there:
            self.connect_again(worker)
            return
        self._dialled[worker] = timeline.random.choice(there) if len(there) > 1 else there[0]
        worker.connect()
        timeline.after(
            self._world.options.connect_timeout_s, worker, self._expect_welcome, worker, worker.link
        )

    def _can_reach(self, worker: SimWorker, party: Process) -> bool:
        """Whether that coordinator takes a connection; a stopped one that leads no more does not:
        the worker tries all addresses at once.
        """
        now, partitions = self._timeline.now, self._timeline.partitions
        if party is not self._timeline.coordinator and party.stopped_until > now:
            return False
        if self._faults.lacks_descriptors(worker.name, party.name):
            return False
        return party.alive and partitions.apart_until(worker.name, party.name) <= now

    def connect_again(self, worker: SimWorker) -> None:
        """After a while."""
        wait_s = self._waits_s.get(worker, RECONNECT_S_FIRST)
        self._waits_s[worker] = min(2 * wait_s, RECONNECT_S_MAX)
        self._timeline.after(
            wait_s * (0.5 + self._timeline.random.random()), worker, self.connect, worker
        )

    @staticmethod
    def _expect_welcome(worker: SimWorker, link: Link) -> None:
        if worker.link is link and not link.welcomed:
            worker.disconnect()

    def _received(self, worker: SimWorker, link: Link, message: FromCoordinator | None) -> None:
        """Something came over the connection; None: its end."""
        if worker.link is not link:
            return
        if message is None:
            worker.disconnect()
            return
        was_welcomed = link.welcomed
        worker.hear(message)
        if isinstance(message, Dismissed):
            worker.disconnect()
        elif link.welcomed and not was_welcomed:
            self._waits_s.pop(worker, None)
            self._beat(worker, link)

    def _beat(self, worker: SimWorker, link: Link) -> None:
        """Renew the lease; give up a connection in which nothing comes back."""
        if worker.link is not link:
            return
        if worker.beats.is_in_vain():
            self._world.took("silent connection given up")
            worker.disconnect()
            return
        worker.beat()
        due = worker.when(worker.now + worker.beats.every_s)
        self._timeline.at(due, worker, self._beat, worker, link)
