"""Write deploy/kubernetes/ from the chart (`make chart`); a test compares them. Helm itself renders."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
CHART = DEPLOY / "helm/tensorhub"
MANIFESTS = DEPLOY / "kubernetes"
NAME = "tensorhub"  # of release and namespace


def rendered(values: Mapping[str, Any]) -> str:
    """All of the chart's objects, in one text. Raises helm_python.HelmError."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(dict(values), name=NAME, namespace=NAME)
    texts = [
        text.strip().removesuffix("---").strip()
        for name, text in files.items()
        if name.endswith(".yaml")
    ]
    return "\n---\n".join(text for text in texts if text) + "\n"


def manifests() -> dict[str, str]:
    """By the name of the file, its text."""
    found = {}
    for values in sorted((CHART / "ci").glob("*-values.yaml")):
        name = values.name.replace("-values", "")
        head = (
            f"# `python deploy/render.py` has rendered this from the chart with ci/{values.name}.\n"
        )
        head += f"# kubectl -n {NAME} apply -f {name}\n"
        found[name] = head + rendered(yaml.safe_load(values.read_text(encoding="utf-8")))
    return found


if __name__ == "__main__":
    for name, text in manifests().items():
        (MANIFESTS / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}", file=sys.stderr)
