"""`tensorhub bench --cluster`: several machines' processes, one report, and no name in it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorhub
from benches.comparison.cluster import Bench, RankGone, StepFailed, _line_of
from benches.comparison.party import Party, Wanted, scrubbed
from tensorhub import sync
from tensorhub.errors import ManifestMismatch
from tests.cli.processes import line_with, run_here, started
from tests.rig import WAIT_S, cluster

SMALL = "--mib 2 --rounds 1 --copies 1 --timeout 60 --skip rdma,nixl".split()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors


@pytest.mark.heavy
def test_a_link_is_measured_and_no_machine_named(tmp_path: Path, prepared_with_torch: None) -> None:
    results = tmp_path / "results.json"
    with sync.serve(token="") as coordinator, ExitStack() as stack:
        command = ["bench", "--address", coordinator.address, *SMALL, "--rounds", "2"]
        source = stack.enter_context(
            started(*command, "--cluster", "0/2", "--results", str(results))
        )
        line_with("waiting for rank 1", source.stderr)
        again = run_here(*command, "--cluster", "0/2")
        assert (again.returncode, "another rank 0 runs" in again.stderr) == (2, True), again.stderr
        reader = stack.enter_context(started(*command, "--cluster", "1/2"))
        code, out, errors = finish(source)
        assert (code, finish(reader)[0]) == (0, 0), errors
    found = json.loads(results.read_text())
    assert [(link["from"], link["to"]) for link in found["links"]] == [(0, 1)]
    assert [(copy["by"], copy["to"]) for copy in found["copies"]] == [
        (by, [1]) for by in ("bare-1", "bare-4", "tcp", "tcp", "bare-4", "bare-1")
    ]
    (read,) = found["copies"][2]["readers"][0]["sources"]
    assert (read["rank"], read["bytes"]) == (0, 2 * 2**20)
    assert "| 0 -> 1 | tcp |" in out
    for name in (socket.gethostname(), "127.0.0.1", coordinator.address):
        assert name not in out + results.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "3/3"], "give RANK/SIZE"),
        (["--cluster", "one"], "give RANK/SIZE"),
        (["--cluster", "0/1"], "give RANK/SIZE"),
        (["--cluster", "0/2", "--results", "/nowhere/file"], "cannot be written"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(arguments: Sequence[str], says: str) -> None:
    done = run_here("bench", "--address", "tcp://127.0.0.1:1", *arguments)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_without_a_coordinator_nothing_is_waited_for() -> None:
    done = run_here("bench", "--cluster", "0/2")
    assert (done.returncode, "give --address" in done.stderr) == (2, True), done.stderr
    done = run_here("bench", "--cluster", "0/2", "--address", "tcp://127.0.0.1:1")
    assert (done.returncode, "CoordinatorUnavailable" in done.stderr) == (1, True), done.stderr


def test_addresses_are_taken_out_of_reasons() -> None:
    text = "no way to tcp://10.0.0.7:4100 or [fe80::1]:9\n  (2.5 s)"
    assert scrubbed(text) == "no way to ADDRESS or ADDRESS (2.5 s)"


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (["allocate", 5], "--mib 4 is the most here"),
        (["allocate", -1], "--mib 4 is the most here"),
        (["allocate", "much"], "TypeError"),
        (["give", 1, 10**9], "connections"),
        (["take_bare", "127.0.0.1", [1], 10**9], "connections"),
        (["open", "nixl"], "--only or --skip leaves out"),
        (["serve"], "KeyError"),
        ([[]], "TypeError"),
    ],
)
async def test_a_rank_gives_no_more_than_its_own_command_line_says(
    order: list[Any], says: str
) -> None:
    measured = Wanted(
        1, 2, partial(tensorhub.connect, ""), 1, 1, 4, [], ["nixl"], WAIT_S, None, False, True
    )
    assert says in (await Party(measured, "run", "127.0.0.1").do(*order))["failed"]


@pytest.mark.parametrize(
    "said", [[1, 2], {"host": 5}, {"host": "h", "machine": {"loopback": True, "transports": []}}]
)
async def test_a_rank_that_says_what_no_rank_says_ends_the_run_by_name(said: Any) -> None:
    class Said:
        async def say(self, line: object) -> None: ...

        async def hear(self, rank: int, number: int, timeout_s: float) -> Any:
            return said

    lines: Any = Said()
    measured = Wanted(
        0, 2, partial(tensorhub.connect, ""), 1, 1, 4, [], [], WAIT_S, None, False, True
    )
    bench = Bench(measured, lines, Party(measured, "run", "127.0.0.1"), "127.0.0.1")
    with pytest.raises(StepFailed, match="rank 1 does not say what its machine is"):
        await bench._meet()
    if not isinstance(said, dict):
        with pytest.raises(RankGone, match="rank 1 answers with what is no answer"):
            await bench.step({1: ["close"]})


async def test_a_line_that_is_too_long_is_refused_before_it_takes_memory() -> None:
    async with cluster("rank 0", "rank 1", token="") as c:
        weights = await c.hubs[0].register("m", {"line": torch.zeros(2**20, dtype=torch.uint8)})
        await weights.publish(1)
        with pytest.raises(ManifestMismatch):
            await _line_of(c.hubs[1], "m", 1, WAIT_S)


# --------------------------------------------------------------------------------------------------
# machines of their own


@contextmanager
def namespaces(count: int) -> Iterator[list[tuple[str, str]]]:
    """So many network namespaces on one bridge, each with its name and address."""
    mark = f"thb{os.getpid()}"
    names = [f"{mark}-{number}" for number in range(count)]
    addresses = [f"10.213.9.{number + 1}" for number in range(count)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=30)

    try:
        ip("link", "add", mark, "type", "bridge")
        ip("link", "set", mark, "up")
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            ip("netns", "add", name)
            port = f"{mark}.{number}"
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", port, "master", mark, "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", name, "link", "set", link, "up")
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)
        subprocess.run(["ip", "link", "delete", mark], capture_output=True, timeout=30)


@pytest.mark.slow
@pytest.mark.root
def test_a_rank_that_dies_ends_the_run_with_what_is_known(tmp_path: Path) -> None:
    token = tmp_path / "token"
    assert run_here("token", "new", "--out", str(token)).returncode == 0
    secret = token.read_text().strip()
    with namespaces(3) as machines, ExitStack() as stack:

        def on(number: int, *arguments: str) -> subprocess.Popen[str]:
            under = ["ip", "netns", "exec", machines[number][0]]
            return stack.enter_context(started(*arguments, under=under))

        serve = ["serve", "--host", machines[0][1], "--port", "0", "--token-file", str(token)]
        address = line_with("tcp://", on(0, *serve).stdout).split()[-1]
        command = ["bench", "--address", address, "--token-file", str(token), *SMALL]
        command += ["--timeout", "5"]
        on(1, *command, "--cluster", "1/3")
        victim = on(2, *command, "--cluster", "2/3")
        source = on(0, *command, "--cluster", "0/3")
        line_with("bare-4", source.stderr)
        victim.kill()
        code, out, _ = finish(source)
    assert code == 1
    assert "the rest: rank 2 is gone" in out
    assert all(f"| {way} | bare-1 |" in out for way in ("0 -> 1", "0 -> 1, 2"))
    assert secret not in out
    assert all(at not in out for _, at in machines)
