"""Log events with fields, one name per event, through structlog into the standard library's loggers.

A library must not print: until the host program configures `logging`, only warnings are seen (on stderr). Responsible for
that route only; what is shown how is the host's choice (`tensorhub serve` has its own).
"""

from __future__ import annotations

import logging
from typing import Any, cast

import structlog

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
