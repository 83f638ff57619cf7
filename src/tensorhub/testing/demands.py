"""How the simulator says that a guarantee does not hold."""

from __future__ import annotations

from tensorhub.types import HandleState

HOLDING = (HandleState.READY, HandleState.DRAINING)


class GuaranteeBroken(AssertionError):
    """One of the design's guarantees does not hold."""


def demand(holds: bool, what: str) -> None:
    """Raise GuaranteeBroken unless it `holds`."""
    if not holds:
        raise GuaranteeBroken(what)
