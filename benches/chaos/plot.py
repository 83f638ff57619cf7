"""An SVG of a run, written by hand: a lane for each process over time, the versions as a staircase,
a legend, the totals.

Pure: events in, text out. Colours are those of Okabe and Ito, which colour-blind people tell apart;
kinds differ by place in the lane as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Final

from benches.chaos.events import Event

Scale = Callable[[float], float]  # seconds to where they are

WIDTH: Final = 1600
LEFT: Final = 130  # of the first second; labels are to the left
RIGHT: Final = 30
TOP: Final = 70
LANE: Final = 46
STAIRS: Final = 170
FONT: Final = 14

UP: Final = "#dfe7ee"
# Bars by kind of fault: colour, and which third of the lane (0: the upper one).
BARS: Final[Mapping[str, tuple[str, int]]] = {
    "stop": ("#56b4e9", 0),
    "freeze": ("#0072b2", 0),
    "partition": ("#d55e00", 1),
    "deaf": ("#e69f00", 1),
    "mute": ("#cc79a7", 1),
    "refuse": ("#8b3a00", 1),
    "slow": ("#009e73", 2),
    "delay": ("#b8a500", 2),
}
DOWN: Final = "#000000"
MARKS: Final = {"publish": "#0072b2", "commit": "#009e73", "error": "#d55e00"}
STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)


def draw(
    events: Sequence[Event], processes: Sequence[str], title: str, totals: Iterable[str]
) -> str:
    """The picture. `totals`: lines below it."""
    end_s = max((max(event.at_s, event.until_s or 0.0) for event in events), default=1.0) or 1.0
    lines = list(totals)
    height = TOP + LANE * len(processes) + STAIRS + 100 + 22 * len(lines)

    def x(at_s: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at_s / end_s, 1)

    parts = [_text(LEFT, 26, title, size=20), *_legend()]
    for number, process in enumerate(processes):
        parts += _lane(
            process,
            [event for event in events if event.process == process],
            TOP + LANE * number,
            x,
            end_s,
        )
    bottom = TOP + LANE * len(processes) + STAIRS + 20
    parts += _meetings(events, x, bottom)
    parts += _staircase(events, x, TOP + LANE * len(processes) + 20, end_s)
    parts += _axis(x, bottom, end_s)
    parts += [_text(LEFT, bottom + 60 + 22 * number, line) for number, line in enumerate(lines)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}"'
    )
    style = f'font-family="sans-serif" font-size="{FONT}"'
    return "\n".join([f"{head} {style}>", _box(0, 0, WIDTH, height, "#ffffff"), *parts, "</svg>\n"])


def _lane(process: str, events: Sequence[Event], top: float, x: Scale, end_s: float) -> list[str]:
    """One process: grey while it lives, bars for faults, ticks below for what its calls came to."""
    height = LANE - 12
    parts = [_text(LEFT - 10, top + 24, process, anchor="end")]
    parts += [
        _box(x(begin), top, x(end) - x(begin), height, UP) for begin, end in _lives(events, end_s)
    ]
    third = height / 3
    for event in events:
        if event.kind in BARS and event.until_s is not None:
            colour, place = BARS[event.kind]
            width = max(2.0, x(min(event.until_s, end_s)) - x(event.at_s))
            parts.append(_box(x(event.at_s), top + place * third, width, third, colour, str(event)))
        elif event.kind == "kill":
            parts.append(_box(x(event.at_s) - 1.5, top - 4, 3, height + 8, DOWN, str(event)))
        elif event.kind == "cut":
            at = x(event.at_s)
            parts.append(
                f'<path d="M{at - 4} {top - 5}h8l-4 8z" '
                f'fill="{DOWN}"><title>{escape(str(event))}</title></path>'
            )
        elif event.kind in MARKS:
            parts.append(_box(x(event.at_s), top + height + 1, 1.2, 6, MARKS[event.kind]))
    return parts


def _lives(events: Sequence[Event], end_s: float) -> list[tuple[float, float]]:
    lives, began = list[tuple[float, float]](), None
    for event in events:
        if event.kind == "up":
            began = event.at_s
        elif event.kind == "kill" and began is not None:
            lives.append((began, event.at_s))
            began = None
    return lives if began is None else [*lives, (began, end_s)]


def _staircase(events: Sequence[Event], x: Scale, top: float, end_s: float) -> list[str]:
    """The newest version that a publish has returned, over time; it goes down at a rollback."""
    steps, height = list[tuple[float, int]](), STAIRS - 30
    for event in events:
        found = re.match(r"mutate (\d+) ", event.text) if event.kind == "publish" else None
        if found:
            steps.append((event.at_s, int(found[1])))
    most = max((version for _, version in steps), default=1)
    path, last = f"M{x(0)} {top + height}", 0
    for at_s, version in steps:
        path += f"H{x(at_s)}V{round(top + height * (1 - version / most), 1)}"
        last = version
    path += f"H{x(end_s)}"
    label = f"versions, to {most}" if last == most else f"versions, to {most}, {last} at the end"
    return [
        _text(LEFT - 10, top + 14, str(most), anchor="end"),
        _text(LEFT - 10, top + height, "0", anchor="end"),
        _text(LEFT + 6, top + 14, label),
        f'<path d="{path}" fill="none" stroke="{MARKS["publish"]}" stroke-width="2"/>',
    ]


def _meetings(events: Sequence[Event], x: Scale, bottom: float) -> list[str]:
    """A dashed line where everything was healed and all had to come to one version."""
    lines = list[str]()
    for event in events:
        if event.kind == "meeting":
            at = x(event.at_s)
            lines.append(
                f'<path d="M{at} {TOP - 8}V{bottom}" stroke="#555" stroke-dasharray="3 5" '
                f'fill="none"/>'
            )
    return lines


def _axis(x: Scale, top: float, end_s: float) -> list[str]:
    step = next((step for step in STEPS if end_s / step <= 20), STEPS[-1])
    parts = [f'<path d="M{x(0)} {top}H{x(end_s)}" stroke="#000"/>']
    for number in range(int(end_s / step) + 1):
        at = x(number * step)
        parts.append(f'<path d="M{at} {top}v6" stroke="#000"/>')
        parts.append(_text(at, top + 22, f"{number * step} s", anchor="middle"))
    return parts


def _legend() -> list[str]:
    shown = [
        ("alive", UP),
        *((kind, colour) for kind, (colour, _) in BARS.items()),
        ("kill", DOWN),
        *MARKS.items(),
    ]
    parts, at = list[str](), float(LEFT)
    for name, colour in shown:
        width, height = (3, 20) if name == "kill" else (3, 9) if name in MARKS else (18, 14)
        parts += [
            _box(at, 38 + (14 - height) / 2, width, height, colour),
            _text(at + width + 5, 50, name),
        ]
        at += width + 24 + 8 * len(name)
    parts.append(f'<path d="M{at} 41h8l-4 8z" fill="{DOWN}"/>')
    parts += [_text(at + 13, 50, "cut"), _text(at + 60, 50, "dashed: all healed")]
    return parts


def _box(left: float, top: float, width: float, height: float, colour: str, tip: str = "") -> str:
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{colour}"' + (
        f"><title>{escape(tip)}</title></rect>" if tip else "/>"
    )


def _text(left: float, top: float, text: str, *, anchor: str = "start", size: int = FONT) -> str:
    return (
        f'<text x="{left:g}" y="{top:g}" text-anchor="{anchor}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
