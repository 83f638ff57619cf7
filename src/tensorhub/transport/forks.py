"""What a forked child gives back: its copies of this library's sockets and locks, which would
outlive their owner.

A child of `os.fork` (a data loader's worker) has a copy of each descriptor, and none of the
library's threads. With a copy of a listening socket, the port would stay taken after `close`. After
a kill of the parent, the kernel would go on to accept connections that no thread serves, and peers
would see no end of theirs. So the child closes its copies at once. The parent's stay as they are. A
child of `subprocess` never has them.

Responsible for closing in children. Not responsible for closing in the process that has opened
them. (Between the call that opens a descriptor and `close_in_children`, a fork in another thread
goes unnoticed.)
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)

_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(opened: T) -> T:
    """Close this socket or file in each child that is forked from now on; returns it."""
    _open.add(opened)
    return opened


def _close_all() -> None:
    for opened in list(_open):
        with contextlib.suppress(OSError):
            opened.close()


os.register_at_fork(after_in_child=_close_all)
