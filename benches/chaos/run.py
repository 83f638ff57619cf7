"""One run of chaos: work under faults, healing, liveness, and the judgement."""

from __future__ import annotations

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

from benches.chaos import archived
from benches.chaos.bench_process import MODEL
from benches.chaos.cast import Host
from benches.chaos.drivers import (
    ARCHIVE,
    CALL_S,
    KEEP,
    ROLES,
    WORKERS,
    Archivist,
    Driver,
    Group,
    Keeper,
    Meeting,
    Trainer,
)
from benches.chaos.events import Event
from benches.chaos.network import Network
from benches.chaos.plan import PROCESS_KINDS, Fault, draw
from benches.chaos.results import Answer, Call, Results, Seat
from tensorhub.errors import TensorHubError

ROUND_S: Final = 60.0  # of chaos, then everything is healed
LIVENESS_S: Final = 120.0  # from healing until every group has the last version
LINK_BITS_PER_S: Final = 256e6  # far less than what deltas are applied at
MEETINGS_MAX: Final = 16  # before the first fault, until a delta has come
SETTLE_S: Final = 30.0  # from then until the coordinator's books show just that
END_S: Final = 30.0  # for a process to leave


@dataclass
class Result:
    """What a run came to."""

    seed: int
    seconds: float
    results: Results
    events: list[Event]
    faults: Counter[str]
    skipped: int
    bytes_relayed: int
    lives: dict[str, int]
    stored: list[int]  # numbers in the archive at the end
    terms: int  # how often a coordinator began to lead
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.results.violations

    def as_json(self) -> dict[str, Any]:
        results = self.results
        return {
            "seed": self.seed,
            "minutes of chaos": round(self.seconds / 60, 2),
            "faults": dict(sorted(self.faults.items())),
            "faults on somebody who was down": self.skipped,
            "lives": self.lives,
            "terms of coordinators": self.terms,
            "newest version": results.visible,
            "fills that changed something": results.commits,
            "bytes checked": results.bytes_checked,
            "bytes read": results.bytes_read,
            "bytes saved by deltas": results.bytes_saved,
            "bytes relayed": self.bytes_relayed,
            "versions in the archive": self.stored,
            "fetches of archived versions": results.archived,
            "bytes read out of the bucket": results.bytes_direct,
            "outcomes": dict(sorted(results.outcomes.items())),
            "violations": [f"{at:.2f} s: {text}" for at, text in results.violations],
        }


class World:
    """What drivers share. Everything that judges is under one lock."""

    def __init__(self, seed: int, network: Network, folder: Path) -> None:
        self.seed = seed
        self.network = network
        self.folder = folder
        self.results = Results()
        self.events = list[Event]()
        self.is_over = threading.Event()
        self.failed = threading.Event()  # a driver, by a mistake of its own
        self.meeting: Meeting | None = None
        self.last_version: int | None = None  # that all were to hold at the end of the last meeting
        self.archive_url = (folder / "archive").as_uri()
        self.archived = list[int]()  # numbers, as the archive has said
        self._started = time.monotonic()
        self._lock = threading.Lock()
        environment = {"TENSORHUB_TOKEN": secrets.token_hex(16), "TMPDIR": str(folder)}
        backends = itertools.cycle(("asyncio", "trio"))
        programs: dict[str, Sequence[str]] = {
            name: ("benches.chaos.bench_process", next(backends))
            for name in (*network.engine.coordinators, *WORKERS)
        }
        for name in network.engine.members:
            peers = ",".join(f"{each}={network.host(each)}" for each in network.engine.members)
            arguments = name, network.host(name), str(folder / name), peers
            programs[name] = ("benches.chaos.engine", *arguments)
        self.hosts = {
            name: Host(name, program, network, environment, folder, self.note)
            for name, program in programs.items()
        }

    @property
    def must_end(self) -> bool:
        """Whether there is nothing more to find out."""
        return self.failed.is_set() or bool(self.results.violations)

    def clock(self) -> float:
        return time.monotonic() - self._started

    def pause(self, seconds: float) -> None:
        self.is_over.wait(seconds)

    def note(self, process: str, kind: str, text: str = "", until_s: float | None = None) -> None:
        self.events.append(Event(self.clock(), process, kind, text, until_s))

    def violated(self, text: str) -> None:
        with self._lock:
            self.results.violated(self.clock(), text)

    def begun(self, seat: Seat, what: str, version: int | None, content: int | None) -> Call:
        with self._lock:
            return self.results.begun(seat, what, self.clock(), version, content)

    def ended(self, process: str, call: Call, answer: Answer | None) -> None:
        with self._lock:
            now = self.clock()
            self.results.ended(call, answer, now)
        outcome = "died" if answer is None else answer["outcome"]
        at = call.version if call.version is not None else (answer or {}).get("version")
        kind = "ok" if outcome == "ok" else "error"
        if (
            outcome == "ok"
            and answer is not None
            and (call.what == "mutate" or answer.get("changed"))
        ):
            kind = "publish" if call.what == "mutate" else "commit"
        extra = (
            ""
            if answer is None or outcome == "ok"
            else f" ({answer.get('memory')}) {answer['text']}"
        )
        self.note(
            process,
            kind,
            f"{call.what}{'' if at is None else f' {at}'} of {call.seat}: {outcome}{extra}"[:600],
        )

    def paired(self, calls: Sequence[Call], answers: Sequence[Answer | None]) -> None:
        with self._lock:
            self.results.paired(calls, answers, self.clock())

    def told(self, process: str, what: str, answer: Answer | None) -> None:
        """A call that is about no memory."""
        outcome = "died" if answer is None else answer["outcome"]
        with self._lock:
            self.results.outcomes[f"{what}: {outcome}"] += 1
        if outcome == "untyped" and answer is not None:
            self.violated(f"bounds: {process} {what} raised {answer['text']}")
        text = "" if answer is None or outcome == "ok" else f" {answer['text']}"
        self.note(process, "ok" if outcome == "ok" else "error", f"{what}: {outcome}{text}"[:600])

    def stored(self, number: int, shard: int, contents: set[int]) -> None:
        with self._lock:
            self.results.stored(number, shard, contents, self.clock())

    def rolling_back(self, to: int) -> None:
        with self._lock:
            self.results.rolling_back(to, self.clock())

    def rolled_back(self, to: int) -> None:
        with self._lock:
            self.results.rolled_back(to, self.clock())


