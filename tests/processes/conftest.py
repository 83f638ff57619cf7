"""Real processes for each test; the slow run has them on trio, too."""

from collections.abc import Iterator

import pytest

from tests.processes.child_processes import ChildProcesses, child_processes


@pytest.fixture(params=["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest, prepared: None) -> Iterator[ChildProcesses]:
    with child_processes(request.param) as made:
        yield made
