"""How an annotated type is written and read: one `Form` per type, made once, when the codec is
imported.

Responsible for turning annotations into checks: `Length`, `Range` and `Printable` where they are
given, 64 bits for a plain int, finite floats, and the exact shape of tuples and records. Writing
checks as much as reading. So a mistake shows where it was made, and not as a connection that the
peer closed.

Annotations drive the reading, not the bytes: a form asks the unpacker for the array or the scalar
that must come next. So nothing nests deeper than the messages do, and no array is allocated for a
length that was not checked.

On the wire, a record (a dataclass) is the array of its fields. An absent record (`Held | None`) is
an empty array. A record is written for a version of the protocol, without younger fields (`Since`).
It is read without them, too, and fields that a younger peer has appended are passed over.

Raises `Violation`, which the codec turns into a `ProtocolError`. A type that the wire cannot carry
is a `TypeError` on import.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Union, cast

from msgpack import Unpacker
from msgpack.exceptions import OutOfData, UnpackException

from tensorhub.messages import PROTOCOL_VERSION
from tensorhub.types import Length, Printable, Range, Since

FIELDS_PASSED_OVER_MAX = 64  # of one record, that a younger peer has appended

Check = Callable[[object], Any]  # returns the value, or raises Violation

_INT_LEAST, _INT_MOST = -(2**63), 2**64 - 1  # what MessagePack can say


class Violation(Exception):
    """A value that its annotation does not allow. `where`: the names of the fields, from the
    outermost in.
    """

    def __init__(self, what: str, *where: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where

    def inside(self, name: str) -> Violation:
        """This violation, seen from the record that holds the faulty value in its field `name`."""
        return Violation(self.what, name, *self.where)


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How one type is written (`encode` gives what msgpack packs) and read (`decode` takes an
    unpacker).
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Unpacker], Any]


def brief(value: object) -> str:
    """Some of `value` for an error message; never more than about 60 characters, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        head = repr(value[:24])[:48]
        return head if len(value) <= 24 else f"{head}... ({len(value)} long)"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a {type(value).__name__}"[:48]


def describe(error: Exception) -> str:
    """What an exception of msgpack's says about the bytes."""
    if isinstance(error, OutOfData):
        return "the frame ends before this"
    if isinstance(error, UnicodeDecodeError):
        return "text that is not UTF-8"
    return "malformed, or of a kind that has no place here"


# --------------------------------------------------------------------------------------------------
# scalars


def _check_bool(value: object) -> bool:
    if type(value) is not bool:
        raise Violation(f"{brief(value)} is not a truth value")
    return value


def _check_none(value: object) -> None:
    if value is not None:
        raise Violation(f"{brief(value)} is not None")


def _int_check(bounds: Range | None) -> Check:
    least, most = (bounds.least, bounds.most) if bounds else (_INT_LEAST, _INT_MOST)

    def check(value: object) -> int:
        if type(value) is not int:
            raise Violation(f"{brief(value)} is not a whole number")
        if not least <= value <= most:
            raise Violation(f"{brief(value)} is not from {least} to {most}")
        return value

    return check


def _float_check(bounds: Range | None) -> Check:
    least, most = (bounds.least, bounds.most) if bounds else (-math.inf, math.inf)

    def check(value: object) -> float:
        if type(value) is not float:
            raise Violation(f"{brief(value)} is not a float")
        if not (math.isfinite(value) and least <= value <= most):
            raise Violation(f"{brief(value)} is not a finite number from {least} to {most}")
        return value

    return check


def _str_check(bounds: Length | None, is_printable: bool) -> Check:
    most = _needed(bounds, "str").most

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise Violation(f"{brief(value)} is not a text")
        if len(value) > most:
            raise Violation(f"{brief(value)} has more than {most} characters")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise Violation("text with a lone surrogate, which UTF-8 cannot say") from None
        if is_printable and not value.isprintable():
            raise Violation(f"{brief(value)} has characters that are not printable")
        return value

    return check


def _bytes_check(bounds: Length | None) -> Check:
    most = _needed(bounds, "bytes").most

    def check(value: object) -> bytes:
        if not isinstance(value, bytes):
            raise Violation(f"{brief(value)} is not bytes")
        if len(value) > most:
            raise Violation(f"{len(value)} bytes, more than {most}")
        return value

    return check


def _needed(bounds: Length | None, what: str) -> Length:
    if bounds is None:
        raise TypeError(f"a {what} on the wire needs a Length")
    return bounds


