"""The example of bounded staleness: it checks each sample's stamp itself."""

import asyncio
import re
from pathlib import Path

import pytest

from tensorhub.testing.auditor import audit
from tensorhub.testing.history import read, recording

pytest.importorskip("uvicorn", reason="the extra http is not installed")


def test_no_sample_is_too_old(tmp_path: Path) -> None:
    from examples.bounded_staleness import BATCH, BOUND, STEPS, main

    told: list[str] = []
    with recording(tmp_path):
        asyncio.run(main(told.append))
    judged = audit(read(tmp_path), is_calm=True)
    assert judged["update: ok"] > 0 < judged["tensors compared"]
    found = re.fullmatch(
        r"(\d+) samples, none older than (\d) versions, each as its stamp says", told[-1]
    )
    assert found is not None
    assert STEPS <= int(found[1]) <= STEPS * BATCH
    assert int(found[2]) <= BOUND
    assert len(told) == STEPS + 1
