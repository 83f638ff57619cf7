"""Who makes the processes work: one thread for each coordinator and each group, with a generator of
its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Final

from benches.byte_patterns import ATTEMPTS
from benches.chaos.cast import Asked, Host
from benches.chaos.results import Answer, Call, Seat

if TYPE_CHECKING:
    from benches.chaos.run import World

NBYTES: Final = 4 * 2**20  # of one rank
CALL_S: Final = 12.0
LEASE_S: Final = 3.0
COORDINATOR_OPTIONS: Final = {"lease_s": LEASE_S, "drain_grace_s": 0.5, "op_timeout_s": CALL_S}
WORKER_OPTIONS: Final = {
    "op_timeout_s": CALL_S,
    "chunk_bytes": 256 * 1024,
    "connect_timeout_s": 3.0,
    "stall_timeout_s": 3.0,
}
# for a process' first command: it imports first, beside all others on a busy machine
START_S: Final = 90.0
# a mutate asks for the number, unpublishes, publishes, or refuses: each has the timeout
MUTATE_CALLS: Final = 4


@dataclass(frozen=True)
class Role:
    """One group. `hosts`: the process of each rank; two ranks may share one."""

    group: str
    hosts: tuple[str, ...]
    host_memory_bytes: int = 0
    spot: bool = False
    prefetch: bool = False
    staged: bool = False
    fetches: bool = False  # now and then it fetches into files
    direct: bool = False  # it reads archived versions out of the bucket
    leaves: bool = False  # now and then it closes its handles and registers again
    transports: tuple[str, ...] | None = None  # None: all that there are
    shared: bool = False  # its tensors are in memory that others map
    site: str = "near"
    host: str = "near"  # where the network has no hosts of its own


ROLES: Final = (
    Role("trainer", ("trainer-0", "trainer-1"), host_memory_bytes=5 * NBYTES, shared=True),
    Role(
        "pair",
        ("pair-0", "pair-1"),
        NBYTES,
        fetches=True,
        transports=("tcp",),
        site="other",
        host="pair",
    ),
    Role(
        "spot",
        ("spot", "spot"),
        NBYTES,
        spot=True,
        leaves=True,
        shared=True,
        site="far",
        host="far",
    ),
    Role(
        "staged",
        ("staged", "staged"),
        8 * NBYTES,
        prefetch=True,
        staged=True,
        site="far",
        host="far",
    ),
    Role(
        "fetcher",
        ("fetcher", "fetcher"),
        fetches=True,
        direct=True,
        leaves=True,
        transports=("archive", "cma", "tcp"),
    ),
)
# room for the version that it follows, two that it has loaded, and deltas
ARCHIVE: Final = Role(
    "archive", ("archive",), 7 * NBYTES, transports=("archive", "tcp"), site="other", host="archive"
)
WORKERS: Final = tuple(dict.fromkeys(host for role in (*ROLES, ARCHIVE) for host in role.hosts))
KEEP: Final = 6  # versions, besides those that are retained


class Meeting:
    """All faults are healed: every group comes, and then to one version."""

    def __init__(self) -> None:
        self.arrived = set[str]()  # groups, with no call running
        self.agreed = threading.Event()  # on the target, or that there is none yet
        self.target: int | None = None  # None: the trainer publishes the next one
        self.done = set[str]()
        self.over = threading.Event()


class Driver(threading.Thread):
    """Keeps what it drives alive, and makes it work until the world says so."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name=f"drives-{name}", daemon=True)
        self.world = world
        self.chance = Random(f"{world.seed} {name}")
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.failure = error
            self.world.note("run", "failed", repr(error))
            self.world.failed.set()

    def work(self) -> None:
        raise NotImplementedError

    def answer(self, asked: Asked) -> Answer | None:
        answer = asked.answer()
        if asked.problem is not None:
            self.world.violated(asked.problem)
        return answer


class Keeper(Driver):
    """Starts a coordinator, again after each death."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.host = world.hosts[name]

    def work(self) -> None:
        network, served = self.world.network, 0  # the life that serves
        host, port = network.coordinators[self.host.name]
        ha = network.ha(self.host.name)
        state_dir = None if network.engine.members else str(self.world.folder / "state")
        settings = {"host": host, "port": port, "ha": ha, "state_dir": state_dir}
        while not self.world.is_over.is_set():
            if not self.host.is_up:
                self.host.start()
            if (life := self.host.lives) != served:
                answer = self.answer(
                    self.host.ask("serve", START_S, options=COORDINATOR_OPTIONS, **settings)
                )
                if answer is not None and answer["outcome"] == "ok":
                    served = life
                elif answer is not None and not (network.engine.members and answer["retryable"]):
                    self.world.violated(f"{self.host.name} cannot serve again: {answer['text']}")
                    self.host.kill()
                    self.host.may_run.set()
            self.world.is_over.wait(0.05)


@dataclass
class Life:
    """What a group's process has by now."""

    number: int = 0
    is_connected: bool = False
    seats: dict[int, Seat] = field(default_factory=dict)  # by rank, registered


