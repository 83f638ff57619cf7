"""The run: rounds of visits, each of them a backend, its processes, one copy that is checked whole
and some that are timed.

Every wait has a deadline. What goes wrong in a visit is its reason, and the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from tensorhub.cli.child_processes import AsyncChildProcess, ChildEnded, Line, closing_all
from tensorhub.cli.common import leaf_of

from . import environments, process_tree
from .backends import Backend
from .sizes import half_tiny

ROOT = Path(__file__).parents[__package__.count(".") + 1]  # from where this package is imported
LEAVE_S = 10.0  # for processes that were told to close; then they are killed
SAMPLE_S = 0.1
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Plan:
    backends: Sequence[Backend]
    rounds: int
    copies: int
    mib: int
    fans: Sequence[int]  # numbers of receivers
    timeout_s: float  # of each step: start, meeting, one copy
    environments: Path

    @property
    def nbytes(self) -> int:
        return self.mib * 2**20


@dataclass(frozen=True, slots=True)
class Copy:
    """One timed copy to all receivers. `seconds` includes `offered_s`, which the source took before
    anybody could read.
    """

    seconds: float
    offered_s: float
    cpu_s: float


@dataclass(slots=True)
class Visit:
    """What came of one visit; of a visit that failed, `reason`, and no copies."""

    backend: str
    fan: int
    round: int
    copies: list[Copy] = field(default_factory=list)
    peak_bytes: int = 0
    # of what it uses; none: it has not started
    versions: dict[str, str] = field(default_factory=dict)
    reason: str | None = None


class VisitFailed(Exception):
    """This backend cannot be measured now; the text says why."""


Tell = Callable[[Visit], None]  # of each visit, as soon as it is over


async def run(plan: Plan, tell: Tell) -> None:
    """All rounds, every other one backwards. What has failed is not tried again; a backend that
    does not start, nowhere.
    """
    broken = {
        (backend.name, fan): reason
        for backend in plan.backends
        if (reason := _lacking(plan, backend))
        for fan in plan.fans
    }
    for (name, fan), reason in broken.items():
        tell(Visit(name, fan, 1, reason=reason))
    steps = [(fan, backend) for fan in plan.fans for backend in plan.backends]
    for number in range(1, plan.rounds + 1):
        for fan, backend in steps if number % 2 else reversed(steps):
            if (backend.name, fan) in broken:
                continue
            done = await visit(plan, backend, fan, number)
            if done.reason is not None:
                broken |= {
                    (backend.name, each): done.reason
                    for each in plan.fans
                    if each == fan or not done.versions
                }
            tell(done)


def _lacking(plan: Plan, backend: Backend) -> str | None:
    return environments.lacking(plan.environments, backend.environment, backend.programs)


async def visit(plan: Plan, backend: Backend, fan: int, number: int) -> Visit:
    """New processes, one copy that is checked whole, and the timed ones."""
    done = Visit(backend.name, fan, number)
    scratch = _scratch()
    try:
        settings = [_setting(plan, scratch, fan, who) for who in range(fan + 1)]
        async with _processes(plan, backend, scratch, settings) as processes:
            await _measure(plan, processes, done, scratch)
    except VisitFailed as error:
        done.copies.clear()
        done.reason = str(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return done


def _scratch() -> Path:
    """In memory. (The name is short: some put sockets there, whose paths have 107 bytes at
    most.)
    """
    return Path(
        tempfile.mkdtemp(prefix=f"thb{os.getpid()}-", dir=MEMORY if MEMORY.is_dir() else None)
    )


def _setting(plan: Plan, scratch: Path, fan: int, number: int) -> str:
    return json.dumps(
        {
            "number": number,
            "receivers": fan,
            "sizes": half_tiny(plan.nbytes),
            "scratch": str(scratch),
        }
    )


async def _measure(
    plan: Plan, processes: Sequence[BenchProcess], done: Visit, scratch: Path
) -> None:
    source, *receivers = processes
    greetings = await _within(plan, "start", _hear_all(processes))
    done.versions, hellos = greetings[0]["versions"], [answer["value"] for answer in greetings]
    await _within(plan, "meet", _ask(processes, "meet", hellos))
    for number in range(plan.copies + 1):
        if number == 0:
            await _within(plan, "clear", _ask(receivers, "clear"))
            copied, done.peak_bytes = await _watched(
                processes, scratch, _within(plan, "first copy", _copy(processes, 0))
            )
        else:
            copied = await _within(plan, f"copy {number}", _copy(processes, number))
            done.copies.append(copied)
        check = "sample" if number else "digest"
        expected, *found = [
            answer["value"] for answer in await _within(plan, check, _ask(processes, check))
        ]
        wrong = [
            process.name
            for process, value in zip(receivers, found, strict=True)
            if value != expected
        ]
        if wrong:
            raise VisitFailed(
                f"{', '.join(wrong)} got other bytes than {source.name} has, in copy {number}"
            )
    with contextlib.suppress(VisitFailed, TimeoutError):
        with anyio.fail_after(LEAVE_S):
            await _ask([*receivers, source], "close")


async def _copy(processes: Sequence[BenchProcess], number: int) -> Copy:
    """A new content, to all receivers. None of our own messages is in the time."""
    source, *receivers = processes
    retired = await source.do("retire")
    await source.do("change")
    before_s = await _cpu_s(processes)
    offered = await source.do("offer", number + 1)
    for receiver in receivers:
        await receiver.tell(do="take", arguments=[offered["value"]])
    await source.tell(do="give", arguments=[])
    given, *taken = await _hear_all(processes)
    cpu_s = await _cpu_s(processes) - before_s
    offered_s = sum(answer["end"] - answer["start"] for answer in (retired, offered))
    moved_s = max(answer["end"] for answer in taken) - min(
        answer["start"] for answer in [given, *taken]
    )
    return Copy(offered_s + moved_s, offered_s, cpu_s)


async def _cpu_s(processes: Sequence[BenchProcess]) -> float:
    return float(sum(answer["value"] for answer in await _ask(processes, "cpu")))


async def _watched(
    processes: Sequence[BenchProcess], scratch: Path, copying: Any
) -> tuple[Copy, int]:
    """The copy, and the most memory that the visit's processes had during it."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            pids = process_tree.members([process.pid for process in processes])
            most = max(
                most, await anyio.to_thread.run_sync(process_tree.memory_bytes, pids, scratch)
            )
            await anyio.sleep(SAMPLE_S)

    async with _leaves(), anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        copied = await copying
        tasks.cancel_scope.cancel()
    return copied, most


