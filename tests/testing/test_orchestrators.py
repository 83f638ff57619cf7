"""docs/orchestrators.md: each of its examples does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tensorhub.testing import simulate

PAGE = Path(__file__).parents[2] / "docs" / "orchestrators.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page defines, from top to bottom."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_its_tests_pass(page: dict[str, Any]) -> None:
    tests = [name for name in page if name.startswith("test_")]
    assert len(tests) == 3
    for name in tests:
        page[name]()


def test_the_bug_is_found_and_reproduced_by_the_line_that_is_printed(
    page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="generated with") as found:
        page["find_the_bug"]()
    line = found.value.__notes__[-1]
    match = re.fullmatch(r"reproduce: TENSORHUB_SEED=(\d+) python -m pytest '(.*)'", line)
    assert match is not None
    assert match[2].endswith("::test_the_bug_is_found_and_reproduced_by_the_line_that_is_printed")
    monkeypatch.setenv("TENSORHUB_SEED", match[1])
    with pytest.raises(AssertionError, match="generated with") as again:
        page["find_the_bug"]()
    assert str(again.value) == str(found.value)


def test_trio_runs_it_too(page: dict[str, Any]) -> None:
    hashes = [simulate(page["scenario"], seeds=[1], spared=["trainer"], backend="trio") for _ in range(2)]
    assert hashes[0] == hashes[1]