class Group(Driver):
    """One group's ranks, which call together."""

    def __init__(self, world: World, role: Role) -> None:
        super().__init__(world, role.group)
        self.role = role
        self.hosts = [world.hosts[name] for name in role.hosts]
        self.lives = {host.name: Life() for host in self.hosts}

    def work(self) -> None:
        while not self.world.is_over.is_set():
            meeting = self.world.meeting
            if meeting is not None:
                self.meet(meeting)
            elif self.ready():
                self.turn()

    def turn(self) -> None:
        """One call of all ranks, and a pause."""
        if self.role.leaves and self.chance.random() < 0.15:
            self.leave()
        elif self.role.fetches and self.chance.random() < 0.3:
            self.fetch()
        else:
            self.update(staged=self.role.staged and self.chance.random() < 0.5)
        self.world.pause(self.chance.uniform(0.0, 0.6))

    def meet(self, meeting: Meeting) -> None:
        """Be there; then do what was agreed, until it is done or the meeting is over."""
        for step, is_done in (
            (meeting.arrived, self.ready),
            (meeting.done, lambda: self.ready() and self.attend(meeting)),
        ):
            while not meeting.over.is_set() and not is_done():
                self.world.pause(0.05)
            step.add(self.role.group)
            while not meeting.agreed.wait(0.05) and not meeting.over.is_set():
                pass
        meeting.over.wait()

    def attend(self, meeting: Meeting) -> bool:
        """Come to the meeting's version; True if all ranks are there."""
        if meeting.target is None:
            return False
        answers = self.update(at_least=meeting.target)
        return all(answer is not None and answer["outcome"] == "ok" for answer in answers)

    def holds(self, version: int) -> bool:
        """Whether all ranks are alive, and said last that they hold it. For who knows that no call
        runs.
        """
        lives = [(host, self.lives[host.name], rank) for rank, host in enumerate(self.hosts)]
        return all(
            host.is_up
            and host.lives == life.number
            and rank in life.seats
            and life.seats[rank].holds == version
            for host, life, rank in lives
        )

    # ------------------------------------------------------------------------------------------
    # being there

    def ready(self) -> bool:
        """Each rank is alive, connected and registered; False if that could not be brought about
        just now.
        """
        for host in dict.fromkeys(self.hosts):
            if not host.is_up:
                if not host.may_run.wait(0.2):
                    return False
                host.start()
        return all(self._is_there(rank, host) for rank, host in enumerate(self.hosts))

    def _is_there(self, rank: int, host: Host) -> bool:
        life = self.lives[host.name]
        if life.number != host.lives:
            life = self.lives[host.name] = Life(host.lives)
        if not life.is_connected:
            life.is_connected = self._connect(host)
        if life.is_connected and rank not in life.seats:
            seat = Seat(self.role.group, rank)
            if self._sit_down(seat):
                life.seats[rank] = seat
        return rank in life.seats

    def _sit_down(self, seat: Seat) -> bool:
        asked = self._ask(
            seat.rank,
            "register",
            seat,
            nbytes=NBYTES,
            group=self.role.group,
            world_size=2,
            spot=self.role.spot,
            shared=self.role.shared,
        )
        [answer] = self._answers([asked])
        return answer is not None and answer["outcome"] == "ok"

    def _connect(self, host: Host) -> bool:
        network, role = self.world.network, self.role
        options = (
            WORKER_OPTIONS
            | {"host_memory_bytes": role.host_memory_bytes}
            | {"direct": [self.world.archive_url] if role.direct else []}
            | network.options(host.name)
        )
        answer = self.answer(
            host.ask(
                "connect",
                START_S,
                address=network.address(host.name),
                name=host.name,
                location={
                    "site": role.site,
                    "host": network.location(host.name) or role.host,
                },
                prefetch=role.prefetch,
                transports=role.transports,
                options=options,
            )
        )
        if (
            answer is not None
            and answer["outcome"] not in ("ok", "CoordinatorUnavailable")
            and not answer.get("retryable")
        ):
            self.world.violated(
                f"{host.name} cannot connect: {answer['outcome']}: {answer['text']}"
            )
        return answer is not None and answer["outcome"] == "ok"

    # ------------------------------------------------------------------------------------------
    # calls

    def _ask(
        self,
        rank: int,
        what: str,
        seat: Seat,
        bound_s: float = CALL_S,
        version: int | None = None,
        content: int | None = None,
        **arguments: Any,
    ) -> tuple[Asked, Call]:
        call = self.world.begun(seat, what, version, content)
        said = {
            name: value
            for name, value in (("version", version), ("content", content))
            if value is not None
        }
        return self.hosts[rank].ask(what, bound_s, rank=rank, **said, **arguments), call

    def _answers(self, asked: Sequence[tuple[Asked, Call]]) -> list[Answer | None]:
        answers = list[Answer | None]()
        for question, call in asked:
            answers.append(self.answer(question))
            self.world.ended(question.host.name, call, answers[-1])
        self.world.paired([call for _, call in asked], answers)
        return answers

    def seat(self, rank: int) -> Seat:
        return self.lives[self.hosts[rank].name].seats[rank]

    def update(self, **arguments: Any) -> list[Answer | None]:
        asked = [
            self._ask(rank, "update", self.seat(rank), timeout=CALL_S, **arguments)
            for rank in (0, 1)
        ]
        return self._answers(asked)

    def fetch(self) -> None:
        """Each rank's shard of the latest version, or of an archived one, as files; no call of a
        group.
        """
        archived = self.world.archived if self.chance.random() < 0.7 else []
        version = self.chance.choice(archived or [None])
        asked = [
            self._ask(rank, "fetch", Seat(self.role.group, rank), version=version, timeout=CALL_S)
            for rank in (0, 1)
        ]
        for question, call in asked:
            self.world.ended(question.host.name, call, self.answer(question))

    def leave(self) -> None:
        """Close the handles, so that the next turn registers again; a handle that is not let go
        stays.
        """
        asked = [
            self._ask(rank, "close_handle", self.seat(rank), 2 * CALL_S, abandon=False)
            for rank in (0, 1)
        ]
        answers = [self.answer(question) for question, _ in asked]
        # each for itself: a close is no call of a group
        for (question, call), answer in zip(asked, answers, strict=True):
            self.world.ended(question.host.name, call, answer)
            if answer is not None and answer.get("state") == "closed":
                self.lives[question.host.name].seats.pop(call.seat.rank, None)


