"""The generated pages of docs/ are what the code says, each transport has a section, and links lead
somewhere.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from docs import api, links, pages
from tensorhub import errors
from tensorhub.observed import PART_NAMES
from tensorhub.transport.built_in import TRANSPORTS
from tests.frameworks.__main__ import runs
from tests.frameworks.recipes import RECIPES

DOCS = Path(__file__).parent.parent / "docs"
MAPS = [DOCS.parent / "ARCHITECTURE.md", DOCS / "protocol.md"]


def _generator() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: make() for name, make in module.PAGES.items()}


@pytest.mark.parametrize("name", ["reference.md", "operating.md"])
def test_generated_pages_are_current(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == _generator()[name], "run: python docs/generate.py"


def test_nothing_tells_anybody_to_install_an_unknown_package() -> None:
    """On PyPI another project has the name `tensorhub`."""
    told = re.compile(
        r"""(pip3?|pipx|uv) (install|add)\b[^`|#]{0,80}?[ '"]tensorhub(\[[\w,]+\])?(?![\w\[./-])"""
    )
    root, wrong = DOCS.parent, []
    for pattern in (
        "*.md",
        "*.toml",
        "docs/**/*.md",
        "src/**/*.py",
        "examples/*.py",
        "benches/**/*.py",
        "benches/**/*.md",
    ):
        for path in root.glob(pattern):
            text = " ".join(path.read_text(encoding="utf-8").split())
            wrong += [f"{path.relative_to(root)}: {found[0]}" for found in told.finditer(text)]
    assert not wrong, wrong


def test_each_extra_is_in_the_first_page() -> None:
    config = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    table = (DOCS.parent / "README.md").read_text(encoding="utf-8").partition("## Install")[2]
    named = {
        extra
        for found in re.findall(r"'tensorhub-ros\[([\w,]+)\]'", table)
        for extra in found.split(",")
    }
    assert named == config["project"]["optional-dependencies"].keys() - {"dev", "docs", "fuzz"}


def test_each_transport_has_a_section_and_a_row_in_the_overview() -> None:
    built_in = list(TRANSPORTS.built_in)
    page = (DOCS / "transports.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[`(\w+)`\]\(#\1\)", page, re.MULTILINE) == built_in
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL))
    assert set(built_in) <= sections.keys()


def test_each_release_of_a_framework_was_tested_by_the_command_that_is_named() -> None:
    page = (DOCS / "frameworks.md").read_text(encoding="utf-8")
    table = page.partition("\n\nAll ran")[0]
    told = dict(re.findall(r"`([\w.-]+)` (?:transformers )?(\d[\w.]*)", table))
    ran = {each["command"].partition("=")[2]: each for each in runs()}
    assert told.keys() == RECIPES.keys() == ran.keys()
    for name in sorted(told):
        tested = ran[name]["releases"].split()
        assert tested[:-1] == RECIPES[name].releases, f"run: python -m tests.frameworks {name}"
        assert tested[0].endswith(f"=={told[name]}")
        assert (int(ran[name]["passed"]) > 0, ran[name]["failed"]) == (True, "0")
    assert f"by {max(each['date'] for each in ran.values())} on" in page


def test_links_between_pages_lead_somewhere() -> None:
    lost: list[str] = []
    for page in [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                lost.append(f"{page.relative_to(DOCS.parent)}: {target}")
    assert not lost


def test_the_site_is_staged_with_each_page_in_its_navigation(tmp_path: Path) -> None:
    pages.stage(tmp_path)
    config = tomllib.loads((DOCS.parent / "zensical.toml").read_text(encoding="utf-8"))
    named = re.findall(r"'([\w/.-]+\.md)'", str(config["project"]["nav"]))
    staged = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")}
    decisions = {name for name in staged if re.match(r"decisions/\d", name)}
    assert sorted(named) == sorted(staged - decisions)
    assert "**TensorHub tcp**" in (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert (tmp_path / "states.md").read_text(encoding="utf-8").count("\n## ") > 5


def test_each_error_says_what_to_do() -> None:
    sections = api.errors_page().split("\n## Warnings")[0].split("\n## `")[1:]
    assert [section.split("`")[0] for section in sections] == list(errors.BY_NAME)
    assert [
        s for s in sections if not re.search(r"\*\*What to do:\*\* \w.*\.\n", s, re.DOTALL)
    ] == []


def test_each_part_of_an_explanation_has_a_remedy() -> None:
    page = (DOCS / "observing.md").read_text(encoding="utf-8").partition("## Where the seconds")[2]
    rows = re.findall(r"^\| (`.*`) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w ]+)`", row)}
    assert named == PART_NAMES.keys() - {"other"}


def test_a_built_page_may_not_lead_nowhere_or_load_from_another_host(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there"></h1>', encoding="utf-8")
    (tmp_path / "page.html").write_text(
        '<a href="other.html#there"></a><a href="https://a.org/"></a><a href="lost.html"></a>'
        '<a href="other.html#lost"></a><img src="lost.svg"><script src="https://a.org/b.js"></script>',
        encoding="utf-8",
    )
    found = [f"page.html: {name}" for name in ("lost.html", "other.html#lost", "lost.svg")]
    assert links.faults(tmp_path) == [*found, "page.html: https://a.org/b.js"]


def test_pages_that_the_code_names_are_there() -> None:
    root = DOCS.parent
    sources = [
        *root.glob("*.md"),
        *(path for name in ("src", "tests", "benches") for path in (root / name).rglob("*.py")),
    ]
    named = {
        name
        for path in sources
        for name in re.findall(r"docs/[\w/]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert [name for name in sorted(named) if not (root / name).exists()] == []


@pytest.mark.parametrize("page", MAPS, ids=lambda page: page.stem)
def test_what_the_maps_name_is_there(page: Path) -> None:
    """A file by its path from the root or from the package, or by its name alone; what a class has
    as `Class.name`.
    """
    root, text = DOCS.parent, page.read_text(encoding="utf-8")
    package = root / "src" / "tensorhub"
    sources = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    files = {path.name for path in sources}
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|toml|cpp))`", text)
    there = [name in files or (root / name).exists() or (package / name).exists() for name in named]
    assert named
    assert [name for name, is_there in zip(named, there, strict=True) if not is_there] == []
    names: dict[str, set[str]] = {}
    for source in sources.values():
        for kind, body in re.findall(
            r"^class (\w+).*?\n((?:[ \t].*\n|\n|\).*\n)*)", source, re.MULTILINE
        ):
            found = re.findall(r"(?:^    (?:async def |def )?|self\.)(\w+)", body, re.MULTILINE)
            names.setdefault(kind, set()).update(found)
    methods = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert [f"{kind}.{name}" for kind, name in methods if name not in names.get(kind, ())] == []
