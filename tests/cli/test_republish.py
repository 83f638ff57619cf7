"""`tensorhub republish`: what it refuses at once. It follows a model in tests/frameworks, where the
package that quantizes is installed.
"""

from pathlib import Path
from typing import Any

import anyio
import pytest

from tensorhub.cli.republish import Republishing
from tensorhub.errors import VersionUnavailable
from tensorhub.integrations import quantized
from tensorhub.types import VersionInfo
from tests.cli.processes import run_here


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ("FP8_DYNAMIC", "compressed-tensors is not installed here: pip install"),
        ("there.json", "compressed-tensors is not installed here: pip install"),
        ("missing.json", "missing.json: no file with a quantization_config"),
    ],
)
def test_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, text: str
) -> None:
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text('{"quantization_config": {}}')
    done = run_here(
        "republish", "m", "m-fp8", "--quantization", quantization, "--address", "tcp://h:1"
    )
    assert done.returncode == 2
    assert text in done.stderr


def test_a_retry_that_fails_alike_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        said = iter(["no source", "no source", "too late", "too late", "no source"])

        def publish(self, version: int) -> None:
            raise VersionUnavailable(next(self.said))

    failing: Any = Failing()
    unused: Any = None
    republishing = Republishing("m", "m-fp8", {}, unused, unused, as_json=False, quiet=False)

    async def publish() -> None:
        info = VersionInfo("m", 1, "c", 1, 1)
        for _ in range(5):
            assert not await republishing._publish(failing, info)

    anyio.run(publish)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["no source", "too late", "no source"]
