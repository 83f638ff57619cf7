"""`tensorhub seed`, as a process: it follows a model, serves it without its publisher, and goes
away cleanly.
"""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from dataclasses import replace
from threading import Thread
from typing import Any

import anyio
import numpy as np
import pytest

from tensorhub import sync
from tensorhub.cli import progress
from tensorhub.cli.seed import Seeder
from tensorhub.errors import VersionUnavailable
from tensorhub.types import FetchReport, Location, Options, VersionInfo, parse_address
from tests.cli.processes import WAIT_S, line_with, run_here, started
from tests.rig import CHUNK_BYTES, CHUNKS, Tensors, holds, tensors, write

OPTIONS = Options(op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES)
NBYTES = CHUNKS * CHUNK_BYTES


def arrays(content: int) -> Tensors:
    return tensors(content)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_follows_a_model_and_outlives_its_publisher(address: str, end: signal.Signals) -> None:
    with sync.connect(address, name="trainer", options=OPTIONS) as hub:
        out = arrays(1)
        source = hub.register("m", out)
        source.publish(1)
        arguments = (
            "seed",
            "m",
            "--host-memory",
            str(NBYTES),
            "--address",
            address,
            "--json",
            "--site",
            "here",
        )
        with started(*arguments) as process:
            said = json.loads(line_with("{", process.stdout))
            assert (said["model"], said["version"], said["ranks"], said["bytes_read"]) == (
                "m",
                1,
                [0],
                NBYTES,
            )
            assert (said["bytes_saved"], said["deltas"]) == (0, ["no base"])
            with source.mutate(2):
                write(out, 2)
            assert json.loads(line_with("{", process.stdout))["version"] == 2
            (replica,) = [r for r in hub.describe("m").replicas if r.purpose == "seed"]
            assert (replica.medium, replica.version, replica.state) == ("host", 2, "ready")
            assert any(worker.location.site == "here" for worker in hub.describe("m").workers)
            source.unpublish()
            write(out, 9)
            mine = {name: np.zeros_like(tensor) for name, tensor in out.items()}
            weights = hub.register("m", mine)
            assert weights.replicate().version == 2
            assert holds(mine, 2)
            process.send_signal(end)
            out_text, err = process.communicate(timeout=WAIT_S)
            assert (process.returncode, out_text) == (0 if end is signal.SIGTERM else 130, "")
            assert "Traceback" not in err


def test_sigterm_hands_over_what_only_a_seed_has(address: str) -> None:
    arguments = ("seed", "m", "--host-memory", str(NBYTES), "--address", address, "--json")
    with sync.connect(address, options=replace(OPTIONS, host_memory_bytes=NBYTES)) as spare:
        with sync.connect(address, options=OPTIONS) as hub:
            hub.retain("m", latest=1)
            hub.register("m", arrays(1)).publish(1)
            with started(*arguments) as seed:
                line_with("{", seed.stdout)
                hub.close()
                assert [each.purpose for each in spare.describe("m").replicas] == ["seed"]
                seed.send_signal(signal.SIGTERM)
                assert seed.wait(WAIT_S) == 0
        assert [(each.purpose, each.version) for each in spare.describe("m").replicas] == [
            ("retention", 1)
        ]


def test_all_ranks_and_some_of_them(address: str) -> None:
    with sync.connect(address, options=OPTIONS) as hub:
        ranks = [hub.register("m", arrays(r), group="g", rank=r, world_size=2) for r in range(2)]
        threads = [Thread(target=rank.publish, args=(1,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with started(
            "seed", "m", "--host-memory", str(2 * NBYTES), "--address", address, "--json"
        ) as process:
            assert json.loads(line_with("{", process.stdout))["ranks"] == [0, 1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        arguments = ("seed", "m", "--rank", "1", "--host-memory", str(NBYTES), "--address", address)
        with started(*arguments) as process:
            assert "seeding m version 1 (rank 1; read" in line_with("seeding", process.stdout)
            (replica,) = [
                r for r in hub.describe("m").replicas if r.purpose == "seed" and r.state == "ready"
            ]
            assert [shard.rank for shard in replica.shards] == [1]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--host-memory", "100"), 1, f"StateError: a seed needs {NBYTES} bytes of host memory"),
        (
            ("--host-memory", str(NBYTES), "--rank", "3"),
            1,
            "VersionUnavailable: version 1 of 'm' has no rank 3",
        ),
        (
            ("--host-memory", str(NBYTES), "--rank", "-1"),
            2,
            "error: usage: --rank -1: give numbers from 0, or all",
        ),
        (("--host-memory", str(NBYTES), "--site", ""), 2, "error: usage: '' cannot name a site"),
        (("--host-memory", "0"), 2, "--host-memory"),
        ((), 2, "--host-memory"),
    ],
)
def test_what_cannot_be_seeded(
    address: str, arguments: tuple[str, ...], code: int, text: str
) -> None:
    with sync.connect(address, options=OPTIONS) as hub:
        hub.register("m", arrays(1)).publish(1)
        ended = run_here("seed", "m", "--address", address, *arguments)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert text in " ".join(ended.stderr.split())
        assert "Traceback" not in ended.stderr


def test_a_refusal_is_printed_once_until_it_changes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals = iter(["silent", "silent", "full"])

    async def seed_shard(hub: object, info: object, rank: int) -> FetchReport:
        raise VersionUnavailable(next(refusals))

    monkeypatch.setattr("tensorhub.cli.seed.seed_shard", seed_shard)
    given: Any = None  # the hub and how to connect: neither is used
    seeder = Seeder("m", None, OPTIONS, Location(), given, as_json=False, quiet=True)
    version = VersionInfo("m", 1, "c", NBYTES, 1)

    async def run() -> None:
        with progress.BytesBar(shown=False) as bar:
            for _ in range(3):
                assert not await seeder._hold(given, version, bar)

    anyio.run(run)
    said = [each for each in capsys.readouterr().err.splitlines() if "not seeded" in each]
    assert said == ["not seeded yet: silent", "not seeded yet: full"]


def test_it_goes_on_under_a_coordinator_that_has_lost_its_state() -> None:
    with ExitStack() as stack:
        with sync.serve(token="", options=OPTIONS) as coordinator:
            address = coordinator.address
            with sync.connect(address, token="", options=OPTIONS) as hub:
                hub.register("m", arrays(1)).publish(1)
                arguments = (
                    "seed",
                    "m",
                    "--host-memory",
                    str(NBYTES),
                    "--address",
                    address,
                    "--json",
                )
                process = stack.enter_context(started(*arguments))
                assert json.loads(line_with("{", process.stdout))["version"] == 1
        stack.enter_context(sync.serve(port=parse_address(address)[1], token="", options=OPTIONS))
        hub = stack.enter_context(sync.connect(address, token="", options=OPTIONS))
        hub.register("m", arrays(2)).publish(1)
        assert json.loads(line_with("{", process.stdout))["bytes_read"] == NBYTES
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "begins anew: 'm': the coordinator has come back without its state" in err
