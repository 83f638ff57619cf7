"""Which registrations of this process share memory, also of several hubs: a fill of one must not
change another.

Memory may be registered more than once, as the trunk that two models share, and published under
both. But a fill writes: it would change bytes that another registration has promised, or is
filling. So a fill, or a `mutate`, is refused while another registration of these bytes holds a
version, and a publish while another registration is filled. (Other writes of the caller are found
as ever, R15.)

Not responsible for tied tensors of one registration, for tensors with padded rows (their padding
may be of other tensors), nor for other processes.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tensorhub.errors import StateError
from tensorhub.model.manifest import TensorDescription

_lock = threading.Lock()  # guards what follows, and the counts of all claims
_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _forget() -> None:
    """A forked child has none of the hubs of its parent."""
    _claims.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget)


class Claim:
    """One registration's memory. It counts as long as something refers to it.

    `title`: the registration's, for errors. `held`: which version it holds or may hold, as a text;
    empty: none.
    """

    def __init__(
        self, title: str, tensors: Iterable[TensorDescription], held: Callable[[], str]
    ) -> None:
        self._title = title
        self._held = held
        places = {
            (each.address, each.address + each.nbytes): each.name
            for each in tensors
            if each.nbytes and not each.strides
        }
        self._spans = sorted(places.items())
        self._starts = [start for (start, _), _ in self._spans]
        self._fills = self._publishes = 0  # that run now
        with _lock:
            # With the names of two tensors that share bytes, its own first.
            self._sharing = [
                (weakref.ref(each), both)
                for each in _claims
                if (both := self._shared(each)) is not None
            ]
            for other, (mine, theirs) in self._sharing:
                if (there := other()) is not None:
                    there._sharing.append((weakref.ref(self), (theirs, mine)))
            _claims.add(self)

    def _shared(self, other: Claim) -> tuple[str, str] | None:
        """The names of a tensor of each claim that share bytes. (Tensors of one claim are equal or
        apart.)
        """
        if not self._spans or not other._spans:
            return None
        if self._spans[-1][0][1] <= other._starts[0] or other._spans[-1][0][1] <= self._starts[0]:
            return None
        if len(self._spans) > len(other._spans):
            both = other._shared(self)
            return None if both is None else both[::-1]
        for (start, end), name in self._spans:
            last = bisect_right(other._starts, end - 1) - 1
            if last >= 0 and other._spans[last][0][1] > start:
                return name, other._spans[last][1]
        return None

    def check_write(self, what: str = "a fill") -> None:
        """StateError: another registration of this memory holds a version, or is filled or
        published now. `what`: what is to write, for the error.
        """
        with _lock:
            self._check_write(what)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Within the block its memory is written. StateError, as of `check_write`."""
        with _lock:
            self._check_write("a fill")
            self._fills += 1
        try:
            yield
        finally:
            with _lock:
                self._fills -= 1

    def _check_write(self, call: str) -> None:
        for other, both in self._others():
            if what := other._held() or other._running:
                raise StateError(
                    f"{self._same(other, both)}, and that registration {what}: {call} of this one "
                    f"would overwrite it. "
                    "Unpublish or close that one first, or register a copy here. (An engine that "
                    "runs on the trainer's own "
                    "tensors has each version as it is made, and needs no registration.)"
                )

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Within the block its memory is published. StateError: another registration of it is being
        filled.
        """
        with _lock:
            for other, both in self._others():
                if other._fills:
                    raise StateError(
                        f"{self._same(other, both)}, and that registration is being filled: wait "
                        f"for its end"
                    )
            self._publishes += 1
        try:
            yield
        finally:
            with _lock:
                self._publishes -= 1

    @property
    def _running(self) -> str:
        return "is being published" if self._publishes else "is being filled" if self._fills else ""

    def _others(self) -> Iterator[tuple[Claim, tuple[str, str]]]:
        return ((there, both) for each, both in self._sharing if (there := each()) is not None)

    def _same(self, other: Claim, both: tuple[str, str]) -> str:
        return (
            f"tensor {both[0]!r} of {self._title} shares memory with {both[1]!r} of {other._title}"
        )


NO_CLAIM = Claim("", (), str)
"""On what is nobody else's."""
