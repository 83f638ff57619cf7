"""A worker process in virtual time: it keeps a connection to the coordinator, as `runtime.control.link` does, and its
deadlines.

Not responsible for what messages mean (`sim.worker`), nor for how they travel (`control_network`).
"""

from __future__ import annotations

from tensorhub.messages import Announce, Dismissed, FromCoordinator, Watch
from tensorhub.runtime.control.link import RECONNECT_S_FIRST, RECONNECT_S_MAX
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.network import COORDINATOR, Link
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.testing.sim.world import World
from tensorhub.types import Location, VersionInfo


class TimedWorker(SimWorker):
    """A worker that connects, beats, and connects again."""

    def __init__(
        self, cluster: World, name: str, location: Location, transports: tuple[str, ...], *, timeline: Timeline
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
            self.cluster.driver.took("silent connection given up")
            self.disconnect()
            return
        self.beat()
        self._timeline.after(self.beats.every_s, self, self._beat, link)
