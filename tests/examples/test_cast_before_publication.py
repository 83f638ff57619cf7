"""The example of a converted copy: each version is checked to the byte, and what it cost is
told.
"""

import pytest

from examples.cast_before_publication import VERSIONS, main


@pytest.mark.anyio
async def test_a_rollout_has_the_masters_in_bf16() -> None:
    told: list[str] = []
    await main(told.append)
    assert sum(line.startswith("version ") for line in told) == VERSIONS
    assert told[-1] == "3 versions of fp32 masters were equal in bf16, to the byte"
