"""Reads untrusted JSON piece by piece, so that the cost of a hostile text is bounded by its
contents.

`json.loads` makes objects of a whole text before a caller can look at it: `"":{},` costs 26 times
its bytes. Here a caller takes one name and one value at a time, and stops at the first fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

# Possessive: the matcher never backtracks, so the time for a text is linear in its length.
_STRING: Final = re.compile(rb'[ \t\n\r]*+"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"')
_SPACE: Final = re.compile(rb"[ \t\n\r]*+")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            # where a dict would silently keep the last
            raise ValueError(f"it says {name[:64]!r} twice")
        found[name] = value
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


class Pieces:
    """A place in a JSON text. Whatever is not JSON, or is there twice, is a ValueError that begins
    with `what`.
    """

    def __init__(self, text: bytes, what: str) -> None:
        self._text = text
        self._what = what
        self._at = 0

    def next_is(self, sign: bytes) -> bool:
        """Whether this comes next, which stays where it is."""
        self._at = self._end_of_space()
        return self._text.startswith(sign, self._at)

    def members(self) -> Iterator[str]:
        """The names in the object that comes next. The caller takes each one's value before he asks
        for the next name.
        """
        self._take(b"{")
        seen = set[str]()
        while seen or not self.next_is(b"}"):
            name = self.string()
            if name in seen:
                raise ValueError(f"{self._what} says {name[:64]!r} twice")
            seen.add(name)
            self._take(b":")
            yield name
            if self.next_is(b"}"):
                break
            self._take(b",")
        self._take(b"}")

    def string(self) -> str:
        """The text that comes next."""
        match = _STRING.match(self._text, self._at)
        if match is None:
            raise self._fault("there is no text where one belongs")
        self._at = match.end()
        try:
            text = match[1].decode()
            return text if "\\" not in text else str(json.loads(f'"{text}"'))
        except ValueError as error:
            raise self._fault(str(error)) from error

    def value(self, bytes_max: int) -> Any:
        """The value that comes next, which has so many bytes at most."""
        self._at = self._end_of_space()
        # it may end within a character
        text = self._text[self._at : self._at + bytes_max].decode(errors="surrogateescape")
        try:
            value, end = _DECODER.raw_decode(text)
            self._at += end if text.isascii() else len(text[:end].encode())
        except (ValueError, RecursionError) as error:
            raise self._fault(str(error) or "it is nested too deeply") from error
        return value

    def end(self) -> None:
        """Nothing but space is left."""
        if self._end_of_space() != len(self._text):
            raise self._fault("something follows its end")

    def _end_of_space(self) -> int:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        return match.end()

    def _take(self, sign: bytes) -> None:
        if not self.next_is(sign):
            raise self._fault(f"there is no {sign.decode()} where one belongs")
        self._at += len(sign)

    def _fault(self, why: str) -> ValueError:
        return ValueError(
            f"{self._what} is not JSON, or not as it has to be ({why[:200]}, at byte {self._at})"
        )