# --------------------------------------------------------------------------------------------------
# the processes


class BenchProcess(AsyncChildProcess):
    """A process of a visit."""

    async def hear(self) -> Line:
        """The next answer; VisitFailed if it failed or is gone."""
        try:
            answer = await super().hear()
        except ChildEnded as ended:
            raise VisitFailed(str(ended)) from None
        if "failed" in answer:
            raise VisitFailed(f"{self.name}: {' '.join(answer['failed'].split())[:500]}")
        return answer

    async def do(self, what: str, *arguments: object) -> Line:
        return await self.ask(do=what, arguments=arguments)


async def _ask(
    processes: Sequence[BenchProcess], do: str, *arguments: object
) -> list[dict[str, Any]]:
    for process in processes:
        await process.tell(do=do, arguments=arguments)
    return await _hear_all(processes)


async def _hear_all(processes: Sequence[BenchProcess]) -> list[dict[str, Any]]:
    """An answer of each; the first failure of any at once, for the others may be waiting for that
    one.
    """
    answers: dict[str, dict[str, Any]] = {}

    async def hear(process: BenchProcess) -> None:
        answers[process.name] = await process.hear()

    async with _leaves(), anyio.create_task_group() as tasks:
        for process in processes:
            tasks.start_soon(hear, process)
    return [answers[process.name] for process in processes]


@contextlib.asynccontextmanager
async def _leaves() -> AsyncIterator[None]:
    """What went wrong in a task group is raised by itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise leaf_of(group) from None


async def _within(plan: Plan, step: str, doing: Any) -> Any:
    try:
        with anyio.fail_after(plan.timeout_s):
            return await doing
    except TimeoutError:
        raise VisitFailed(f"no end of its {step} within {plan.timeout_s:g} s") from None


@contextlib.asynccontextmanager
async def _processes(
    plan: Plan, backend: Backend, scratch: Path, settings: Sequence[str]
) -> AsyncIterator[list[BenchProcess]]:
    """A process for each setting, the source first; all of them and whatever they have started are
    gone afterwards.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "UCX_POSIX_DIR": str(scratch),
        **backend.variables,
    }
    python = str(environments.interpreter(plan.environments, backend.environment))
    started: list[BenchProcess] = []
    async with closing_all() as children:
        try:
            for number, setting in enumerate(settings):
                name = f"receiver {number}" if number else "the source"
                command = [python, "-m", f"{__package__}.bench_process", backend.name, setting]
                started.append(BenchProcess(name, command, environment=os.environ | variables))
                children.append(started[-1])
            yield started
        finally:
            with anyio.CancelScope(shield=True):
                await _end_trees([process.pid for process in started])


async def _end_trees(roots: Sequence[int]) -> None:
    """Kill whoever is left of the visit, until nobody is."""
    deadline = time.monotonic() + LEAVE_S
    while (left := process_tree.members(roots)) and time.monotonic() < deadline:
        process_tree.end(left)
        await anyio.sleep(0.02)
