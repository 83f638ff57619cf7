"""What every test shares: tests that need something which this machine lacks are skipped, with the
reason.
"""

import contextlib
import gc
import importlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from benches.prepared import popen
from tensorhub.cli.app import COMMANDS
from tensorhub.logs import repeats

JUDGED = "judged"  # the property in which a test says which demands its seeds have judged
MODULES = (  # of prepared children
    "tests.processes.actor",
    "tensorhub.sync",
    "tensorhub.api.embedded",
    *(f"tensorhub.cli.{command}" for command in COMMANDS),
    "anyio._backends._asyncio",
    "anyio._backends._trio",
)

# How long an example takes says more of the machine than of the code.
settings.register_profile("tensorhub", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tensorhub")


def _lacks_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA device"


def has_rdma() -> bool:
    """Whether this machine has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def _lacks_rdma() -> str | None:
    if has_rdma():
        return None
    if "TENSORHUB_RDMA_GUEST" not in os.environ:
        return "no RDMA device; `make rdma` runs it in a guest that has one"
    from tests.rdma.guest import machine

    return machine.why_not()  # see tests/rdma/conftest.py


_LACKS: dict[str, Callable[[], str | None]] = {
    "root": lambda: None if os.geteuid() == 0 else "not root",
    "gpu": _lacks_gpu,
    "rdma": _lacks_rdma,
    "peer": lambda: (
        None if os.environ.get("TENSORHUB_TEST_PEER") else "TENSORHUB_TEST_PEER is not set"
    ),
}


def pytest_configure() -> None:
    # A script's background commands begin with Ctrl-C ignored, and so does all that they start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-traces", action="store_true", help="write the golden traces of tests/traces anew"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each of xdist's workers begins to import the tests at another file, so that on a fresh machine
    each compiles its part, and loads what the others have compiled.
    """
    ours: dict[str, object] | None = getattr(session.config, "workerinput", None)
    if ours is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = (
        len(files) * int(str(ours["workerid"]).removeprefix("gw")) // int(str(ours["workercount"]))
    )
    for path in files[first:] + files[:first]:
        name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection reports it
            importlib.import_module(name)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command run within the tests' process sets up logging as for a process of its own; no later
    test is to see that.
    """
    level, handlers = logging.root.level, logging.root.handlers[:]
    repeats.forget()
    yield
    logging.root.setLevel(level)
    for handler in [each for each in logging.root.handlers if each not in handlers]:
        logging.root.removeHandler(handler)


def pytest_collection_finish() -> None:
    """Tests that look for what is left collect garbage: among their own objects, not in all modules
    of torch each time.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor in all modules that the tests of another file have imported, once their own fixtures have
    gone.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def every_object() -> Iterator[None]:
    """For a test that looks at all objects: those as well that were here before the first test."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small children of this test do not import what they need: see benches/prepared.py."""
    monkeypatch.setattr(subprocess, "Popen", popen(*MODULES))


@pytest.fixture
def prepared_with_torch(prepared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for children that need torch."""
    monkeypatch.setattr(subprocess, "Popen", popen(*MODULES, "torch"))


@pytest.fixture
def rewrite_traces(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite-traces"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which demands the simulated seeds of tests/testing/test_slice.py have never judged."""
    reports = terminalreporter.getreports("passed")
    judged = [what for each in reports for name, what in each.user_properties if name == JUDGED]
    if judged:
        from tensorhub.testing.coverage import demands

        known = demands()
        never = known.keys() - set().union(*judged)
        terminalreporter.section(f"{len(never)} of {len(known)} demands were judged by no seed")
        for what in sorted(never):
            terminalreporter.write_line(f"{known[what]}: {what}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str | None] = {}
    for item in items:
        for need, lacks in _LACKS.items():
            if item.get_closest_marker(need) is None:
                continue
            if need not in reasons:
                reasons[need] = lacks()
            reason = reasons[need]
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
