"""A seeded loop over the pure cluster: users call, messages travel, things fail; then all heals and must converge."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tensorhub.errors import GroupAborted, OperationTimeout, StateError
from tensorhub.testing import CHUNK_BYTES, CHUNKS, Asked, BrokenHook, GuaranteeBroken, Handle, PureCluster
from tensorhub.types import HandleState, Medium, Selector

FAULTS = (
    "disconnect",
    "crash",
    "restart",
    "time",
    "source",
    "store",
    "hook",
    "cancel",
    "double",
    "replace",
    "half-open",
)


def is_users(handle: Handle) -> bool:
    """Whether it is a handle that a user has and calls."""
    return handle.shard.serves and handle.shard.medium is Medium.DEVICE


class Chaos:
    """One run. `seed` decides everything: which faults there are, how often, and in which order things happen."""

    def __init__(self, seed: int, steps: int = 400) -> None:
        self.random = random = Random(seed)
        self.seed = seed
        self.steps = steps
        self.cluster = PureCluster()
        self.faults = {fault: 3 ** random.randint(-2, 1) for fault in FAULTS if random.random() < 0.4}
        self.next_version = 1
        self.fault_rate = random.choice((0.02, 0.05, 0.15))
        self.accesses = Random(~seed)  # of its own, so that what a seed meant before it still means
        self.access_rate = self.accesses.choice((0.0, 0.0, 0.02, 0.1))
        self.world_size = world_size = random.choice((1, 1, 2, 3))
        copies = Random(seed + 1_000_003)
        for number in range(random.randint(2, 4)):
            odd = random.random() < 0.05
            self.cluster.host_bytes = copies.choice((0, 0, 1, 2)) * CHUNKS * CHUNK_BYTES
            self.cluster.group(f"g{number}", world_size + odd, spot=random.random() < 0.15)
        self.fetch_rate = random.choice((0.0, 0.1, 0.3))
        if copies.random() < 0.5:
            next(iter(self.cluster.workers.values())).retain(copies.choice((1, 2)))

    def __repr__(self) -> str:
        return f"Chaos({self.seed}, {self.steps}).run()"

    def run(self) -> None:
        for _ in range(self.steps):
            self.step()
        self.heal()

    def step(self) -> None:
        random, cluster = self.random, self.cluster
        choices = cluster.choices()
        if self.faults and random.random() < self.fault_rate:
            names, weights = zip(*self.faults.items(), strict=True)
            self.fault(random.choices(names, weights)[0])
        elif choices and random.random() < 0.93:
            cluster.do(random.choice(choices))
        else:
            self.user()
        if self.accesses.random() < self.access_rate:
            self.access(self.accesses.choice(list(cluster.live_handles()) or [None]))
        cluster.check()

    @staticmethod
    def access(handle: Handle | None) -> None:
        """Begin an access that no fence can end, or end it."""
        if handle is not None and handle.access is None:
            handle.hold_access()
        elif handle is not None:
            handle.end_access()

    def user(self) -> None:
        """All live ranks of one group make the same call, unless they are in the midst of another; or a worker fetches."""
        random = self.random
        handles = [handle for handle in self.cluster.live_handles() if is_users(handle)]
        if not handles:
            return
        if self.fetch_rate and random.random() < self.fetch_rate:
            self.fetch(random.choice(handles))
            return
        group = random.choice(handles).shard.group
        members = [h for h in handles if h.shard.group == group and h.member.state is not HandleState.CLOSED]
        ranks = [h for h in members if h.idle and h.registered]
        if not ranks or (len(ranks) < len(members) and random.random() < 0.9):
            return
        if self.faults and random.random() < 0.03:
            ranks = ranks[:1]
        what = random.choice(("publish", "publish", "fill", "fill", "fill", "fill", "unpublish", "rare"))
        number, timeout_s = self.next_version, random.choice((0.5, 5.0, 60.0))
        if what == "publish":
            self.next_version += 1
            if random.random() < 0.1:
                number = random.randint(0, self.next_version)
        if what == "rare":
            what = random.choice(("close", "refuse", "mix", "fill", "order", "order"))
        if what == "order":
            self.order(random.choice(handles))
            return
        recent = max(0, self.next_version - random.randint(1, 2))
        selector: Selector = random.choice(("latest", "latest", "latest", "latest-1", recent))
        hold = random.random() < 0.3
        for handle in ranks:
            self.one_call(handle, what, number, selector, hold, timeout_s)

    def fetch(self, beside: Handle) -> None:
        random = self.random
        selector: Selector = random.choice(("latest", "latest", "latest-1", max(0, self.next_version - 1)))
        fetcher = beside.worker.fetcher(random.randrange(self.world_size))
        fetcher.fetch(selector, random.choice((0.5, 5.0, 60.0)))

    def order(self, handle: Handle) -> None:
        """A worker asks for something that concerns the whole model."""
        random, worker = self.random, handle.worker
        match random.choice(("rollback", "retain", "retain", "pin", "unpin")):
            case "rollback":
                worker.rollback(max(0, self.next_version - random.randint(1, 5)))
            case "retain":
                worker.retain(random.choice((0, 0, 1, 2)))
            case "pin":
                worker.pin(max(0, self.next_version - random.randint(1, 2)))
            case "unpin":
                if worker.pins:
                    worker.unpin(random.choice(list(worker.pins)))

    def one_call(
        self, handle: Handle, what: str, number: int, selector: Selector, hold: bool, timeout_s: float
    ) -> Asked | None:
        state = handle.member.state
        holds = state in (HandleState.READY, HandleState.DRAINING)
        try:
            match what:
                case "publish":
                    if holds and handle.shard.world_size == 1:
                        return handle.unpublish(timeout_s)
                    return handle.publish(number, timeout_s)
                case "fill":
                    if holds or state is HandleState.IN_DOUBT or self.random.random() < 0.5:
                        return handle.update(selector, timeout_s, hold=hold)
                    return handle.replicate(selector, timeout_s, hold=hold)
                case "unpublish":
                    return handle.unpublish(timeout_s)
                case "close":
                    close = self.random.random() < 0.2
                    return handle.close(timeout_s, abandon=self.random.random() < 0.3) if close else None
                case "refuse":
                    return handle.refuse()
                case _:
                    other = self.random.choice(("publish", "fill", "unpublish"))
                    return self.one_call(handle, other, number, selector, hold, timeout_s)
        except StateError:
            return None

    def fault(self, kind: str) -> None:
        random, cluster = self.random, self.cluster
        workers = [w for w in cluster.workers.values() if w.alive]
        if not workers:
            return
        worker = random.choice(workers)
        handle = random.choice(list(cluster.live_handles()))
        match kind:
            case "disconnect" | "half-open":
                if worker.link is not None:
                    worker.disconnect()
                elif kind == "half-open" or random.random() < 0.7:
                    worker.connect()
            case "crash":
                if random.random() < 0.3:
                    worker.crash()
            case "restart":
                if random.random() < 0.5:
                    cluster.restart(kept=random.random() < 0.5)
                for each in workers:
                    if each.link is None and random.random() < 0.7:
                        each.connect()
            case "time":
                cluster.advance(random.choice((0.01, 0.3, 2.0, 4.0, 12.0)), run=random.random() < 0.5)
            case "source":
                if handle.pull is not None and handle.pull.grants:
                    handle.source_ended(random.choice(list(handle.pull.grants)), random.choice(("stalled", "lost")))
            case "store":
                if cluster.unstored:
                    cluster.fail_store()
            case "hook":
                handle.hook_error = None if handle.hook_error is not None else BrokenHook("the hook broke")
            case "cancel":
                if not handle.idle:
                    handle.cancel()
            case "double":
                self.user()
            case "replace":
                dead = [h for h in cluster.all_handles() if not h.worker.alive and is_users(h)]
                if dead:
                    shard = random.choice(dead).shard
                    name = f"w{len(cluster.workers)}"
                    cluster.handle(name, shard.group, shard.rank, shard.world_size, spot=shard.spot)

    def heal(self) -> None:
        """Faults are over. Whoever still can, must be able to publish, and everybody to fetch it (G7)."""
        cluster = self.cluster
        for handle in cluster.live_handles():
            handle.hook_error = None
        cluster.heal()
        cluster.check()
        self.let_go()
        self.demand_liveness()

    def let_go(self) -> None:
        """Nothing is retained any more."""
        live = [worker for worker in self.cluster.workers.values() if worker.alive]
        for worker in live:
            worker.retain(0)
            for pin in list(worker.pins):
                worker.unpin(pin)
        self.cluster.run()
        for model in self.cluster.coordinator.cluster.models.values():
            if live and model.retained():
                raise GuaranteeBroken(f"still retained: {model.retained()}, pins {model.pins}")

    def demand_liveness(self) -> None:
        cluster = self.cluster
        groups: dict[str, list[Handle]] = {}
        for handle in cluster.live_handles():
            usable = handle.registered and handle.registration_error is None
            if usable and is_users(handle) and handle.member.state is not HandleState.CLOSED:
                groups.setdefault(handle.shard.group, []).append(handle)
        whole = [ranks for ranks in groups.values() if len(ranks) == ranks[0].shard.world_size]
        for writers in whole:
            for handle in writers:
                self.end(handle)
            self.next_version += 10
            self.must(writers, lambda handle: handle.publish(self.next_version))
            for readers in whole:
                if readers is not writers and readers[0].shard.world_size == writers[0].shard.world_size:
                    self.must(readers, lambda handle: handle.update("latest"))

    def end(self, handle: Handle) -> None:
        """Take the memory back, whatever it is."""
        if handle.member.state in (HandleState.READY, HandleState.IN_DOUBT):
            asked = handle.unpublish()
            self.cluster.heal()
            if asked.error is not None:
                raise GuaranteeBroken(f"{handle}: unpublish: {asked.error!r}")

    def must(self, ranks: list[Handle], call: Callable[[Handle], Asked]) -> None:
        """This call of all ranks has to succeed, once what happened before is paid for: each refusal (a body raised) that
        a rank has not heard of yet ends one call of that rank, and ranks may have several before them (seed 1001224).
        """
        for _ in range(12):
            asked = [call(handle) for handle in ranks]
            self.cluster.heal()
            errors = [each.error for each in asked if each.error is not None]
            if not errors:
                break
            if not all(isinstance(error, GroupAborted | OperationTimeout) for error in errors):
                raise GuaranteeBroken(f"G7: {ranks[0]}: {errors!r}")
        for each in asked:
            if each.error is not None or each.number != self.next_version:
                raise GuaranteeBroken(f"G7: {each.handle} {each.what}: {each.error!r} {each.version}")
