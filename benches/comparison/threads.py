"""Bare copies by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Have so many threads, the caller's one of them, do their parts (0, 1, ...), then raise the
    first failure, if any.
    """
    failures: list[BaseException] = []

    def guarded(part: int) -> None:
        try:
            work(part)
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=guarded, args=(part,)) for part in range(1, count)]
    for other in others:
        other.start()
    guarded(0)
    for other in others:
        other.join()
    if failures:
        raise failures[0]
