"""Mutants in children of a process that has imported all of the tests: a child puts the changed code
into the functions in its own memory, and runs what reaches the changed line.

No file is written, and nothing is imported twice. What a test starts as a process of its own runs
the code as it is.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutants.operators import BLOCKS, Mutant, make, sites

REACHED = "_reached_a_mutants_line"
MEMORY_BYTES_MAX = 16 << 30  # of addresses, torch's included: a mutant may allocate without end
# A case may take so much of a processor, and so many times what it took before: an endless loop ends
# soon, on a busy machine too. All cases of a mutant may take so much by the clock, and so many times
# what they took.
PROCESSOR_S, PROCESSOR_TIMES = 3.0, 10
CLOCK_S, CLOCK_TIMES = 60.0, 3
DEADLINE, CRASH = "its deadline", "the end of its process"

Case = pytest.Item | int  # a test, or a seed of the simulator


@dataclass
class Stage:
    """Cases that may notice a mutant. `of` leaves some of them out for some mutants."""

    name: str
    cases: Sequence[Case]


@dataclass
class Verdict:
    mutant: Mutant
    killer: str | None = None  # the stage
    by: str = ""
    reached: int = 0  # cases that reach the line, and
    run: int = 0  # so many were run


@dataclass
class Cost:
    """What a case that reaches a line has taken."""

    case: int  # its index in the stage
    processor_s: float
    clock_s: float

    def __lt__(self, other: Cost) -> bool:
        return (self._size(), self.case) < (other._size(), other.case)

    def _size(self) -> int:
        return int(self.processor_s * 20).bit_length()  # cases of one size stay in their order


@dataclass
class Child:
    pid: int
    seconds: float
    place: str
    said: bytes = b""
    started: float = field(default_factory=time.monotonic)

    def is_late(self) -> bool:
        """Its time is up, without that in which it could have run, and other processes did: on a
        busy machine each mutant would seem to hang.
        """
        return time.monotonic() - self.started > self.seconds + kept_waiting_s(self.pid)


def kept_waiting_s(pid: int) -> float:
    """How long its main thread has waited for a processor; 0 where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@dataclass
class Task:
    """What a child does: its result becomes JSON."""

    work: Callable[[], object]
    seconds: float = 3600.0


def spread(tasks: Sequence[Task], jobs: int) -> Generator[tuple[int, Any], None, None]:
    """Run tasks, each in a child, so many at a time; the number and the result of each that is
    done: a JSON value, `DEADLINE` or `CRASH`.
    """
    waiting, running = list(enumerate(tasks)), dict[int, tuple[int, Child]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, task = waiting.pop(0)
                pipe, child = _start(task)
                running[pipe] = index, child
            ready, _, _ = select.select(list(running), [], [], 0.2)
            for pipe, (index, child) in list(running.items()):
                end = False
                if pipe in ready:
                    said = os.read(pipe, 1 << 20)
                    child.said += said
                    end = not said or said.endswith(b"\n")
                if end or child.is_late():
                    del running[pipe]
                    yield index, _end(pipe, child, in_time=end)
    finally:
        for pipe, (_, child) in running.items():
            _end(pipe, child, in_time=False)


def _start(task: Task) -> tuple[int, Child]:
    mine, its = os.pipe()
    place = tempfile.mkdtemp(prefix="mutant-")
    pid = os.fork()
    if pid:
        os.close(its)
        return mine, Child(pid, task.seconds, place)
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        os.environ["TMPDIR"], tempfile.tempdir = place, None
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        try:
            result = task.work()
        except BaseException as error:
            result = f"{CRASH}: {error!r} at {traceback.extract_tb(error.__traceback__)[-1]}"
        answer = json.dumps(result).encode() + b"\n"
        while answer:
            answer = answer[os.write(its, answer) :]
    finally:
        os._exit(0)


def _end(pipe: int, child: Child, *, in_time: bool) -> Any:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # and what its tests have started
    _, status = os.waitpid(child.pid, 0)
    os.close(pipe)
    shutil.rmtree(child.place, ignore_errors=True)
    if child.said.endswith(b"\n"):
        return json.loads(child.said)
    out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return DEADLINE if out_of_time or not in_time else CRASH


# -- code


class Functions:
    """The functions of a package that are in memory, wherever something refers to them."""

    def __init__(self, package: Path) -> None:
        gc.unfreeze()  # see tests/conftest.py: what is frozen is not found
        self._at = dict[tuple[str, str, int], list[FunctionType]]()
        for each in gc.get_objects():
            if type(each) is not FunctionType:  # a proxy's `isinstance` would run its code
                continue
            if each.__code__.co_filename.startswith(str(package)):
                self._at.setdefault(_place(each.__code__), []).append(each)
        gc.freeze()

    def replace(self, path: Path, tree: ast.Module) -> None:
        """Have them run what the tree says."""
        inner = [compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)]
        for code in inner:
            inner += [each for each in code.co_consts if isinstance(each, CodeType)]
            for function in self._at.get(_place(code), []):
                if function.__code__ != code:
                    function.__code__ = code


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def watched(path: Path, mutants: dict[tuple[int, int], int]) -> ast.Module:
    """The module, saying the number of a mutant when it reaches its statement."""
    tree = ast.parse(path.read_bytes())
    numbers = dict[ast.AST, list[int]]()
    for site in sites(tree, {function for function, _ in mutants}):
        if site.at in mutants:
            numbers.setdefault(site.statement, []).append(mutants[site.at])
    for node in list(ast.walk(tree)):
        for block in BLOCKS:
            inside = getattr(node, block, None)
            if isinstance(inside, list):
                for index in reversed(range(len(inside))):
                    each = inside[index]
                    calls = ast.parse(
                        "\n".join(f"{REACHED}({number})" for number in numbers.get(each, []))
                    ).body
                    if isinstance(each, ast.stmt):
                        inside[index:index] = calls
                    else:  # a handler, or a case: it has been reached when its body is
                        each.body[:0] = calls
    return tree


