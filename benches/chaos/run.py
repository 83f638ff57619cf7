"""One run of chaos: work under faults, healing, liveness, and the judgement."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benches.chaos.cast import Host
from benches.chaos.drivers import CALL_S, COORDINATOR_OPTIONS, ROLES, WORKERS, Driver, Group, Keeper, Trainer
from benches.chaos.ledger import Answer, Call, Ledger, Seat
from benches.chaos.network import Relays
from benches.chaos.plan import PROCESS_KINDS, Fault, draw

LIVENESS_S: Final = 90.0  # from healing until every group has the last version
SETTLE_S: Final = 30.0  # from then until the coordinator's books show just that
END_S: Final = 30.0  # for a process to leave


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `kind`: a fault's kind, or what a party did."""

    at_s: float
    party: str
    kind: str
    text: str = ""
    until_s: float | None = None  # of a fault

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.party:11} {self.kind:10} {self.text}"


@dataclass
class Result:
    """What a run came to."""

    seed: int
    seconds: float
    ledger: Ledger
    events: list[Event]
    faults: Counter[str]
    skipped: int
    bytes_relayed: int
    lives: dict[str, int]
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.ledger.violations

    def as_json(self) -> dict[str, Any]:
        ledger = self.ledger
        return {
            "seed": self.seed,
            "minutes of chaos": round(self.seconds / 60, 2),
            "faults": dict(sorted(self.faults.items())),
            "faults on somebody who was down": self.skipped,
            "lives": self.lives,
            "newest version": ledger.visible,
            "fills that changed something": ledger.commits,
            "bytes checked": ledger.bytes_checked,
            "bytes relayed": self.bytes_relayed,
            "outcomes": dict(sorted(ledger.outcomes.items())),
            "violations": [f"{at:.2f} s: {text}" for at, text in ledger.violations],
        }


