"""`tensorhub archive`, as a process: it archives what is published, dies with everything else, and a
new cluster begins from the bucket.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tensorhub import sync
from tensorhub.types import Options
from tests.cli.processes import WAIT_S, line_with, run_here, started
from tests.rig import CHUNK_BYTES, CHUNKS, equal, tensors

pytest.importorskip("obstore", reason="the extra archive is not installed")
pytest.importorskip("zstandard", reason="the extra delta is not installed")

OPTIONS = Options(op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES)
NBYTES = CHUNKS * CHUNK_BYTES
MEMORY = ("--host-memory", str(3 * NBYTES))


def test_a_cluster_begins_again_from_the_bucket(address: str, tmp_path: Path) -> None:
    archive = ("archive", "--model", "m", "--to", f"file://{tmp_path}/bucket", *MEMORY)
    held = tensors(1)
    with (
        sync.connect(address, options=OPTIONS) as hub,
        started(*archive, "--address", address, "--json") as process,
    ):
        weights = hub.register("m", held)
        weights.publish(1)
        said = json.loads(line_with("{", process.stdout))
        assert (said["version"], said["base"], said["bytes"]) == (1, None, NBYTES)
        with weights.mutate(2):
            held["a"][5] += 1
        said = json.loads(line_with("{", process.stdout))
        assert (said["version"], said["base"]) == (2, 1)
        assert said["stored_bytes"] < NBYTES / 100
        process.kill()
        process.wait(WAIT_S)
    with sync.serve(options=OPTIONS) as coordinator:
        refused = run_here(*archive, "--address", coordinator.address)
        assert refused.returncode == 1
        assert "is of another cluster" in refused.stderr
        assert "--serve" in refused.stderr
        with (
            started(*archive, "--address", coordinator.address, "--serve") as process,
            sync.connect(coordinator.address, options=OPTIONS) as hub,
        ):
            assert "has 2 versions" in line_with("bucket", process.stderr)
            found = hub.fetch("m")
            assert found.info.version == 2
            assert equal({name: each.numpy() for name, each in found.items()}, held)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--to", "https://example.org/x"), "https"),
        (("--to", "file:///no/such/place/at/all"), "/no/such/place"),
        (("--to", "file:///tmp/x", "--every", "0"), "1 or more"),
    ],
)
def test_what_cannot_be_used_is_refused(address: str, given: tuple[str, ...], words: str) -> None:
    refused = run_here("archive", "--model", "m", *given, *MEMORY, "--address", address)
    assert refused.returncode in (1, 2)
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
