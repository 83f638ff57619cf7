"""Keeps workers connected in virtual time, as `runtime.control.link` does: connects, beats, gives up, and connects again.

Not responsible for what messages mean (`sim.worker`), nor for how they travel (`control_network`).
"""

from __future__ import annotations

from tensorhub.messages import Dismissed, FromCoordinator
from tensorhub.runtime.control.link import RECONNECT_S_FIRST, RECONNECT_S_MAX
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.network import COORDINATOR, Link
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.testing.sim.world import World


class Keeper:
    """That of all workers."""

    def __init__(self, world: World, timeline: Timeline) -> None:
        self._world = world
        self._timeline = timeline
        self._waits_s: dict[SimWorker, float] = {}  # how long each waits before it tries again, on average

    def connect(self, worker: SimWorker) -> None:
        """Try to reach the coordinator, now and until it is reached."""
        timeline = self._timeline
        if worker.link is not None or not worker.alive:
            return
        blocked = timeline.partitions.blocked_until(worker.name, COORDINATOR)
        if blocked > timeline.now or not timeline.coordinator.alive:
            self.connect_again(worker)
            return
        worker.connect()
        timeline.after(self._world.options.connect_timeout_s, worker, self._expect_welcome, worker, worker.link)

    def connect_again(self, worker: SimWorker) -> None:
        """After a while."""
        wait_s = self._waits_s.get(worker, RECONNECT_S_FIRST)
        self._waits_s[worker] = min(2 * wait_s, RECONNECT_S_MAX)
        self._timeline.after(wait_s * (0.5 + self._timeline.random.random()), worker, self.connect, worker)

    @staticmethod
    def _expect_welcome(worker: SimWorker, link: Link) -> None:
        if worker.link is link and not link.welcomed:
            worker.disconnect()

    def received(self, worker: SimWorker, link: Link, message: FromCoordinator | None) -> None:
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
        self._timeline.after(worker.beats.every_s, worker, self._beat, worker, link)
