"""What makes mutants: which changes there are, which lines are drawn, and that tests notice them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mutants.__main__ import EXPLAINED, PACKAGE, ROOT
from tests.mutants.operators import draw, explained, find, make, sites
from tests.mutants.running import CRASH, DEADLINE, Child, Task, kept_waiting_s, spread

SURVIVORS_MAX = 2  # of ten near their tests: what a commit changes may bring another line in


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("if a < b: pass", {"if a <= b:", "if a >= b:", "if True:", "if False:"}),
        ("while not a: pass", {"while a:", "while True:", "while False:"}),
        ("a.b = 2", {"a.b = 3", "a.b = 1", "pass"}),
        ("a.b = True", {"a.b = False", "pass"}),
        ("a += b", {"a -= b", "pass"}),
        ("return a and b", {"return a or b", "return a", "return b", "return not (a and b)"}),
        ("a.b(c, d=e)", {"a.b(c)", "pass"}),
        ("return max(a, b)", {"return min(a, b)", "return not max(a, b)"}),
        ("return [a for a in b if c]", {"return [a for a in b]", "return not [a for a in b if c]"}),
        ("raise a('text', 1)", {"pass"}),
        ("for a in b: continue", {"break"}),
        ("log.info('event', count=1)", set[str]()),
        ("raise NotImplementedError", set[str]()),
        ("'''Words.'''", set[str]()),
    ],
)
def test_a_line_is_changed_in_each_of_these_ways(
    line: str, changed: set[str], tmp_path: Path
) -> None:
    module = tmp_path / "module.py"
    module.write_text(f"def f(a, b) -> bool:\n    {line}\n")
    found = list(sites(ast.parse(module.read_bytes())))
    assert {make(tmp_path, module, each.at)[0].after for each in found} == changed


def test_a_swallowed_exception_comes_through(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def f(a):\n    try:\n        a\n    except OSError:\n        return 0\n")
    mutant, tree = make(tmp_path, module, (0, 0))
    assert mutant.after == "except OSError: raise"
    assert ast.unparse(tree).endswith("raise")


def test_a_sample_is_of_the_same_lines_after_others_have_come(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    body = "def f(a):\n" + "".join(f"    a.b({number})\n" for number in range(50))
    module.write_text(body)
    before = draw(tmp_path, ["module"], seed=1, sample=5)
    module.write_text(f"# a line\n\n\nUNRELATED = 1\n\n\n{body}")
    after = draw(tmp_path, ["module"], seed=1, sample=5)
    assert [each.key for each in after] == [each.key for each in before]
    assert [each.line for each in after] == [each.line + 6 for each in before]
    assert {each.key for each in draw(tmp_path, ["module"], seed=2, sample=5)} != {
        each.key for each in before
    }


def test_a_process_that_waits_for_a_processor_is_not_late() -> None:
    child = Child(os.getpid(), 10.0, "")
    child.started -= 5 + kept_waiting_s(os.getpid())
    assert not child.is_late()
    child.started -= 3600
    assert child.is_late()


def test_a_process_that_hangs_or_ends_says_so() -> None:
    tasks = [Task(lambda: time.sleep(600), 0.1), Task(lambda: os.kill(os.getpid(), 9)), Task(dict)]
    assert dict(spread(tasks, 3)) == {0: DEADLINE, 1: CRASH, 2: {}}


def test_no_process_outlives_the_search(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def hangs() -> None:
        (tmp_path / "begins").write_text(str(os.getpid()))
        (tmp_path / "begins").rename(begun)
        time.sleep(600)

    def waits() -> None:
        while not begun.exists():
            time.sleep(0.01)

    search = spread([Task(hangs), Task(waits)], 2)
    assert next(search) == (1, None)
    search.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


@pytest.mark.parametrize("key", explained(EXPLAINED), ids=lambda key: f"{key[0]} {key[1]}")
def test_what_is_explained_can_still_be_made(key: tuple[str, str, str, str]) -> None:
    assert find(PACKAGE, key), f"{EXPLAINED.name} explains a line that is gone: remove {key}"


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_ten_mutants_are_noticed() -> None:
    """In so much as a commit's time allows; `make mutants` tries more, and all tests."""
    sample = "--sample=10 --seed=1 --nearest-only --jobs=1".split()
    accepted = ["--packages=scheduler deltas flows", f"--survivors-max={SURVIVORS_MAX}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", *sample, *accepted],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 mutants: " in done.stdout
