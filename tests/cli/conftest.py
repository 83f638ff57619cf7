"""What tests of several commands share."""

from collections.abc import Iterator

import pytest

from tensorhub import sync


@pytest.fixture(autouse=True)
def _prepared(prepared: None) -> None:
    """Commands run in real processes; how a process of their own begins, test_app.py has."""


@pytest.fixture
def address() -> Iterator[str]:
    """That of a coordinator of this test's own, in this process: what is tested is who talks to
    it.
    """
    with sync.serve(token="") as coordinator:
        yield coordinator.address