def run(seed: int, seconds: float, network: Network) -> Result:
    """One run in this process' children; nothing of it is left, whatever happens. `network`:
    entered by the caller.
    """
    folder = Path(tempfile.mkdtemp(prefix="tensorhub-chaos-"))
    world = World(seed, network, folder)
    drivers: list[Driver] = [Keeper(world, name) for name in network.engine.coordinators]
    drivers += [
        Trainer(world, role) if role.group == "trainer" else Group(world, role) for role in ROLES
    ]
    drivers.append(Archivist(world, ARCHIVE))
    try:
        network.cap(LINK_BITS_PER_S)
        _start_members(world)
        for driver in drivers:
            driver.start()
        groups = [driver for driver in drivers if isinstance(driver, Group)]
        _begin_deltas(world, groups)  # so that there is something to break
        faults, skipped, chaos_s = _storms(
            world, groups, draw(seed, seconds, list(world.hosts), network.kinds)
        )
        if not world.must_end:
            _meet(world, groups, anew=True)
            _check_books(world)  # while nobody calls
            _fetch_archived(world)
        if network.failure is not None:
            world.violated(f"the relay failed: {network.failure!r}")
        for driver in drivers:
            if driver.failure is not None:
                world.violated(f"the driver {driver.name} failed: {driver.failure!r}")
        _end(world, drivers)
        stored = _check_archive(world)
        lives = {name: host.lives for name, host in world.hosts.items()}
        return Result(
            seed,
            chaos_s,
            world.results,
            world.events,
            faults,
            skipped,
            network.bytes_passed,
            lives,
            stored,
            sum(
                log.read_text(errors="replace").count("coordinator_listens")
                for log in folder.glob("coordinator*.err")
            ),
        )
    finally:
        world.is_over.set()
        for host in world.hosts.values():
            host.may_run.set()
        for host in world.hosts.values():
            host.end()
        shutil.rmtree(folder, ignore_errors=True)


def _begin_deltas(world: World, groups: Sequence[Group]) -> None:
    """Versions until one came as a delta: readers ask at one version, and get them at a later
    one.
    """
    for _ in range(MEETINGS_MAX):
        _meet(world, groups, anew=True)
        _go_on(world)
        if world.results.bytes_saved or world.must_end:
            break