# -- runs


@dataclass(eq=False)
class Search:
    """Which of the mutants are noticed, and by what."""

    package: Path
    jobs: int
    seconds: float  # of cases that have taken so long, for a mutant in a stage
    tell: Callable[[str], None]
    failed: str | None = field(default=None, init=False)
    verdicts: list[Verdict] = field(default_factory=list[Verdict], init=False)
    is_complete: bool = field(default=False, init=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def run(self, mutants: Sequence[Mutant], stages: Sequence[Stage]) -> None:
        """Try all; `verdicts` says what is known so far, also when an exception ends this."""
        for path in {mutant.path for mutant in mutants}:
            name = ".".join(("tensorhub", *Path(path).with_suffix("").parts))
            with contextlib.suppress(ImportError):
                importlib.import_module(name.removesuffix(".__init__"))
        functions = Functions(self.package)
        self.verdicts = [Verdict(mutant) for mutant in mutants]
        for stage in stages:
            alive = [verdict for verdict in self.verdicts if verdict.killer is None]
            if alive and stage.cases:
                self._stage(stage, alive, functions)
        self.is_complete = True

    def _stage(self, stage: Stage, alive: list[Verdict], functions: Functions) -> None:
        self.tell(f"{stage.name}: {len(stage.cases)} cases, which of {len(alive)} lines they reach")
        reached = self._reached(stage, alive, functions)
        tasks, of = list[Task](), list[Verdict]()
        for number, verdict in enumerate(alive):
            costs, chosen, seconds = sorted(reached[number]), list[Cost](), 0.0
            for cost in costs:
                if chosen and seconds + cost.processor_s > self.seconds:
                    break
                chosen.append(cost)
                seconds += cost.processor_s
            verdict.reached += len(costs)
            verdict.run += len(chosen)
            if chosen:
                work = _bound(self._first_failure, verdict.mutant, stage, chosen, functions)
                clock_s = sum(cost.clock_s for cost in chosen)
                tasks.append(Task(work, CLOCK_S + CLOCK_TIMES * clock_s))
                of.append(verdict)
        for done, (index, by) in enumerate(spread(tasks, self.jobs), 1):
            if by is not None:
                of[index].killer, of[index].by = stage.name, by
            m = of[index].mutant
            self.tell(f"{stage.name} {done}/{len(tasks)} {m.place} {by or 'SURVIVED'}")

    def _reached(
        self, stage: Stage, alive: list[Verdict], functions: Functions
    ) -> list[list[Cost]]:
        """By the lines' numbers: the cases that reach them."""
        paths = dict[str, dict[tuple[int, int], int]]()
        for number, verdict in enumerate(alive):
            paths.setdefault(verdict.mutant.path, {})[verdict.mutant.at] = number

        def look(share: range) -> object:
            numbers_seen = set[int]()
            setattr(builtins, REACHED, numbers_seen.add)
            for path, numbers in paths.items():
                functions.replace(self.package / path, watched(self.package / path, numbers))
            found = list[tuple[int, float, float, list[int]]]()
            for index in share:
                numbers_seen.clear()
                processor, clock = time.process_time(), time.monotonic()
                following = stage.cases[index + 1] if index + 1 in share else None
                if self._failure(stage.cases[index], following) is None:
                    took = time.process_time() - processor, time.monotonic() - clock
                    found.append((index, *took, sorted(numbers_seen)))
            return found

        count = len(stage.cases)
        shares = [
            range(count * job // self.jobs, count * (job + 1) // self.jobs)
            for job in range(self.jobs)
        ]
        reached = [list[Cost]() for _ in alive]
        passed = 0
        for _, found in spread([Task(_bound(look, share)) for share in shares], self.jobs):
            if isinstance(found, str):
                raise RuntimeError(f"the tests of the code as it is came to {found}")
            passed += len(found)
            for *cost, numbers in found:
                for number in numbers:
                    reached[number].append(Cost(*cost))
        if passed < count:
            self.tell(f"{stage.name}: {count - passed} cases fail as the code is, and are left out")
        return reached

    def _first_failure(
        self, mutant: Mutant, stage: Stage, costs: Sequence[Cost], functions: Functions
    ) -> str | None:
        _, tree = make(self.package, self.package / mutant.path, mutant.at)
        functions.replace(self.package / mutant.path, tree)
        cases = [stage.cases[cost.case] for cost in costs]
        for cost, case, following in zip(costs, cases, [*cases[1:], None], strict=True):
            # at its end, SIGPROF ends the process
            signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S + PROCESSOR_TIMES * cost.processor_s)
            if failure := self._failure(case, following):
                return failure
        return None

    def _failure(self, case: Case, following: Case | None) -> str | None:
        """What failed, if something did."""
        if isinstance(case, int):
            from tensorhub.testing import run_seed

            try:
                run_seed(case)
            except Exception as error:
                return f"seed {case}: {type(error).__name__}"
            return None
        self.failed = None
        assert not isinstance(following, int)
        case.ihook.pytest_runtest_protocol(item=case, nextitem=following)
        return self.failed


def _bound(work: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: work(*arguments)
