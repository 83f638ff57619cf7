"""Stage the pages of the site below build/pages (`python -m docs.pages`, or `make site`): all
written pages, and those that are made from the code.

A link to a file of the repository becomes a link to a copy of that file.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from os.path import relpath
from pathlib import Path

from docs import api, generate

ROOT = Path(__file__).resolve().parent.parent
MOVED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benches/README.md": "benches.md",
}
# Made for the site. The committed reference has the errors, too; in the site they are a page.
MADE: dict[str, Callable[[], str]] = {
    "reference.md": api.page_without_errors,
    "errors.md": api.errors_page,
    "states.md": generate.states_page,
    "benchmarks.md": generate.benchmarks_page,
}
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#)([^)#\s]+)")


def written() -> dict[Path, str]:
    """Each written page, and its place in the site."""
    found = {ROOT / source: place for source, place in MOVED.items()}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        place = path.relative_to(ROOT / "docs")
        found[path] = str(place.with_name("index.md") if place.name == "README.md" else place)
    return {path: place for path, place in found.items() if place not in MADE}


def stage(target: Path) -> None:
    """Write everything that the site consists of below `target`, which is emptied before."""
    shutil.rmtree(target, ignore_errors=True)
    places = written()

    def relink(text: str, source: Path, place: str) -> str:
        def lead(link: re.Match[str]) -> str:
            there = (source.parent / link[2]).resolve()
            if there.is_dir():
                there /= "README.md"
            goal = places.get(there)
            if there.parent == ROOT / "docs" and there.name in MADE:
                goal = there.name
            if goal is None:
                goal = f"files/{there.relative_to(ROOT)}"
                (target / goal).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(there, target / goal)
            return f"{link[1]}{relpath(goal, Path(place).parent)}"

        return LINK.sub(lead, text)

    for source, place, text in _texts(places):
        path = target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(relink(text, source, place), encoding="utf-8")


def _texts(places: dict[Path, str]) -> Iterator[tuple[Path, str, str]]:
    for source, place in places.items():
        yield source, place, source.read_text(encoding="utf-8")
    for name, make in MADE.items():
        yield ROOT / "docs" / name, name, make()


if __name__ == "__main__":
    stage(ROOT / "build" / "pages")
    sys.stdout.write(f"staged {ROOT / 'build' / 'pages'}\n")
