"""The pure core as a Hypothesis machine: a rule for each call of a user, and one of the same name for each `Fault`.

Hypothesis leaves out rules at random, and shrinks what it finds to the rules that matter. After each step everything is
checked; in the end faults are over, and every call must end, and whoever is left can publish and fetch (G7).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensorhub.coordinator import invariants
from tensorhub.errors import GroupAborted, LeaseLost, OperationTimeout, StateError
from tensorhub.testing import CHUNK_BYTES, CHUNKS, BrokenHook, Fault, GuaranteeBroken, SimHandle, SimWorker
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.testing.sim.network import COORDINATOR, Link
from tensorhub.types import HandleState, Selector
from tests.property.faulty import FaultyCluster

GROUPS = 3
TRIES = 6  # of one call, once faults are over: each of them may be what pays for something that happened before
GROUP = st.integers(0, GROUPS - 1)
ANY = st.integers(0, 8)  # one of those that there are
SELECTOR = st.sampled_from(["latest", "latest", "latest-1", "available", 1])
TIMEOUT_S = st.sampled_from([60.0, 60.0, 2.0])
CALL = st.sampled_from(["publish", "update", "unpublish", "refuse", ""])
SHORT_S = st.sampled_from([0.5, 3.0])
LONG_S = st.sampled_from([0.5, 3.0, 15.0])
# What happens next by itself: everything; the steps that these numbers pick among those that could; or seconds pass.
THEN = st.one_of(st.none(), st.lists(st.integers(0, 1000), max_size=12), st.sampled_from([0.5, 4.0]))
Then = list[int] | float | None
CALLS = st.sampled_from(["publish", "publish", "update", "update", "stage", "prefetch", "unpublish"])


class CoreMachine(RuleBasedStateMachine):
    """Three groups of the same size, one of them perhaps on spot workers, and whatever host memory they have."""

    @initialize(world_size=st.integers(1, 3), copies=st.integers(0, 2), spot=st.booleans())
    def set_up(self, world_size: int, copies: int, spot: bool) -> None:
        host_bytes = copies * CHUNKS * CHUNK_BYTES
        self.cluster = FaultyCluster(host_bytes=host_bytes, manifest=make_manifest(CHUNKS, "xxh3-64"))
        spots = [False] * (GROUPS - 1) + [spot]
        self.groups = [self.cluster.group(f"g{number}", world_size, spot=spots[number]) for number in range(GROUPS)]
        self.processes = 0
        self.published = 0
        self.hasty = 0  # calls that will have hardly any time
        self.cluster.run()
        self.publish(0, 60.0, None)
        self.update(1, "latest", hold=False, staged=False, timeout_s=60.0, then=None)

    # -- choosing

    def users(self) -> list[SimHandle]:
        """What users have and call."""
        return [h for group in self.groups for h in group if h.worker.alive and h.member.state is not HandleState.CLOSED]

    def pick(self, index: int) -> SimHandle | None:
        """One of them."""
        users = self.users()
        return users[index % len(users)] if users else None

    def pick_worker(self, index: int) -> SimWorker | None:
        """One that runs."""
        workers = [worker for worker in self.cluster.workers.values() if worker.alive]
        return workers[index % len(workers)] if workers else None

    def ranks(self, group: int) -> list[SimHandle]:
        """The ranks of a group that can be called."""
        return [handle for handle in self.groups[group] if handle in self.users() and handle.idle and handle.registered]

    # -- calling

    def time_s(self, timeout_s: float) -> float:
        """How long a call has."""
        if not self.hasty:
            return timeout_s
        self.hasty -= 1
        self.cluster.happened[Fault.HASTE] += 1
        return 0.05

    def call(self, handle: SimHandle, what: str, timeout_s: float, *args: Any, **more: Any) -> None:
        """Call it, if its state allows that."""
        with suppress(StateError):
            getattr(handle, what)(*args, self.time_s(timeout_s), **more)

    def go_on(self, then: Then) -> None:
        if then is None:
            self.cluster.run()
        elif isinstance(then, float):
            self.cluster.advance(then)
        else:
            for pick in then:
                choices = self.cluster.choices()
                if choices:
                    self.cluster.do(choices[pick % len(choices)])

    # -- what users do

    @rule(group=GROUP, timeout_s=TIMEOUT_S, then=THEN)
    def publish(self, group: int, timeout_s: float, then: Then) -> None:
        for handle in self.ranks(group):
            if handle.member.state is HandleState.READY:
                self.call(handle, "unpublish", timeout_s)
        self.go_on(then)
        self.published += 1
        for handle in self.ranks(group):
            self.call(handle, "publish", timeout_s, self.published)
        self.go_on(then)

    @rule(calls=st.lists(st.tuples(GROUP, CALLS, THEN), min_size=1, max_size=8))
    def work(self, calls: list[tuple[int, str, Then]]) -> None:
        """What users mostly do, in one rule, so that there is more of it than of what goes wrong."""
        for group, what, then in calls:
            match what:
                case "publish":
                    self.publish(group, 30.0, then)
                case "update" | "stage":
                    self.update(group, "latest", hold=False, staged=what == "stage", timeout_s=30.0, then=then)
                case "prefetch":
                    self.prefetch(group, "latest", 30.0, then)
                case _:
                    self.unpublish(group, 30.0, then)

    @rule(group=GROUP, selector=SELECTOR, hold=st.booleans(), staged=st.booleans(), timeout_s=TIMEOUT_S, then=THEN)
    def update(self, group: int, selector: Selector, hold: bool, staged: bool, timeout_s: float, then: Then) -> None:
        for handle in self.ranks(group):
            self.call(handle, "stage" if staged else "update", timeout_s, selector, hold=hold)
        self.go_on(then)

    @rule(group=GROUP, selector=SELECTOR, timeout_s=TIMEOUT_S, then=THEN)
    def prefetch(self, group: int, selector: Selector, timeout_s: float, then: Then) -> None:
        for handle in self.ranks(group):
            self.call(handle, "prefetch", timeout_s, selector)
        self.go_on(then)

    @rule(index=ANY, shard=st.integers(0, 2), selector=SELECTOR, timeout_s=TIMEOUT_S, then=THEN)
    def fetch(self, index: int, shard: int, selector: Selector, timeout_s: float, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            self.call(worker.fetcher(shard), "fetch", timeout_s, selector)
        self.go_on(then)

    @rule(group=GROUP, timeout_s=TIMEOUT_S, then=THEN)
    def unpublish(self, group: int, timeout_s: float, then: Then) -> None:
        for handle in self.ranks(group):
            self.call(handle, "unpublish", timeout_s)
        self.go_on(then)

    @rule(index=ANY, abandon=st.booleans(), timeout_s=TIMEOUT_S, then=THEN)
    def close(self, index: int, abandon: bool, timeout_s: float, then: Then) -> None:
        handle = self.pick(index)
        if handle is not None and handle.idle:
            self.call(handle, "close", timeout_s, abandon=abandon)
        self.go_on(then)

    @rule(group=GROUP, then=THEN)
    def register_again(self, group: int, then: Then) -> None:
        self.enrol(self.groups[group])
        self.go_on(then)

    def enrol(self, ranks: list[SimHandle]) -> None:
        """Register again who has closed, or was refused."""
        for rank, handle in enumerate(ranks):
            gone = handle.registration_error is not None or handle.member.state is HandleState.CLOSED
            if gone and handle.worker.alive and handle.idle and not handle.serving:
                shard = handle.shard
                handle.worker.drop(handle)
                ranks[rank] = handle.worker.register(shard.group, shard.rank, shard.world_size, spot=shard.spot)

    @rule(index=ANY, back=st.integers(0, 3), then=THEN)
    def rollback(self, index: int, back: int, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            worker.asks.rollback(max(0, self.published - back))
        self.go_on(then)

    @rule(index=ANY, latest=st.integers(0, 2), then=THEN)
    def retain(self, index: int, latest: int, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            worker.asks.retain(latest)
        self.go_on(then)

    @rule(index=ANY, back=st.integers(0, 2), then=THEN)
    def pin_or_unpin(self, index: int, back: int, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            pins = worker.asks.pins
            worker.asks.unpin(next(iter(pins))) if pins else worker.asks.pin(max(0, self.published - back))
        self.go_on(then)

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, 4.0, 12.0]), then=THEN)
    def time_passes(self, seconds: float, then: Then) -> None:
        self.cluster.advance(seconds, run=then is None)
        self.go_on(then)

    # -- what goes wrong: one rule per fault

    @rule(index=ANY, then=THEN)
    def crash(self, index: int, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None and sum(w.alive for w in self.cluster.workers.values()) > 1:
            self.happens(Fault.CRASH)
            worker.crash()
        self.go_on(then)

    @rule(index=ANY, then=THEN)
    def restart(self, index: int, then: Then) -> None:
        dead = [(group, handle) for group in self.groups for handle in group if not handle.worker.alive]
        if dead:
            self.happens(Fault.RESTART)
            group, handle = dead[index % len(dead)]
            shard, self.processes = handle.shard, self.processes + 1
            worker = self.cluster.worker(f"new{self.processes}")
            group[shard.rank] = worker.register(shard.group, shard.rank, shard.world_size, spot=shard.spot)
        self.go_on(then)

    @rule(kept=st.booleans(), then=THEN)
    def coordinator(self, kept: bool, then: Then) -> None:
        self.happens(Fault.COORDINATOR)
        self.cluster.restart(kept=kept)
        self.connect_all()
        self.go_on(then)

    @rule(then=THEN)
    def state_lost(self, then: Then) -> None:
        self.happens(Fault.STATE_LOST)
        self.cluster.restart(lost=True)
        self.connect_all()
        self.go_on(then)

    @rule()
    def connect_all(self) -> None:
        for worker in self.cluster.workers.values():
            if worker.alive and worker.link is None and not self.cluster.partitions.blocked_until(worker.name, COORDINATOR):
                worker.connect()

    @rule(seconds=LONG_S)
    def store_slow(self, seconds: float) -> None:
        self.happens(Fault.STORE_SLOW)
        self.cluster.slow_store_until = self.cluster.now + seconds

    @rule(then=THEN)
    def store_fail(self, then: Then) -> None:
        self.cluster.failing[""] = 1
        self.go_on(then)

    @rule(index=ANY, other=st.one_of(st.none(), ANY), seconds=LONG_S, then=THEN)
    def partition(self, index: int, other: int | None, seconds: float, then: Then) -> None:
        worker, second = self.pick_worker(index), self.pick_worker(other or 0)
        if worker is not None and second is not None and (other is None or worker is not second):
            self.happens(Fault.PARTITION)
            name = second.name if other is not None else COORDINATOR
            self.cluster.partitions.block(worker.name, name, self.cluster.now + seconds)
        self.go_on(then)

    @rule(index=ANY, then=THEN)
    def cut(self, index: int, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None and worker.link is not None:
            self.happens(Fault.CUT)
            worker.disconnect()
        self.go_on(then)

    @rule(index=ANY, seconds=SHORT_S, then=THEN)
    def delay(self, index: int, seconds: float, then: Then) -> None:
        link = self.link_of(index)
        if link is not None:
            self.happens(Fault.DELAY)
            link.held_until = self.cluster.now + seconds
        self.go_on(then)

    @rule(index=ANY, seconds=LONG_S, then=THEN)
    def behind(self, index: int, seconds: float, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            self.happens(Fault.BEHIND)
            self.cluster.unread_until[worker.name] = self.cluster.now + self.cluster.options.lease_s + seconds
        self.go_on(then)

    @rule(index=ANY)
    def reorder(self, index: int) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            self.cluster.late_tails[worker.name] = 1
            if worker.link is not None and worker.link.up:
                worker.disconnect()
                worker.connect()

    @rule(index=ANY, count=st.sampled_from([1, 5, 30]))
    def duplicate(self, index: int, count: int) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            self.cluster.doubles[worker.name] += count

    @rule(index=ANY, then=THEN)
    def drop(self, index: int, then: Then) -> None:
        link = self.link_of(index)
        if link is not None:
            self.cluster.happened[Fault.DROP] += len(link.up) + len(link.down)
            link.is_lossy = True
            link.up.clear()
            link.down.clear()
        self.go_on(then)

    @rule(index=ANY, control=st.booleans(), then=THEN)
    def corrupt(self, index: int, control: bool, then: Then) -> None:
        worker = self.pick_worker(index)
        if control and worker is not None:
            self.cluster.garbled[worker.name] = 1
        elif not control:
            self.cluster.damaged[""] = 1
        self.go_on(then)

    @rule(index=ANY, then=THEN)
    def overwrite(self, index: int, then: Then) -> None:
        handle = self.pick(index)
        if handle is not None and misdeeds.overwrite(handle):
            self.happens(Fault.OVERWRITE)
        self.go_on(then)

    @rule(index=ANY, then=THEN)
    def lie(self, index: int, then: Then) -> None:
        users = self.users()
        if any(misdeeds.lie(handle) for handle in [*users[index % max(1, len(users)) :], *users]):
            self.happens(Fault.LIE)
        self.go_on(then)

    @rule(index=ANY)
    def stall(self, index: int) -> None:
        self.spoil_a_lane(index, Fault.STALL)

    @rule(index=ANY)
    def slow(self, index: int) -> None:
        self.spoil_a_lane(index, Fault.SLOW)

    def spoil_a_lane(self, index: int, kind: Fault) -> None:
        """One that there is, or the next one that is made."""
        lanes = [lane for handle in self.cluster.live_handles() if handle.pull for lane in handle.pull.lanes.values()]
        self.cluster.for_lanes.append(kind)
        if lanes:
            self.cluster.spoil(lanes[index % len(lanes)])

    @rule(index=ANY, seconds=LONG_S, then=THEN)
    def pause(self, index: int, seconds: float, then: Then) -> None:
        worker = self.pick_worker(index)
        if worker is not None:
            self.happens(Fault.PAUSE)
            worker.stopped_until = self.cluster.now + seconds
        self.go_on(then)

    @rule(index=ANY, then=THEN)
    def hook(self, index: int, then: Then) -> None:
        handle = self.pick(index)
        if handle is not None:
            self.happens(Fault.HOOK)
            handle.hook_error = None if handle.hook_error else BrokenHook("the hook broke")
        self.go_on(then)

    @rule(index=ANY, then=THEN)
    def cancel(self, index: int, then: Then) -> None:
        busy = [handle for handle in self.cluster.live_handles() if handle.member.running is not None]
        if busy:
            self.happens(Fault.CANCEL)
            busy[index % len(busy)].cancel()
        self.go_on(then)

    @rule(
        group=GROUP, calls=st.lists(st.sampled_from(["publish", "update", "unpublish", "refuse", ""]), min_size=3), then=THEN
    )
    def differ(self, group: int, calls: list[str], then: Then) -> None:
        for handle, what in zip(self.ranks(group), calls, strict=False):
            self.happens(Fault.DIFFER)
            match what:
                case "publish":
                    self.published += 1
                    self.call(handle, what, 60.0, self.published)
                case "update":
                    self.call(handle, what, 60.0, "latest")
                case "unpublish":
                    self.call(handle, what, 60.0)
                case "refuse":
                    handle.refuse()
                case _:
                    pass
        self.go_on(then)

    @rule(count=st.integers(1, 6))
    def haste(self, count: int) -> None:
        self.hasty = count

    @rule(index=ANY, seconds=LONG_S)
    def device(self, index: int, seconds: float) -> None:
        handle = self.pick(index)
        if handle is not None:
            handle.hold_access()
            if handle.access is not None:
                self.happens(Fault.DEVICE)
                self.cluster.later.append((self.cluster.now + seconds, handle.end_access))

    @rule(index=ANY, notice_s=SHORT_S, then=THEN)
    def preempt(self, index: int, notice_s: float, then: Then) -> None:
        spot = [handle for handle in self.users() if handle.shard.spot]
        if spot:
            self.happens(Fault.PREEMPT)
            worker = spot[index % len(spot)].worker
            for handle in [handle for handle in worker.handles if handle.idle]:
                self.call(handle, "close", notice_s)
            self.cluster.later.append((self.cluster.now + notice_s, lambda: worker.crash() if worker.alive else None))
        self.go_on(then)

    def happens(self, kind: Fault) -> None:
        """It really does."""
        self.cluster.happened[kind] += 1

    def link_of(self, index: int) -> Link | None:
        """The connection of one of the workers."""
        worker = self.pick_worker(index)
        link = worker.link if worker is not None else None
        return link

    # -- what has to hold

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()
            invariants.check_counts(self.cluster.coordinator.cluster)

    def teardown(self) -> None:
        """Faults are over: every call ends, and everybody who is left can publish and fetch."""
        if hasattr(self, "cluster"):
            self.cluster.heal()
            self.let_go()
            whole = [group for group in self.groups if all(handle in self.users() for handle in group)]
            for writer in whole:
                self.converge(writer, whole)
            self.cluster.check()

    def let_go(self) -> None:
        """Nothing is retained any more, and everybody is registered."""
        for worker in [worker for worker in self.cluster.workers.values() if worker.alive]:
            worker.asks.retain(0)
            for pin in [*worker.asks.pins, *worker.asks.unpinned]:
                worker.asks.unpin(pin)
        for _ in range(TRIES):
            for group in self.groups:
                self.enrol(group)
            self.cluster.run()
            if all(handle.registered and handle in self.users() for group in self.groups for handle in group):
                return
            self.cluster.advance(4.0)

    def converge(self, writer: list[SimHandle], whole: list[list[SimHandle]]) -> None:
        """This group publishes, and the others get it."""
        for handle in writer:
            if handle.member.state in (HandleState.READY, HandleState.IN_DOUBT):
                self.must([handle], lambda handle: handle.unpublish())
        self.published += 10
        number = self.published
        self.must(writer, lambda handle: handle.publish(number))
        for reader in whole:
            if reader is not writer:
                for asked in self.must(reader, lambda handle: handle.update("latest")):
                    if asked.number != number:
                        raise GuaranteeBroken(f"liveness: {asked.handle} got {asked.number}, not {number}")

    def must(self, ranks: list[SimHandle], call: Any) -> list[CallRecord]:
        """This call of all ranks has to succeed, once what happened before is paid for."""
        asked: list[CallRecord] = []
        for _ in range(TRIES):
            asked = [call(handle) for handle in ranks]
            end = self.cluster.now + 100.0
            self.cluster.run()
            while not all(each.done for each in asked) and self.cluster.now < end:
                self.cluster.advance(2.0)
            errors = [each.error for each in asked if each.error is not None or not each.done]
            if not errors:
                return asked
            if not all(isinstance(error, GroupAborted | OperationTimeout | LeaseLost) for error in errors):
                break
        raise GuaranteeBroken(f"liveness: {ranks[0]}: {asked[0].what}: {errors!r}")