class World:
    """What drivers share. Everything that judges is under one lock."""

    def __init__(self, seed: int, network: Relays, folder: Path) -> None:
        self.seed = seed
        self.network = network
        self.folder = folder
        self.ledger = Ledger()
        self.events = list[Event]()
        self.calm = threading.Event()  # no more faults; come to the last version
        self.is_over = threading.Event()
        self.failed = threading.Event()  # a driver, by a mistake of its own
        self.last_version: int | None = None
        self.stop_by_s = float("inf")
        self._started = time.monotonic()
        self._lock = threading.Lock()
        environment = {"TENSORHUB_TOKEN": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
        self.hosts = {name: Host(name, network, environment, folder, self.note) for name in ("coordinator", *WORKERS)}

    def clock(self) -> float:
        return time.monotonic() - self._started

    def must_stop(self) -> bool:
        return self.is_over.is_set() or self.clock() > self.stop_by_s

    def pause(self, seconds: float) -> None:
        self.is_over.wait(seconds)

    def note(self, party: str, kind: str, text: str = "", until_s: float | None = None) -> None:
        self.events.append(Event(self.clock(), party, kind, text, until_s))

    def violated(self, text: str) -> None:
        with self._lock:
            self.ledger.violated(self.clock(), text)

    def begun(self, seat: Seat, what: str, version: int | None, content: int | None) -> Call:
        with self._lock:
            return self.ledger.begun(seat, what, self.clock(), version, content)

    def ended(self, party: str, call: Call, answer: Answer | None) -> None:
        with self._lock:
            now = self.clock()
            self.ledger.ended(call, answer, now)
        outcome = "died" if answer is None else answer["outcome"]
        at = call.version if call.version is not None else (answer or {}).get("version")
        kind = "ok" if outcome == "ok" else "error"
        if outcome == "ok" and answer is not None and (call.what == "mutate" or answer.get("changed")):
            kind = "publish" if call.what == "mutate" else "commit"
        extra = "" if answer is None or outcome == "ok" else f" ({answer.get('memory')}) {answer['text']}"
        self.note(party, kind, f"{call.what}{'' if at is None else f' {at}'} of {call.seat}: {outcome}{extra}"[:600])

    def paired(self, calls: Sequence[Call], answers: Sequence[Answer | None]) -> None:
        with self._lock:
            self.ledger.paired(calls, answers, self.clock())

    def told(self, party: str, what: str, answer: Answer | None) -> None:
        """A call that is about no memory."""
        outcome = "died" if answer is None else answer["outcome"]
        with self._lock:
            self.ledger.outcomes[f"{what}: {outcome}"] += 1
        if outcome == "untyped" and answer is not None:
            self.violated(f"G10: {party} {what} raised {answer['text']}")
        self.note(party, "ok" if outcome == "ok" else "error", f"{what}: {outcome}")

    def rolling_back(self, to: int) -> None:
        with self._lock:
            self.ledger.rolling_back(to, self.clock())

    def rolled_back(self, to: int) -> None:
        with self._lock:
            self.ledger.rolled_back(to, self.clock())


def run(seed: int, seconds: float, network: Relays) -> Result:
    """One run in this process' children; nothing of it is left, whatever happens. `network`: entered by the caller."""
    folder = Path(tempfile.mkdtemp(prefix="tensorhub-chaos-"))
    world = World(seed, network, folder)
    drivers: list[Driver] = [Keeper(world)]
    drivers += [Trainer(world, role) if role.group == "trainer" else Group(world, role) for role in ROLES]
    try:
        for driver in drivers:
            driver.start()
        faults, skipped = _storm(world, draw(seed, seconds, list(world.hosts), network.kinds))
        chaos_s = world.clock()
        _heal(world)
        _converge(world, [driver for driver in drivers if isinstance(driver, Group)])
        if network.failure is not None:
            world.violated(f"the relay failed: {network.failure!r}")
        for driver in drivers:
            if driver.failure is not None:
                world.violated(f"the driver {driver.name} failed: {driver.failure!r}")
        _end(world, drivers)
        lives = {name: host.lives for name, host in world.hosts.items()}
        return Result(seed, chaos_s, world.ledger, world.events, faults, skipped, network.bytes_passed, lives)
    finally:
        world.is_over.set()
        for host in world.hosts.values():
            host.may_run.set()
        for host in world.hosts.values():
            host.end()
        shutil.rmtree(folder, ignore_errors=True)


def _storm(world: World, plan: Sequence[Fault]) -> tuple[Counter[str], int]:
    """The faults, each at its time; how many of each kind, and how many met nobody."""
    done, skipped, order = Counter[str](), 0, itertools.count()
    due = [(fault.at_s, next(order), fault, True) for fault in plan]
    heapq.heapify(due)
    while due and not world.failed.is_set() and not world.ledger.violations:
        at_s, _, fault, begins = heapq.heappop(due)
        world.is_over.wait(max(0.0, at_s - world.clock()))
        if not begins:
            _take_back(world, fault)
            continue
        until_s = world.clock() + fault.duration_s
        if not _begin(world, fault):
            skipped += 1
        else:
            done[fault.kind if fault.kind in PROCESS_KINDS else f"{fault.kind} {fault.plane}"] += 1
            world.note(fault.party, fault.kind, str(fault)[9:].strip(), until_s)
        heapq.heappush(due, (until_s, next(order), fault, False))
    return done, skipped


def _begin(world: World, fault: Fault) -> bool:
    host = world.hosts[fault.party]
    if fault.kind == "kill":
        return host.kill()
    if fault.kind in PROCESS_KINDS:
        return host.stop()
    world.network.begin(fault)
    return True


def _take_back(world: World, fault: Fault) -> None:
    host = world.hosts[fault.party]
    if fault.kind == "kill":
        host.may_run.set()
    elif fault.kind in PROCESS_KINDS:
        host.go_on()
    elif fault.kind != "cut":
        world.network.end(fault)


def _heal(world: World) -> None:
    world.network.heal()
    for host in world.hosts.values():
        host.go_on_for_good()
        host.may_run.set()
    world.note("run", "healed")


def _converge(world: World, groups: Sequence[Group]) -> None:
    """G7: everybody comes to one last version; then the coordinator's books show that, and nothing else."""
    deadline_s = world.stop_by_s = world.clock() + LIVENESS_S
    for group in groups:
        group.must_end_by = deadline_s
    world.calm.set()
    for group in groups:
        group.join(max(0.0, deadline_s + 2 * CALL_S - world.clock()))
    late = [group.role.group for group in groups if not group.is_done]
    if late:
        books = _books(world)
        world.violated(f"G7: {', '.join(late)} did not come to {world.last_version} in {LIVENESS_S:g} s; books: {books}")
        return
    world.note("run", "converged", f"on {world.last_version}")
    until_s, problem = world.clock() + SETTLE_S, ""
    while world.clock() < until_s:
        problem = _unsettled(world, _books(world))
        if not problem:
            return
        world.pause(0.2)
    world.violated(f"G7: {SETTLE_S:g} s after the last call {problem}")


def _books(world: World) -> Answer | None:
    return world.hosts["trainer-0"].ask("describe", CALL_S, timeout=CALL_S).answer()


def _unsettled(world: World, books: Answer | None) -> str:
    """What the coordinator's books do not show as it is."""
    if books is None or books["outcome"] != "ok":
        return f"describe says {books}"
    model = books["value"]
    live = sorted([name, "live"] for name in WORKERS)
    if sorted(model["workers"]) != live:
        return f"the workers are {model['workers']}"
    if model["leases"]:
        return f"there are leases: {model['leases']}"
    held = sorted(
        group
        for group, version, state, medium, shards in model["replicas"]
        if _is_last(world, version, state, medium, shards)
    )
    if held != sorted(role.group for role in ROLES):
        return f"the replicas are {model['replicas']}"
    return ""


def _is_last(world: World, version: int, state: str, medium: str, shards: Sequence[Sequence[Any]]) -> bool:
    whole = all(shard[2] == "complete" for shard in shards) and len(shards) == 2
    return medium == "device" and version == world.last_version and state == "ready" and whole


def _end(world: World, drivers: Sequence[Driver]) -> None:
    """Everybody leaves in order, and ends well."""
    world.is_over.set()
    for driver in drivers:
        driver.join(END_S)
        if driver.is_alive():
            world.violated(f"{driver.name} did not end")
    for name in (*WORKERS, "coordinator"):
        code = world.hosts[name].dismiss(END_S)
        if code != 0:
            world.violated(
                f"{name} ended with exit code {code}" if code is not None else f"{name} did not end in {END_S:g} s"
            )
    with contextlib.suppress(KeyError):
        world.note("run", "ended")


__all__ = ["COORDINATOR_OPTIONS", "Event", "Result", "World", "run"]
