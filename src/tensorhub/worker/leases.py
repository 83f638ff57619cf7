"""The read leases of one fill: what the coordinator has granted, and what the pull reads under
them.

Responsible for two things. The pull's sources are those that the coordinator has granted, also
after a lost connection and under a new coordinator. And the coordinator hears of each lease that
was given up. Not responsible for when a fill reads (`filling`), nor for reading.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub.messages import Grant, ReadFailed
from tensorhub.types import OpKey
from tensorhub.worker.calls import AddPullSource, DropPullSource
from tensorhub.worker.member_context import MemberContext

# leases of one fill that were given up, in case the coordinator has not heard of it
FAILED_KEPT_MAX = 64


class Leases:
    """The leases of one fill. They are gathered until the fill reads; then each is a lane of its
    pull.

    `operation`: the operation of the fill now.
    """

    def __init__(self, context: MemberContext, operation: Callable[[], OpKey]) -> None:
        self._context = context
        self._operation = operation
        self._reads = False  # the pull runs
        self._grants: tuple[Grant, ...] = ()  # to begin the pull with
        # the pull's sources, by the lease that the coordinator knows
        self._lanes: dict[str, Grant] = {}
        # by such a lease: the lease under which the pull began to read
        self._lane_names: dict[str, str] = {}
        # the newest that were given up, and the message about each
        self._failed: dict[str, ReadFailed] = {}

    def granted(self, grants: tuple[Grant, ...]) -> None:
        """The pull, which has not begun, is to begin with these. Each lease is read under once,
        even if named twice.
        """
        self._grants = tuple({grant.lease: grant for grant in grants}.values())

    def begin_reading(self) -> tuple[Grant, ...]:
        """The pull begins: with which sources."""
        self._reads = True
        self._lanes = {grant.lease: grant for grant in self._grants}
        self._lane_names = {lease: lease for lease in self._lanes}
        return self._grants

    def end_reading(self) -> None:
        """The pull is done, or is being stopped."""
        self._reads = False

    def reconcile(self, grants: tuple[Grant, ...]) -> None:
        """After a lost connection: the coordinator's list of our leases is the true one.

        Where a new coordinator grants, under a lease of its own, a memory that a lane reads
        already, that lane goes on.
        """
        wanted = {grant.lease: grant for grant in grants}
        for lease in sorted(self._lanes.keys() - wanted):
            same = next(
                (
                    g
                    for g in grants
                    if g.lease not in self._lanes and _is_same(g, self._lanes[lease])
                ),
                None,
            )
            if same is None:
                self._context.act(DropPullSource(self._lane_names[lease]))
            else:
                del self._lanes[lease]
                self._lanes[same.lease], self._lane_names[same.lease] = (
                    same,
                    self._lane_names.pop(lease),
                )
        for grant in grants:
            self.add(grant)

    def add(self, grant: Grant) -> None:
        if not self._reads:
            self.granted((*self._grants, grant))
        elif grant.lease in self._failed:
            # it was not heard: a lease is read under once
            self._context.say(self._failed[grant.lease])
        elif grant.lease not in self._lanes:
            self._lanes[grant.lease], self._lane_names[grant.lease] = grant, grant.lease
            self._context.act(AddPullSource(grant))

    def drop(self, lease: str) -> None:
        """The coordinator takes the lease back; it hears when nothing is read under the lease any
        more.
        """
        if self._reads and lease in self._lanes:
            self._context.act(DropPullSource(self._lane_names[lease]))
        else:
            self._grants = tuple(grant for grant in self._grants if grant.lease != lease)
            self._context.say(
                ReadFailed(self._operation(), self._context.shard.rank, lease, "dropped", "")
            )

    def failed(self, lane: str, reason: str, detail: str, chunk: int | None) -> None:
        """That lane has ended. `lane`: the lease under which the pull began to read there."""
        lease = next((lease for lease, name in self._lane_names.items() if name == lane), None)
        if lease is not None:
            del self._lanes[lease], self._lane_names[lease]
            failed = ReadFailed(
                self._operation(), self._context.shard.rank, lease, reason, detail[:1000], chunk
            )
            self._failed[lease] = failed
            while len(self._failed) > FAILED_KEPT_MAX:
                del self._failed[next(iter(self._failed))]
            self._context.say(failed)


def _is_same(one: Grant, other: Grant) -> bool:
    """Whether both grants are for one memory, under one generation."""
    mine, theirs = ((g.incarnation, g.registration, g.generation) for g in (one, other))
    return mine == theirs
