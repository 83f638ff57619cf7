"""Where this machine has no RDMA device, and TENSORHUB_RDMA_GUEST is set (`make rdma`), what needs
one runs in a guest that has: all that was chosen together, and each test with its own result, here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import has_rdma
from tests.rdma.guest import machine

LIMIT_S = 900.0
# of the environment, so that the guest tests the same code
_LIBRARY = ("PYTHONPATH", "VIRTUAL_ENV")


@cache
def _results(session: pytest.Session) -> dict[str, ElementTree.Element] | str:
    """What the guest says of each test, by its id; or why it says nothing."""
    wanted = [item.nodeid for item in session.items if _is_for_guest(item)]
    with tempfile.TemporaryDirectory(prefix="tensorhub-guest-") as directory:
        out = Path(directory)
        (out / "wanted").write_text("\n".join(wanted))
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "rdma",
            "-rA",
            "--color=no",
        ]
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            f"--junitxml={out}/junit.xml",
            f"@{out}/wanted",
        ]
        passed_on = {name: os.environ[name] for name in _LIBRARY if name in os.environ}
        try:
            status = machine.run(
                command, out, LIMIT_S, passed_on | {"PYTHONDONTWRITEBYTECODE": "1"}
            )
            if status not in (0, 1):  # 1: some have failed
                raise machine.GuestFailed(f"pytest ended with {status} in the guest")
            found = ElementTree.parse(out / "junit.xml").iter("testcase")
        except (machine.GuestFailed, OSError) as error:
            console = out / "console"
            return f"{error}\n{console.read_text(errors='replace')[-4000:] if console.exists() else ''}"
        names = {_name_of(nodeid): nodeid for nodeid in wanted}
        return {
            names[key]: each
            for each in found
            if (key := (each.get("classname"), each.get("name"))) in names
        }


def _name_of(nodeid: str) -> tuple[str, str]:
    """How a test is called in JUnit's form."""
    path, _, name = nodeid.partition("::")
    return path.removesuffix(".py").replace("/", "."), name


def _is_for_guest(item: pytest.Item) -> bool:
    skipped = any(mark.name == "skip" for mark in item.iter_markers())
    is_wanted = "TENSORHUB_RDMA_GUEST" in os.environ and not has_rdma()
    return is_wanted and not skipped and item.get_closest_marker("rdma") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """The guest runs before the first test begins: it takes longer than a test may."""
    if not session.config.option.collectonly and any(_is_for_guest(item) for item in session.items):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and not machine.is_built():
            reporter.write_line("the guest's kernel is built first, once: some minutes of CPU")
        _results(session)


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not _is_for_guest(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item) -> Iterator[pytest.TestReport]:
    results = _results(item.session)
    found = results if isinstance(results, str) else results.get(item.nodeid)
    said: object = None
    outcome, seconds = "passed", 0.0
    if isinstance(found, str) or found is None:
        outcome, said = "failed", found or "the guest says nothing of this test"
    else:
        seconds = float(found.get("time") or 0.0)
        for kind in ("failure", "error"):
            if (fault := found.find(kind)) is not None:
                outcome, said = "failed", fault.text or fault.get("message")
        if (skip := found.find("skipped")) is not None:
            outcome, said = "skipped", (str(item.path), 0, f"Skipped: {skip.get('message')}")
    for when in ("setup", "call", "teardown"):
        is_it = when == "call"
        yield pytest.TestReport(
            item.nodeid,
            item.location,
            dict.fromkeys(item.keywords, 1),
            outcome if is_it else "passed",  # type: ignore[arg-type]
            said if is_it else None,  # type: ignore[arg-type]
            when,
            duration=seconds if is_it else 0.0,
        )
