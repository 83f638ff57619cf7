"""How the simulator says that a guarantee does not hold, and how often it has looked."""

from __future__ import annotations

from collections import defaultdict

from tensorhub.types import HandleState

HOLDING = (HandleState.READY, HandleState.DRAINING)
# Numbers and texts stand here as the documents state them: a judge does not import them from the
# code that it judges.
# R4, record 0014: leases after which an owner without a connection may drop a retained version
CUT_OFF_LEASES = 1.6
# R6: after its deadline a call is given up within 2 s, and at most two further steps have 2 s each
LATE_S_MAX = 6.0
NO_AVAILABLE = "and 'available' waits for no worker"  # G7: the call is refused at once
CHECKSUM_CONFIRMED = "they have digested it again: their bytes are unchanged"  # R8
LOST_STATE = "has come back without its state, as a new cluster"  # R2
MAKES_ROOM = "it makes room"  # G10: a read-only session at a cap ends
LEFT_ON_PURPOSE = "its last holder has left on purpose"  # R4


class GuaranteeBroken(AssertionError):
    """A guarantee does not hold. The text begins with that guarantee's name, as in `content:
    ...`.
    """


judged: defaultdict[str, int] = defaultdict(int)  # how often, by what was demanded


def demand(holds: bool, what: str, *about: object) -> None:
    """Count that `what` was judged, and raise GuaranteeBroken, with `about`, unless it `holds`.
    `what`: a guarantee's name, and a text of this call alone.
    """
    judged[what] += 1
    if not holds:
        raise GuaranteeBroken(what.format(*about))
