from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from tensorhub.archives.store import Store
from tests.archives.servers import S3, CannotStart, seaweedfs

pytest.importorskip("obstore", reason="obstore is not installed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is archived and read again, is so over HTTP in `make test-slow`: `test_store` has each
    call of a store there in `make test`, too.
    """
    for item in items:
        if item.path == Path(__file__).with_name("test_versions.py") and "[s3" in item.name:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    try:
        with seaweedfs() as server:
            yield server
    except CannotStart as error:
        pytest.skip(str(error))


@pytest.fixture(params=["file", "s3"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens one store, again and again."""
    if request.param == "file":
        return lambda: Store(f"file://{tmp_path}/archive", writable=True)
    server: S3 = request.getfixturevalue("s3")
    url = f"{server.url}/{token_hex(4)}"
    return lambda: Store(url, options=server.options, timeout_s=60, writable=True)


@pytest.fixture
def store(open_store: Callable[[], Store]) -> Store:
    return open_store()


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/archive", writable=True)
