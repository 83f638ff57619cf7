"""Beliefs about links and workers that are drawn at random: readers are moved in mid-fill again and
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from zlib import crc32

from tensorhub.coordinator import readers, source_choice
from tensorhub.coordinator.entities import Holding, RankPart
from tensorhub.coordinator.readers import Readers
from tensorhub.scheduler.slowness import SLOWNESS_MAX, Slowness

LITTLE = 1e-9


def drawn(*what: object) -> int:
    """At random, and always the same."""
    return crc32(repr(what).encode())


@contextmanager
def wild_beliefs() -> Iterator[None]:
    improve, known = Readers.improve, source_choice._estimate

    def weighed(self: Readers, part: RankPart) -> None:
        self._weigh(part.member.worker)
        improve(self, part)
        self._improve(part, 1.0, LITTLE)  # also if its source is neither slow nor shared

    def slowness(_: Slowness, worker: str, rates: object, now: float) -> int:
        return max(0, drawn(worker, round(now, 1)) % (SLOWNESS_MAX + 4) - 3)

    def estimate(holding: Holding, part: RankPart, *what: Any) -> tuple[tuple[int, float], int]:
        """The group of a source (`choice.rank`) is known, and comes first."""
        (group, _), number = known(holding, part, *what)
        return (
            group,
            1.0 + drawn(holding.number, holding.member.registration, part.operation.name),
        ), number

    with ExitStack() as patched:
        for owner, name, by in (
            (Readers, "improve", weighed),
            (Slowness, "of", slowness),
            (source_choice, "_estimate", estimate),
            (readers, "COMPARE_S", 0.0),
            (readers, "GAIN_S", LITTLE),
            (readers, "FASTER", 1.0),
        ):
            patched.enter_context(patch.object(owner, name, by))
        yield
