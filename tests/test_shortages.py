"""A process that may open no more files: what it is told, and that no peer is blamed.

Each such process is a real one of its own, which has tried everything once before (Python imports
by opening files).
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import tensorhub
from tensorhub import sync
from tests.rig import WAIT_S

BEGIN = """
import contextlib, os, resource, sys
import anyio, numpy as np
import tensorhub
from tensorhub.errors import StateError

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
QUICK = tensorhub.Options(op_timeout_s=20)

@contextlib.contextmanager
def only(free):
    "No more descriptors than these can be had."
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for each in taken[len(taken) - free:]:
        os.close(each)
    try:
        yield
    finally:
        for each in taken[:len(taken) - free]:
            os.close(each)

async def lacks(free, opens):
    "Whether that many are too few. Then the error says so."
    with only(free):
        try:
            opened = await opens()
        except StateError as error:
            assert "RLIMIT_NOFILE is 256" in str(error) and error.retryable, error
            return True
        await opened.close()
        return False
"""

OPENING = """
async def main():
    for opens in (
        lambda: tensorhub.connect(sys.argv[2], token="", options=QUICK),
        lambda: tensorhub.serve(token=""),
    ):
        assert not await lacks(100, opens)
        free = 0
        while await lacks(free, opens):
            free += 1
        assert 3 <= free < 30, free

anyio.run(main, backend=sys.argv[1])
"""

READING = """
async def main():
    for transport in ("shm", "cma", "tcp"):
        assert await read(transport, 100)
        free = 0
        while not await read(transport, free):
            free += 1
        assert 0 < free < 20, free

async def read(transport, free):
    "Whether it succeeds with so few; an error is of this process, and then the source is as good as before."
    async with tensorhub.connect(sys.argv[2], token="", transports=[transport], options=QUICK) as hub:
        copy = await hub.register("m", {"a": np.zeros(2**20, np.uint8)})
        with only(free):
            try:
                await copy.replicate()
            except StateError as error:
                assert "RLIMIT_NOFILE is 256" in str(error) and error.retryable, error
            else:
                return True
        report = await copy.replicate()
        assert [each.outcome for each in report.sources] == ["used"], report.sources
        return False

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("program", [OPENING, READING], ids=["opening", "reading"])
def test_a_lack_of_descriptors_is_a_typed_error_that_names_the_limit(
    program: str, backend: str
) -> None:
    memory = tensorhub.shared_empty_like({"a": np.zeros(2**20, np.uint8)})
    with (
        sync.serve(token="") as coordinator,
        sync.connect(coordinator.address, token="") as trainer,
    ):
        trainer.register("m", memory).publish(1)
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            BEGIN + program,
            backend,
            coordinator.address,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=4 * WAIT_S, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
