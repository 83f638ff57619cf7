"""Check the built site (`python -m docs.links`): every link leads to a page, an anchor or a file of
it, and no page loads anything from another host.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).resolve().parent.parent / "site"
LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """What a page leads to, what it loads, and what can be led to on it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors.add(named.get("id") or "")
        loaded = named.get(LOADED.get(tag, ""))
        if loaded and named.get("rel") != "canonical":
            self.loads.append(loaded)
        target = named.get("href") if tag == "a" else None
        if target:
            self.links.append(target)


def faults(site: Path) -> list[str]:
    """Each link or load that is wrong, with its page."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                wrong = target in page.loads and parts.scheme != "data"
            else:
                # the page for unknown addresses has links from the root
                start = site if target.startswith("/") else path.parent
                goal = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
                goal = goal / "index.html" if goal.is_dir() else goal
                lost = (
                    parts.fragment and goal in pages and parts.fragment not in pages[goal].anchors
                )
                wrong = not goal.exists() or bool(lost)
            if wrong:
                found.append(f"{path.relative_to(site)}: {target}")
    if not pages:
        found.append(f"no page is below {site}")
    return found


if __name__ == "__main__":
    wrong = faults(SITE)
    sys.exit("\n".join(wrong) if wrong else 0)
