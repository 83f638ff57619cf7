"""A test here needs its framework, and skips with the reason where that is not installed."""

from __future__ import annotations

import faulthandler
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.frameworks.recipes import RECIPES

HERE = Path(__file__).parent
EXIT_S = 300  # until a process that does not exit shows its threads, and is ended


def pytest_unconfigure(config: pytest.Config) -> None:
    """Frameworks leave threads, sockets and process groups behind."""
    if config.option.markexpr == "framework":
        faulthandler.dump_traceback_later(EXIT_S, exit=True, file=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("framework"):
            name = next(each for each, recipe in RECIPES.items() if item.path.name in recipe.tests)
            if find_spec(RECIPES[name].module or name) is None:
                reason = (
                    f"{name} is not installed here; `make frameworks FRAMEWORKS={name}` "
                    f"installs it, and runs this"
                )
                item.add_marker(pytest.mark.skip(reason=reason))
