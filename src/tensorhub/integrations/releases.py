"""Which releases of a framework an adapter was made for. Another one may call it otherwise, and
weights be lost silently.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub.errors import StateError


def check_release(framework: str, installed: str, supported: Sequence[str]) -> None:
    """Raise StateError unless `installed` is one of the supported releases, each given as
    "major.minor", or with the third number where that changes hooks.
    """
    parts = installed.split(".")
    if not any(parts[: len(each.split("."))] == each.split(".") for each in supported):
        releases = ", ".join([each if each.count(".") > 1 else f"{each}.x" for each in supported])
        raise StateError(
            f"{framework} {installed} is installed, and TensorHub's adapter was made for "
            f"{releases}: other releases may "
            f"call it in other ways. Install one of these, or a TensorHub that was made for "
            f"{framework} {installed}"
        )
