"""Write the generated pages of docs/ (`python docs/generate.py`); a test compares them with what lies there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for docs and examples, which are not installed

from docs import api
from tensorhub.coordinator import states
from tensorhub.worker.states import HANDLE_TABLE

DOCS = Path(__file__).parent
TABLES: tuple[tuple[str, str, Mapping[Any, frozenset[Any]]], ...] = (
    ("Coordinator", "recovering", states.COORDINATOR_TABLE),
    ("Worker lease", "live", states.WORKER_TABLE),
    ("Version", "staged", states.VERSION_TABLE),
    ("Replica", "filling", states.REPLICA_TABLE),
    ("Read lease", "active", states.LEASE_TABLE),
    ("Group operation", "gathering", states.OPERATION_TABLE),
    ("Handle (`weights.state`)", "empty", HANDLE_TABLE),
)


def states_page() -> str:
    """docs/states.md: one Mermaid diagram per table."""
    parts = [
        "# State machines\n",
        "Generated from the tables in `coordinator/states.py` and `worker/states.py` by `python docs/generate.py`.",
        "A table is the only writer of its state: a transition that is not drawn here raises, with the entity's story.\n",
    ]
    for title, first, table in TABLES:
        lines = [f"    [*] --> {first}"]
        for state in table:
            lines.extend(f"    {state.value} --> {new.value}" for new in sorted(table[state], key=lambda s: str(s.value)))
            if not table[state]:
                lines.append(f"    {state.value} --> [*]")
        parts += [f"## {title}\n", "```mermaid", "stateDiagram-v2", *lines, "```\n"]
    return "\n".join(parts)


PAGES = {"states.md": states_page, "reference.md": api.page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
        sys.stdout.write(f"wrote {name}\n")
