"""A crew of real processes for each test; the slow run has them on trio, too."""

from collections.abc import Iterator

import pytest

from tests.processes.crew import Crew, crew


@pytest.fixture(params=["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with crew(request.param) as made:
        yield made
