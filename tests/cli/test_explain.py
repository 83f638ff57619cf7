"""`tensorhub explain`: its table, and what it refuses."""

import io

import pytest
from rich.console import Console, Group

from tensorhub.cli.explain import sheets
from tensorhub.observed import Explanation, Part
from tensorhub.types import OpKey
from tests.cli.processes import run_here

HOSTILE = "a\x1b[2J\x9b31m\rb\u202e"
FOUND = Explanation(
    "actor",
    7,
    "rollout",
    "update",
    OpKey("actor", "rollout", 1, 2),
    1.7e9,
    2.0,
    "1.4 of 2 s: the link from trainer-0 to rollout-7, 210 Mbit/s",
    (
        Part("before_write", 0.5, "rollout-7"),
        Part("link", 1.4, "rollout-7", "trainer-0", "210 Mbit/s"),
        Part("other", 0.1),
    ),
    unsure_s=0.002,
    help=("with a seed in paris: 0.3 s",),
)


def shown(found: Explanation, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(Group(*(sheet.table() for sheet in sheets(found))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_the_sentence_is_first_and_the_parts_follow_in_their_order() -> None:
    assert shown(FOUND) == (
        "1.4 of 2 s: the link from trainer-0 to rollout-7, 210 Mbit/s\n"
        "update of 'actor' to version 7 by rollout\n"
        "seconds  share  part          worker                  figures\n"
        "0.500    25%    before_write  rollout-7\n"
        "1.400    70%    link          rollout-7 <- trainer-0  210 Mbit/s\n"
        "0.100    5%     other\n"
        "between machines, parts may be off by 0.002 s\n"
        "with a seed in paris: 0.3 s"
    )


@pytest.mark.parametrize("width", [80, 40])
def test_names_from_the_network_are_text_and_no_line_is_too_long(width: int) -> None:
    parts = (Part(HOSTILE, 1.0, f"[bold]{HOSTILE}", HOSTILE * 20, HOSTILE),)
    found = Explanation(
        HOSTILE, 1, HOSTILE, HOSTILE, FOUND.key, 0.0, 0.0, HOSTILE, parts, help=(HOSTILE,)
    )
    text = shown(found, width)
    assert "[bold]" in text
    assert text.replace("\n", "").isprintable()
    assert all(len(line) <= width for line in text.splitlines())


def test_what_cannot_be_asked_is_a_usage_error() -> None:
    for wrong in (("m", "x"), ("m", "-1"), ("", "1"), ("m", "--group", "")):
        done = run_here("explain", *wrong, "--address", "tcp://127.0.0.1:1")
        assert done.returncode == 2, done
