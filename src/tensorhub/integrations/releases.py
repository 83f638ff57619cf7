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


class CallsDiffer(StateError):
    """Found by `check_calls`. The framework need not make these calls, so a user may insist."""


def check_release(
    framework: str, installed: str, tested: Sequence[str], *, probe: Callable[[], object]
) -> None:
    """Return if `installed` is one of the tested releases, each given as "major.minor", or with
    further numbers where these change hooks.

    Another release is accepted with a warning if `probe` returns: it raises unless the installed
    release puts every weight where the adapter puts it, or makes the calls that the adapter takes.
    With TENSORHUB_ACCEPT_UNTESTED=1, other calls are a warning, too. Raises StateError otherwise.
    """
    if is_tested(installed, tested):
        return
    releases = ", ".join([each if each.count(".") > 1 else f"{each}.x" for each in tested])
    text = f"{framework} {installed} is installed, and TensorHub's adapter was made for {releases}"
    differs = None
    try:
        probe()
    except Exception as error:
        differs = f"{type(error).__name__}: {error}"
        can_insist = isinstance(error, CallsDiffer)
        if not can_insist or os.environ.get(ACCEPT_UNTESTED) != "1":
            insist = f", or set {ACCEPT_UNTESTED}=1 to go on with this one" if can_insist else ""
            raise StateError(
                f"{text}. The probe of this release has failed ({differs}): "
                f"install a tested release{insist}"
            ) from error
    log.warning(
        "release_untested",
        framework=framework,
        installed=installed,
        tested=list(tested),
        differs=differs,
    )


def is_tested(installed: str, tested: Sequence[str]) -> bool:
    parts = installed.split(".")
    return any(parts[: len(each.split("."))] == each.split(".") for each in tested)


def check_calls(ours: type, theirs: type) -> None:
    """A probe: raise CallsDiffer unless `ours` takes the calls of each public method of `theirs`, a
    framework's interface.
    """
    for name, method in vars(theirs).items():
        if name.startswith("_") or not inspect.isroutine(method):
            continue
        mine = getattr(ours, name, None)
        if mine is None:
            raise CallsDiffer(f"{theirs.__name__} has a call {name} that the adapter lacks")
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
            raise CallsDiffer(
                f"{theirs.__name__}.{name} has other arguments: the adapter lacks {lacks}, and "
                f"needs {needs}"
            )
