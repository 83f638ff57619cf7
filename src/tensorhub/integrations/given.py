"""Checks of what callers give to several adapters, where a type alone does not say it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tensorhub.api.arguments import checked_options, is_list
from tensorhub.errors import InvalidType, shown
from tensorhub.types import Options, VersionInfo, as_timeout_s


def texts(what: str, given: object, example: str) -> tuple[str, ...]:
    """A sequence of names, patterns or URLs. InvalidType: one text alone, which would be taken for
    its letters, or something else.
    """
    if is_list(given) and all(isinstance(each, str) for each in given):  # type: ignore[attr-defined]
        return tuple(given)  # type: ignore[arg-type]
    raise InvalidType(f'{what}={shown(given)}: give a list, as ["{example}"]')


def bounded(options: Options | None, timeout_s: float) -> Options:
    """These options, with which `connect` waits for a coordinator no longer than an adapter's call
    may take.
    """
    options, timeout_s = checked_options(options), as_timeout_s(timeout_s, 0.0, "timeout_s")
    return replace(options, coordinator_wait_s=min(options.coordinator_wait_s, timeout_s))


def wrapped(published: Iterable[str], wanted: Iterable[str]) -> str:
    """What to say of names that do not fit where they are those of a module that wraps the model;
    else nothing. `wanted`: the names of all parameters, also of those that are published.
    """
    outer = {name.partition(".")[0] if "." in name else "" for name in published}
    if len(outer) != 1 or "" in outer or any(name.startswith(f"{min(outer)}.") for name in wanted):
        return ""
    prefix = f"{min(outer)}."
    return (
        f"; all published names begin with {prefix!r}, and none of the engine's does: publish the "
        f"module within"
    )


def check_info(given: object) -> None:
    """InvalidType: it is no VersionInfo. A number alone does not say of which content it is."""
    if not isinstance(given, VersionInfo):
        raise InvalidType(
            f"version {shown(given)}: give what publish has returned, or hub.wait_for(model, "
            f"at_least=...), a VersionInfo"
        )
