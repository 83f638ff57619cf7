"""A worker process in virtual time: it keeps a connection to the coordinator, as `runtime.control.link` does, and its
deadlines.

Also what the coordinator's process does with connections, as `runtime.control.server` has it. Not responsible for what
messages mean (`worker`), nor for faults: it finds out about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensorhub.coordinator import DOOR, Connected, Disconnected, Received, Silent
from tensorhub.messages import Announce, Dismissed, FromCoordinator, FromWorker, Prepared, Rollback, Watch
from tensorhub.runtime.control.link import RECONNECT_S_FIRST, RECONNECT_S_MAX
from tensorhub.runtime.control.server import LAST_WORDS_S
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.network import COORDINATOR, Link
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.testing.sim.world import World
from tensorhub.types import Location, VersionInfo


class TimedWorker(SimWorker):
    """A worker that connects, beats, and connects again."""

    def __init__(
        self, cluster: World, timeline: Timeline, name: str, location: Location, transports: tuple[str, ...] = ("tcp",)
    ) -> None:
        super().__init__(cluster, name, location, transports)
        self._timeline = timeline
        self.wait_s = RECONNECT_S_FIRST
        self.newest: dict[str, VersionInfo | None] = {"actor": None}  # of the models that it watches, as it was told
        timeline.after(RECONNECT_S_MAX, self, self._end_pins)

    def connect(self) -> None:
        """Try to reach the coordinator, now and until it is reached."""
        timeline = self._timeline
        if self.link is not None or not self.alive:
            return
        blocked = timeline.partitions.blocked_until(self.name, COORDINATOR)
        if blocked > timeline.now or not timeline.coordinator.alive:
            timeline.after(self._next_wait(), self, self.connect)
            return
        super().connect()
        link = self.link
        timeline.after(self.cluster.options.connect_timeout_s, self, self._expect_welcome, link)

    def _next_wait(self) -> float:
        wait_s, self.wait_s = self.wait_s, min(2 * self.wait_s, RECONNECT_S_MAX)
        return wait_s * (0.5 + self._timeline.random.random())

    def _expect_welcome(self, link: Link) -> None:
        if self.link is link and not link.welcomed:
            self.disconnect()

    def disconnect(self) -> None:
        if self.link is not None:
            super().disconnect()
            self._timeline.after(self._next_wait(), self, self.connect)

    def received(self, link: Link, message: FromCoordinator | None) -> None:
        """Something came over the connection; None: its end."""
        if self.link is not link:
            return
        if message is None:
            self.disconnect()
            return
        was_welcomed = link.welcomed
        self.hear(message)
        if isinstance(message, Announce):
            self.newest[message.model] = message.newest
            self.cluster.guarantees.history.announced(self, message)
        if isinstance(message, Dismissed):
            self.disconnect()
        elif link.welcomed and not was_welcomed:
            self.wait_s = RECONNECT_S_FIRST
            self._roll_back_again()
            self._beat(link)

    def say_watches(self) -> None:
        for model in self.newest:
            self.say(Watch(model))

    def _roll_back_again(self) -> None:
        """Whoever still waits for a rollback asks for it again, by its name."""
        undone = list(self.rollbacks.values())
        self.rollbacks.clear()
        for each in undone:
            self.rollback(each.to, each.model, each.ident)

    def _end_pins(self) -> None:
        """Say again, until it is heard and done, which pins are over."""
        if self.link is not None and self.link.welcomed:
            for pin in list(self.unpinned):
                self.unpin(pin)
        self._timeline.after(RECONNECT_S_MAX, self, self._end_pins)

    def _beat(self, link: Link) -> None:
        """Renew the lease; give up a connection in which nothing comes back."""
        if self.link is not link:
            return
        if self.beats.is_in_vain():
            self.cluster.took("silent connection given up")
            self.disconnect()
            return
        self.beat()
        self._timeline.after(self.beats.every_s, self, self._beat, link)


class ControlFaults(Protocol):
    """What goes wrong on the way, asked for each thing that could be struck."""

    def garbles(self, worker: SimWorker) -> bool:
        """Whether this control message is damaged."""

    def doubles(self, message: FromWorker | FromCoordinator) -> bool:
        """Whether this message comes twice."""

    def link_lost(self, link: Link) -> None:
        """Its worker's end is gone: what it has said may come late."""

    def voted(self, worker: SimWorker, vote: Prepared) -> None:
        """The coordinator is about to hear that worker's vote."""

    def rolls_back(self) -> None:
        """The coordinator is about to hear of a rollback."""

    def reads_at(self, worker: SimWorker) -> float:
        """When the coordinator reads what has come from that worker just now."""


