"""Deliberate bugs, each of which the simulator must find: the proof that its checks can fail.

A bug is a context manager that breaks the code while it is entered. `tests/testing/test_bugs.py`
runs seeds in it until one fails; if none does, that is a hole in the checks, not in this list.
Modules here are `outside` (written by somebody who had read the public API and the rules only, not
the checks), `inside`, `seen` (what callers see, for the reference model), `woken` (who goes on
when), `behind` (what lies unread at the coordinator), `carried` (what a worker's shell is told to
carry out), `bridged` (readers of another layout), `moved` (readers that change their source),
`changed` (deltas), `archived` (archives), and `deposed` (failover, split brain, unknown writes, older states).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from tensorhub.testing import Fault

BUGS: dict[str, Bug] = {}  # by name, of the modules that are imported


def every_bug() -> dict[str, Bug]:
    """Those of all modules here, by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return BUGS


@dataclass(frozen=True)
class Bug:
    """One deliberate bug. `breaks`: the guarantee or rule that it breaks, and how, in a line."""

    name: str
    breaks: str
    enter: Callable[[], AbstractContextManager[None]]
    faults: tuple[Fault, ...] | None = None  # that a seed may draw; None: all
    seeds_max: int = 200
    # how `sim.layouts`, `sim.sites` and `simulated` draw instead
    draws: Mapping[str, object] = field(default_factory=dict)
    is_wild: bool = False  # anything is believed of links and workers (`tests.testing.wild`)


def bug(
    breaks: str,
    *,
    faults: tuple[Fault, ...] | None = None,
    seeds_max: int = 200,
    is_wild: bool = False,
    **draws: object,
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], AbstractContextManager[None]]]:
    """Register a generator function, whose body before its `yield` breaks something, as a bug of
    its name.
    """

    def register(make: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
        entered = contextmanager(make)
        name = make.__name__
        assert name not in BUGS, f"two bugs are called {name}"
        BUGS[name] = Bug(name, breaks, entered, faults, seeds_max, draws, is_wild)
        return entered

    return register


def replaced(owner: Any, attribute: str, by: Any) -> AbstractContextManager[Any]:
    """`owner.attribute` is something else while it is entered."""
    return patch.object(owner, attribute, by)