class Trainer(Group):
    """Publishes one version after the other; now and then it retains more or fewer, or begins a new
    lineage.
    """

    def __init__(self, world: World, role: Role) -> None:
        super().__init__(world, role)
        self.next = 1
        self.attempt = 0

    def turn(self) -> None:
        chance = self.chance.random()
        if chance < 0.04:
            self.retain(self.chance.choice((0, 1, 2)))
        elif chance < 0.06 and self.next > 4:
            self.roll_back(self.next - self.chance.randint(2, 4))
        else:
            self.mutate()
        self.world.pause(self.chance.uniform(0.1, 0.7))

    def mutate(self) -> bool:
        """The next version by all ranks; True if any says that it is out."""
        self.attempt += 1
        content, version = self.next * ATTEMPTS + self.attempt % ATTEMPTS, self.next
        asked = [
            self._ask(
                rank,
                "mutate",
                self.seat(rank),
                MUTATE_CALLS * CALL_S,
                version,
                content,
                timeout=CALL_S,
            )
            for rank in (0, 1)
        ]
        answers = self._answers(asked)
        outcomes = [answer["outcome"] for answer in answers if answer is not None]
        if "ok" in outcomes or "VersionConflict" in outcomes:
            self.next += 1
        return "ok" in outcomes

    def retain(self, latest: int) -> None:
        self.world.results.retain.add(latest)
        answer = self.answer(self.hosts[0].ask("retain", CALL_S, latest=latest, timeout=CALL_S))
        self.world.told(self.hosts[0].name, "retain", answer)
        if answer is not None and answer["outcome"] == "ok":
            self.world.results.retain = {latest}

    def roll_back(self, to: int) -> None:
        """Until it is certain: whether one that failed has happened is not known."""
        if to < 1 or to > self.world.results.visible:
            return
        self.world.rolling_back(to)
        while not self.world.is_over.is_set():
            if not self.ready():
                continue
            answer = self.answer(self.hosts[0].ask("rollback", CALL_S, to=to, timeout=CALL_S))
            self.world.told(self.hosts[0].name, "rollback", answer)
            if answer is not None and answer["outcome"] == "ok":
                self.world.rolled_back(to)
                self.next = to + 1
                return

    def attend(self, meeting: Meeting) -> bool:
        if meeting.target is None and self.mutate():
            meeting.target = self.next - 1
        return super().attend(meeting)


class Archivist(Group):
    """One archive: begun again after each death, and whenever something has ended it."""

    def turn(self) -> None:
        self._look(1)
        self.world.pause(self.chance.uniform(0.0, 0.6))

    def attend(self, meeting: Meeting) -> bool:
        return meeting.target is not None and self._look(meeting.target)

    def holds(self, version: int) -> bool:
        return False

    def _sit_down(self, seat: Seat) -> bool:
        # until its lease is over, another life of it is connected
        begun = self._told("archive", START_S, url=self.world.archive_url, keep=KEEP) == "ok"
        self.world.pause(0.0 if begun else 0.5)
        return begun

    def _look(self, at_least: int) -> bool:
        """Ask what the archive has, once it has a version from `at_least` on."""
        outcome = self._told("archived", CALL_S, at_least=at_least, timeout=CALL_S)
        if outcome not in ("ok", "OperationTimeout"):
            self.lives[self.hosts[0].name].seats.clear()
        return outcome == "ok"

    def _told(self, what: str, bound_s: float, **arguments: Any) -> str:
        """How that ended."""
        [host] = self.hosts
        answer = self.answer(host.ask(what, bound_s, **arguments))
        self.world.told(host.name, what, answer)
        if answer is None:
            return "died"
        if answer["outcome"] in ("IntegrityError", "VersionConflict", "InvalidValue"):
            self.world.violated(f"archive: {what} raised {answer['text']}")
        self.world.archived = answer.get("value", self.world.archived)
        return str(answer["outcome"])
