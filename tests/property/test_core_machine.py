"""The guarantees under faults, by Hypothesis, which shrinks what it finds (seeds: see tests/testing)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorhub.errors import StateError
from tensorhub.testing import CHUNK_BYTES, CHUNKS, BrokenHook, Choice, Handle, PureCluster
from tensorhub.types import HandleState, Medium, Selector


def is_users(handle: Handle) -> bool:
    """Whether it is a handle that a user has and calls."""
    return handle.shard.serves and handle.shard.medium is Medium.DEVICE


class CoreMachine(RuleBasedStateMachine):
    """One rule per kind of fault, so that Hypothesis can leave kinds out, and shrink to those that matter."""

    @initialize(world_size=st.integers(1, 3), groups=st.integers(2, 3), copies=st.integers(0, 2))
    def set_up(self, world_size: int, groups: int, copies: int) -> None:
        self.cluster = PureCluster(host_bytes=copies * CHUNKS * CHUNK_BYTES)
        self.groups = [self.cluster.group(f"g{number}", world_size) for number in range(groups)]
        self.published = 0

    def pick(self, index: int) -> Handle | None:
        handles = [h for h in self.cluster.live_handles() if is_users(h) and h.member.state is not HandleState.CLOSED]
        return handles[index % len(handles)] if handles else None

    def ranks(self, index: int) -> list[Handle]:
        ranks = [h for h in self.groups[index % len(self.groups)] if h.worker.alive]
        return ranks if all(h.idle and h.registered for h in ranks) else []

    def choices(self) -> list[Choice]:
        return self.cluster.choices() if hasattr(self, "cluster") else []

    # -- what users do

    @rule(group=st.integers(0, 2), timeout_s=st.sampled_from([0.5, 60.0]))
    def publish(self, group: int, timeout_s: float) -> None:
        self.published += 1
        for handle in self.ranks(group):
            if handle.member.state in (HandleState.EMPTY, HandleState.TORN, HandleState.IN_DOUBT):
                handle.publish(self.published, timeout_s)

    @rule(
        group=st.integers(0, 2),
        selector=st.sampled_from(["latest", "latest", "latest-1", 1]),
        hold=st.booleans(),
        timeout_s=st.sampled_from([0.5, 60.0]),
    )
    def update(self, group: int, selector: Selector, hold: bool, timeout_s: float) -> None:
        for handle in self.ranks(group):
            if handle.member.state is not HandleState.CLOSED:
                handle.update(selector, timeout_s, hold=hold)

    @rule(
        index=st.integers(0, 8),
        shard=st.integers(0, 2),
        selector=st.sampled_from(["latest", "latest-1", 1]),
        timeout_s=st.sampled_from([0.5, 60.0]),
    )
    def fetch(self, index: int, shard: int, selector: Selector, timeout_s: float) -> None:
        handle = self.pick(index)
        if handle is not None:
            handle.worker.fetcher(shard).fetch(selector, timeout_s)

    @rule(group=st.integers(0, 2))
    def unpublish(self, group: int) -> None:
        for handle in self.ranks(group):
            if handle.member.state is HandleState.READY:
                handle.unpublish()

    @rule(index=st.integers(0, 8))
    def close(self, index: int) -> None:
        handle = self.pick(index)
        if handle is not None and handle.idle:
            try:
                handle.close()
            except StateError:
                return

    @rule(index=st.integers(0, 8))
    def cancel(self, index: int) -> None:
        handle = self.pick(index)
        if handle is not None and handle.member.running is not None:
            handle.cancel()

    @rule(index=st.integers(0, 8), back=st.integers(0, 3))
    def rollback(self, index: int, back: int) -> None:
        handle = self.pick(index)
        if handle is not None:
            handle.worker.rollback(max(0, self.published - back))

    @rule(index=st.integers(0, 8), latest=st.integers(0, 2))
    def retain(self, index: int, latest: int) -> None:
        handle = self.pick(index)
        if handle is not None:
            handle.worker.retain(latest)

    @rule(index=st.integers(0, 8), back=st.integers(0, 2))
    def pin_or_unpin(self, index: int, back: int) -> None:
        handle = self.pick(index)
        if handle is not None:
            pins = handle.worker.pins
            handle.worker.unpin(next(iter(pins))) if pins else handle.worker.pin(max(0, self.published - back))

    # -- what happens by itself

    @precondition(lambda self: self.choices())
    @rule(picks=st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    def deliver(self, picks: list[int]) -> None:
        for pick in picks:
            choices = self.choices()
            if not choices:
                return
            self.cluster.do(choices[pick % len(choices)])

    @rule()
    def deliver_all(self) -> None:
        self.cluster.run()

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, 4.0, 12.0]), deliver=st.booleans())
    def time_passes(self, seconds: float, deliver: bool) -> None:
        self.cluster.advance(seconds, run=deliver)

    # -- what goes wrong

    @rule(index=st.integers(0, 8))
    def disconnect_or_connect(self, index: int) -> None:
        handle = self.pick(index)
        if handle is not None:
            worker = handle.worker
            worker.disconnect() if worker.link is not None else worker.connect()

    @rule(index=st.integers(0, 8))
    def crash(self, index: int) -> None:
        handle = self.pick(index)
        if handle is not None:
            handle.worker.crash()

    @rule(kept=st.booleans())
    def restart_the_coordinator(self, kept: bool) -> None:
        self.cluster.restart(kept=kept)
        for worker in self.cluster.workers.values():
            if worker.alive:
                worker.connect()

    @precondition(lambda self: hasattr(self, "cluster") and bool(self.cluster.unstored))
    @rule()
    def fail_the_store(self) -> None:
        self.cluster.fail_store()

    @rule(index=st.integers(0, 8))
    def fail_a_source(self, index: int) -> None:
        handle = self.pick(index)
        if handle is not None and handle.pull is not None and handle.pull.grants:
            handle.source_ended(next(iter(handle.pull.grants)), "stalled")

    @rule(index=st.integers(0, 8))
    def break_a_hook(self, index: int) -> None:
        handle = self.pick(index)
        if handle is not None:
            handle.hook_error = BrokenHook("the hook broke")

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        """Faults are over: every call ends."""
        if hasattr(self, "cluster"):
            for handle in self.cluster.live_handles():
                handle.hook_error = None
            self.cluster.heal()
            self.cluster.check()


CoreMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_core_machine = CoreMachine.TestCase
