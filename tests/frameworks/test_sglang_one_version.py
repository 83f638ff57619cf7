"""One version on all SGLang engines, or on none: see `one_version_rig`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frameworks import sglang_cpu
from tests.frameworks.one_version_rig import OneVersionTests, Rig, rigged
from tests.frameworks.sglang_generating import Engine

pytestmark = [pytest.mark.framework, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    sglang_cpu.shim()  # transformers wants torchvision
    with rigged(tmp_path_factory.mktemp("rig"), Engine) as made:
        yield made


class TestOneVersion(OneVersionTests):
    pass
