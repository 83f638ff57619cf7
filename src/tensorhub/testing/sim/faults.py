"""The kinds of fault that a simulation can inject, and which of them a seed draws."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from random import Random

KINDS_LEAST = 3
LATER_DRAWN = 0.25  # of all seeds, of each kind that is drawn by itself


class Fault(StrEnum):
    """Each can be switched on and off by itself."""

    CRASH = "crash"  # a worker's process and its memory are gone
    RESTART = "restart"  # the rank of a dead worker is registered by a new process
    COORDINATOR = "coordinator"  # the coordinator dies, and comes back on what is durable
    # the coordinator dies, and comes back without its state, as a new cluster (R2)
    STATE_LOST = "state-lost"
    STORE_SLOW = "store-slow"  # a write takes seconds
    STORE_FAIL = "store-fail"  # a write fails
    PARTITION = "partition"  # nothing passes between two parties for a while; nothing is lost
    CUT = "cut"  # a connection breaks: its two ends notice at different times
    DELAY = "delay"  # a connection is held up
    REORDER = "reorder"  # the tail of a broken connection arrives after the next one is up
    DUPLICATE = "duplicate"  # a message arrives twice
    DROP = "drop"  # a connection loses everything from some point on, until somebody notices
    CORRUPT = "corrupt"  # bytes are damaged on their way
    OVERWRITE = "overwrite"  # a user writes published memory
    STALL = "stall"  # a source accepts its readers, and sends nothing
    SLOW = "slow"  # a link between two workers is a hundred times as slow
    PAUSE = "pause"  # a process is stopped, and goes on later
    # what somebody says, or everybody, lies unread at the coordinator for longer than a lease
    BEHIND = "behind"
    HOOK = "hook"  # a before_write raises
    CANCEL = "cancel"  # a call is cancelled
    DIFFER = "differ"  # the ranks of a group call differently, or one does not call
    HASTE = "haste"  # calls have hardly any time
    DEVICE = "device"  # an access of the owner's own (a digest, a copy) lasts long
    # somebody who has read a version overwrites it, and vouches for it with digests of its own
    LIE = "lie"
    PREEMPT = "preempt"  # a spot worker is told to go: it closes with little time, and dies
    FAILOVER = "failover"  # the leading coordinator dies, and a standby leads
    # a leader is stopped, or cut off from its store; when it goes on, another one leads
    SPLIT = "split"
    STORE_AWAY = "store-away"  # no write gets through; a leader steps down before its lease is over
    # nothing passes from one party to another for a while, or over one half of a connection
    ONE_WAY = "one-way"
    ALLOCATE = "allocate"  # host memory of a copy cannot be allocated
    STORE_UNSURE = "store-unsure"  # a write is durable, and its writer hears so late, or never
    CLOCK = "clock"  # a worker's clock jumps ahead, or stands still
    STORE_DOUBT = "store-doubt"  # a write fails, and may be durable: its writer steps down
    DESCRIPTORS = "descriptors"  # a process can open no more connections
    OLDER_STATE = "older-state"  # the coordinator comes back on an older copy of its state


FORGETTING = frozenset(
    {
        *(
            Fault.COORDINATOR,
            Fault.STATE_LOST,
            Fault.PARTITION,
            Fault.CUT,
            Fault.DELAY,
            Fault.REORDER,
            Fault.ONE_WAY,
        ),
        *(Fault.DROP, Fault.PAUSE, Fault.BEHIND, Fault.FAILOVER, Fault.SPLIT, Fault.STORE_AWAY),
        *(Fault.CLOCK, Fault.STORE_DOUBT, Fault.DESCRIPTORS, Fault.OLDER_STATE),
    }
)
"""Those with which a coordinator may forget what it knows of what others hold still: it dies, or
takes them for lost.
"""


CHANGES = frozenset({Fault.CORRUPT, Fault.OVERWRITE, Fault.LIE})
"""Those that change bytes: without digests no reader can notice."""
LATER = frozenset(
    {
        *(Fault.ALLOCATE, Fault.ONE_WAY, Fault.CLOCK, Fault.STORE_DOUBT, Fault.DESCRIPTORS),
        Fault.OLDER_STATE,
    }
)
"""Those that each are drawn by themselves: seeds without them are what they were before."""


class FaultPlan:
    """What one seed has drawn: some kinds, each with a weight of its own, and how often anything
    goes wrong.
    """

    def __init__(self, random: Random, allowed: Collection[Fault] | None, seed: int) -> None:
        self.allowed = frozenset(Fault if allowed is None else allowed)
        self._kinds = kinds = [kind for kind in Fault if kind not in LATER and kind in self.allowed]
        few = min(len(kinds), KINDS_LEAST)
        count = few if random.random() < 0.2 else random.randint(few, len(kinds))
        drawn = random.sample(kinds, count)
        self.weights = {kind: 4.0 ** random.uniform(-1.5, 1.5) for kind in Fault if kind in drawn}
        self.mean_s = random.choice((0.2, 0.6, 2.0))  # between two faults
        for kind in [kind for kind in Fault if kind in LATER]:
            own = Random(f"{kind} {seed}")
            is_drawn = own.random() < LATER_DRAWN if allowed is None else kind in allowed
            if is_drawn:
                self.weights[kind] = 4.0 ** own.uniform(-1.5, 1.5)

    def __repr__(self) -> str:
        return f"<FaultPlan every {self.mean_s} s: {', '.join(self.weights)}>"

    def draw(self, random: Random) -> Fault | None:
        """The next kind."""
        if not self.weights:
            return None
        return random.choices(list(self.weights), list(self.weights.values()))[0]

    def leave_out(self, kinds: Collection[Fault]) -> None:
        """Those strike no more."""
        self._kinds = [kind for kind in self._kinds if kind not in kinds]
        self.weights = {kind: its for kind, its in self.weights.items() if kind not in kinds}

    def make_frequent(self, kind: Fault) -> None:
        """No kind strikes more often, if it may be drawn at all."""
        if kind in self.allowed:
            self.weights[kind] = max(self.weights.values(), default=1.0)

    def broaden(self, random: Random) -> None:
        """One kind more: the drawn kinds find no victim."""
        others = [kind for kind in self._kinds if kind not in self.weights]
        if others:
            self.weights[random.choice(others)] = max(self.weights.values(), default=1.0)
