"""The generated pages of docs/ are what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def _generator() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: make() for name, make in module.PAGES.items()}


@pytest.mark.parametrize("name", ["states.md", "reference.md"])
def test_generated_pages_are_current(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == _generator()[name], "run: python docs/generate.py"
