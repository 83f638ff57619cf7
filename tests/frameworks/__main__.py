"""Makes the environment of each framework that is named, and runs its tests there: `python -m
tests.frameworks trl ray`.

An environment is made once, in `.venv-frameworks/NAME`, and anew when its recipe changes. Without
names: all frameworks. Each run replaces its environment's line in runs.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tests.frameworks.recipes import RECIPES

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = REPOSITORY / ".venv-frameworks"
HERE = Path(__file__).parent
RUNS = HERE / "runs.csv"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frameworks", description=__doc__)
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(RECIPES))
    parser.add_argument(
        "--only-make", action="store_true", help="make the environments, and run nothing"
    )
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.frameworks) - set(RECIPES)):
        parser.error(f"no recipe for {', '.join(unknown)}; there is one for {', '.join(RECIPES)}")
    failed = [
        name for name in arguments.frameworks or RECIPES if not run(name, arguments.only_make)
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def run(name: str, only_make: bool) -> bool:
    python, results = environment(name), ENVIRONMENTS / name / "results.xml"
    tests = [str(path) for test in RECIPES[name].tests if (path := HERE / test).exists()]
    if only_make or not tests:
        return True
    # Frameworks warn about themselves. What is ours is looked for in the suite that needs no
    # framework.
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-m",
        "framework",
        "-o",
        "filterwarnings=default",
        f"--junit-xml={results}",
        *tests,
    ]
    results.unlink(missing_ok=True)
    passed = subprocess.run(command, cwd=REPOSITORY).returncode == 0
    if results.exists():
        note(name, results)
    return passed


def note(name: str, results: Path) -> None:
    """Replace the environment's line in runs.csv."""
    (suite,) = ElementTree.parse(results).getroot()
    counts = {each: int(suite.attrib[each]) for each in ("tests", "skipped", "failures", "errors")}
    failed = counts["failures"] + counts["errors"]
    commit = subprocess.check_output(["git", "log", "-1", "--format=%h"], cwd=REPOSITORY)
    line = {
        "command": f"make frameworks FRAMEWORKS={name}",
        "releases": " ".join((*RECIPES[name].releases, f"torch=={version('torch')}")),
        "passed": str(counts["tests"] - counts["skipped"] - failed),
        "skipped": str(counts["skipped"]),
        "failed": str(failed),
        "minutes": f"{float(suite.attrib['time']) / 60:.1f}",
        "date": f"{datetime.datetime.now(datetime.UTC).date()}",
        "commit": commit.decode().strip(),
    }
    lines = {each["command"]: each for each in runs()} | {line["command"]: line}
    with RUNS.open("w", newline="") as file:
        writer = csv.DictWriter(file, line, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[each] for each in sorted(lines))


def runs() -> list[dict[str, str]]:
    if not RUNS.exists():
        return []
    with RUNS.open(newline="") as file:
        return list(csv.DictReader(file))


def environment(name: str) -> str:
    """The interpreter of the framework's environment, which sees that for development as well."""
    recipe, root = RECIPES[name], ENVIRONMENTS / name
    python, stamp = root / "bin" / "python", root / "recipe.txt"
    if stamp.exists() and stamp.read_text() == recipe.text:
        return str(python)
    print(f"{name}: making {root}", flush=True)
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    seen = [str(REPOSITORY / "src"), sysconfig.get_path("purelib")]
    if recipe.base is not None:
        environment(recipe.base)
        base = str(ENVIRONMENTS / recipe.base)
        seen.insert(1, sysconfig.get_path("purelib", vars={"base": base}))
    (packages / "tensorhub-development.pth").write_text("".join(f"{path}\n" for path in seen))
    for packages_wanted in recipe.installs:
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *packages_wanted.split()], check=True, cwd=REPOSITORY)
    stamp.write_text(recipe.text)
    return str(python)


if __name__ == "__main__":
    sys.exit(main())
