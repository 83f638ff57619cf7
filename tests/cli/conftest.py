"""What tests of several commands share."""

from collections.abc import Iterator

import pytest

from tensorhub import sync


@pytest.fixture
def address() -> Iterator[str]:
    """That of a coordinator of this test's own, in this process: what is tested is who talks to it."""
    with sync.serve(token="") as coordinator:
        yield coordinator.address
