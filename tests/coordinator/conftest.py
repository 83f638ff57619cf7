"""What tests of the coordinator look at."""

from __future__ import annotations

import pytest

from tensorhub.coordinator.entities import Operation
from tensorhub.coordinator.operations import Operations


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """The operations that are settled, each as often as it is."""
    looked: list[Operation] = []
    settle = Operations.settle

    def noting(self: Operations, operation: Operation) -> None:
        looked.append(operation)
        settle(self, operation)

    monkeypatch.setattr(Operations, "settle", noting)
    return looked
