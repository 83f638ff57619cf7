"""Log events with fields, one name per event, through structlog into the standard library's loggers.

A library must not print: until the host program configures `logging`, only warnings are seen (on stderr). Responsible for
that route only; what is shown how is the host's choice (`tensorhub serve` has its own).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import structlog

TALLY_S = 1.0  # between two lines of one event that is counted

PROCESSORS = (
    structlog.stdlib.filter_by_level,
    structlog.processors.format_exc_info,
    structlog.processors.KeyValueRenderer(key_order=["event"]),
)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger `name` of the standard library, taking structlog's events with fields."""
    logger: Any = structlog.wrap_logger(
        logging.getLogger(name),
        processors=PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return cast(structlog.stdlib.BoundLogger, logger)


class Tally:
    """An event that strangers can bring about as often as they like: logged once a second at most, with `times`, how often
    it has happened since it was logged last, and the fields of the newest. Any thread may count.
    """

    def __init__(self, say: Callable[..., object], event: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._event = event
        self._clock = clock
        self._lock = threading.Lock()
        self._times = 0  # since it was logged last
        self._not_before = -math.inf

    def count(self, **fields: object) -> None:
        """It has happened once more."""
        with self._lock:
            self._times += 1
            now, times = self._clock(), self._times
            if now < self._not_before:
                return
            self._times, self._not_before = 0, now + TALLY_S
        self._say(self._event, times=times, **fields)
