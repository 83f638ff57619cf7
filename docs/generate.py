"""Write the generated pages of docs/ (`python docs/generate.py`); a test compares them with what lies there."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for docs and examples, which are not installed

from docs import api
from tensorhub.testing.coverage import MACHINES

DOCS = Path(__file__).parent
TITLES = {"handle": "Handle (`weights.state`)", "source": "Source of a pull"}


def states_page() -> str:
    """docs/states.md: one Mermaid diagram per table."""
    parts = [
        "# State machines\n",
        "Generated from the tables in `coordinator/states.py`, `worker/states.py` and `scheduler/pull.py` by",
        "`python docs/generate.py`.",
        "A table is the only writer of its state: a transition that is not drawn here raises, with the entity's story.\n",
    ]
    for name, first, table in MACHINES:
        lines = [f"    [*] --> {first}"]
        for state in table:
            lines.extend(f"    {state.value} --> {new.value}" for new in sorted(table[state], key=lambda s: str(s.value)))
            if not table[state]:
                lines.append(f"    {state.value} --> [*]")
        parts += [f"## {TITLES.get(name, name.capitalize())}\n", "```mermaid", "stateDiagram-v2", *lines, "```\n"]
    return "\n".join(parts)


PAGES = {"states.md": states_page, "reference.md": api.page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
        sys.stdout.write(f"wrote {name}\n")
