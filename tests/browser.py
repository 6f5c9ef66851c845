"""A real browser for tests: Chromium without a window, over the WebDriver protocol (w3.org/TR/webdriver2) that chromedriver speaks."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-color-profile=srgb",
)  # fmt: skip
#: Keys that have no character, as the protocol writes them.
LEFT, RIGHT, ENTER = "\ue012", "\ue014", "\ue007"
#: Names an element in an answer.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
SECONDS = 60  # that anything may take, on a busy machine


def needed() -> str:
    """The path of chromedriver. Without one the test is left out, unless STRETTO_BROWSER=required, as CI has it."""
    found = shutil.which("chromedriver")
    if found is None:
        said = "pages are looked at in Chromium, and there is none; `apt-get install chromium chromium-driver` brings it"
        (pytest.fail if os.environ.get("STRETTO_BROWSER") == "required" else pytest.skip)(said)
    return found


class Browser:
    """One window. errors: what its pages wrote to the console as errors."""

    def __init__(self, driver: str, profile: Path, size: tuple[int, int], dark: bool) -> None:
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout
        started = next(line for line in self.process.stdout if "started successfully on port" in line)
        found = re.search(r"on port (\d+)", started)
        assert found
        self.address = f"http://127.0.0.1:{found[1]}"
        flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
        asked = {"browserName": "chrome", "goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self.session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})["sessionId"]
        except BaseException:  # nobody has it yet who could close it
            self._end()
            raise

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        with urlopen(Request(self.address + path, data, {"Content-Type": "application/json"}, method=method), timeout=SECONDS) as reply:
            return json.load(reply)["value"]

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        return self._call(method, f"/session/{self.session}{path}", body)

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: object) -> Any:
        """What the script returns in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait(self, condition: str) -> Any:
        """The value of an expression of the page, once it is true."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if value := self.run(f"return {condition}"):
                return value
            time.sleep(0.02)
        raise AssertionError(f"never came true: {condition}; the page says {self.text('body')[:500]}")

    def _find(self, selector: str) -> str:
        return str(self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT])

    def click(self, selector: str) -> None:
        """With the mouse, in its middle; not if something lies over it."""
        self._ask("POST", f"/element/{self._find(selector)}/click")

    def keys(self, selector: str, text: str) -> None:
        """Typed on the keyboard."""
        self._ask("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self._ask("GET", f"/element/{self._find(selector)}/text"))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map(one => one.textContent)", selector))

    def screenshot(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))
        return path

    def errors(self) -> list[str]:
        return [one["message"] for one in self._ask("POST", "/se/log", {"type": "browser"}) if one["level"] == "SEVERE"]

    def close(self) -> None:
        try:
            self._call("DELETE", f"/session/{self.session}")
        finally:
            self._end()

    def _end(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)


@contextmanager
def browsing(size: tuple[int, int] = (1400, 1700), dark: bool = False) -> Iterator[Browser]:
    """A browser with a fresh profile, closed in any case."""
    driver = needed()
    with tempfile.TemporaryDirectory(prefix="browser-") as profile:
        browser = Browser(driver, Path(profile), size, dark)
        try:
            yield browser
        finally:
            browser.close()
