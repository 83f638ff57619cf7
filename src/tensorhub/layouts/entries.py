"""What `sources=` says of the tensors that are registered, looked at once: when they are.

Responsible for reading it, and for naming everything that is wrong with it. Not responsible for what a view takes (`views`),
nor for whether it fits its place (`pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from tensorhub import errors
from tensorhub.errors import RegistrationError
from tensorhub.layouts.views import Place, View, parts

Entry: TypeAlias = tuple[tuple[Place, View], ...] | tuple[View, ...]
Sources: TypeAlias = Mapping[str, object] | Callable[[str], object]


def entries_of(names: Iterable[str], sources: Sources | None) -> tuple[dict[str, Entry], list[str]]:
    """The present entries of the tensors of these names, and all their faults. A callable is called once for each name:
    it may be the caller's code.
    """
    found: dict[str, Entry] = {}
    faults: list[str] = []
    entry_of = sources if callable(sources) else (sources or {}).get
    unknown = {} if sources is None or callable(sources) else dict.fromkeys(sources)
    for name in names:
        unknown.pop(name, None)
        given = entry_of(name)
        if given is None:
            continue
        try:
            pairs, views = parts(name, given)
        except RegistrationError as error:
            faults.append(str(error))
        else:
            found[name] = pairs or views
    faults += [f"sources names {errors.shown(name)}, and no tensor of that name is registered" for name in unknown]
    return found, faults


def without_shape(entries: Mapping[str, object]) -> dict[str, str]:
    """The tensors that have a view without a global shape, each with the name of the viewed tensor."""
    found = dict[str, str]()
    for name, entry in entries.items():
        pairs, views = parts(name, entry)
        for view in (*views, *(view for _, view in pairs)):
            if view.shape is None:
                found.setdefault(name, view.name)
    return found


def names_in(sources: Sources | None, tensors: Iterable[str]) -> Iterator[str]:
    """The names of the global tensors that the entries of these tensors speak of. None of the entries is at fault."""
    entry_of = sources if callable(sources) else (sources or {}).get
    for name in tensors:
        if (entry := entry_of(name)) is not None:
            pairs, views = parts(name, entry)
            yield from (view.name for view in (*views, *(view for _, view in pairs)))
