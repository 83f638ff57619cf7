"""What becomes of a release of a framework that an adapter was not tested with: it may call the
adapter otherwise, and weights be lost silently.

An adapter asks where weights are loaded, not where it is imported: whatever loads no weights works
with any release.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Final

from tensorhub.errors import StateError
from tensorhub.logs import get_logger

log = get_logger(__name__)

ACCEPT_UNTESTED: Final = "TENSORHUB_ACCEPT_UNTESTED"  # an environment variable: "1" accepts


def check_release(
    framework: str,
    installed: str,
    tested: Sequence[str],
    *,
    probe: Callable[[], object] | None = None,
) -> None:
    """Return if `installed` is one of the tested releases, each given as "major.minor", or with
    further numbers where these change hooks.

    Another release is accepted with a warning if `probe` returns: it raises unless the installed
    release puts every weight where the adapter puts it. Without a probe it is accepted, with a
    warning, if the environment has TENSORHUB_ACCEPT_UNTESTED=1. Raises StateError otherwise.
    """
    if is_tested(installed, tested):
        return
    releases = ", ".join([each if each.count(".") > 1 else f"{each}.x" for each in tested])
    text = f"{framework} {installed} is installed, and TensorHub's adapter was made for {releases}"
    if probe is not None:
        try:
            probe()
        except Exception as error:
            raise StateError(
                f"{text}. The probe of this release has failed ({type(error).__name__}: {error}): "
                f"install a tested release"
            ) from error
    elif os.environ.get(ACCEPT_UNTESTED) != "1":
        raise StateError(
            f"{text}: other releases may call it in other ways. Install one of these, or set "
            f"{ACCEPT_UNTESTED}=1 to go on with this one"
        )
    log.warning(
        "release_untested",
        framework=framework,
        installed=installed,
        tested=list(tested),
        probed=probe is not None,
    )


def is_tested(installed: str, tested: Sequence[str]) -> bool:
    parts = installed.split(".")
    return any(parts[: len(each.split("."))] == each.split(".") for each in tested)


def check_calls(ours: type, theirs: type) -> None:
    """A probe: raise StateError unless `ours` takes the calls of each public method of `theirs`, a
    framework's interface.
    """
    for name, method in vars(theirs).items():
        if name.startswith("_") or not inspect.isroutine(method):
            continue
        mine = getattr(ours, name, None)
        if mine is None:
            raise StateError(f"{theirs.__name__} has a call {name} that the adapter lacks")
        known = inspect.signature(mine).parameters.values()
        asked = inspect.signature(getattr(theirs, name)).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known)
        lacks = [] if takes_any else sorted(asked.keys() - {each.name for each in known})
        needs = [
            each.name
            for each in known
            if each.default is each.empty
            and each.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            and each.name not in asked
        ]
        if lacks or needs:
            raise StateError(
                f"{theirs.__name__}.{name} has other arguments: the adapter lacks {lacks}, and "
                f"needs {needs}"
            )
