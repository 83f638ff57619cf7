"""Which part of a seed's run is run: all of it, or some of its faults, turns of its users and
parties.

Theory of operation. A run is made of *atoms*: each fault that strikes (`"17"`, by its number), each
turn of a group (`"g0.2"`; the fetch and the order in it are `"g0.2f"` and `"g0.2o"`), each worker
that only seeds (`"w9"`), the archive, and the damage with which faults end. What is left out draws
nothing, so all that is drawn later would be other values. So a first run of the whole seed is
recorded: the state of the random numbers at the beginning of each event. A part's event begins in
the state of the same event there; one that had no like begins in a state made from its name.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable
from random import Random
from typing import Any, Protocol

from tensorhub.testing.drivers.timeline import Event, Timeline
from tensorhub.testing.sim.faults import Fault

ARCHIVE, DAMAGE = "archive", "damage"


class Whole:
    """All of the run."""

    until: int | None = None  # after so many events faults end; None: when there was enough

    def broadens(self, strike: int, *, wants: bool) -> bool:
        """Whether one kind of faults more is drawn at this strike."""
        return wants

    def publishes(self, turn: str, *, wants: bool) -> bool:
        """Whether a group publishes in this turn, whatever it has drawn."""
        return wants

    def strikes(self, strike: int, kind: Fault) -> bool:
        """Whether the fault with this number is injected."""
        return True

    def takes_turn(self, group: str, turn: str) -> bool:
        """Whether that group does what comes in this turn, or in this part of it."""
        return True

    def has(self, party: str) -> bool:
        """Whether this group or seeding worker, the archive, or the last damage is there."""
        return True


class Recording(Whole):
    """All of the run, remembered."""

    def __init__(self) -> None:
        self.states: dict[str, bytes] = {}  # of the random numbers, by event
        self.broadened: set[int] = set()
        self.published: set[str] = set()  # turns
        self.kinds: dict[str, Fault] = {}  # of each fault, by its atom
        self.parties: dict[str, list[str]] = {}  # the atoms of each

    def broadens(self, strike: int, *, wants: bool) -> bool:
        if wants:
            self.broadened.add(strike)
        return wants

    def publishes(self, turn: str, *, wants: bool) -> bool:
        if wants:
            self.published.add(turn)
        return wants

    def strikes(self, strike: int, kind: Fault) -> bool:
        self.kinds[str(strike)] = kind
        return True

    def takes_turn(self, group: str, turn: str) -> bool:
        self.parties[group].append(f"{group}.{turn}")
        return True

    def has(self, party: str) -> bool:
        self.parties[party] = [] if party.startswith("g") else [party]
        return True

    @property
    def atoms(self) -> list[str]:
        return [*self.kinds, *(atom for each in self.parties.values() for atom in each)]


class Part(Whole):
    """These atoms alone. A group of which no turn is left is not there."""

    def __init__(self, whole: Recording, atoms: Collection[str], until: int) -> None:
        self.atoms = frozenset(atoms)
        self.until = until
        self.met = set[str]()  # of these: the run has come to them
        self._whole = whole
        self._parties = {atom.partition(".")[0] for atom in atoms}

    def broadens(self, strike: int, *, wants: bool) -> bool:
        return strike in self._whole.broadened

    def publishes(self, turn: str, *, wants: bool) -> bool:
        return turn in self._whole.published

    def strikes(self, strike: int, kind: Fault) -> bool:
        return self._meets(str(strike))

    def takes_turn(self, group: str, turn: str) -> bool:
        return self._meets(f"{group}.{turn}")

    def has(self, party: str) -> bool:
        self._meets(party)
        return party in self._parties

    def _meets(self, atom: str) -> bool:
        if atom not in self.atoms:
            return False
        self.met.add(atom)
        return True


class _Named(Protocol):
    name: str


class PartTimeline(Timeline):
    """Remembers everything. The random numbers of each event are its own: they begin in its state
    of `states`, which takes new ones where `records`.
    """

    def __init__(self, seed: int, states: dict[str, bytes], *, records: bool) -> None:
        super().__init__(seed)
        self._seed = seed
        self._states = states
        self._records = records
        self._last = b""
        self._times: Counter[str] = Counter()
        self._trace = deque()  # without a bound

    def next_event(self) -> Event | None:
        event = super().next_event()
        if event is not None:
            self._begin(_name_of(event))
        return event

    def _begin(self, name: str) -> None:
        """Events of one name are counted."""
        self._times[name] += 1
        key = f"{name} {self._times[name]}"
        if self._records:
            state = array("I", self.random.getstate()[1]).tobytes()
            if state != self._last:  # most events draw nothing
                self._last = state
            self._states[key] = self._last
        elif key in self._states:
            self.random.setstate((Random.VERSION, tuple(array("I", self._states[key])), None))
        else:
            self.random.seed(f"{self._seed} {key}")

    @property
    def lines(self) -> int:
        """How many things have happened, but for heartbeats."""
        return len(self._trace)


def _name_of(event: Event) -> str:
    parties: Iterable[Any] = (event.party, *event.args)
    names = (getattr(each, "name", "") for each in parties)
    return " ".join((event.act.__name__, *(name for name in names if isinstance(name, str))))
