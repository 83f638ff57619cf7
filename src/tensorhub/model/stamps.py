"""Stamps: which content was in a rank's memory when something was made with it.

Responsible for the value and its text. Not responsible for what is in a memory
(`worker.member_memory`), nor for what is known of a stamp's content (`api.stamping`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import quote, unquote

from tensorhub.errors import InvalidType, InvalidValue, shown
from tensorhub.types import VERSION_MAX, check_name

STAMP_CHARS_MAX: Final = 8192  # of the text: each character of a model's name may take twelve
_FORM: Final = re.compile(
    r"(?P<model>[^:]+):(?P<lineage>0|[1-9]\d{0,18}):(?P<version>0|[1-9]\d{0,18})"
    r":(?P<content>[^:]+):(?P<root>[0-9a-f]{64}|)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which content was in a rank's memory. Made by `Weights.stamp`; `check_stamp` verifies it.

    `content_id` names the bytes for all time: two publications never share one, also of one
    number. `root`: 32 bytes, the BLAKE2b hash of the digests with which this rank has verified its
    shard. Empty where it has verified none: the rank has published these bytes itself, reads them
    in another layout than the published one, or they have no digests.

    `str(stamp)` is text of ASCII characters without spaces, commas, semicolons and quotes, for an
    HTTP header or a sample's metadata; `Stamp.parse` is its inverse.
    """

    model: str
    lineage: int  # each rollback begins the next one
    version: int
    content_id: str
    root: bytes

    def __str__(self) -> str:
        model, content_id = (quote(each, safe="") for each in (self.model, self.content_id))
        return f"{model}:{self.lineage}:{self.version}:{content_id}:{self.root.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The stamp of which `text` is the `str`. InvalidValue or InvalidType: it is none's."""
        given: object = text
        if not isinstance(given, str):
            raise InvalidType(f"{shown(given)} is no stamp: give the text that str(stamp) is")
        found = _FORM.fullmatch(given) if len(given) <= STAMP_CHARS_MAX else None
        if found is not None:
            try:
                model = check_name("model", unquote(found["model"], errors="strict"))
                content_id = check_name("content", unquote(found["content"], errors="strict"))
            except (UnicodeDecodeError, InvalidValue):
                pass
            else:
                lineage, version = int(found["lineage"]), int(found["version"])
                root = bytes.fromhex(found["root"])
                stamp = cls(model, lineage, version, content_id, root)
                bounded = max(lineage, version) <= VERSION_MAX and len(content_id) <= 64
                if bounded and str(stamp) == given:
                    return stamp
        raise InvalidValue(
            f"{shown(given)} is no stamp: it is to be MODEL:LINEAGE:VERSION:CONTENT:ROOT, as "
            f"str(stamp) has written it"
        )
