"""One version on all engines, or on none: the states of an engine, the records of what was decided,
and a trainer's steps. PURE: no clock, no I/O.

1. *Stage*: every engine fetches the version beside the one that it serves, and votes.
2. *Flip*: every engine stops serving, and puts the staged version in place. The old one is kept.
3. *Decide*: the trainer records "commit" if all have flipped, else "abort". The coordinator keeps
   records, and of two for one attempt only the first counts.
4. *Settle*: engines serve again: the new version after a commit, the old one after an abort.

So no engine serves the new version before all have stopped serving the old one. An engine that
hears of no decision looks for the record, and in the end records "abort" itself.

An engine that did not vote, or has started anew, must not serve the old version when the others
serve the new one. So an engine serves only with a *lease*: it has read the records within
`lease_s`. Before the flip the trainer records a *fence*: an engine that reads it and has not voted
in this attempt serves nothing until the decision. Where an engine did not vote, the trainer waits
for `lease_s`: that engine has then read the fence, or has no lease.

Records are numbers of a model of their own, so they need no other state in the coordinator: attempt
`n` has the fence `2 * n` and the decision `2 * n + 1`, and attempts of version `v` begin at
`v * ATTEMPTS`. Before a trainer makes an attempt, it aborts the one before, or has fenced that: so
no two trainers make an attempt of the same number, and a vote for one is none for the other.

A coordinator that has lost its state has no records, and versions may begin at 1 again. An engine
that hears of it *forgets*: it serves nothing until a version was committed there. Another engine
may not have heard of it, and has a lease of before. So nothing is committed there before that
lease is over.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from tensorhub.errors import StateError
from tensorhub.machine import Stateful

ATTEMPTS: Final = 1024  # of one version
VERSION_MAX: Final = 2**51  # of which attempts have numbers
COMMIT, ABORT = 1, 2  # bytes of a decision's record


def version_of(attempt: int) -> int:
    return attempt // ATTEMPTS


@dataclass(frozen=True)
class Records:
    """What was recorded. `known`: the newest records, by number, with their bytes; the two newest
    ones at least. `committed`: the newest version of which a commit was noted.
    """

    known: Mapping[int, int]
    committed: int | None

    @property
    def newest(self) -> int:
        return max(self.known, default=-1)

    @property
    def fence(self) -> int | None:
        """The attempt of which a fence is the newest record."""
        newest = self.newest
        return None if newest < 0 or newest % 2 else newest // 2

    @property
    def current(self) -> int | None:
        """The version that engines may serve."""
        commits = [
            version_of(number // 2)
            for number, nbytes in self.known.items()
            if number % 2 and nbytes == COMMIT
        ]
        return max([*commits, *([] if self.committed is None else [self.committed])], default=None)

    def decision(self, attempt: int) -> bool | None:
        """Whether an attempt was committed; None: nothing was decided."""
        nbytes = self.known.get(2 * attempt + 1)
        if nbytes is not None:
            return nbytes == COMMIT
        return None if self.newest <= 2 * attempt else self.current == version_of(attempt)


class EngineState(StrEnum):
    READY = "ready"  # serves what it has, if it has a lease
    STAGED = "staged"  # likewise; has voted
    FLIPPED = "flipped"  # serves nothing; waits for the decision


E = EngineState
ENGINE_TABLE: Mapping[E, frozenset[E]] = {
    E.READY: frozenset({E.STAGED}),
    E.STAGED: frozenset({E.FLIPPED, E.READY}),
    E.FLIPPED: frozenset({E.READY}),
}


class Seat(Stateful[EngineState]):
    """One engine's part. `version`: what it has in place, and may serve with a lease; None: it is
    out of date, or has nothing yet.
    """

    machine: ClassVar[str] = "engine of a fleet"
    table: ClassVar = ENGINE_TABLE
    __slots__ = (
        "attempt",
        "changed_at",
        "decide_s",
        "flipped_at",
        "lease_s",
        "lease_until",
        "version",
    )

    def __init__(self, lease_s: float, decide_s: float) -> None:
        super().__init__(EngineState.READY)
        self.lease_s, self.decide_s = lease_s, decide_s
        self.version: int | None = None
        self.attempt = -1  # the newest one that it has voted in, or has heard of
        self.lease_until = self.flipped_at = -math.inf
        self.changed_at = -math.inf  # by the trainer: records that were asked for before lack it

    def serves(self, now: float) -> int | None:
        """The version that may be served at this moment."""
        return self.version if self.state is not E.FLIPPED and now < self.lease_until else None

    def begin(self, attempt: int, now: float) -> None:
        """The version is being staged, over what was staged before. StateError: not now."""
        if self.state is E.FLIPPED or attempt < self.attempt:
            does = "waits for the decision on" if self.state is E.FLIPPED else "was asked to take"
            raise StateError(
                f"this engine {does} version {version_of(self.attempt)}, and cannot take version "
                f"{version_of(attempt)} now: end the other trainer that updates it; or the "
                f"coordinator has lost its state, and this engine has not reached it since: repeat "
                f"the update",
                retryable=True,
            )
        if self.state is E.STAGED and attempt > self.attempt:
            self.become(E.READY, attempt, now, "a new attempt")
        self.attempt = attempt

    def vote(self, attempt: int, now: float) -> None:
        """The version of that attempt is staged. StateError: another attempt has begun."""
        if attempt != self.attempt or self.state is E.FLIPPED:
            raise StateError(
                f"attempt {attempt} was given up: attempt {self.attempt} has begun", retryable=True
            )
        if self.state is E.READY:
            self.become(E.STAGED, attempt, now, "voted")

    def flip(self, attempt: int, now: float) -> bool:
        """Stop serving. False: it was done before."""
        if attempt == self.attempt and self.state is E.FLIPPED:
            return False
        if attempt != self.attempt or self.state is not E.STAGED:
            raise StateError(
                f"this engine is {self.state} in attempt {self.attempt}, and has not voted in "
                f"attempt {attempt}",
                retryable=True,
            )
        self.flipped_at = self.changed_at = now
        self.become(E.FLIPPED, attempt, now, "all have voted")
        return True

    def settle(self, attempt: int, is_commit: bool, now: float) -> bool:
        """Serve again. Returns whether the version in place is the staged one now; after an abort
        the old one must have been put back before.
        """
        if attempt != self.attempt or self.state is E.READY:
            return False
        is_new = is_commit and self.state is E.FLIPPED
        if is_new:
            self.version = version_of(attempt)
        self.changed_at = now
        self.become(E.READY, attempt, now, "committed" if is_commit else "aborted")
        return is_new

    def is_outdated(self, asked_at: float) -> bool:
        """Whether records that were asked for then may be older than what this seat knows."""
        return asked_at <= self.changed_at

    def heard(self, records: Records, asked_at: float) -> None:
        """Renew the lease, or give up what is not current; after an attempt that was decided was
        settled.
        """
        is_voter = self.state is not E.READY and records.fence == self.attempt
        may_serve = records.fence is None or is_voter
        if may_serve:
            self.lease_until = max(self.lease_until, asked_at + self.lease_s)
        if not (may_serve and self.version == records.current):
            self.version = None

    def forget(self, now: float) -> None:
        """The coordinator has lost its state: numbers of before mean nothing there."""
        if self.state is not E.READY:
            self.become(E.READY, self.attempt, now, "the coordinator has lost its state")
        self.version, self.attempt, self.changed_at = None, -1, now

    def is_overdue(self, now: float) -> bool:
        """Whether it has waited long enough for a decision to record "abort" itself."""
        return self.state is E.FLIPPED and now >= self.flipped_at + self.decide_s

    def is_behind(self, records: Records) -> bool:
        """Whether it is to take the current version by itself."""
        is_free = self.version is None and self.state is not E.FLIPPED
        return is_free and records.current is not None and records.fence is None

    def caught_up(self, version: int, records: Records, asked_at: float) -> None:
        """The version was put in place: serve it, if it is the current one still."""
        if self.state is E.FLIPPED:
            return
        if self.state is E.STAGED and version == version_of(self.attempt):
            self.become(E.READY, self.attempt, asked_at, "committed without it")
        self.version = version
        self.heard(records, asked_at)


# ------------------------------------------------------------------------------------------------
# the trainer's steps


@dataclass(frozen=True)
class Stage:
    """Answer: the names of engines that have voted."""

    attempt: int
    engines: Set[str]


@dataclass(frozen=True)
class Fence:
    """Record it, and wait for `lease_s` where an engine did not vote. Answer: whether it was
    recorded.
    """

    attempt: int
    waits: bool


@dataclass(frozen=True)
class Flip:
    """Answer: the names of engines that have flipped."""

    attempt: int
    engines: Set[str]


@dataclass(frozen=True)
class Decide:
    """Record it, unless another decision was recorded. Answer: whether the attempt is
    committed.
    """

    attempt: int
    is_commit: bool


@dataclass(frozen=True)
class Settle:
    attempt: int
    engines: Set[str]
    is_commit: bool


Step = Stage | Fence | Flip | Decide | Settle
Answer = Set[str] | bool
Steps = Generator[Step, Answer, frozenset[str]]


def steps(first: int, engines: Sequence[str], attempts_max: int) -> Steps:
    """A trainer's steps to bring a version to all engines. Each step is to be answered. Returns the
    names of the engines that have it; none: the version was given up, and all serve the old one.

    An attempt ends where an engine does not answer as it should. The next one is made without that
    engine: it cannot have voted in it, so a fence keeps it from serving.
    """
    asked = frozenset(engines)
    for attempt in range(first, first + attempts_max):
        voted = yield Stage(attempt, asked)
        assert isinstance(voted, Set)
        if not voted:
            break
        if frozenset(voted) != asked:
            asked = frozenset(voted)
            continue
        if not (yield Fence(attempt, waits=len(asked) < len(engines))):
            break
        flipped = yield Flip(attempt, asked)
        assert isinstance(flipped, Set)
        is_commit = bool((yield Decide(attempt, frozenset(flipped) == asked)))
        yield Settle(attempt, asked, is_commit)
        if is_commit:
            return asked
        asked = frozenset(flipped)
        if not asked:
            break
    return frozenset()
