"""Has the processes that a test starts, and those that they start, record what their callers see.

The environment that `recorded` makes puts this folder into the path of each Python process, which
then imports `sitecustomize` when it starts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorhub.testing.history import FOLDER_VARIABLE

HERE = str(Path(__file__).parent)


def recorded(folder: Path) -> dict[str, str]:
    """The variables for processes that record into that folder."""
    paths = [HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER_VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def record_children(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """All processes that this one starts from now on, those of benches too: they have its path."""
    for name, value in recorded(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(HERE)
