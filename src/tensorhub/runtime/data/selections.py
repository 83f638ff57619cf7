"""The selections that a worker's readers have said to it, decoded once for all its memory and all its versions.

A reader says a selection in pieces, of which as many are kept as UPLOADS_MAX readers may have begun; the upload that was
begun longest ago gives way, and its reader begins again. What is whole is kept until others need the room.

Responsible for the bounds, and for what a hostile reader says being a selection at all. Not responsible for whether it fits
a memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tensorhub.errors import ProtocolError
from tensorhub.layouts.reading import STRIPS_MAX, Selection
from tensorhub.manifest import id_of
from tensorhub.messages import SELECTION_BYTES_MAX

UPLOADS_MAX = 4  # that are under way at a time
KEPT_BYTES_MAX = 4 * SELECTION_BYTES_MAX  # of encodings; decoded they take several times as much
KEPT_STRIPS_MAX = 4 * STRIPS_MAX  # and loops: few bytes of an encoding may say very many, each of which takes some 200
KEPT_MAX = 4096


@dataclass(slots=True)
class _Upload:
    name: str
    total: int
    blob: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class _Kept:
    """`nbytes`: of its encoding. `strips`: with their loops."""

    selection: Selection
    nbytes: int
    strips: int


class Selections:
    """For any thread."""

    def __init__(self) -> None:
        self._decoding = threading.Lock()  # one at a time: what is decoded and not kept yet takes memory, too
        self._lock = threading.Lock()  # guards what follows
        self._kept: dict[str, _Kept] = {}  # the one used last at the end
        self._bytes = self._strips = 0  # always the sums of theirs
        self._uploads: dict[object, _Upload] = {}  # by reader, the newest at the end

    def __repr__(self) -> str:
        return f"<Selections: {len(self._kept)} of {self._bytes} bytes, {len(self._uploads)} under way>"

    def find(self, name: str) -> Selection | None:
        with self._lock:
            found = self._kept.pop(name, None)
            if found is None:
                return None
            self._kept[name] = found
            return found.selection

    def upload(self, reader: object, name: str, total: int, offset: int, piece: bytes) -> tuple[int, list[str]]:
        """Take the next piece from this reader. Returns how many bytes are there, and the names of selections that gave way.
        ProtocolError: it is no selection, or another one.
        """
        with self._lock:
            begun = self._uploads.get(reader)
            if begun is None or (begun.name, begun.total) != (name, total):
                self._uploads.pop(reader, None)
                while len(self._uploads) >= UPLOADS_MAX:
                    del self._uploads[next(iter(self._uploads))]
                begun = self._uploads[reader] = _Upload(name, total)
            if offset != len(begun.blob):
                return len(begun.blob), []
            if offset + len(piece) > total:
                raise ProtocolError(f"a selection of {total} bytes has more of them")
            begun.blob += piece
            if len(begun.blob) < total:
                return len(begun.blob), []
            del self._uploads[reader]
        blob = bytes(begun.blob)
        if id_of(blob) != name:
            raise ProtocolError("a selection does not have its name")
        with self._decoding:
            if self.find(name) is not None:  # another reader has said it meanwhile
                return total, []
            selection = Selection.decode(blob)
            with self._lock:
                return total, self._keep(name, _Kept(selection, total, _strips_and_loops(selection)))

    def _keep(self, name: str, new: _Kept) -> list[str]:
        gone: list[str] = []
        while self._kept and (
            len(self._kept) >= KEPT_MAX
            or self._bytes + new.nbytes > KEPT_BYTES_MAX
            or self._strips + new.strips > KEPT_STRIPS_MAX
        ):
            oldest = next(iter(self._kept))
            given_up = self._kept.pop(oldest)
            self._bytes -= given_up.nbytes
            self._strips -= given_up.strips
            gone.append(oldest)
        self._kept[name] = new
        self._bytes += new.nbytes
        self._strips += new.strips
        return gone

    def leave(self, reader: object) -> None:
        """This reader says nothing more."""
        with self._lock:
            self._uploads.pop(reader, None)


def _strips_and_loops(selection: Selection) -> int:
    return sum([1 + len(strip.loops) for chunk in selection.chunks for strip in chunk])
