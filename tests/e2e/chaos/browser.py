"""A headless Chromium, over the W3C WebDriver protocol of its driver."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx

from ports import HeldPort

#: What the test machine may take for one command or until a page is as wanted.
WITHIN_S = 60.0
ENTER = "\ue007"
TAB = "\ue004"


def installed() -> bool:
    """Chromium and its driver are there."""
    return all(shutil.which(name) for name in ("chromium", "chromedriver"))


class Browser:
    """One window of a `browser`."""

    def __init__(self, session: str) -> None:
        self._http = httpx.Client(base_url=session, timeout=WITHIN_S)

    def close(self) -> None:
        self._http.close()

    def command(self, method: str, path: str, **body: Any) -> Any:
        """The value that a WebDriver command answers."""
        answer = self._http.request(method, path, json=body if method == "POST" else None).json()["value"]
        assert not isinstance(answer, dict) or "error" not in answer, answer
        return answer

    def devtools(self, name: str, **params: Any) -> Any:
        """The answer of a command of Chromium's own protocol."""
        return self.command("POST", "/goog/cdp/execute", cmd=name, params=params)

    def open(self, url: str) -> None:
        self.command("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script's `return` gives."""
        return self.command("POST", "/execute/sync", script=script, args=list(arguments))

    def keys(self, text: str) -> None:
        """Press and release each key."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.command("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def until(self, script: str, holds: Callable[[Any], object] = bool) -> Any:
        """What `script` returns once `holds` is true of it; an AssertionError after `WITHIN_S`. The page is
        another process: it has no event for a test."""
        ends = time.monotonic() + WITHIN_S
        while not holds(found := self.run(script)):
            assert time.monotonic() < ends, f"{script}: {found!r}"
            time.sleep(0.1)
        return found

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page, and the colours that its user prefers."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        """The window, as WebP."""
        found = self.devtools("Page.captureScreenshot", format="webp", quality=70)
        file.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """Errors that the page has written to its console since the last question."""
        found = self.command("POST", "/se/log", type="browser")
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A Chromium whose profile is in `folder`; it and its driver are ended."""
    port = HeldPort().port
    with (folder / "chromedriver.log").open("wb") as log:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        ends = time.monotonic() + WITHIN_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/status", timeout=WITHIN_S).json()["value"]["ready"]:
                    break
            assert time.monotonic() < ends, "chromedriver does not answer"
            time.sleep(0.1)
        options = {
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={folder / 'profile'}",
            ]
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = httpx.post(
            f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=WITHIN_S
        ).json()["value"]
        assert "sessionId" in made, made
        session = f"{url}/session/{made['sessionId']}"
        page = Browser(session)
        try:
            yield page
        finally:
            page.close()
            httpx.delete(session, timeout=WITHIN_S)
    finally:
        driver.terminate()
        driver.wait(WITHIN_S)
