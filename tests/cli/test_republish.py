"""`tensorhub republish`: what it refuses at once. It follows a model in tests/frameworks, where the
package that quantizes is installed.
"""

from pathlib import Path

import pytest

from tensorhub.integrations import quantized
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
