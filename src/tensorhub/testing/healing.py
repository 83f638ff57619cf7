"""Faults are over: every call must end, and whoever still can must be able to publish, and everybody to fetch it (G7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub.errors import GroupAborted, LeaseLost, OperationTimeout
from tensorhub.testing.guarantees import demand
from tensorhub.testing.handle import Asked, Handle
from tensorhub.testing.network import TimedLink
from tensorhub.testing.users import Team
from tensorhub.testing.worker import SimWorker
from tensorhub.types import HandleState

if TYPE_CHECKING:
    from tensorhub.testing.simulated import SimulatedCluster

TRIES = 12
REST_S = 400.0
WAITS_S = 5000.0  # a fill that waits for a version of after the faults


class Healing:
    """The second phase of a run."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._waiting: list[Asked] = []  # fills that were called while things still went wrong, of a version to come
        self._awaited = 0  # its number

    def ask(self) -> None:
        """While things still go wrong: whoever is at rest wants the next version, and waits for it."""
        users = self._cluster.users
        users.next_version += 10
        self._awaited = users.next_version
        ready = [team for team in users.teams if self._is_whole(team) and all(handle.idle for handle in team.ranks)]
        for team in [team for team in ready[1:] if team.world_size == ready[0].world_size]:
            for handle in team.ranks:
                self._waiting.append(handle.update("latest", WAITS_S, at_least=self._awaited))

    def run(self) -> None:
        """Demand convergence. Raises GuaranteeBroken."""
        cluster = self._cluster
        waiting = self._running_calls()
        self._rest("after the last fault")
        cluster.run_until(lambda: False, 2 * cluster.options.lease_s)
        self._rest("two leases after the last fault")
        for asked in waiting:
            demand(asked.done or not asked.handle.worker.alive, f"G7: {asked.handle}: {asked.what} never ended")
        cluster.check()
        cluster.check_agreement()
        self._let_go()
        self._meet_the_waiting()
        whole = [team for team in cluster.users.teams if self._is_whole(team)]
        for writer in whole:
            self._publish_and_update(writer, whole)
        cluster.check()

    def _running_calls(self) -> list[Asked]:
        """Calls that run when the last fault ends."""
        handles = [handle for handle in self._cluster.live_handles() if handle.asked is not None]
        return [h.asked for h in handles if h.asked is not None and not h.asked.done and h.asked not in self._waiting]

    def _rest(self, when: str) -> None:
        """Let everything that was asked for come to its end."""
        cluster = self._cluster
        if not cluster.run_until(self._is_at_rest, REST_S):
            handles = [handle for handle in cluster.live_handles() if not handle.idle]
            offline = [w for w in cluster.workers.values() if w.alive and (w.link is None or not w.link.welcomed)]
            told = [f"{handle}: {handle.member.running}, to do {list(handle.todo)}" for handle in handles]
            demand(False, f"G7: no rest {when}: {told} {offline} {len(cluster.unstored)} not stored")

    def _is_at_rest(self) -> bool:
        cluster = self._cluster
        return (
            cluster.process.alive
            and not cluster.unstored
            and cluster.process.stopped_until <= cluster.now
            and all(self._is_connected(w) for w in cluster.workers.values() if w.alive)
            and all((handle.idle or self._waits(handle)) and handle.is_answered for handle in cluster.live_handles())
        )

    def _is_connected(self, worker: SimWorker) -> bool:
        link = worker.link
        runs = worker.stopped_until <= self._cluster.now
        return runs and isinstance(link, TimedLink) and link.welcomed and not link.is_lossy and not worker.unpinned

    def _waits(self, handle: Handle) -> bool:
        return not handle.todo and handle.asked in self._waiting

    def _that_wait_whole(self) -> list[Asked]:
        """Calls that all ranks of their group still wait with; where one rank's has ended, the others' are cancelled."""
        waiting = [asked for asked in self._waiting if not asked.done and asked.handle.worker.alive]
        whole: list[Asked] = []
        for asked in waiting:
            shard = asked.handle.shard
            if sum(other.handle.shard.group == shard.group for other in waiting) == shard.world_size:
                whole.append(asked)
            else:
                asked.handle.cancel()
        return whole

    def _meet_the_waiting(self) -> None:
        """What is waited for is published: each call that still waits ends well (G7)."""
        cluster, waiting = self._cluster, self._that_wait_whole()
        groups = {asked.handle.shard.group for asked in waiting}
        writers = [team for team in cluster.users.teams if self._is_whole(team) and team.name not in groups]
        sizes = {asked.handle.shard.world_size for asked in waiting}
        writers = [team for team in writers if team.world_size in sizes]
        if not writers:
            for asked in waiting:
                asked.handle.cancel()
            self._waiting.clear()
            self._rest("after waiting calls were cancelled")
            return
        self._take_back(writers[0])
        self._must(writers[0], self._awaited, lambda handle: handle.publish(self._awaited))
        self._waiting.clear()
        self._rest("after what was waited for was published")
        for asked in waiting:
            ok = not asked.handle.worker.alive or (asked.error is None and asked.number == self._awaited)
            demand(ok, f"G7: {asked.handle} waited for {self._awaited}: {asked.error!r} {asked.version}")

    @staticmethod
    def _is_whole(team: Team) -> bool:
        return all(h.worker.alive and h.registered and h.registration_error is None for h in team.ranks) and all(
            h.member.state is not HandleState.CLOSED for h in team.ranks
        )

    def _let_go(self) -> None:
        """Nothing is retained any more."""
        cluster = self._cluster
        live = [worker for worker in cluster.workers.values() if worker.alive]
        for worker in live:
            worker.retain(0)
            for pin in list(worker.pins):
                worker.unpin(pin)
            worker.pins.clear()
        for team in cluster.users.teams:
            cluster.users.enrol(team)
        cluster.run_until(lambda: False, 2.0)
        self._rest("after everything was let go")
        for model in cluster.coordinator.cluster.models.values():
            demand(not live or not model.retained(), f"still retained: {model.retained()}, pins {model.pins}")

    def _publish_and_update(self, writer: Team, whole: list[Team]) -> None:
        users = self._cluster.users
        self._take_back(writer)
        users.next_version += 10
        number = users.next_version
        self._must(writer, number, lambda handle: handle.publish(number))
        for reader in whole:
            if reader is not writer and reader.world_size == writer.world_size:
                self._must(reader, number, lambda handle: handle.update("latest"))

    def _take_back(self, writer: Team) -> None:
        """Its memory is its own again."""
        for handle in writer.ranks:
            if handle.member.state in (HandleState.READY, HandleState.IN_DOUBT):
                asked = handle.unpublish()
                self._rest("after unpublish")
                demand(asked.error is None, f"G7: {handle}: unpublish: {asked.error!r}")

    def _must(self, team: Team, number: int, call: Callable[[Handle], Asked]) -> None:
        """This call of all ranks has to succeed, once what happened before is paid for: each refusal (a body raised) that a
        rank has not heard of yet ends one call of that rank, and ranks may have several before them. So does the loss of the
        coordinator's state.
        """
        asked: list[Asked] = []
        for _ in range(TRIES):
            asked = [call(handle) for handle in team.ranks]
            self._rest(f"after {asked[0].what} of {team.name}")
            errors = [each.error for each in asked if each.error is not None]
            if not errors:
                break
            known = all(isinstance(error, GroupAborted | OperationTimeout | LeaseLost) for error in errors)
            demand(known, f"G7: {team.ranks[0]}: {errors!r}")
        for each in asked:
            ok = each.error is None and each.number == number
            demand(ok, f"G7: {each.handle} {each.what}: {each.error!r} {each.version}")
