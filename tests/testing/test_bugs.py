"""Each deliberate bug of `tests.testing.bugs` is found by the simulator within its seeds. `make
bugs`: some five minutes on two cores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest

from tensorhub.testing import GuaranteeBroken, run_seed, simulated
from tensorhub.testing.sim import layouts, sites
from tests.testing.bugs import Bug, every_bug
from tests.testing.wild import wild_beliefs

BUGS = every_bug()
# a planted bug that no longer fits what it replaces
MISTAKEN = re.compile(
    r"takes \d+ positional|unexpected keyword|is not defined|has no attribute|missing \d+ required"
)


def test_there_are_enough() -> None:
    assert len(BUGS) >= 30


@pytest.mark.parametrize("planted", BUGS.values(), ids=lambda planted: planted.name)
def test_what_it_breaks_is_still_there(planted: Bug) -> None:
    """Also where nobody runs the seeds: whoever renames something is told at once that a bug has
    lost its place.
    """
    with planted.enter():
        pass


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("found", BUGS.values(), ids=lambda found: found.name)
def test_the_simulator_finds(found: Bug) -> None:
    with drawing(found):
        seed = first_failing(found)
        assert seed is not None, f"{found.name} survived {found.seeds_max} seeds: {found.breaks}"
        run_seed(seed, faults=found.faults)  # it is the bug that was found


@contextmanager
def drawing(found: Bug) -> Iterator[None]:
    """With that bug's chances, of whichever module they are."""
    with ExitStack() as stack:
        for module in (layouts, sites, simulated):
            mine = {name: value for name, value in found.draws.items() if hasattr(module, name)}
            stack.enter_context(patch.dict(vars(module), mine))
        if found.is_wild:
            stack.enter_context(wild_beliefs())
        yield


def first_failing(found: Bug) -> int | None:
    """The first seed that fails while the bug is there."""
    with found.enter():
        for seed in range(found.seeds_max):
            try:
                run_seed(seed, faults=found.faults)
            except GuaranteeBroken as broken:
                text = f"{broken.__cause__!r}"
                assert not MISTAKEN.search(text), f"{found.name} is out of date: {text}"
                return seed
    return None
