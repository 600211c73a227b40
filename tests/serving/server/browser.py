"""A real browser without a window, over its DevTools pipe: no driver, no WebSocket, nothing to install but Chromium.

    with browser(folder) as page:
        page.open("http://127.0.0.1:8080/")
        page.wait("document.querySelectorAll('#items li').length")
        page.picture(folder / "page.png", width=1280, height=900, dark=False)

Chromium reads messages from file descriptor 3 and writes to 4, each JSON with a zero byte behind it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._number, self._session = to_browser, from_browser, b"", 0, ""
        self.problems: list[str] = []  # what the console and the page's security policy complained of
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], 30)[0], "the browser says nothing"
            self._rest += os.read(self._from, 1 << 20)
        first, self._rest = self._rest.split(b"\0", 1)
        return json.loads(first)

    def _note(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        if message.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(about["exceptionDetails"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            url = about["request"]["url"]
            if not url.startswith(("http://127.0.0.1:", "data:")):
                self.problems.append(f"fetched {url}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a script."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, *, seconds: float = 20.0) -> Any:
        """The value of a script as soon as it is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script} stays {found!r}: {self.run('document.body.innerText')}"
            time.sleep(0.05)
        return found

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def fill(self, **values: str | bool) -> None:
        """Fields by their ids."""
        for name, value in values.items():
            field = "checked" if isinstance(value, bool) else "value"
            self.run(f"document.getElementById('{name}').{field} = {json.dumps(value)}")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def resize(self, *, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with one empty tab, until the block ends; its profile lies in a folder of the test."""
    assert CHROMIUM is not None
    its_end, to_browser = os.pipe()
    from_browser, its_other_end = os.pipe()
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
    options += ("--no-first-run", "--disable-background-networking", "--disable-component-update")
    command = [CHROMIUM, *options, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    quoted = "exec " + " ".join(f"'{each}'" for each in command) + f" 3<&{its_end} 4>&{its_other_end}"
    process = subprocess.Popen(
        ["bash", "-c", quoted],
        pass_fds=(its_end, its_other_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(its_end)
    os.close(its_other_end)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
