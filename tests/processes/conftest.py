"""Real processes for each test; the slow run has them on trio, too."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.child_processes import ChildProcesses, child_processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are heavy. (The hook is given the items of other folders, too.)"""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.heavy)


@pytest.fixture(params=["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest, prepared: None) -> Iterator[ChildProcesses]:
    with child_processes(request.param) as made:
        yield made
