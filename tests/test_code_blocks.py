"""Every block of code in the written pages: Python compiles and runs, commands exist with the
options that are given.

A Python block that needs a framework is marked with `<!-- not run: needs NAME -->`, and only
compiled; `make frameworks` runs the examples that it is taken from. Blocks of the README and of
`tutorial.md` run in tests of their own.
"""

from __future__ import annotations

import ast
import configparser
import functools
import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
import torch

import tensorhub
from tensorhub.cli import app
from tensorhub.types import SourceReport
from tests.frameworks.recipes import RECIPES
from tests.rig import begin_store, nothing_left

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benches" / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "reference.md"),
]
OF_THEIR_OWN = {"README.md": "test_ten_minutes.py", "docs/tutorial.md": "test_tutorial.py"}
LANGUAGES = {"ini", "python", "sh", "text", "toml", "yaml"}
FENCE = re.compile(
    r"^(?:<!-- not run: needs (?P<needs>\w+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    needs: str | None  # a framework
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def compiled(self) -> Any:
        """So that a traceback shows the page's own lines."""
        return compile(
            "\n" * self.line + self.code,
            str(self.page),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )


def blocks(language: str | None = None) -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start("code"))
            block = Block(page, line, found["language"], found["needs"], found["code"])
            if language in (None, block.language):
                yield block


def test_every_block_says_its_language() -> None:
    found = list(blocks())
    assert [str(block) for block in found if block.language not in LANGUAGES] == []
    fences = sum(page.read_text(encoding="utf-8").count("```") for page in PAGES)
    assert fences == 2 * len(found)


# --------------------------------------------------------------------------------------------------
# Python


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # as in `python -m asyncio`


ALONE = [block for block in blocks("python") if str(block).split(":")[0] not in OF_THEIR_OWN]
# What a page writes as a user has it, and as it runs here.
HERE = (("s3://weights", "file://{tmp}"), ("world_size=64", "world_size=1"))


@pytest.mark.parametrize("block", ALONE, ids=str)
async def test_python_runs(block: Block, tmp_path: Path) -> None:
    code = block.code
    for written, here in HERE:
        code = code.replace(written, here.format(tmp=tmp_path))
    compiled = block._replace(code=code).compiled()
    if block.needs is not None:
        assert block.needs in {*RECIPES, "nixl"}
        return
    begin_store()
    options = tensorhub.Options(host_memory_bytes=2**20)
    async with (
        nothing_left(),
        tensorhub.serve() as coordinator,
        tensorhub.connect(coordinator.address) as trainer,
        tensorhub.connect(coordinator.address, options=options) as hub,
        anyio.create_task_group() as tasks,
    ):
        policy = torch.nn.Linear(4, 4)
        published = await trainer.register("actor", policy)
        await published.publish(1)
        weights = await hub.register("actor", torch.nn.Linear(4, 4))
        await weights.replicate()

        async def train() -> None:
            async with published.mutate(90):
                policy.weight.data.add_(1)

        if "at_least=90" in code:
            tasks.start_soon(train)
        model = torch.nn.Linear(4, 4)
        model.bias.requires_grad_(False)  # a base beside an adapter
        names: dict[str, Any] = {
            "__name__": "page",
            "address": coordinator.address,
            "app": nothing,
            "hub": hub,
            "model": model,
            "rank": 0,
            "tensorhub": tensorhub,
            "tensors": engine_tensors(),
            "torch": torch,
            "weights": weights,
        }
        result = eval(compiled, names)  # of a block without `await`, this has run it
        if inspect.iscoroutine(result):
            await result
        tasks.cancel_scope.cancel()
        if names["hub"] is not hub:
            await names["hub"].close()
        names.clear()


async def nothing(*_: object) -> None:
    """An ASGI application."""


def engine_tensors() -> dict[str, torch.Tensor]:
    """The engine of docs/layouts.md, with narrow rows."""
    return {
        "layers.0.qkv": torch.empty(3072, 1),
        "embed": torch.empty(128512, 1),
        "experts.w2": torch.empty(8, 2, 1),
    }


# --------------------------------------------------------------------------------------------------
# settings, and names within the text


def test_settings_parse_and_name_what_exists() -> None:
    for block in blocks("toml"):
        assert tomllib.loads(block.code)
    for block in blocks("ini"):
        settings = configparser.ConfigParser(interpolation=None)
        settings.read_string(block.code)
        assert fault(shlex.split(settings["Service"]["ExecStart"])) is None
    settings_of_frameworks = [*blocks("yaml"), *blocks("text")]
    modules = {
        name
        for block in settings_of_frameworks
        for name in re.findall(r"tensorhub\.integrations\.\w+", block.code)
    }
    assert modules
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []


NO_PYTHON = {"access", "transports", "py"}  # a logger, a group of entry points, a file


def has(owner: object, name: str) -> bool:
    if name in NO_PYTHON:
        return True
    if owner is tensorhub and importlib.util.find_spec(f"tensorhub.{name}") is not None:
        return True
    return hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {})


def test_names_in_the_text_exist() -> None:
    owners = {
        "tensorhub": tensorhub,
        "hub": tensorhub.Hub,
        "Hub": tensorhub.Hub,
        "weights": tensorhub.Weights,
        "Options": tensorhub.Options,
        "Location": tensorhub.Location,
        "FetchReport": tensorhub.FetchReport,
        "SourceReport": SourceReport,
    }
    pattern = re.compile(rf"(?<![\w./\[])({'|'.join(owners)})(?:\.|\((?=\w+=))([a-z]\w*)(?![\w/-])")
    lost, found = [], 0
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # names what is gone, too
            continue
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for code in re.findall(r"`([^`]+)`", text):
            for owner, name in pattern.findall(code):
                found += 1
                if not has(owners[owner], name):
                    lost.append(f"{page.relative_to(ROOT)}: {owner}.{name}")
    assert found > 80
    assert lost == []


