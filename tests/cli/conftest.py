"""What tests of several commands share."""

from collections.abc import Iterator

import pytest

from tests.cli.processes import line_with, started


@pytest.fixture
def address() -> Iterator[str]:
    """That of a coordinator of this test's own."""
    with started("serve", "--quiet") as coordinator:
        yield line_with("tcp://", coordinator.stdout).strip()
