"""No two groups bring a byte of a version into a site: who waits until a group of another layout in its site has all of it.

Theory of operation. Who reads a version *enters* its site with it; the first one has it from other sites. Groups of
its layout follow it, chunk by chunk, unless its update is staged. A group of another layout can read nothing of it before it
is complete, and would have everything come from the other site once more. So that group is not bound before. It waits at
the site's *gate*, where it is found when the group that enters is done or gives up, or when the site has another source.

It does not wait for ever. Who enters has to move: each of its ranks within a lease. And nobody waits for more than half of
his time, so that there is time left for another way. Who enters is bound and waits at no gate, and who waits at one holds
nothing of that version. So nobody waits in a circle.

Responsible for that. Not responsible for which way is best (`ways`), nor for what else a group waits for before it is bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import inf

from tensorhub.coordinator import ways
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Gate, Operation, Version
from tensorhub.coordinator.ways import Way
from tensorhub.types import OpKind

LOOKED_AT_MAX = 4  # of those who enter; the first one that moves decides


@dataclass(eq=False, repr=False)
class Gates:
    """Changes gates; nobody else does."""

    _cluster: Cluster

    def must_wait(self, operation: Operation, version: Version, way: Way) -> bool:
        """Whether it should not be bound yet, since it can soon be read within its site. It is looked at again in time."""
        operation.gate = None
        site = _site_of(operation)
        gate = version.gates.get(site)
        if gate is None or _is_free(operation) or way.follows_in(site) or way.bridges_in(site):
            return False
        until = self._until(operation, gate)
        if until <= self._cluster.now or ways.holds_some(version, operation):
            return False
        operation.gate = gate
        self._cluster.timers.set("gate", operation.name, until)
        return True

    def _until(self, operation: Operation, gate: Gate) -> float:
        """How long it waits there, if nothing happens."""
        half = min(part.deadline - part.call.timeout_s / 2 for part in operation.parts.values())
        mine = ways.first_member(operation)
        for other in islice(gate.entering.values(), LOOKED_AT_MAX):
            is_alike = other.group.reads_as == operation.group.reads_as
            if is_alike and not (other.is_staged or operation.is_staged):
                continue  # whichever begins to write first is followed by the other
            if mine.worker.reaches(ways.first_member(other).worker, across=True):
                until = min(half, self._moves_until(other))
                if until > self._cluster.now:
                    return until
        return -inf

    def _moves_until(self, operation: Operation) -> float:
        """Until when it is not taken for one that does not move any more."""
        parts = operation.parts.values()
        moved_at = min((part.moved_at for part in parts if not part.voted), default=None)
        return (max(part.moved_at for part in parts) if moved_at is None else moved_at) + self._cluster.options.lease_s

    def bound(self, operation: Operation) -> None:
        """It waits at no gate any more. If others can read there what it brings into its site, it enters: also where it has
        a source within the site, which may leave.
        """
        self._cluster.timers.cancel("gate", operation.name)
        operation.gate = None
        layout, site = ways.first_part(operation).layout, _site_of(operation)
        if operation.unchanged or operation.kind is OpKind.FETCH or _is_free(operation) or not layout.covers:
            return
        gate = operation.gate = operation.bound.gates.setdefault(site, Gate(site))
        gate.entering[operation.key] = operation
        self._cluster.note(operation.bound)

    def ended(self, operation: Operation) -> None:
        """It is decided: who has waited for it goes on."""
        self._cluster.timers.cancel("gate", operation.name)
        gate, version = operation.gate, operation.version
        if version is None or gate is None:
            return
        if operation in islice(gate.entering.values(), LOOKED_AT_MAX):
            self._cluster.wake_all(gate.waiting)
        del gate.entering[operation.key]
        if not gate.entering:
            del version.gates[gate.site]
        self._cluster.note(version)


def _site_of(operation: Operation) -> str:
    """That of its first rank."""
    return ways.first_member(operation).worker.location.site


def _is_free(operation: Operation) -> bool:
    """Whether it neither waits nor is waited for: it reads one shard only, goes on with what it has begun before a restart,
    or its ranks are in several sites.
    """
    first, site = ways.first_member(operation), _site_of(operation)
    begun = operation.resumes
    if first.is_of_one_shard or first.fits_any_layout or (begun is not None and not begun.anew):
        return True
    return any(part.member.worker.location.site != site for part in operation.parts.values())
