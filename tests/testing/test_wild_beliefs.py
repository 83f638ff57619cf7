"""Whatever is believed of links and workers, no guarantee depends on it: readers are moved in mid-fill again and again."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from tensorhub.coordinator import readers, source_choice
from tensorhub.coordinator.entities import Holding, RankPart
from tensorhub.coordinator.readers import Readers
from tensorhub.scheduler.slowness import SLOWNESS_MAX, Slowness
from tensorhub.testing import run_seed

SEEDS = range(60)


def drawn(*what: object) -> int:
    """At random, and always the same."""
    return crc32(repr(what).encode())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_is_believed_the_guarantees_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = 0
    swap, improve, known = Readers._swap, Readers.improve, source_choice._estimate

    def counted(self: Readers, *lease_and_source: object) -> None:
        nonlocal moves
        moves += 1
        swap(self, *lease_and_source)  # type: ignore[arg-type]

    def weighed(self: Readers, part: RankPart) -> None:
        self._weigh(part.member.worker)
        improve(self, part)

    def slowness(_: Slowness, worker: str, rates: object, now: float) -> int:
        return max(0, drawn(worker, round(now, 1)) % (SLOWNESS_MAX + 4) - 3)

    def estimate(holding: Holding, part: RankPart, *what: Any) -> tuple[tuple[bool, float], int]:
        """Who is in another site is known, and comes last."""
        (is_far, _), number = known(holding, part, *what)
        return (is_far, 1.0 + drawn(holding.number, holding.member.registration, part.operation.name)), number

    monkeypatch.setattr(Readers, "_swap", counted)
    monkeypatch.setattr(Readers, "improve", weighed)
    monkeypatch.setattr(Slowness, "of", slowness)
    monkeypatch.setattr(Slowness, "is_open", lambda *_: True)
    monkeypatch.setattr(source_choice, "_estimate", estimate)
    monkeypatch.setattr(source_choice, "DOUBTED_S_MIN", 0.0)
    monkeypatch.setattr(readers, "COMPARE_S", 0.0)
    monkeypatch.setattr(readers, "GAIN_S", 1e-9)
    monkeypatch.setattr(readers, "FASTER", 1.0)
    for seed in SEEDS:
        run_seed(seed)
    assert moves > 5
