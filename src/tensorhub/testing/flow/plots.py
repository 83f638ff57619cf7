"""A run as an SVG, written by hand: stall per rollout, the load of the links, and the source of
each worker's last version.

Pure: runs in, text out. Colours are those of Okabe and Ito, which colour-blind people tell apart, then
three darker ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean
from typing import Final

from tensorhub.testing.flow.report import depths, parents
from tensorhub.testing.flow.run import Run, last_edges
from tensorhub.testing.flow.scenario import Scenario
from tensorhub.testing.flow.workload import Attempt

WIDTH: Final = 1100
LEFT: Final = 220
RIGHT: Final = 110  # of the figures behind the bars
PLOT: Final = WIDTH - LEFT - RIGHT
COLOURS: Final = (
    *("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#999999", "#f0e442", "#000000"),
    *("#882255", "#332288", "#999933"),
)
HATCH: Final = (  # for who was never done: fill="url(#hatch)"
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0v6" stroke="#999999" stroke-width="3"/></pattern></defs>'
)
HATCHED: Final = "url(#hatch)"
ROW: Final = 60  # of one system's stalls, and of one kind of links
TREE: Final = 360
BINS: Final = 400  # of a timeline
NODES_NAMED: Final = 40  # a larger tree has dots without names


def draw(scenario: Scenario, runs: Sequence[Run], notes: Sequence[str] = ()) -> str:
    """The picture. Links and tree are those of the first run."""
    parts, top = [_text(20, 32, f"{scenario.name}: {scenario.title}", size=20)], 60.0
    for number, panel in enumerate((_stalls(scenario, runs), _links(scenario, runs[0]), _tree(runs[0]))):
        title, height, lines = panel
        parts += [_text(20, top + 20, title, size=16), f'<g transform="translate(0 {top + 30:g})">', *lines, "</g>"]
        top += height + (50 if number < 2 else 40)
    parts += [_text(20, top + 18 * number, note) for number, note in enumerate(notes)]
    height = top + 18 * len(notes) + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    ground = _box(0, 0, WIDTH, height, "#ffffff")
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">', HATCH, ground, *parts, "</svg>\n"])


Panel = tuple[str, float, list[str]]


def _stalls(scenario: Scenario, runs: Sequence[Run]) -> Panel:
    """A bar for each rollout: its mean stall of an update; a line at the floor. Where none was done it is hatched, and
    as high as can be if the whole system did none.
    """
    means = [_mean_stalls(run) for run in runs]
    most = max([scenario.copy_s, *(seconds for each in means for seconds, is_done in each.values() if is_done)])
    lines: list[str] = []
    for number, (run, each) in enumerate(zip(runs, means, strict=True)):
        top, wide = number * ROW, PLOT / max(1, len(run.workload.rollouts))
        colour, bottom = COLOURS[number % len(COLOURS)], top + ROW - 12
        mean_s = run.row.updates.mean_s
        figure = f"{mean_s:.3f} s" if mean_s is not None else "none done" if each else "no updates"
        lines.append(_text(LEFT - 10, top + 30, run.row.system, anchor="end"))
        lines.append(_text(LEFT + PLOT + 8, top + 30, figure))
        for place, rollout in enumerate(run.workload.rollouts):
            if rollout.name in each:
                seconds, is_done = each[rollout.name]
                share = 1.0 if mean_s is None else min(1.0, seconds / most)
                high, fill = max(1.0, (ROW - 16) * share), colour if is_done else HATCHED
                tip = f"{rollout.name}: {'' if is_done else 'none done, cut short after '}{seconds:.3f} s"
                lines.append(_box(LEFT + place * wide, bottom - high, max(0.5, wide * 0.85), high, fill, tip))
        floor = bottom - (ROW - 16) * scenario.copy_s / most
        lines.append(f'<path d="M{LEFT} {floor:.1f}h{PLOT}" stroke="#000" stroke-dasharray="3 4"/>')
        lines.append(f'<path d="M{LEFT} {bottom}h{PLOT}" stroke="#000"/>')
    title = f"mean stall of an update, by rollout, to {most:.3g} s; dashed: one copy over its NIC, {scenario.copy_s:.3g} s"
    if not all(is_done for each in means for _, is_done in each.values()):
        title += "; hatched: none done, cut short"
    return title, len(runs) * ROW, lines


def _mean_stalls(run: Run) -> dict[str, tuple[float, bool]]:
    """By rollout: the mean of its updates that were done, and True; else of those that were cut short, or of its joins if it
    never had a version, and False. Who had a version and none to update to is not there.
    """
    updates: dict[str, list[Attempt]] = {}
    joins: dict[str, list[Attempt]] = {}
    for attempt in run.workload.attempts:
        (joins if attempt.joins else updates).setdefault(attempt.rollout, []).append(attempt)
    found: dict[str, tuple[float, bool]] = {}
    for name, attempts in (joins | updates).items():
        done = [each.seconds for each in attempts if each.outcome == "done"]
        if name in updates or not done:
            found[name] = fmean(done or [each.seconds for each in attempts]), bool(done)
    return found


def _links(scenario: Scenario, run: Run) -> Panel:
    """What goes over each kind of links, of what they could carry."""
    world, end = run.world, max(run.world.timeline.now, 1e-9)
    lines: list[str] = []
    kinds = world.topology.watched()
    for number, (name, links) in enumerate(kinds.items()):
        top = number * ROW
        bottom, capacity = top + ROW - 12, sum(world.topology.capacities[link] for link in links)
        path = [f"M{LEFT} {bottom}"]
        for place, rate in enumerate(_means(run, frozenset(links), end)):
            high = (ROW - 16) * min(1.0, rate / capacity)
            path.append(f"L{LEFT + PLOT * place / BINS:.1f} {bottom - high:.1f}H{LEFT + PLOT * (place + 1) / BINS:.1f}")
        lines.append(_text(LEFT - 10, top + 30, name, anchor="end"))
        colour = COLOURS[number % len(COLOURS)]
        lines.append(f'<path d="{"".join(path)}V{bottom}Z" fill="{colour}"><title>{escape(name)}</title></path>')
        lines.append(f'<path d="M{LEFT} {bottom}h{PLOT}" stroke="#000"/>')
    for began, _ in run.workload.puts:
        at = LEFT + PLOT * began / end
        lines.append(f'<path d="M{at:.1f} 0v{len(kinds) * ROW - 12}" stroke="#555" stroke-dasharray="2 6"/>')
    title = f"{run.row.system}: use of links over {end:.4g} s, of all that they carry; dotted: a publication begins"
    return title, len(kinds) * ROW, lines


def _means(run: Run, links: frozenset[int], end: float) -> Iterator[float]:
    """The mean rate in each bin."""
    wide, rate, at, carried, number = end / BINS, 0.0, 0.0, 0.0, 0
    changes = [(change.at_s, change.bytes_per_s) for change in run.world.transfers.changes if change.link in links]
    for when, more in [*changes, (end, 0.0)]:
        while number < BINS and (number + 1) * wide <= when:
            yield (carried + rate * ((number + 1) * wide - at)) / wide
            at, carried, number = (number + 1) * wide, 0.0, number + 1
        carried += rate * max(0.0, when - at)
        at, rate = max(at, when), rate + more


def _tree(run: Run) -> Panel:
    """Each worker is a dot, the deeper the farther down; a line leads to whom it had most of the last version from."""
    tree = parents(last_edges(run.world, run.workload))
    depth = depths(tree)
    rows: dict[int, list[str]] = {}
    for name in [*(source for source in tree.values() if source not in tree), *tree]:
        there = rows.setdefault(depth.get(name, 0), [])
        if name not in there[-1:]:
            there.append(name)
    rows = {level: list(dict.fromkeys(there)) for level, there in rows.items()}
    most, places = max(rows, default=0), dict[str, tuple[float, float]]()
    for level, there in sorted(rows.items()):
        there.sort(key=lambda name: places.get(tree.get(name, ""), (0.0, 0.0))[0])  # below its source
        for number, name in enumerate(there):
            places[name] = 40 + (WIDTH - 80) * (number + 0.5) / len(there), 14 + (TREE - 40) * level / max(1, most)
    lines: list[str] = []
    for name, source in tree.items():
        (x, y), (there_x, there_y) = places[name], places[source]
        lines.append(f'<path d="M{there_x:.1f} {there_y:.1f}L{x:.1f} {y:.1f}" stroke="#56b4e9" stroke-width="0.8"/>')
    is_named = len(places) <= NODES_NAMED
    for name, (x, y) in places.items():
        colour = COLOURS[4] if name.startswith("trainer") else COLOURS[0]
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if is_named else 2}" fill="{colour}"><title>{name}</title></circle>'
        )
        if is_named:
            lines.append(_text(x + 7, y + 4, name))
    return f"{run.row.system}: who had the last version from whom, {most} deep", TREE, lines


def _box(left: float, top: float, width: float, height: float, colour: str, tip: str = "") -> str:
    place = f'x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{colour}"' + (f"><title>{escape(tip)}</title></rect>" if tip else "/>")


def _text(left: float, top: float, text: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{left:g}" y="{top:g}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
