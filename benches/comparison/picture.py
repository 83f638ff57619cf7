"""The rows as an SVG, written by hand: a bar of GiB/s for each backend, its spread, and the
ceilings as lines.

Pure: rows in, text out. Colours are those of Okabe and Ito, which colour-blind people tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from .backends import Kind
from .report import Row

WIDTH: Final = 1100
LEFT: Final = 270  # of the bars; titles are to the left
RIGHT: Final = 150  # of the figures behind them
TOP: Final = 70
BAR: Final = 22
GAP: Final = 50  # above each group, with its title
COLOURS: Final = {Kind.CEILING: "#999999", Kind.TENSORHUB: "#0072b2", Kind.PEER: "#e69f00"}
NAMES: Final = {Kind.CEILING: "ceilings", Kind.TENSORHUB: "TensorHub", Kind.PEER: "others"}
LINES: Final = {"memcpy": ("memcpy-1", "memcpy-2"), "bare sockets": ("bare",)}
STEPS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
STEPS_SHOWN: Final = 10


def draw(rows: Sequence[Row], title: str, notes: Sequence[str]) -> str:
    """The picture. `notes`: lines below it. Backends without a figure are left out."""
    shown = [row for row in rows if row.gib_per_s is not None]
    fans = list(dict.fromkeys(row.receivers for row in shown))
    most = max((row.gib_per_s.largest for row in shown if row.gib_per_s), default=1.0)
    height = (
        TOP
        + sum(GAP + BAR * sum(row.receivers == fan for row in shown) for fan in fans)
        + 60
        + 20 * len(notes)
    )
    parts, top = [text(20, 30, title, size=20), *_legend()], float(TOP)
    for fan in fans:
        group = [row for row in shown if row.receivers == fan]
        parts += _group(group, fan, top, most)
        top += GAP + BAR * len(group)
    parts += _axis(top, most)
    parts += [text(20, top + 60 + 20 * number, note) for number, note in enumerate(notes)]
    return document(WIDTH, height, parts)


def _group(rows: Sequence[Row], fan: int, top: float, most: float) -> list[str]:
    """All backends to one number of receivers; the ceilings are dashed lines through all of
    them.
    """
    parts = [text(20, top + 32, f"1 source, {fan} receiver{'s' if fan > 1 else ''}", size=16)]
    bottom = top + GAP + BAR * len(rows)
    for name, backends in LINES.items():
        speeds = [
            row.gib_per_s.median for row in rows if row.backend.name in backends and row.gib_per_s
        ]
        if speeds:
            at = _x(max(speeds), most)
            parts.append(
                f'<path d="M{at} {top + 40}V{bottom}" stroke="#d55e00" stroke-dasharray="4 4" '
                f'fill="none"/>'
            )
            parts.append(text(at, top + 36, name, anchor="middle", size=11))
    for number, row in enumerate(rows):
        parts += _bar(row, top + GAP + BAR * number, most)
    return parts


def _bar(row: Row, top: float, most: float) -> list[str]:
    speed = row.gib_per_s
    if speed is None:
        return []
    middle, left, right = top + BAR / 2, _x(speed.least, most), _x(speed.largest, most)
    tip = f"{row.backend.title}: {speed} GiB/s, {row.seconds} s, CPU {row.cpu_s_per_gib} s/GiB"
    return [
        text(LEFT - 8, top + 15, row.backend.title, anchor="end", size=13),
        box(
            LEFT,
            top + 3,
            max(1.0, _x(speed.median, most) - LEFT),
            BAR - 6,
            COLOURS[row.backend.kind],
            tip,
        ),
        (
            f'<path d="M{left} {middle}H{right}M{left} {middle - 4}v8M{right} {middle - 4}v8" '
            f'stroke="#000" fill="none"/>'
        ),
        text(right + 6, top + 15, f"{speed.median:.2f}", size=12),
    ]


def _axis(top: float, most: float) -> list[str]:
    step = next((step for step in STEPS if most / step <= STEPS_SHOWN), STEPS[-1])
    parts = [f'<path d="M{LEFT} {top}H{_x(most, most)}" stroke="#000"/>']
    for number in range(int(most / step) + 1):
        at = _x(number * step, most)
        parts += [
            f'<path d="M{at} {top}v6" stroke="#000"/>',
            text(at, top + 22, f"{number * step:g}", anchor="middle"),
        ]
    return [*parts, text(_x(most, most) + 12, top + 22, "GiB/s, all receivers", size=12)]


def _legend() -> list[str]:
    parts, at = list[str](), float(LEFT)
    for kind, colour in COLOURS.items():
        parts += [box(at, 46, 18, 14, colour), text(at + 24, 58, NAMES[kind])]
        at += 120
    return [*parts, text(at, 58, "bar: median; whisker: least to largest of all copies", size=12)]


def _x(speed: float, most: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * speed / most, 1)


def box(left: float, top: float, width: float, height: float, colour: str, tip: str = "") -> str:
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{colour}"' + (
        f"><title>{escape(tip)}</title></rect>" if tip else "/>"
    )


def text(left: float, top: float, text: str, *, anchor: str = "start", size: int = 14) -> str:
    return (
        f'<text x="{left:g}" y="{top:g}" text-anchor="{anchor}" '
        f'font-size="{size}">{escape(text)}</text>'
    )


def document(width: float, height: float, parts: Sequence[str]) -> str:
    """An SVG file of these parts, on white."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">'
    )
    return "\n".join([head, box(0, 0, width, height, "#ffffff"), *parts, "</svg>\n"])
