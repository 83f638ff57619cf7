"""Checks of what callers give to the public API, where a type alone does not say it.

Not responsible for names, numbers and selectors, which are checked wherever they come from (`types`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorhub.errors import InvalidType, InvalidValue, shown
from tensorhub.layouts.entries import Sources
from tensorhub.types import VERSION_MAX, Options, WorkerView, check_name, check_version, invalid

WORKERS_OF_PAGE_MAX = 65_536


def is_list(given: object) -> bool:
    """Whether it is a sequence of things; text and bytes are one thing each."""
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)


def checked_options(options: Options | None) -> Options:
    if not isinstance(options, Options | None):
        raise InvalidType(f"options={shown(options)}: give tensorhub.Options(...), or None")
    return options or Options()


def check_ranks(rank: int, world_size: int) -> None:
    """Raise StateError unless there can be such a rank."""
    strange = [each for each in (rank, world_size) if type(each) is not int]
    if strange or not 0 <= rank < world_size <= 2**20:
        text = f"rank={shown(rank)}, world_size={shown(world_size)}: ranks are integers from 0 to world_size - 1"
        raise invalid(next(iter(strange), rank), int, text)


def checked_sources(sources: Sources | None) -> Sources | None:
    if sources is None or callable(sources) or isinstance(sources, Mapping):
        return sources
    raise InvalidType(f"sources={shown(sources)}: give a mapping of names to views, or a function of a name")


def check_part(model: object, version: object, after: object, limit: object) -> None:
    if model is not None:
        check_name("model", model)
    elif (version, after, limit) != (None, None, None):
        raise InvalidValue("version=, after= and limit= choose a part of one model: give the model, too")
    if version is not None:
        check_version(version)
    if after is not None:
        check_name("worker", after.name if isinstance(after, WorkerView) else after)
    if limit is not None and (
        not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= WORKERS_OF_PAGE_MAX
    ):
        text = f"limit={shown(limit)}: give the number of workers on a page, 1 to {WORKERS_OF_PAGE_MAX}"
        raise invalid(limit, int, text)


def check_latest(latest: object) -> None:
    if not isinstance(latest, int) or isinstance(latest, bool) or not 0 <= latest <= VERSION_MAX:
        raise invalid(latest, int, f"latest={shown(latest)}: give the number of versions to keep, 0 or more")
