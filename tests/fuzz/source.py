"""Values out of bytes: how a fuzzer's input becomes messages, choices and numbers.

The same bytes give the same values, whoever chose them: Hypothesis, libFuzzer or a file of the
corpus. Each draw takes few bytes, so that a mutation changes little of what follows; past the end
everything is its least.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar, Union

from tensorhub.types import Length, Printable, Range, printable

T = TypeVar("T")

ITEMS_MAX = 4  # of a list that is drawn
TEXTS = ("", "a", "latest", "é\U0001f600", "\x00", "../x", "/", "x" * 64, "tcp://127.0.0.1:1")


class Source:
    """Draws values from bytes, from the first on."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether there is anything left."""
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        """The next bytes; fewer at the end."""
        taken = self._data[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))

    def byte(self) -> int:
        return self._data[self._at - 1] if self.take(1) else 0

    def flag(self) -> bool:
        return self.byte() & 1 == 1

    def below(self, count: int) -> int:
        """0 to count - 1."""
        return (self.byte() if count <= 256 else int.from_bytes(self.take(4), "big")) % count

    def choice(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def blob(self, most: int) -> bytes:
        """A few bytes, with their number before them."""
        return self.take(min(self.byte(), most))

    def number(self, least: int, most: int) -> int:
        """One of the extremes, near the least, or anything."""
        kind = self.byte()
        if kind >= 250:
            return (
                least,
                most,
                max(least, most - 1),
                min(most, max(least, 2**32)),
                min(most, max(least, 2**63)),
                most // 2,
            )[kind - 250]
        if kind >= 240:
            return least + int.from_bytes(self.take(8), "big") % (most - least + 1)
        return min(most, max(least, 0) + kind)

    def text(self, most: int) -> str:
        kind = self.byte()
        if kind < len(TEXTS):
            return TEXTS[kind][:most]
        return self.blob(min(most, 40)).decode("utf-8", "replace")

    def value(
        self, annotation: Any, pools: Mapping[str, Sequence[Any]] | None = None, name: str = ""
    ) -> Any:
        """What that annotation allows. `pools`: what a field of that name mostly is."""
        return drawer(annotation)(self, pools or {}, name)


Drawer = Callable[[Source, Mapping[str, Sequence[Any]], str], Any]


@functools.cache
def drawer(annotation: Any) -> Drawer:
    """What draws values of that annotation; a field's pool comes first, if it has one."""
    inner, kind = _drawer(annotation), _kind(annotation)

    def draw(source: Source, pools: Mapping[str, Sequence[Any]], name: str) -> Any:
        pool = pools.get(name)
        if pool and isinstance(pool[0], kind):  # fields of different kinds may have one name
            index = source.byte()
            if index < 240:
                return pool[index % len(pool)]
        return inner(source, pools, name)

    return draw


def _kind(annotation: Any) -> type:
    """What values of it are, if that is one class."""
    if typing.get_origin(annotation) is Annotated:
        return _kind(annotation.__origin__)
    return annotation if isinstance(annotation, type) else object


def _drawer(annotation: Any) -> Drawer:
    extras: tuple[Any, ...] = ()
    if typing.get_origin(annotation) is Annotated:
        annotation, extras = annotation.__origin__, annotation.__metadata__
    most = next((extra.most for extra in extras if isinstance(extra, Length)), 0)
    bounds = next((extra for extra in extras if isinstance(extra, Range)), None)
    is_printable = Printable() in extras
    least, top = (int(bounds.least), int(bounds.most)) if bounds else (-(2**63), 2**64 - 1)
    scalars: dict[Any, Drawer] = {
        bool: lambda source, pools, name: source.flag(),
        types.NoneType: lambda source, pools, name: None,
        int: lambda source, pools, name: source.number(least, top),
        float: lambda source, pools, name: (0.0, 0.5, 60.0, float(top))[source.below(4)],
        str: lambda source, pools, name: (
            printable(source.text(most)).replace("\n", " ")[:most]
            if is_printable
            else source.text(most)
        ),
        bytes: lambda source, pools, name: source.blob(most),
    }
    if annotation in scalars:
        return scalars[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return lambda source, pools, name: drawer(source.choice(arguments))(source, pools, "")
    if origin is tuple and arguments[-1] is ...:
        item = drawer(arguments[0])
        return lambda source, pools, name: tuple(
            [item(source, pools, "") for _ in range(source.below(min(most, ITEMS_MAX) + 1))]
        )
    if origin is tuple:
        items = [drawer(argument) for argument in arguments]
        return lambda source, pools, name: tuple([item(source, pools, "") for item in items])
    if issubclass(annotation, StrEnum):
        members = list(annotation)
        return lambda source, pools, name: source.choice(members)
    hints = typing.get_type_hints(annotation, include_extras=True)
    fields = [(field.name, drawer(hints[field.name])) for field in dataclasses.fields(annotation)]
    return lambda source, pools, name: annotation(
        **{field: draw(source, pools, field) for field, draw in fields}
    )
