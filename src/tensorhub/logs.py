"""Log events with fields, one name per event, through structlog into the standard library's
loggers.

A library must not print: until the host program configures `logging`, only warnings are seen (on
stderr). Responsible for that route only; the host program chooses how events are shown (`tensorhub
serve` has its own way).
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import structlog
from structlog.typing import EventDict

TALLY_S = 1.0  # between two lines of one event that is counted

# between two lines of one warning that repeats: twice as long each time
AGAIN_S, AGAIN_S_MAX = 10.0, 600.0
REMEMBERED = 1024  # warnings that may repeat
_NUMBER = re.compile(r"\d+")  # reasons that differ only in numbers count as equal
IDENTITY = (
    "model",
    "registration",
    "transport",
    "source",
    "coordinator",
    "engine",
    "path",
)  # fields that name the subject of a warning


class Repeats:
    """A warning that was said already is counted, and said again from time to time, with `times`,
    how often it has happened since. Any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[tuple[object, ...], _Said] = {}  # oldest warning first

    def __call__(self, logger: logging.Logger, method: str, fields: EventDict) -> EventDict:
        """A processor of structlog's."""
        if method != "warning" or "times" in fields:
            return fields
        about = [str(fields.get(name)) for name in IDENTITY]
        key = (logger.name, fields["event"], _NUMBER.sub("#", str(fields.get("reason"))), *about)
        with self._lock:
            now, said = self._clock(), self._said.get(key)
            if said is None or now >= said.until + said.pause_s:
                said = _Said(now, AGAIN_S / 2)
            said.times += 1
            if now < said.until:
                raise structlog.DropEvent
            if said.times > 1:
                fields["times"] = said.times
            said.times, said.pause_s = 0, min(2 * said.pause_s, AGAIN_S_MAX)
            said.until = now + said.pause_s
            self._said.pop(key, None)
            self._said[key] = said
            if len(self._said) > REMEMBERED:
                del self._said[next(iter(self._said))]
        return fields

    def forget(self) -> None:
        """What has been said."""
        self._said.clear()


@dataclass(slots=True)
class _Said:
    until: float  # nothing is said before
    pause_s: float
    times: int = 0  # since it was said last


class Said:
    """An event with its fields, as the message of a record of the standard library. Its text is
    `event='worker_lost' reason=...`.
    """

    __slots__ = ("fields",)

    def __init__(self, fields: EventDict) -> None:
        self.fields = fields

    def __str__(self) -> str:
        return str(_AS_TEXT(None, "", dict(self.fields)))


_AS_TEXT = structlog.processors.KeyValueRenderer(key_order=["event"])


def _as_message(_: object, __: str, fields: EventDict) -> tuple[tuple[Said], dict[str, object]]:
    return (Said(fields),), {}


class JsonLines(logging.Formatter):
    """One JSON object a line, ASCII only: "time" (ISO 8601, UTC), "level", "logger", "event" and
    the event's fields. A record of another library has its text as "event".
    """

    def format(self, record: logging.LogRecord) -> str:
        said: object = record.msg
        fields = said.fields if isinstance(said, Said) else {"event": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        return json.dumps({**about, **fields, **about}, default=str)


repeats = Repeats()
PROCESSORS = (
    structlog.stdlib.filter_by_level,
    repeats,
    structlog.processors.format_exc_info,
    _as_message,
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
    """An event that peers can bring about as often as they like: logged once a second at most, with
    `times`, how often it has happened since it was logged last, and the fields of the newest. Any
    thread may count.
    """

    def __init__(
        self, say: Callable[..., object], event: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
