"""A headless Chromium, driven over WebDriver: HTTP and JSON, without a library for it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_S = 60.0  # beside busy processes, a page takes a while
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name for a reference


def why_not() -> str | None:
    """Why no browser can be had here; None: one can."""
    lacks = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(lacks)} not found (Debian: chromium, chromium-driver)" if lacks else None


class Browser:
    """One tab."""

    def __init__(self, port: int, profile: Path) -> None:
        self._port = port
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": _binary()}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"
        # else a headless page has the focus of no window, and hears of no focus
        self.devtools("Emulation.setFocusEmulationEnabled", enabled=True)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        try:
            sent = json.dumps(body or {}) if method == "POST" else None
            connection.request(method, path, sent, {"Content-Type": "application/json"})
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{path}: {value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What the body of a function returns in the page."""
        body = {"script": script, "args": arguments}
        return self._ask("POST", f"{self._session}/execute/sync", body)

    def devtools(self, command: str, **parameters: object) -> Any:
        body = {"cmd": command, "params": parameters}
        return self._ask("POST", f"{self._session}/goog/cdp/execute", body)

    def text(self) -> str:
        """All text of the page, hidden or not."""
        return str(self.run("return document.querySelector('#app').textContent"))

    def until(self, condition: Callable[[], T], what: str = "") -> T:
        """The first true value of the condition; it is asked again and again."""
        deadline = time.monotonic() + WAIT_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {WAIT_S:g} s: {what}; the page:\n{self.text()}")
            time.sleep(0.05)
        return value

    def see(self, *texts: str) -> None:
        """Wait until the page shows all of them."""
        for text in texts:
            self.until(lambda: text in self.text(), f"{text!r} is shown")  # noqa: B023

    def type_into(self, selector: str, text: str) -> None:
        body = {"using": "css selector", "value": selector}
        found = self._ask("POST", f"{self._session}/element", body)[ELEMENT]
        self._ask("POST", f"{self._session}/element/{found}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Keys, one after the other, where the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        body = {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        self._ask("POST", f"{self._session}/actions", body)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show the page as a screen of this size does."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        page = "document.scrollingElement.scrollWidth"
        return int(self.run(f"return {page} - document.scrollingElement.clientWidth"))

    def complaints(self) -> list[str]:
        """Warnings and errors in the console since the last look."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [each["message"] for each in entries if each["level"] in ("WARNING", "SEVERE")]

    def requested(self) -> set[str]:
        """The addresses that were asked for since the last look."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "performance"})
        events = [json.loads(each["message"])["message"] for each in entries]
        asked = [each for each in events if each["method"] == "Network.requestWillBeSent"]
        return {each["params"]["request"]["url"] for each in asked}

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._ask("DELETE", self._session)


def _binary() -> str:
    found = shutil.which("chromium")
    assert found is not None
    return found


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile; it has ended afterwards."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert driver.stdout is not None
        port = next(
            int(match[1])
            for line in driver.stdout
            if (match := re.search(r"started successfully on port (\d+)", line))
        )
        made = Browser(port, profile)
        try:
            yield made
        finally:
            made.close()
    finally:
        driver.terminate()
        driver.communicate()