# --------------------------------------------------------------------------------------------------
# commands

PREFIXES = {"sudo", "nohup", "command", "-v"}
FOREIGN = {
    "apt", "apt-get", "cmp", "curl", "export", "git", "helm", "kill", "kubectl", "mv", "nice", "openssl", "python3", "source", "vllm",
}  # fmt: skip
LEFT_TO_RIGHT = re.compile(r"[\[\]()]")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command of a block, and each `tensorhub ...` and `make ...` in a line of text, in words."""
    for block in blocks("sh"):
        words: list[str] = []
        for number, line in enumerate(block.code.replace("\\\n", "").splitlines(), block.line + 1):
            found = shlex.split(line, comments=True)
            # `...` stands for the start of the command before
            words = [*words[: words.index("-m") + 2], *found[1:]] if found[:1] == ["..."] else found
            for part in " ".join(shlex.quote(word) for word in words).split(" '&&' "):
                if part:
                    yield f"{block.page.relative_to(ROOT)}:{number}", shlex.split(part)
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # names what is gone, too
            continue
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for inline in re.findall(r"`((?:tensorhub|make|python -m) [^`]+)`", text):
            place = str(page.relative_to(ROOT))
            yield place, shlex.split(LEFT_TO_RIGHT.sub(" ", " ".join(inline.split())))


def options_of(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--\w", word)]


@functools.cache
def options_of_command(name: str, under: str | None = None) -> set[str] | None:
    """The options of `tensorhub NAME` or `tensorhub NAME UNDER`; None: there is no such command."""
    if name not in app.COMMANDS:
        return None
    command = app._load(name)
    if under is not None and hasattr(command, "commands"):
        if under not in command.commands:
            return None
        command = command.commands[under]
    return {option for parameter in command.params for option in parameter.opts} | {"--help"}


def fault_of_tensorhub(words: list[str]) -> str | None:
    if not words or words[0] in {"--help", "--version"}:
        return None
    known = options_of_command(words[0], words[1] if words[0] == "token" else None)
    if known is None:
        return "there is no such command"
    return next((f"no option {name}" for name in options_of(words) if name not in known), None)


def fault_of_make(words: list[str]) -> str | None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, is_set, _ = word.partition("=")
        if not re.search(rf"^{name} \?=" if is_set else rf"^{name}:", makefile, re.MULTILINE):
            return f"no {'variable' if is_set else 'target'} {name}"
    return None


@functools.cache
def source_below(module: str) -> str:
    """The source of a module, or of all modules of a package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin)
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def fault_of_python(words: list[str]) -> str | None:
    """Of `python -m MODULE [SUBJECT] --option`, or of `python FILE`."""
    if words[:1] != ["-m"]:
        known = (ROOT / words[0]).exists() or words[0] == "loop.py"  # the README's own
        return None if known else f"no file {words[0]}"
    module, rest = words[1], words[2:]
    if module.split(".")[0] not in {"benches", "tests", "docs"}:
        return None
    if not source_below(module):
        return f"no module {module}"
    # benchmarks share parsers of options
    source = source_below("benches" if module.startswith("benches") else module)
    if module == "tests.rdma.guest":
        return fault(rest) if rest else None
    subject = rest[0] if module == "benches" and rest and rest[0][0] != "-" else ""
    if subject and not source_below(f"benches.{subject}"):
        return f"no benchmark {subject}"
    return next(
        (f"no option {name}" for name in options_of(rest) if f'"{name}"' not in source), None
    )


def fault_of_pip(words: list[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for asked in re.findall(r"(?:^| )(?:\.|tensorhub-ros)\[([\w,]+)\]", " ".join(words)):
        for extra in asked.split(","):
            if extra not in extras:
                return f"no extra {extra}"
    return None


KINDS = {
    "make": fault_of_make,
    "pip": fault_of_pip,
    "tensorhub": fault_of_tensorhub,
}


def fault(words: list[str]) -> str | None:
    """What is wrong with a command; None: nothing."""
    while words and (words[0] in PREFIXES or re.match(r"\w+=", words[0])):
        words = words[1:]
    if not words or words[0].startswith("$(") or words[0].isupper():
        return None
    name = Path(words[0]).name
    if name == "env":
        return fault(words[1:])
    if name == "python":
        return fault_of_python(words[1:])
    if name in KINDS:
        return KINDS[name](words[1:])
    return None if name in FOREIGN else f"an unknown program: {name}"


def test_commands_exist_with_these_options() -> None:
    found = list(commands())
    assert len(found) > 60
    wrong = [
        f"{place}: {shlex.join(words)}: {text}" for place, words in found if (text := fault(words))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("tensorhub serve --prot 1", "no option --prot"),
        ("tensorhub surve", "there is no such command"),
        ("tensorhub token rad-only", "there is no such command"),
        ("make tset", "no target tset"),
        ("make chaos MINUTE=3", "no variable MINUTE"),
        ("python -m benches one_to_none", "no benchmark one_to_none"),
        ("sudo .venv/bin/python -m benches.testbed --systms a", "no option --systms"),
        ("pip install '.[torhc]'", "no extra torhc"),
        ("pip install 'tensorhub-ros[torhc]'", "no extra torhc"),
        ("tensrohub serve", "an unknown program: tensrohub"),
    ],
)
def test_a_wrong_command_is_found(line: str, wrong: str) -> None:
    assert fault(shlex.split(line)) == wrong
