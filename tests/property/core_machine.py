"""The pure core as a Hypothesis machine: what users call, and the faults that shrink well.

Hypothesis leaves out rules at random, and shrinks what it finds to the rules that matter. After
each step everything is checked; in the end faults are over, every call must end, and each group
that is left can publish and fetch (G7). The simulator draws every kind of `Fault` by seeds
(`tests/testing`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensorhub.coordinator import invariants
from tensorhub.errors import GroupAborted, LeaseLost, OperationTimeout, StateError
from tensorhub.testing import CHUNK_BYTES, CHUNKS, GuaranteeBroken, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import HandleState, Selector

GROUPS = 3
# of one call, once faults are over: each of them may be what pays for something that happened
# before
TRIES = 6
GROUP = st.integers(0, GROUPS - 1)
ANY = st.integers(0, 8)  # one of those that there are
SELECTOR = st.sampled_from(["latest", "latest", "latest-1", "available", 1])
TIMEOUT_S = st.sampled_from([60.0, 60.0, 2.0])
# What happens next by itself: everything; the steps that these numbers pick among those that could;
# or seconds pass.
THEN = st.one_of(
    st.none(), st.lists(st.integers(0, 1000), max_size=12), st.sampled_from([0.5, 4.0])
)
Then = list[int] | float | None
CALLS = st.sampled_from(
    ["publish", "publish", "update", "update", "stage", "prefetch", "unpublish"]
)
FAULTS = [
    "crash",
    "restart",
    "coordinator",
    "state lost",
    "cut",
    "pause",
    "overwrite",
    "cancel",
    "close",
    "retain",
]


class CoreMachine(RuleBasedStateMachine):
    """Three groups of one size, with host memory for up to two copies."""

    @initialize(world_size=st.integers(1, 3), copies=st.integers(0, 2))
    def set_up(self, world_size: int, copies: int) -> None:
        host_bytes = copies * CHUNKS * CHUNK_BYTES
        self.cluster = StepwiseCluster(
            host_bytes=host_bytes, manifest=make_manifest(CHUNKS, "xxh3-64")
        )
        self.groups = [self.cluster.group(f"g{number}", world_size) for number in range(GROUPS)]
        self.published = self.processes = 0
        self.cluster.run()
        self.work([(0, "publish", None), (1, "update", None)], "latest", 60.0)

    def users(self) -> list[SimHandle]:
        """What users have and call."""
        return [
            h
            for group in self.groups
            for h in group
            if h.worker.alive and h.member.state is not HandleState.CLOSED
        ]

    def ranks(self, group: int) -> list[SimHandle]:
        """The ranks of a group that can be called."""
        return [
            handle
            for handle in self.groups[group]
            if handle in self.users() and handle.idle and handle.registered
        ]

    def go_on(self, then: Then) -> None:
        if then is None:
            self.cluster.run()
        elif isinstance(then, float):
            self.cluster.advance(then)
        else:
            for pick in then:
                if choices := self.cluster.choices():
                    self.cluster.do(choices[pick % len(choices)])

    @rule(
        calls=st.lists(st.tuples(GROUP, CALLS, THEN), min_size=1, max_size=8),
        selector=SELECTOR,
        timeout_s=TIMEOUT_S,
    )
    def work(
        self, calls: list[tuple[int, str, Then]], selector: Selector, timeout_s: float
    ) -> None:
        for group, what, then in calls:
            if what == "publish":
                self.published += 1
            for handle in self.ranks(group):
                with suppress(StateError):  # its state may not allow that
                    match what:
                        case "publish":
                            if handle.member.state is HandleState.READY:
                                handle.unpublish(timeout_s=timeout_s)
                                self.go_on(then)
                            handle.publish(self.published, timeout_s=timeout_s)
                        case "unpublish":
                            handle.unpublish(timeout_s=timeout_s)
                        case _:
                            getattr(handle, what)(selector, timeout_s=timeout_s)
            self.go_on(then)

    @rule(kind=st.sampled_from(FAULTS), index=ANY, then=THEN)
    def strike(self, kind: str, index: int, then: Then) -> None:
        cluster, users = self.cluster, self.users()
        alive = [worker for worker in cluster.workers.values() if worker.alive]
        worker = alive[index % len(alive)]
        match kind:
            case "crash" if len(alive) > 1:
                worker.crash()
            case "restart":
                self.start_again()
            case "coordinator" | "state lost":
                cluster.restart(lost=kind == "state lost")
                self.connect()
            case "cut" if worker.link is not None:
                worker.disconnect()
            case "pause":
                worker.stopped_until = cluster.now + (0.5, 3.0, 15.0)[index % 3]
            case "overwrite" if users:
                misdeeds.overwrite(users[index % len(users)])
            case "cancel":
                for handle in [
                    each for each in cluster.live_handles() if each.member.running is not None
                ][index : index + 1]:
                    handle.cancel()
            case "close" if users and users[index % len(users)].idle:
                with suppress(StateError):
                    users[index % len(users)].close(timeout_s=60.0, abandon=index % 2 == 1)
            case "retain":
                worker.asks.retain(index % 3)
            case _:
                self.connect()
        self.go_on(then)

    def connect(self) -> None:
        for worker in self.cluster.workers.values():
            if worker.alive and worker.link is None:
                worker.connect()

    def start_again(self) -> bool:
        """Register again each rank whose process has died, and each that has closed or was refused;
        returns if all are.
        """
        for group in self.groups:
            for rank, handle in enumerate(group):
                worker, shard = handle.worker, handle.shard
                gone = (
                    handle.registration_error is not None
                    or handle.member.state is HandleState.CLOSED
                )
                if not worker.alive:
                    self.processes += 1
                    worker = self.cluster.worker(f"new{self.processes}")
                elif gone and handle.idle and not handle.serving:
                    worker.drop(handle)
                else:
                    continue
                group[rank] = worker.register(shard.group, shard.rank, shard.world_size)
        self.cluster.run()
        return all(
            handle.registered and handle in self.users()
            for group in self.groups
            for handle in group
        )

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()
            invariants.check_counts(self.cluster.coordinator.cluster)

    def teardown(self) -> None:
        """Faults are over: every call ends, and everybody who is left can publish and fetch."""
        if hasattr(self, "cluster"):
            for worker in self.cluster.workers.values():
                worker.stopped_until = 0.0
            self.cluster.heal()
            for worker in self.cluster.workers.values():
                if worker.alive:
                    worker.asks.retain(0)
            tries = iter(range(TRIES))
            while not self.start_again() and next(tries, None) is not None:
                self.cluster.advance(4.0)
            whole = [
                group for group in self.groups if all(handle in self.users() for handle in group)
            ]
            for writer in whole:
                self.converge(writer, whole)
            self.cluster.check()

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
                        raise GuaranteeBroken(
                            f"liveness: {asked.handle} got {asked.number}, not {number}"
                        )

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
            if not all(
                isinstance(error, GroupAborted | OperationTimeout | LeaseLost) for error in errors
            ):
                break
        raise GuaranteeBroken(f"liveness: {ranks[0]}: {asked[0].what}: {errors!r}")
