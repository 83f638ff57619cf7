"""Events that peers can bring about as often as they like; events as lines of JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tensorhub.logs import JsonLines, Tally, get_logger


def test_what_is_counted_is_said_once_a_second_with_how_often() -> None:
    said: list[dict[str, object]] = []
    now = [0.0]

    def say(event: str, **fields: object) -> None:
        said.append({"event": event, **fields})

    tally = Tally(say, "flooded", lambda: now[0])
    for number in range(1000):
        now[0] = number / 500
        tally.count(who=number)
    assert said == [
        {"event": "flooded", "times": 1, "who": 0},
        {"event": "flooded", "times": 500, "who": 500},
    ]


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, object]]]]:
    """What a logger with a handler of JSON lines has written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("tests.logs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)


def test_a_line_of_json_has_the_time_and_each_field(
    lines: Callable[[], list[dict[str, object]]],
) -> None:
    log = get_logger("tests.logs")
    before = datetime.now(UTC)
    log.info("told", nbytes=3, path=Path("/x"), text='\x1b[31m\n\u202e"')
    log.debug("not told")
    logging.getLogger("tests.logs").warning("plain %s", "text")
    told, plain = lines()
    at = datetime.fromisoformat(str(told.pop("time")))
    assert at.utcoffset() == timedelta(0)
    assert before - timedelta(milliseconds=1) <= at <= datetime.now(UTC)
    about = {"level": "info", "logger": "tests.logs"}
    text = '\x1b[31m\n\u202e"'
    assert told == {**about, "event": "told", "nbytes": 3, "path": "/x", "text": text}
    assert (plain["event"], plain["level"]) == ("plain text", "warning")


def test_an_exception_is_a_field(lines: Callable[[], list[dict[str, object]]]) -> None:
    for log in (get_logger("tests.logs"), logging.getLogger("tests.logs")):
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")
    for line in lines():
        assert (line["event"], line["level"]) == ("failed", "error")
        assert "ValueError: why" in str(line["exception"])


def test_a_host_programs_handler_gets_text(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("tests.logs.text").warning("told", nbytes=3)
    assert caplog.messages == ["event='told' nbytes=3"]
