"""How far a fence is: which accesses are to be shut out by now, and whether the fence stands, or is
given up.

Responsible for the course of a fence after `Owner.close`. Not responsible for waiting, nor for how
a reader is shut out.
"""

from __future__ import annotations

from typing import NamedTuple

from tensorhub.types import RegistrationId
from tensorhub.worker.owner import Owner


class FenceStep(NamedTuple):
    """`overdue`: accesses that run although their grace is over. `is_late`: the fence is given up,
    unless they end now.
    """

    stands: bool
    overdue: frozenset[int] = frozenset()
    is_late: bool = False


def look(
    owner: Owner, registration: RegistrationId, now: float, grace_until: float, until: float
) -> FenceStep:
    """The state of a fence of closed memory. Readers may take their bytes until `grace_until`, then
    they are shut out; at `until` the fence is given up: the owner's own accesses end by themselves
    only.
    """
    if owner.is_quiet(registration):
        return FenceStep(True)
    return FenceStep(
        False, owner.accesses_to(registration) if now >= grace_until else frozenset(), now >= until
    )
