"""Checks of what callers give to the public API, where a type alone does not say it.

Not responsible for names, numbers and selectors, which are checked wherever they come from
(`types`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorhub.errors import InvalidType, InvalidValue, shown
from tensorhub.layouts.views import Sources
from tensorhub.types import (
    VERSION_MAX,
    Options,
    WorkerView,
    as_integer,
    check_name,
    check_version,
    invalid,
)

RANKS_MAX = 2**20
WORKERS_OF_PAGE_MAX = 65_536


def is_list(given: object) -> bool:
    """Whether it is a sequence of things; text and bytes are one thing each."""
    return isinstance(given, Sequence) and not isinstance(
        given, str | bytes | bytearray | memoryview
    )


def checked_options(options: Options | None) -> Options:
    if not isinstance(options, Options | None):
        raise InvalidType(f"options={shown(options)}: give tensorhub.Options(...), or None")
    return options or Options()


def check_ranks(rank: object, world_size: object) -> tuple[int, int]:
    """Both as ints. StateError: there can be no such rank."""
    number, size = as_integer(rank), as_integer(world_size)
    if number is None or size is None or not 0 <= number < size <= RANKS_MAX:
        text = (
            f"rank={shown(rank)}, world_size={shown(world_size)}: ranks are integers from 0 to "
            f"world_size - 1"
        )
        raise invalid(world_size if number is not None and size is None else rank, int, text)
    return number, size


def check_rank(rank: object) -> int:
    """A version's rank as an int; the world size is not known here. StateError: no version can have
    this rank.
    """
    number = as_integer(rank)
    if number is None or not 0 <= number < RANKS_MAX:
        text = (
            f"rank={shown(rank)}: ranks are integers from 0 to world_size - 1; None is the "
            f"whole model"
        )
        raise invalid(rank, int, text)
    return number


def checked_sources(sources: Sources | None) -> Sources | None:
    if sources is None or callable(sources) or isinstance(sources, Mapping):
        return sources
    raise InvalidType(
        f"sources={shown(sources)}: give a mapping of names to views, or a function of a name"
    )


def check_part(
    model: object, version: object, after: object, limit: object
) -> tuple[int | None, int | None]:
    """The version, if one is chosen, and the most workers of the answer (None: all)."""
    if model is not None:
        check_name("model", model)
    elif (version, after) != (None, None) or limit not in (None, 0):
        raise InvalidValue(
            "version=, after= and limit= choose a part of one model: give the model, too"
        )
    chosen = None if version is None else check_version(version)
    if after is not None:
        check_name("worker", after.name if isinstance(after, WorkerView) else after)
    most = as_integer(limit)
    if limit is not None and (most is None or not 0 <= most <= WORKERS_OF_PAGE_MAX):
        text = (
            f"limit={shown(limit)}: give the number of workers on a page, 0 (counts only) to "
            f"{WORKERS_OF_PAGE_MAX}"
        )
        raise invalid(limit, int, text)
    return chosen, most


def check_event(number: object) -> int:
    """The number of an event, or 0: before the first one."""
    after = as_integer(number)
    if after is None or not 0 <= after < 2**64:
        raise invalid(number, int, f"after={shown(number)}: give an event, its number, or None")
    return after


def check_latest(latest: object) -> int:
    number = as_integer(latest)
    if number is None or not 0 <= number <= VERSION_MAX:
        raise invalid(
            latest, int, f"latest={shown(latest)}: give the number of versions to keep, 0 or more"
        )
    return number