def _storms(
    world: World, groups: Sequence[Group], plan: Sequence[Fault]
) -> tuple[Counter[str], int, float]:
    """Faults, and a meeting after each ROUND_S. Returns how many of each kind, how many met nobody,
    and for how long.
    """
    done, skipped, chaos_s = Counter[str](), 0, 0.0
    for number, part in itertools.groupby(plan, lambda fault: fault.at_s // ROUND_S):
        began_s = world.clock()
        skipped += _storm(world, list(part), began_s - number * ROUND_S, done)
        chaos_s += world.clock() - began_s
        _heal(world)
        if world.must_end:
            break
        _meet(world, groups, anew=False)
        _go_on(world)
    return done, skipped, chaos_s


def _storm(world: World, plan: Sequence[Fault], after_s: float, done: Counter[str]) -> int:
    """One round's faults, each at its time, to their ends; how many met nobody."""
    skipped, order = 0, itertools.count()
    due = [(fault.at_s + after_s, next(order), fault, True) for fault in plan]
    heapq.heapify(due)
    while due and not world.must_end:
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
            world.note(fault.process, fault.kind, str(fault)[9:].strip(), until_s)
        heapq.heappush(due, (until_s, next(order), fault, False))
    return skipped


def _begin(world: World, fault: Fault) -> bool:
    host = world.hosts[fault.process]
    if fault.kind == "kill":
        return host.kill()
    if fault.kind in PROCESS_KINDS:
        return host.stop()
    world.network.begin(fault)
    return True


def _take_back(world: World, fault: Fault) -> None:
    host = world.hosts[fault.process]
    if fault.kind == "kill":
        host.may_run.set()
        _start_members(world)
    elif fault.kind in PROCESS_KINDS:
        host.go_on()
    elif fault.kind != "cut":
        world.network.end(fault)


def _heal(world: World) -> None:
    world.network.heal()
    for host in world.hosts.values():
        host.go_on_for_good()
        host.may_run.set()
    _start_members(world)
    world.note("run", "healed")


def _start_members(world: World) -> None:
    """Those of etcd that are down and may run; they end with this thread."""
    for host in (world.hosts[name] for name in world.network.engine.members):
        if not host.is_up and host.may_run.is_set():
            host.start()


def _meet(world: World, groups: Sequence[Group], *, anew: bool) -> None:
    """G5, G7: what a whole live group holds, everybody can get (`anew`: or a version that is
    published now).
    """
    meeting = world.meeting = Meeting()
    deadline_s = world.clock() + LIVENESS_S

    def all_in(names: set[str]) -> bool:
        while len(names) < len(groups) and world.clock() < deadline_s and not world.failed.is_set():
            world.pause(0.05)
        return len(names) == len(groups)

    problem = "register"
    if all_in(meeting.arrived):
        newest = world.results.visible
        holders = [group.role.group for group in groups if group.holds(newest)]
        if holders and not anew:
            meeting.target = newest
        wanted = (
            f"{newest}, which {', '.join(holders)} held"
            if meeting.target
            else f"what comes after {newest}"
        )
        world.note("run", "meeting", f"on {wanted}")
        meeting.agreed.set()
        problem = "" if all_in(meeting.done) else f"come to {wanted}"
    if problem:
        late = sorted(
            {group.role.group for group in groups}
            - (meeting.done if meeting.agreed.is_set() else meeting.arrived)
        )
        world.violated(
            f"liveness: {', '.join(late)} did not {problem} in {LIVENESS_S:g} s; books: "
            f"{_books(world)}"
        )
    world.last_version = meeting.target


def _go_on(world: World) -> None:
    """The meeting is over."""
    meeting, world.meeting = world.meeting, None
    if meeting is not None:
        meeting.over.set()


def _check_books(world: World) -> None:
    """After a meeting: the coordinator's books show everybody with the last version, and nothing
    else.
    """
    until_s, problem = world.clock() + SETTLE_S, "it was never asked"
    while problem and world.clock() < until_s:
        problem = _unsettled(world, _books(world))
        world.pause(0.2)
    if problem:
        world.violated(f"liveness: {SETTLE_S:g} s after the last call {problem}")


def _fetch_archived(world: World) -> None:
    """Every version that the archive keeps can be had, while nobody else calls; others are there
    for as long as these need them.
    """
    for version in world.archived[-KEEP:]:
        call = world.begun(Seat("fetcher", 0), "fetch", version, None)
        asked = world.hosts["fetcher"].ask("fetch", CALL_S, rank=0, version=version, timeout=CALL_S)
        answer = asked.answer()
        world.ended("fetcher", call, answer)
        if answer is None or answer["outcome"] != "ok":
            world.violated(f"archive: {version} is there, and a fetch of it says {answer}")


def _check_archive(world: World) -> list[int]:
    """Read all that is in the archive; its numbers."""
    numbers = set[int]()
    try:
        for version, shard, contents in archived.read(world.archive_url, MODEL):
            world.stored(version, shard, contents)
            numbers.add(version)
    except TensorHubError as error:
        world.violated(f"archive: {error}")
    return sorted(numbers)


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


def _is_last(
    world: World, version: int, state: str, medium: str, shards: Sequence[Sequence[Any]]
) -> bool:
    whole = all(shard[2] == "complete" for shard in shards) and len(shards) == 2
    return medium == "device" and version == world.last_version and state == "ready" and whole


def _end(world: World, drivers: Sequence[Driver]) -> None:
    """Everybody leaves in order, and ends well."""
    world.is_over.set()
    _go_on(world)
    for driver in drivers:
        driver.join(END_S)
        if driver.is_alive():
            world.violated(f"{driver.name} did not end")
    for name in world.network.engine.members:
        if (code := world.hosts[name].dismiss(0.0)) is not None:
            world.violated(f"{name} ended by itself with exit code {code}")
    for name in (*WORKERS, *world.network.engine.coordinators):
        code = world.hosts[name].dismiss(END_S)
        if code != 0:
            world.violated(
                f"{name} ended with exit code {code}"
                if code is not None
                else f"{name} did not end in {END_S:g} s"
            )
    world.note("run", "ended")
