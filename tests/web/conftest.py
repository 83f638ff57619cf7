"""One browser for all tests of the dashboard."""

from collections.abc import Iterator

import pytest

from tests.web.browser import Browser, browser, why_not


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Browser]:
    """The browser, with a laptop's screen; nothing has been in its console when the test ends."""
    chromium.open("about:blank")
    chromium.look()
    chromium.complaints()
    chromium.requested()
    yield chromium
    assert chromium.complaints() == []
