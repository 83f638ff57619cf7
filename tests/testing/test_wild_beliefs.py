"""Whatever is believed of links and workers, no guarantee depends on it: readers are moved in
mid-fill again and again.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tensorhub.coordinator.readers import Readers
from tensorhub.testing import run_seed
from tests.testing.wild import wild_beliefs

SEEDS = range(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_is_believed_the_guarantees_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = Counter[str]()
    swap = Readers._swap

    def moved(self: Readers, *part_and_source: object) -> None:
        happened["moved"] += 1
        swap(self, *part_and_source)  # type: ignore[arg-type]

    monkeypatch.setattr(Readers, "_swap", moved)
    with wild_beliefs():
        for seed in SEEDS:
            run_seed(seed)
    assert happened["moved"] > 5
