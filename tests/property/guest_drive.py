"""A random drive of the coordinator by guests: they come, call, vote, cancel, vanish and come back, while trainers
publish, copy, take their memory back, roll back and leave.

In the end time passes, everybody does what he has to, and each guest that is left is served (G7): who still waits for what
is there is one whom somebody forgot to wake. Every step's invariants are checked. The bounds are to be `SMALL`, so that
places are scarce.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from random import Random

from tensorhub.coordinator import Disconnected, Received, Tick
from tensorhub.coordinator.entities import Member, Model, Operation
from tensorhub.coordinator.states import LeaseState, OperationState
from tensorhub.messages import (
    Abandon,
    Deregister,
    ErrorInfo,
    Fenced,
    Fill,
    Heartbeat,
    Leave,
    LeaveRequest,
    Prepared,
    ReaderCut,
    ReadFailed,
    Registered,
    Rollback,
)
from tensorhub.testing import CHUNKS
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import OpKey, OpKind, Options
from tests.coordinator.test_guests import Lobby

SMALL = {
    "GUESTS_OF_HOLDING_MAX": 2,
    "WOKEN_PER_STEP": 2,
    "TIMERS_PER_STEP": 2,
    "NOTED_PER_STEP": 4,
    "GUEST_REGISTRATIONS_MAX": 24,
}
MANIFEST = make_manifest(CHUNKS, "none").encode()  # no digests: a vote counts at once
ORIGINS = "ABC"
TRAINERS_MAX = 3
LEASE_S = 20.0
ROUNDS_MAX = 400  # at the end; each call takes one, and the leases of who has vanished some 20


class GuestForgotten(AssertionError):
    """Who could be served waits."""


class GuestDrive:
    """One seed's drive."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.lobby = Lobby(Options(lease_s=LEASE_S, sessions_max=24))
        self.sessions, self.names = count(1), count(1)
        self.guests: dict[str, int] = {}  # incarnation -> session, of those that are connected
        self.away: list[str] = []  # incarnations that may come back
        self.trainers: dict[int, str] = {}  # session -> name
        self.calls: dict[OpKey, str] = {}  # whose they are; some are over
        self.served = 0
        self.waited = 0  # for a place at a source that was there
        self.actions: list[tuple[int, Callable[[], None]]] = [
            (6, self.guest_comes),
            (16, self.guest_calls),
            (4, self.guest_votes),
            (2, self.guest_cancels),
            (4, self.guest_fails),
            (2, self.guest_vanishes),
            (2, self.guest_is_back),
            (1, self.guest_leaves),
            (2, self.trainer_comes),
            (4, self.trainer_goes_on),
            (1, self.trainer_withdraws),
            (3, self.trainer_answers),
            (1, self.trainer_leaves),
            (1, self.trainer_rolls_back),
            (4, self.time_passes),
        ]

    def run(self) -> None:
        """Raise GuestForgotten, or InvariantBroken."""
        weights = [weight for weight, _ in self.actions]
        self.publish(self.new_trainer())
        for _, act in self.random.choices(self.actions, weights, k=self.random.randint(40, 120)):
            act()
            self.drop_who_was_dismissed()
        self.end()

    # ------------------------------------------------------------------------------------------------------ looking

    @property
    def model(self) -> Model:
        return self.lobby.core.cluster.models["m"]

    def undecided(self) -> list[Operation]:
        """The calls of guests that are connected."""
        operations = self.lobby.core.cluster.undecided.values()
        return [operation for operation in operations if self.calls.get(operation.key) in self.guests]

    def pick(self, of: list[Operation]) -> tuple[int, Operation] | None:
        """One of these, and its guest's session."""
        operation = self.random.choice(of) if of else None
        return None if operation is None else (self.guests[self.calls[operation.key]], operation)

    def reading(self) -> list[Operation]:
        return [operation for operation in self.undecided() if operation.writing and operation.parts[0].leases]

    def member(self, session: int) -> Member:
        return self.lobby.core.cluster.members[self.trainers[session]]

    def drop_who_was_dismissed(self) -> None:
        for incarnation, session in list(self.guests.items()):
            if session in self.lobby.closed:
                self.lobby.step(Disconnected(session))
                del self.guests[incarnation]

    # ------------------------------------------------------------------------------------------------------- guests

    def guest_comes(self, incarnation: str = "") -> None:
        session = next(self.sessions)
        incarnation = incarnation or f"read-only-{session}"
        self.lobby.guest(session, self.random.choice(ORIGINS), joins=False, incarnation=incarnation)
        if session not in self.lobby.closed:
            self.lobby.joins(session)
            self.guests[incarnation] = session

    def guest_calls(self) -> None:
        if self.guests:
            incarnation, session = self.random.choice(list(self.guests.items()))
            self.call(session, incarnation, str(next(self.names)))

    def call(self, session: int, incarnation: str, name: str) -> None:
        """Registers, unless there is no place, and says its call: perhaps again."""
        registered = self.lobby.fetches(session, name)
        if isinstance(registered, Registered):
            known = next((key for key in self.calls if key.group == registered.registration), None)
            key = known or OpKey("m", registered.registration, registered.epoch, registered.sequence)
            self.calls[key] = incarnation
            fill = Fill(key, 0, key.group, OpKind.FETCH, "latest", None, 1, False, False, 1e6)
            self.lobby.say(session, fill)

    def guest_votes(self) -> None:
        if (picked := self.pick(self.reading())) is not None:
            session, operation = picked
            self.lobby.say(session, Prepared(operation.key, 0))
            assert operation.state is OperationState.COMMITTED
            self.served += 1
            self.lobby.say(session, Deregister(next(self.lobby.requests), operation.key.group, False))

    def guest_cancels(self) -> None:
        self.cancel_one_of(self.undecided())

    def cancel_one_of(self, operations: list[Operation]) -> None:
        if (picked := self.pick(operations)) is not None:
            session, operation = picked
            self.lobby.say(session, Abandon(operation.key, 0, ErrorInfo("StateError", "enough", False)))

    def guest_fails(self) -> None:
        if (picked := self.pick(self.reading())) is not None:
            session, operation = picked
            lease, reason = self.random.choice(list(operation.parts[0].leases)), self.random.choice(["lost", "dropped"])
            self.lobby.say(session, ReadFailed(operation.key, 0, lease, reason, "x"))

    def guest_vanishes(self) -> None:
        if self.guests:
            incarnation = self.random.choice(list(self.guests))
            self.lobby.step(Disconnected(self.guests.pop(incarnation)))
            self.away.append(incarnation)

    def guest_is_back(self) -> None:
        """Perhaps when its lease is over, and it is unknown."""
        if self.away:
            incarnation = self.away.pop(self.random.randrange(len(self.away)))
            self.guest_comes(incarnation)
            mine = [key for key, whose in self.calls.items() if whose == incarnation]
            for key in mine if incarnation in self.guests else ():
                if str(key) in self.lobby.core.cluster.undecided:
                    self.call(self.guests[incarnation], incarnation, key.group.removeprefix("read-only-"))

    def guest_leaves(self) -> None:
        if self.guests:
            self.lobby.say(self.guests[self.random.choice(list(self.guests))], Leave("done"))

    # ----------------------------------------------------------------------------------------------------- trainers

    def new_trainer(self) -> int:
        session = next(self.sessions)
        self.trainers[session] = f"t{session}"
        self.lobby.connect(session)
        self.lobby.register(session, self.trainers[session], MANIFEST)
        return session

    def any_trainer(self) -> int | None:
        return self.random.choice(list(self.trainers)) if self.trainers else None

    def publish(self, session: int) -> None:
        self.lobby.publish(session, self.trainers[session], (self.model.mark or 0) + 1, self.member(session).group.sequence)

    def replicate(self, session: int) -> None:
        group = self.member(session).group
        key, generation = OpKey("m", group.name, group.epoch, group.sequence), 1000 + next(self.names)
        fill = Fill(key, 0, group.name, OpKind.REPLICATE, "latest", None, generation, False, False, 1e6)
        self.lobby.say(session, fill)

    def trainer_comes(self) -> None:
        if len(self.trainers) < TRAINERS_MAX:
            self.replicate(self.new_trainer())

    def trainer_goes_on(self) -> None:
        """With its copy; or with another version, which it publishes or copies."""
        session = self.any_trainer()
        if session is None:
            return
        if self.member(session).group.operation is not None:
            self.finish_copy(session)
        elif self.member(session).holding is None and self.random.random() < 0.5:
            self.publish(session)
        else:
            self.replicate(session)

    def finish_copy(self, session: int) -> None:
        operation = self.member(session).group.operation
        if operation is not None and operation.writing and operation.parts[0].leases:
            self.lobby.say(session, Prepared(operation.key, 0))

    def trainer_withdraws(self) -> None:
        session = self.any_trainer()
        holding = self.member(session).holding if session is not None else None
        if session is not None and holding is not None and holding.complete:
            request = next(self.lobby.requests)
            name, abandons = self.trainers[session], self.random.random() < 0.5
            self.lobby.say(session, LeaveRequest(request, name, holding.generation, 9.0, abandons, False))

    def trainer_answers(self) -> None:
        session = self.any_trainer()
        if session is not None:
            self.answer(session)

    def answer(self, session: int) -> None:
        """It has cut who was to be cut, and fenced what it may take back."""
        member = self.member(session)
        for lease in list(self.lobby.core.cluster.leases.values()):
            if lease.holding.member is member and lease.state is LeaseState.FENCING:
                self.lobby.say(session, ReaderCut(lease.id))
        if member.registration not in self.model.withdrawals:
            for holding in list(member.leaving):
                self.lobby.say(session, Fenced(member.registration, holding.generation))

    def trainer_leaves(self) -> None:
        if len(self.trainers) > 1 and (session := self.any_trainer()) is not None:
            self.lobby.say(session, Leave("done"))
            del self.trainers[session]

    def trainer_rolls_back(self) -> None:
        session = self.any_trainer()
        if session is not None and self.model.mark is not None:
            to = self.random.randint(0, self.model.mark)
            self.lobby.say(session, Rollback(next(self.lobby.requests), f"back{next(self.names)}", "m", to))

    # --------------------------------------------------------------------------------------------------------- time

    def time_passes(self) -> None:
        self.pass_time(self.random.choice([0.1, 1.0, 6.0]))

    def pass_time(self, seconds: float) -> None:
        """With heartbeats; and every step for which it is time."""
        self.lobby.now += seconds
        for session in (*self.guests.values(), *self.trainers):
            self.lobby.step(Received(session, Heartbeat(1, self.lobby.now)))
        self.lobby.step(Tick())
        self.lobby.ticks()
        self.drop_who_was_dismissed()

    def end(self) -> None:
        """Nobody comes or goes any more. Somebody holds what `latest` is, if need be a new version. (Who is bound to one
        whose holders were lost waits for them, until it gives up.)
        """
        all_vote = self.random.random() < 0.5
        for _ in range(ROUNDS_MAX):
            newest = self.model.newest_visible()
            if newest is None or not newest.has_live_source():
                self.publish(self.new_trainer())
            self.pass_time(0.1 if self.reading() else 1.0)
            for session in self.trainers:
                self.answer(session)
                self.finish_copy(session)
            forgotten = [o for o in self.undecided() if o.version is None or o.version.has_live_source()]
            if not forgotten:
                return
            self.waited += len(self.model.guests_unbound)
            if all_vote:  # which has all who wait looked at, by the way
                self.guest_votes()
            else:
                self.cancel_one_of(self.reading())
        raise GuestForgotten(f"{forgotten} of {list(self.model.versions.values())}")