def _scalar_check(kind: Any, extras: tuple[object, ...]) -> tuple[type, Check] | None:
    """The Python type and the check of a scalar annotation; None if it is none."""
    length = next((extra for extra in extras if isinstance(extra, Length)), None)
    bounds = next((extra for extra in extras if isinstance(extra, Range)), None)
    if kind is bool:
        return bool, _check_bool
    if kind is types.NoneType:
        return types.NoneType, _check_none
    if kind is int:
        return int, _int_check(bounds)
    if kind is float:
        return float, _float_check(bounds)
    if kind is str:
        return str, _str_check(length, Printable() in extras)
    if kind is bytes:
        return bytes, _bytes_check(length)
    return None


def _scalar(python_type: type, check: Check) -> Form:
    def decode(unpacker: Unpacker) -> Any:
        return check(unpacker.unpack())

    def encode_float(value: object) -> Any:
        # Python takes an int for a float; the wire does not
        whole = type(value) is int and abs(value) < 2**53
        return check(float(cast(int, value)) if whole else value)

    return Form(encode_float if python_type is float else check, decode)


def _wide(bounds: Range) -> Form:
    """Whole numbers of which some are beyond MessagePack's: those are bytes on the wire,
    big-endian, as few as may be.
    """
    least, most = int(bounds.least), int(bounds.most)

    def check(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Violation(
                f"{brief(value)} is not a whole number of at most {most.bit_length()} bits"
            )
        return value

    def encode(value: object) -> int | bytes:
        number = check(value)
        return (
            number if number <= _INT_MOST else number.to_bytes(-(-number.bit_length() // 8), "big")
        )

    def decode(unpacker: Unpacker) -> int:
        value = unpacker.unpack()
        if type(value) is bytes and 8 < len(value) <= -(-most.bit_length() // 8) and value[0]:
            return check(int.from_bytes(value, "big"))
        return check(value)

    return Form(encode, decode)


def _enum(kind: type[StrEnum]) -> Form:
    members = {member.value: member for member in kind}

    def read(value: object) -> StrEnum:
        member = members.get(value) if isinstance(value, str) else None
        if member is None:
            raise Violation(f"{brief(value)} is none of {', '.join(members)}"[:100])
        return member

    return Form(lambda value: read(value).value, lambda unpacker: read(unpacker.unpack()))


# ---------------------------------------------------------------------------------- unions, tuples,
# records


def _union(members: tuple[Any, ...], version: int) -> Form:
    """`X | None` for a record X, or a choice of scalars that their Python types tell apart."""
    rest = [member for member in members if member is not types.NoneType]
    if len(rest) == 1 and dataclasses.is_dataclass(rest[0]) and len(members) == 2:
        return _record_form(cast(type, rest[0]), version, optional=True)
    checks: dict[type, Check] = {}
    for member in members:
        found = _scalar_check(*_stripped(member))
        if found is None or found[0] in checks:
            raise TypeError(f"the wire cannot tell the members of {members} apart")
        checks[found[0]] = found[1]
    names = " or ".join(kind.__name__ for kind in checks)

    def check(value: object) -> Any:
        chosen = checks.get(str if isinstance(value, str) else type(value))
        if chosen is None:
            raise Violation(f"{brief(value)} is not {names}")
        return chosen(value)

    return Form(check, lambda unpacker: check(unpacker.unpack()))


def _many(item: Form, most: int) -> Form:
    encode_item, decode_item = item.encode, item.decode

    def encode(value: object) -> list[Any]:
        if not isinstance(value, tuple):
            raise Violation(f"{brief(value)} is not a tuple")
        if len(value) > most:
            raise Violation(f"{len(value)} items, more than {most}")
        return [encode_item(one) for one in value]

    def decode(unpacker: Unpacker) -> tuple[Any, ...]:
        count = unpacker.read_array_header()
        if count > most:
            raise Violation(f"{count} items, more than {most}")
        return tuple([decode_item(unpacker) for _ in range(count)])

    return Form(encode, decode)


def _fixed(items: tuple[Form, ...]) -> Form:
    size = len(items)
    encoders, decoders = [item.encode for item in items], [item.decode for item in items]

    def encode(value: object) -> list[Any]:
        if not isinstance(value, tuple) or len(value) != size:
            raise Violation(f"{brief(value)} is not a tuple of {size}")
        return [encode_item(one) for encode_item, one in zip(encoders, value, strict=True)]

    def decode(unpacker: Unpacker) -> tuple[Any, ...]:
        count = unpacker.read_array_header()
        if count != size:
            raise Violation(f"{count} items, not {size}")
        return tuple([decode_item(unpacker) for decode_item in decoders])

    return Form(encode, decode)


class Record:
    """How the fields of one dataclass are written and read, without the array around them, as they
    are in one version of the protocol.
    """

    __slots__ = ("_fields", "_size_least", "kind", "size")

    def __init__(self, kind: type, version: int) -> None:
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = dataclasses.fields(kind)
        since = [
            next((each.version for each in _stripped(hints[f.name])[1] if type(each) is Since), 0)
            for f in fields
        ]
        if since != sorted(since) or any(
            young and field.default is dataclasses.MISSING
            for young, field in zip(since, fields, strict=True)
        ):
            raise TypeError(f"{kind.__name__}: a field with Since comes last, and has a default")
        names = [f.name for f, young in zip(fields, since, strict=True) if young <= version]
        self.kind = kind
        self.size = len(names)
        self._size_least = since.count(0)
        self._fields = [
            (name, form.encode, form.decode)
            for name in names
            for form in (form_of(hints[name], version),)
        ]

    def encode(self, value: Any) -> list[Any]:
        """The fields of `value`, as msgpack packs them."""
        if type(value) is not self.kind:
            raise Violation(f"{brief(value)} is not a {self.kind.__name__}")
        packed = []
        for name, encode, _ in self._fields:
            try:
                packed.append(encode(getattr(value, name)))
            except Violation as error:
                raise error.inside(name) from None
        return packed

    def decode(self, unpacker: Unpacker, count: int) -> Any:
        """Read so many fields, in order, and make the value."""
        extra = count - self.size
        if count < self._size_least or extra > FIELDS_PASSED_OVER_MAX:
            raise Violation(f"{count} fields, not {self.size} as a {self.kind.__name__} has")
        values = []
        for name, _, decode in self._fields if extra >= 0 else self._fields[:count]:
            try:
                values.append(decode(unpacker))
            except Violation as error:
                raise error.inside(name) from None
            except (ValueError, UnpackException) as error:
                raise Violation(describe(error), name) from error
        try:
            for _ in range(extra):
                unpacker.skip()
        except (ValueError, UnpackException) as error:
            raise Violation(describe(error), "a field of a younger release") from error
        return self.kind(*values)


def _record_form(kind: type, version: int, *, optional: bool) -> Form:
    record = record_of(kind, version)
    if not record.size:
        raise TypeError(
            f"{kind.__name__} has no fields; the wire keeps the empty array for an absent record"
        )

    def encode(value: object) -> list[Any]:
        return [] if optional and value is None else record.encode(value)

    def decode(unpacker: Unpacker) -> Any:
        count = unpacker.read_array_header()
        if count == 0 and optional:
            return None
        return record.decode(unpacker, count)

    return Form(encode, decode)


@functools.cache
def record_of(kind: type, version: int = PROTOCOL_VERSION) -> Record:
    """The `Record` of a dataclass; TypeError if the wire cannot carry one of its fields."""
    return Record(kind, version)


def _stripped(annotation: Any) -> tuple[Any, tuple[object, ...]]:
    """An annotation without its NewType and Annotated, and what Annotated added."""
    extras: tuple[object, ...] = ()
    while True:
        if typing.get_origin(annotation) is Annotated:
            annotation, extras = annotation.__origin__, extras + annotation.__metadata__
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation, extras


def form_of(annotation: Any, version: int = PROTOCOL_VERSION) -> Form:
    """How a field with this annotation is written and read; TypeError if the wire cannot carry
    it.
    """
    kind, extras = _stripped(annotation)
    bounds = next((extra for extra in extras if isinstance(extra, Range)), None)
    if kind is int and bounds is not None and bounds.most > _INT_MOST:
        return _wide(bounds)
    scalar = _scalar_check(kind, extras)
    if scalar is not None:
        return _scalar(*scalar)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union or origin is types.UnionType:
        return _union(arguments, version)
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        length = next((extra for extra in extras if isinstance(extra, Length)), None)
        return _many(form_of(arguments[0], version), _needed(length, "tuple").most)
    if origin is tuple and arguments:
        return _fixed(tuple(form_of(argument, version) for argument in arguments))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record_form(kind, version, optional=False)
    raise TypeError(f"the wire cannot carry {annotation}")
