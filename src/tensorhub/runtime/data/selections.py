"""The selections that a worker's readers have sent to it, decoded once for all its memory and all
its versions.

A reader sends a selection in pieces. UPLOADS_MAX readers may have incomplete uploads. Where there
are more, an upload gives way, and its reader begins again: an upload of a reader with the read-only
token if there is one, of these one of the account with the most uploads, of these the upload that
was idle longest. A complete selection is kept until newer selections need the room.

A few bytes may describe very many parts (strips, cells, loops), which follow a rule. A selection's
cost grows with its parts, so the parts are counted first. There are no more than the memory may
need, and no account (`Lane.account`: a token and an address) has more parts looked at in a while
than its budget. A read-only token has a smaller budget.

Responsible for these bounds, and for checking that the bytes of a hostile reader are a selection.
Not responsible for whether it fits a memory.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub.errors import ProtocolError
from tensorhub.layouts.reading import Selection
from tensorhub.messages import SELECTION_BYTES_MAX
from tensorhub.model.accesses import Refusal
from tensorhub.model.manifest import id_of
from tensorhub.transport.owner import Lane

UPLOADS_MAX = 4  # that are under way at a time
KEPT_BYTES_MAX = 4 * SELECTION_BYTES_MAX  # of encodings
KEPT_PARTS_MAX = 2**22  # each of which takes some 70 bytes at most
KEPT_MAX = 4096
# of an account: the ranks of one host, each of which has its selection looked at twice
BUDGET_PARTS = 2**25
BUDGET_S = 60.0  # in which a budget that is used up is whole again
# the same, for a read-only token; one selection is looked at in any case, however many it says
READ_ONLY_PARTS = 2**20
BUDGETS_MAX = 1024  # accounts whose budgets are not whole


Account = tuple[bytes | None, bool, str]  # see `Lane.account`


@dataclass(slots=True)
class _Upload:
    name: str
    total: int
    blob: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class _Kept:
    """`nbytes`: of its encoding."""

    selection: Selection
    nbytes: int
    parts: int


class _Budgets:
    """The parts that accounts may still have looked at. Not for several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # parts, at which time; the newest at the end
        self._used: dict[Account, tuple[float, float]] = {}

    def spend(self, reader: Lane, parts: int) -> Refusal | None:
        now, most = self._clock(), READ_ONLY_PARTS if reader.is_read_only else BUDGET_PARTS
        used, since = self._used.pop(reader.account, (0.0, now))
        used = max(0.0, used - (now - since) * most / BUDGET_S)
        is_over = used > 0 and used + parts > most
        while len(self._used) >= BUDGETS_MAX:
            del self._used[next(iter(self._used))]
        self._used[reader.account] = used if is_over else used + parts, now
        if not is_over:
            return None
        return Refusal(
            f"readers with this token and address have said selections of {round(used)} parts "
            f"lately, and this one has "
            f"{parts}: more than {most} in {BUDGET_S:.0f} s are not looked at; read again later"
        )


class Selections:
    """For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # one at a time: what is decoded and not kept yet takes memory, too
        self._decoding = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._kept: dict[str, _Kept] = {}  # the most recently used selection at the end
        self._bytes = self._parts = 0  # always the sums of theirs
        self._budgets = _Budgets(clock)
        self._uploads: dict[Lane, _Upload] = {}  # by reader, the one that went on last at the end

    def __repr__(self) -> str:
        return (
            f"<Selections: {len(self._kept)} of {self._bytes} bytes, "
            f"{len(self._uploads)} under way>"
        )

    def find(self, name: str) -> Selection | None:
        with self._lock:
            found = self._kept.pop(name, None)
            if found is None:
                return None
            self._kept[name] = found
            return found.selection

    def spend(self, reader: Lane, name: str) -> Refusal | None:
        """That selection is looked at for this reader once more. A refusal: the reader's budget
        does not allow that.
        """
        with self._lock:
            found = self._kept.get(name)
            return None if found is None else self._budgets.spend(reader, found.parts)

    def upload(
        self, reader: Lane, parts_max: int, name: str, total: int, offset: int, piece: bytes
    ) -> tuple[int, list[str]] | Refusal:
        """Take the next piece from this reader, of a selection of `parts_max` parts at most.
        Returns how many bytes are there, and the names of selections that gave way. A refusal: it
        has too many parts, or the reader has said too many lately. ProtocolError: it is no
        selection, or another one.
        """
        with self._lock:
            begun = self._uploads.pop(reader, None)
            if begun is None or (begun.name, begun.total) != (name, total):
                begun = _Upload(name, total)
            self._uploads[reader] = begun
            if len(self._uploads) > UPLOADS_MAX:
                counts = Counter(each.account for each in self._uploads)

                def gives_way(each: Lane) -> tuple[bool, int]:
                    return each.is_read_only, counts[each.account]

                del self._uploads[max(self._uploads, key=gives_way)]  # of equals the first
                if reader not in self._uploads:
                    return 0, []
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
        parts = Selection.parts_said(blob)
        if parts > parts_max:
            return Refusal(
                f"a selection of {parts} parts is not of this memory, whose bytes nobody lays out "
                f"in so many"
            )
        with self._lock:
            if (refusal := self._budgets.spend(reader, parts)) is not None:
                return refusal
        with self._decoding:
            if self.find(name) is not None:  # another reader has said it meanwhile
                return total, []
            selection = Selection.decode(blob)
            with self._lock:
                return total, self._keep(name, _Kept(selection, total, parts))

    def _keep(self, name: str, new: _Kept) -> list[str]:
        gone: list[str] = []
        while self._kept and (
            len(self._kept) >= KEPT_MAX
            or self._bytes + new.nbytes > KEPT_BYTES_MAX
            or self._parts + new.parts > KEPT_PARTS_MAX
        ):
            oldest = next(iter(self._kept))
            given_up = self._kept.pop(oldest)
            self._bytes -= given_up.nbytes
            self._parts -= given_up.parts
            gone.append(oldest)
        self._kept[name] = new
        self._bytes += new.nbytes
        self._parts += new.parts
        return gone

    def leave(self, reader: Lane) -> None:
        """This reader says nothing more."""
        with self._lock:
            self._uploads.pop(reader, None)
