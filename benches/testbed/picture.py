"""The comparison as an SVG: how long each worker stalls for one version, by phases, and the floor.
Pure: rows in, text out.

Colours are those of Okabe and Ito, which colour-blind people tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final

from benches.comparison.picture import box, document, text
from benches.testbed.report import Row
from benches.testbed.systems.base import PHASES

WIDTH: Final = 1100
LEFT: Final = 340  # of the bars; titles are to the left
RIGHT: Final = 130
TOP: Final = 90
BAR: Final = 30
COLOURS: Final = dict(zip(PHASES, ("#999999", "#e69f00", "#0072b2", "#009e73"), strict=True))
STEPS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
LINES: Final = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#999999",
    "#000000",
)
DASHES: Final = ("none", "8 4", "2 4")  # of a curve, when the colours begin anew
HATCH: Final = (  # for a system that has done no update: fill="url(#hatch)"
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)">'
    '<path d="M0 0v6" stroke="#999999" stroke-width="3"/></pattern></defs>'
)
HATCHED: Final = "url(#hatch)"
FAILURE: Final = 110  # characters of one
HEIGHT: Final = 420  # of a curve


def bars(rows: Sequence[Row], title: str, notes: Sequence[str]) -> str:
    """The stall of one update, the trainer's shared out among them. A red line is the floor. Who
    has done none has a hatched bar; who did not run, the reason.
    """
    most = max((row.per_update_s for row in rows if row.has_updated), default=1.0)
    parts = [HATCH, text(20, 30, title, size=20), *_legend()]
    for number, row in enumerate(rows):
        parts += _bar(row, TOP + BAR * number, most)
    bottom = TOP + BAR * len(rows)
    parts += _axis(bottom, most)
    parts += [text(20, bottom + 60 + 20 * number, note) for number, note in enumerate(notes)]
    return document(WIDTH, bottom + 70 + 20 * len(notes), parts)


def _bar(row: Row, top: float, most: float) -> list[str]:
    parts, at_s = [text(LEFT - 8, top + 19, row.title, anchor="end", size=13)], 0.0
    if row.stalls is None:
        return [*parts, text(LEFT + 6, top + 19, str(row.failure)[:FAILURE], size=12)]
    if not row.has_updated:
        tip = f"{row.title}: none done, {row.stalls.unfinished} cut short"
        parts.append(box(LEFT, top + 5, _x(most, most) - LEFT, BAR - 10, HATCHED, tip))
        return [*parts, text(_x(most, most) + 6, top + 19, "none done", size=12)]
    share = row.per_update_s / max(1e-9, sum(row.stalls.phases.values()))
    for name in PHASES:
        seconds = row.stalls.phases[name] * share
        tip = f"{row.title}: {name} {seconds:.3f} s of {row.per_update_s:.3f} s"
        parts.append(
            box(_x(at_s, most), top + 5, _x(seconds, most) - LEFT, BAR - 10, COLOURS[name], tip)
        )
        at_s += seconds
    floor = _x(row.floor_s, most)
    parts.append(f'<path d="M{floor} {top + 1}v{BAR - 2}" stroke="#d55e00" stroke-width="2"/>')
    parts.append(
        text(_x(at_s, most) + 6, top + 19, f"{at_s:.2f} s, {row.stalls.ratio:.2f}", size=12)
    )
    return parts


def _legend() -> list[str]:
    parts, at = list[str](), float(LEFT)
    for name, colour in COLOURS.items():
        parts += [box(at, 56, 18, 14, colour), text(at + 24, 68, name)]
        at += 120
    parts.append(f'<path d="M{at} 54v18" stroke="#d55e00" stroke-width="2"/>')
    return [*parts, text(at + 8, 68, "floor")]


def _axis(top: float, most: float) -> list[str]:
    step = next((step for step in STEPS if most / step <= 10), STEPS[-1])
    parts = [f'<path d="M{LEFT} {top}H{_x(most, most)}" stroke="#000"/>']
    for number in range(int(most / step) + 1):
        at = _x(number * step, most)
        parts += [
            f'<path d="M{at} {top}v6" stroke="#000"/>',
            text(at, top + 22, f"{number * step:g}", anchor="middle"),
        ]
    return [*parts, text(_x(most, most) + 12, top + 22, "s, one update", size=12)]


def _x(seconds: float, most: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * seconds / most, 1)


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]], title: str, across: str, up: str
) -> str:
    """A line for each system. `across`, `up`: what the axes are."""
    known = [point for points in lines.values() for point in points if isfinite(point[1])]
    every = sorted({x for points in lines.values() for x, _ in points})
    right, most = max(every, default=1.0), max((y for _, y in known), default=1.0)
    left, top, width = 80, 70, 560

    def at(point: tuple[float, float]) -> str:
        return (
            f"{round(left + width * point[0] / right, 1)} "
            f"{round(top + HEIGHT * (1 - point[1] / most), 1)}"
        )

    parts = [
        text(20, 30, title, size=20),
        text(left + width / 2, top + HEIGHT + 48, across, anchor="middle"),
    ]
    parts += [
        f'<path d="M{left} {top}V{top + HEIGHT}H{left + width}" stroke="#000" fill="none"/>',
        text(20, 58, up),
    ]
    step = next((step for step in STEPS if most / step <= 10), STEPS[-1])
    for number in range(int(most / step) + 1):
        y = round(top + HEIGHT * (1 - number * step / most), 1)
        parts += [
            f'<path d="M{left - 6} {y}h6" stroke="#000"/>',
            text(left - 10, y + 5, f"{number * step:g}", anchor="end"),
        ]
    for x in every:
        place = round(left + width * x / right, 1)
        parts.append(text(place, top + HEIGHT + 22, f"{x:g}", anchor="middle"))
    for number, (name, points) in enumerate(lines.items()):
        colour, drawn = (
            LINES[number % len(LINES)],
            [point for point in points if isfinite(point[1])],
        )
        style = (
            f'stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{DASHES[number // len(LINES) % len(DASHES)]}"'
        )
        if drawn:
            parts.append(f'<path d="M{"L".join(map(at, drawn))}" {style} fill="none"/>')
        never = [f"{x:g}" for x, y in points if not isfinite(y)]
        said = f"{name}; none done at {', '.join(never)}" if never else name
        row = top + 24 * number
        parts += [
            f'<path d="M{left + width + 24} {row + 7}h24" {style}/>',
            text(left + width + 54, row + 12, said, size=13),
        ]
    return document(WIDTH, top + HEIGHT + 70, parts)
