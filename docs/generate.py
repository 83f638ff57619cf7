"""Write the generated pages of docs/ (`python docs/generate.py`); a test compares them with what
lies there.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from enum import StrEnum
from pathlib import Path

# for docs and examples, which are not installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs import api
from tensorhub.log_events import EVENTS
from tensorhub.testing.coverage import MACHINES, demands

DOCS = Path(__file__).parent
TITLES = {
    "handle": "Handle (`weights.state`)",
    "publish": "Phases of a publish",
    "fill": "Phases of a fill",
    "leave": "Phases of a leave (unpublish, close; of a host copy: release)",
    "immediate call": "Phases of a call that ends when it starts (refuse)",
    "source": "Source of a pull",
}


def meanings(states: type[StrEnum]) -> tuple[str, dict[str, str]]:
    """What a machine is about (its states' docstring), and what each state means (the comment
    behind it, or the comments above it).
    """
    source = inspect.getsource(states)
    (class_def,) = ast.parse(source).body
    assert isinstance(class_def, ast.ClassDef)
    found = re.findall(r'((?:^ +# .+\n)*)^ +\w+ = "(\w+)"(?:  # (.+))?$', source, re.MULTILINE)
    texts = {
        state: behind or " ".join(re.findall("# (.+)", above)) for above, state, behind in found
    }
    return ast.get_docstring(class_def) or "", {
        state: text for state, text in texts.items() if text
    }


def states_page() -> str:
    """A page of the site: for each table what its states mean, and what each may become. A state
    without a comment is a KeyError.
    """
    parts = [
        "# State machines\n",
        (
            "Generated from the tables in `coordinator/states.py`, `worker/states.py` and "
            "`scheduler/pull.py`, and from"
        ),
        ("the comments at their states. A transition that is not listed here raises, with the"),
        "entity's story. The [glossary](glossary.md) defines the words.\n",
    ]
    for name, first, table in MACHINES:
        about, meaning = meanings(type(first))
        parts += [
            f"## {TITLES.get(name, name.capitalize())}\n",
            f"{about}\n",
            "| state | meaning | may become |",
            "|---|---|---|",
        ]
        for state in table:
            after = ", ".join(f"`{new}`" for new in sorted(str(new.value) for new in table[state]))
            begins = " (first)" if state is first else ""
            ends = after or "(ends)"
            parts.append(f"| `{state.value}`{begins} | {meaning[state.value]} | {ends} |")
        parts.append("")
    return "\n".join(parts)


def comparison_table() -> str:
    """What `tensorhub bench` has found (docs/bench.json): a row for each backend."""
    found = json.loads((DOCS / "bench.json").read_text(encoding="utf-8"))["rows"]
    fans = sorted({row["receivers"] for row in found})
    rows = {(row["backend"], row["receivers"]): row for row in found}
    head = ["", *(f"1 to {fan}: {column}" for fan in fans for column in ("of bare", "CPU s/GiB"))]
    lines = [head, ["---"] * len(head)]
    for first in found:
        if first["receivers"] == fans[0]:
            cells = [f"**{first['title']}**" if first["kind"] == "tensorhub" else first["title"]]
            for row in (rows[first["backend"], fan] for fan in fans):
                speed = row["of_bare"]
                cells.append(f"{speed['median']:.2f} [{speed['least']:.2f}-{speed['largest']:.2f}]")
                cells.append(f"{row['cpu_s_per_gib']['median']:.2f}")
            lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def benchmarks_page() -> str:
    """docs/benchmarks.md with its table, which only the site shows: the picture shows most of it."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    mark = "<!-- table of bench.json -->\n"
    if mark not in page:
        raise SystemExit(f"docs/benchmarks.md lacks {mark}")
    return page.replace(mark, comparison_table())


def event_tables(page: str) -> str:
    """The page with its tables of log events: rows of one meaning and remedy are one row."""
    for told_by, title in (("coordinator", "the coordinator logs"), ("worker", "a worker logs")):
        rows: dict[tuple[str, str], list[str]] = {}
        for name, event in EVENTS.items():
            if event.told_by == told_by:
                rows.setdefault((event.meaning, event.remedy), []).append(f"`{name}`")
        head = f"| {title} | meaning | remedy |\n|---|---|---|\n"
        cells = [(", ".join(names), *texts) for texts, names in rows.items()]
        table = head + "".join(f"| {' | '.join(each)} |\n".replace("|  |", "| |") for each in cells)
        found = re.search(re.escape(head) + r"(\|.*\n)+", page)
        if found is None:
            raise SystemExit(f"docs/operating.md lacks {head}")
        page = page.replace(found[0], table)
    return page


def operating_page() -> str:
    return event_tables((DOCS / "operating.md").read_text(encoding="utf-8"))


def simulation_page() -> str:
    """The page with its table of demands. docs/simulated.json is what `tensorhub simulate --json`
    has printed.
    """
    found = json.loads((DOCS / "simulated.json").read_text(encoding="utf-8"))
    stated = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    names = re.findall(
        r"^\| <a .*?</a>G\d+ \| (.+?) \||^\*\*R\d+ (.+?)\.\*\*", stated, re.MULTILINE
    )
    rows = {one or other: [0, 0] for one, other in names}
    for what, module in demands().items():
        name = what.partition(": ")[0]
        if name not in rows:
            name = f"invariants: {module.partition('/')[0]}"
        row = rows.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += found["demands"].get(what, {"times": 0})["times"]
    head = f"{'promise':24}{'demands':>9}{'judged per seed':>18}\n"
    table = head
    for name, (number, times) in rows.items():
        judged = round(times / found["seeds"], 1 if times < 10 * found["seeds"] else None)
        table += f"{name:24}{number:9}{judged:18,}\n" if number else ""
    page = (DOCS / "simulation.md").read_text(encoding="utf-8")
    before = re.search(re.escape(head) + r"(\w.*\n)*", page)
    if before is None:
        raise SystemExit(f"docs/simulation.md lacks {head}")
    return page.replace(before[0], table)


PAGES = {
    "reference.md": api.page,
    "operating.md": operating_page,
    "simulation.md": simulation_page,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
        sys.stdout.write(f"wrote {name}\n")
