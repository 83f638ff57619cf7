"""Hypothesis strategies for messages, made from the same annotations that the codec is made
from.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from enum import StrEnum
from typing import Annotated, Any, Union

from hypothesis import strategies as st

from tensorhub import messages
from tensorhub.types import Length, Printable, Range

MESSAGES: tuple[type, ...] = typing.get_args(messages.Message)


def _scalar(
    kind: Any, length: int, bounds: Range | None, is_printable: bool
) -> st.SearchStrategy[Any] | None:
    if kind is bool:
        return st.booleans()
    if kind is types.NoneType:
        return st.none()
    if kind is int:
        least, most = (bounds.least, bounds.most) if bounds else (-(2**63), 2**64 - 1)
        return st.integers(int(least), int(most)) | st.sampled_from([int(least), int(most)])
    if kind is float:
        assert bounds is not None
        return st.floats(bounds.least, bounds.most)
    if kind is str:
        printable = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
        return st.text(
            printable if is_printable else st.characters(exclude_categories=["Cs"]),
            max_size=min(length, 20),
        )
    if kind is bytes:
        return st.binary(max_size=min(length, 40))
    return None


@functools.cache
def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that `annotation` allows; long ones are not tried here."""
    extras: tuple[Any, ...] = ()
    if typing.get_origin(annotation) is Annotated:
        annotation, extras = annotation.__origin__, annotation.__metadata__
    length = next((extra.most for extra in extras if isinstance(extra, Length)), 0)
    bounds = next((extra for extra in extras if isinstance(extra, Range)), None)
    scalar = _scalar(annotation, length, bounds, Printable() in extras)
    if scalar is not None:
        return scalar
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is tuple and arguments[-1] is ...:
        return st.lists(values(arguments[0]), max_size=min(length, 3)).map(tuple)
    if origin is tuple:
        return st.tuples(*[values(argument) for argument in arguments])
    if issubclass(annotation, StrEnum):
        return st.sampled_from(annotation)
    hints = typing.get_type_hints(annotation, include_extras=True)
    return st.builds(
        annotation,
        **{field.name: values(hints[field.name]) for field in dataclasses.fields(annotation)},
    )


def any_message() -> st.SearchStrategy[messages.Message]:
    """A message of any class."""
    return st.one_of([values(kind) for kind in MESSAGES])