class ControlNetwork:
    """What is on its way between workers and the coordinator, in virtual time."""

    def __init__(self, world: World, timeline: Timeline, faults: ControlFaults) -> None:
        self._world = world
        self._timeline = timeline
        self._faults = faults
        self.latency_s = timeline.random.choice((0.0003, 0.003, 0.03))

    def latency(self) -> float:
        """Of one message."""
        return self.latency_s * (0.5 + self._timeline.random.random())

    def _blocked(self, worker: SimWorker, link: Link) -> float:
        until = max(link.held_until, self._timeline.partitions.blocked_until(worker.name, COORDINATOR))
        return until if until > self._timeline.now else 0.0

    def new_link(self, worker: SimWorker) -> Link:
        """The worker connects: the coordinator will see it, before anything that is said."""
        timeline = self._timeline
        link = Link(next(self._world.sessions))
        link.up_due = timeline.now + self.latency()
        timeline.at(link.up_due, timeline.coordinator, self._read, worker, link, self._accepted)
        return link

    # -- what lies unread at the coordinator

    def _read(self, worker: SimWorker, link: Link, act: Callable[[SimWorker, Link], None]) -> None:
        """The coordinator comes to this at once, or when it has read what came before over that connection. Over others it
        may have read what came later.
        """
        if not link.unread and self._faults.reads_at(worker) <= self._timeline.now:
            act(worker, link)
        else:
            link.unread += 1
            self._read_later(worker, link, act)

    def _read_later(self, worker: SimWorker, link: Link, act: Callable[[SimWorker, Link], None]) -> None:
        timeline = self._timeline
        link.read_due = max(link.read_due, self._faults.reads_at(worker))
        timeline.at(link.read_due, timeline.coordinator, self._read_now, worker, link, act)

    def _read_now(self, worker: SimWorker, link: Link, act: Callable[[SimWorker, Link], None]) -> None:
        if self._faults.reads_at(worker) > self._timeline.now:
            self._read_later(worker, link, act)
            return
        link.unread -= 1
        act(worker, link)
        for handle in worker.handles:
            self._world.touch(handle)  # whoever is counted on for what is so old is found out

    def _accepted(self, worker: SimWorker, link: Link) -> None:
        self._world.links[link.session] = (worker, link)
        self._world.step(Connected(link.session, worker.incarnation, "worker"))

    # -- up

    def said_up(self, worker: SimWorker, link: Link) -> None:
        """The last of `link.up` is on its way."""
        timeline = self._timeline
        if link.is_lossy:
            link.up.pop()
            return
        link.up_due = max(link.up_due, timeline.now + self.latency())
        timeline.at(link.up_due, timeline.coordinator, self._arrive_up, worker, link)

    def _arrive_up(self, worker: SimWorker, link: Link) -> None:
        timeline = self._timeline
        blocked = self._blocked(worker, link)
        if blocked:
            link.up_due = max(link.up_due, blocked)
            timeline.at(blocked, timeline.coordinator, self._arrive_up, worker, link)
            return
        self._read(worker, link, self._hear)

    def _hear(self, worker: SimWorker, link: Link) -> None:
        message = link.up.popleft()
        if link.session not in self._world.links or link.is_lossy:
            return
        if self._faults.garbles(worker):
            self.close_session(worker, link)  # what is malformed costs its sender the connection
            return
        self._hand_over(worker, link, message)
        if self._faults.doubles(message):
            self._hand_over(worker, link, message)

    def _hand_over(self, worker: SimWorker, link: Link, message: FromWorker) -> None:
        self._timeline.trace(worker.name, "->", message)
        if isinstance(message, Prepared):
            self._faults.voted(worker, message)
        elif isinstance(message, Rollback):
            self._faults.rolls_back()
        self._world.step(Received(link.session, message))

    def looked_for(self, session: int) -> None:
        """The coordinator asks what of this session lies unread. If nothing does, it is told so, after all of now."""
        timeline = self._timeline
        _, link = self._world.links.get(session, (None, None))
        if session == DOOR and any(map(self._waits_at_door, self._world.workers.values())):
            return
        if link is None or not link.unread:
            timeline.at(timeline.now, timeline.coordinator, self._looked, session)

    def _waits_at_door(self, worker: SimWorker) -> bool:
        link = worker.link
        return link is not None and link.unread > 0 and self._world.session_of(worker.incarnation) != link.session

    def _looked(self, session: int) -> None:
        self._world.step(Silent((session,)))

    def link_lost(self, worker: SimWorker, link: Link) -> None:
        """The worker's end is gone: the coordinator will notice, after what is on its way; if it can."""
        timeline = self._timeline
        self._faults.link_lost(link)
        link.up_due = max(link.up_due, timeline.now + self.latency())
        timeline.at(link.up_due, timeline.coordinator, self._arrive_end, worker, link)

    def _arrive_end(self, worker: SimWorker, link: Link) -> None:
        blocked = self._blocked(worker, link)
        if blocked:
            self._timeline.at(blocked, self._timeline.coordinator, self._arrive_end, worker, link)
        elif not link.is_lossy:
            self._read(worker, link, self._ends)

    def _ends(self, worker: SimWorker, link: Link) -> None:
        self._over(link)

    def _over(self, link: Link) -> None:
        if self._world.links.pop(link.session, None) is not None:
            self._world.step(Disconnected(link.session))

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
            said_at = min(self._blocked(worker, link), timeline.now + LAST_WORDS_S)
            timeline.at(max(said_at, timeline.now) + self.latency(), timeline.coordinator, self._over, link)
        if link.is_lossy:
            link.down.pop()
            return
        link.down_due = max(link.down_due, timeline.now + self.latency())
        timeline.at(link.down_due, worker, self._arrive_down, worker, link)

    def _arrive_down(self, worker: TimedWorker, link: Link) -> None:
        timeline = self._timeline
        blocked = self._blocked(worker, link)
        if blocked:
            link.down_due = max(link.down_due, blocked)
            timeline.at(blocked, worker, self._arrive_down, worker, link)
            return
        message = link.down.popleft()
        if worker.link is not link or link.is_lossy:
            return
        if self._faults.garbles(worker):
            worker.disconnect()
            return
        if message is not None:
            timeline.trace(worker.name, "<-", message)
        worker.received(link, message)
        if message is not None and worker.link is link and self._faults.doubles(message):
            worker.received(link, message)

    def coordinator_died(self) -> None:
        """Every connection breaks, also those that are being made."""
        timeline = self._timeline
        self._world.links.clear()
        for worker in list(self._world.workers.values()):
            link = worker.link
            if link is not None and worker.alive:
                timeline.after(self.latency(), worker, self._broken, worker, link)

    def _broken(self, worker: SimWorker, link: Link) -> None:
        blocked = self._blocked(worker, link)
        if blocked:
            self._timeline.at(blocked, worker, self._broken, worker, link)
        elif worker.link is link and not link.is_lossy:
            worker.disconnect()
