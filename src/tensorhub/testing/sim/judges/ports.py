"""What judges may look at: handles, workers, calls, and the world that they are in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from tensorhub.coordinator import Coordinator, Entry
from tensorhub.model.accesses import Access
from tensorhub.model.manifest import Manifest
from tensorhub.testing.sim.clocks import Clock
from tensorhub.testing.sim.judges import reference_model
from tensorhub.testing.sim.memory import Cells
from tensorhub.testing.sim.network import Link
from tensorhub.types import Location, OpKey, Options, RegistrationId, VersionInfo
from tensorhub.worker.calls import Action, Call
from tensorhub.worker.member import Member
from tensorhub.worker.owner import Owner
from tensorhub.worker.registration_session import Shard


@dataclass(eq=False)
class JudgedCall:
    """One call, and how it ended."""

    what: Call
    judged: reference_model.Call  # the same, as the reference model knows it
    began: float = 0.0
    until: float = inf  # its deadline
    timeout_s: float = inf
    online: bool = True  # its worker has been connected all the time
    granted: bool = False  # the coordinator has let go what was held
    granted_at: float = 0.0  # when it has let it go, where it was asked to
    follows: bool = False  # another rank of its replica was let go before
    committed: bool = False  # it has heard that its operation was
    # a shard that no other process kept when the coordinator let its process go
    alone: int | None = None
    # names of sources from which it got bytes without their digest
    damaged: set[str] = field(default_factory=set)
    bound: str = ""  # the content id that "available" was when that was said first
    key: OpKey | None = None
    # the operations in which this call has voted, under each coordinator
    votes: tuple[OpKey, ...] = ()
    done: bool = False
    version: VersionInfo | None = None
    changed: bool = False
    error: Exception | None = None


class JudgedWorker(Protocol):
    """A worker process."""

    name: str
    location: Location
    incarnation: str
    link: Link | None  # to a coordinator
    alive: bool
    stopped_until: float  # its threads do not run before
    owner: Owner
    known_since: float  # when a coordinator that did not know it has welcomed it
    unsure_at: float  # when the coordinator could last not count on it
    # when it has last lost a connection over which it was heard, by its own clock
    cut_off_at: float

    clock: Clock
    read_only: bool  # its token is

    @property
    def now(self) -> float:
        """The time by its own clock."""

    def when(self, due: float) -> float:
        """When its clock shows that."""

    @property
    def is_online(self) -> bool:
        """Whether it has a connection over which it was welcomed."""

    @property
    def handles(self) -> Sequence[JudgedHandle]: ...


class JudgedHandle(Protocol):
    """One registration of a worker."""

    name: str
    id: RegistrationId
    shard: Shard
    layout_id: str  # its group's; of a copy of one shard that of the group that has read it
    member: Member
    todo: deque[Action]
    cells: Cells
    grid: Manifest | None  # of whose chunks they are; None: not known yet
    staging: list[str] | None  # the cells of what is staged
    generation: int  # under which its memory is open, or was last
    last_held: str  # the content id that it held last
    lied: str  # the content id that it vouches for with bytes of its own
    changed: str  # the content id whose bytes here have changed, as it has found out itself
    # one that no fence can end, and what it read in the cell at first
    access: tuple[Access, str] | None
    fencing_since: float | None  # its next action is a fence, which was begun
    freed_at: float  # when its own access ended that a fence has waited for, last

    @property
    def worker(self) -> JudgedWorker: ...

    @property
    def last_call(self) -> JudgedCall | None: ...

    @property
    def idle(self) -> bool:
        """Whether no call runs on it, and nothing is left to be done."""

    @property
    def unwanted(self) -> frozenset[int]:
        """Chunks that its fetch leaves out."""

    def was_written(self, chunk: int) -> bool:
        """Whether the handle's own user has written the chunk's present bytes."""

    def check_invariants(self) -> None:
        """Those of its own machines."""


class JudgedWorld(Protocol):
    """What there is."""

    now: float
    clock_rate: float  # of coordinators' clocks: their seconds in one of all others
    options: Options
    is_unharmed: Callable[[], bool]  # whether no fault has happened so far, as far as anybody knows
    user_errors: tuple[type[Exception], ...]  # that a user's own code raises
    was_older: bool  # the state, at some time: words of a coordinator on an older copy may be late

    @property
    def coordinator(self) -> Coordinator: ...
    @property
    def store(self) -> Sequence[Entry]: ...

    def core_of(self, worker: JudgedWorker) -> Coordinator:
        """The coordinator that the worker has heard last; it may not lead any more."""

    def is_behind(self, worker: JudgedWorker) -> bool:
        """Whether that one does not lead any more, and believes so by a wrong clock: what it says
        was so when its lease ended.
        """

    def handle_of(self, registration: str) -> JudgedHandle | None:
        """The handle of that registration, unless it is gone."""

    def all_handles(self) -> Iterator[JudgedHandle]:
        """Those of dead workers, too."""

    def live_handles(self) -> Iterator[JudgedHandle]:
        """Those of workers that are alive."""

    def mates(self, handle: JudgedHandle) -> Sequence[JudgedHandle]:
        """The remaining ranks of its group."""

    def session_of(self, incarnation: str) -> int | None:
        """The newest connection over which the present coordinator has welcomed it."""

    def is_coming(self, incarnation: str) -> bool:
        """Whether what it has said over a new connection lies unread at the coordinator."""

    def unread(self, session: int) -> int | None:
        """How much of that connection lies unread at the coordinator; None: it has read its end."""

    def is_recording_rollback(self, model: str) -> bool:
        """Whether a rollback of that model is on its way to the store."""

    def has_unheard(self, model: str) -> bool:
        """Whether versions of that model came back from an archive, and its coordinator has not
        heard that this is durable.
        """
