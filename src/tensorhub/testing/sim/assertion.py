"""How the simulator says that a guarantee does not hold."""

from __future__ import annotations

from tensorhub.types import HandleState

HOLDING = (HandleState.READY, HandleState.DRAINING)


class GuaranteeBroken(AssertionError):
    """A guarantee does not hold. The text begins with that guarantee's name, as in `content: ...`."""


def demand(holds: bool, what: str) -> None:
    """Raise GuaranteeBroken unless it `holds`."""
    if not holds:
        raise GuaranteeBroken(what)
