"""A real browser for tests, spoken to over pipes with the DevTools protocol.

Chromium reads commands from file descriptor 3 and answers on 4, JSON objects that end
in a zero byte; nothing else is needed.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

_TIMEOUT = 60.0

# Puts the pipes where the browser looks for them and becomes the browser.
_LAUNCHER = """
import fcntl, os, sys
one, two = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(one, 3)
os.dup2(two, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str:
    """Path of the browser.

    Raises:
        FileNotFoundError: None is installed.
    """
    for name in _NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise FileNotFoundError(
        "the tests of the report need a browser: apt-get install chromium"
    )


class Page:
    """One page of the browser; `browse` makes it."""

    def __init__(self, process: subprocess.Popen[bytes], send: int, receive: int):
        self._process = process
        self._send, self._receive = send, receive
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        # Every message to the console, uncaught exception and failed request.
        self.complaints: list[str] = []
        # Addresses that the page asked for.
        self.requests: list[str] = []

    def open(self, url: str) -> None:
        """Makes the page and loads an address."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + _TIMEOUT
        while self.evaluate("document.readyState + location.href") != f"complete{url}":
            if time.monotonic() > deadline:
                raise TimeoutError(f"the browser did not load {url}")
            time.sleep(0.05)

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the viewport in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def emulate(self, *, media: str = "screen", scheme: str = "light") -> None:
        """Sets the medium (screen, print) and the colour scheme (light, dark)."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise ValueError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its answer; notes events on the way."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._number:
                self._note(answer)
                continue
            if "error" in answer:
                raise ValueError(f"{method}: {answer['error']}")
            return answer["result"]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if not select.select([self._receive], [], [], max(left, 0))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._receive, 1 << 20)
            if not data:
                raise ConnectionError(f"the browser ended: {self._process.poll()}")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(params))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.loadingFailed":
            self.complaints.append(f"failed: {params['errorText']}")


@contextlib.contextmanager
def browse(path: Path, profile: Path) -> Iterator[Page]:
    """Opens a file in a browser with an empty profile, and ends the browser."""
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    command = [find_browser(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(to_browser), str(from_browser), *command],
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    page = Page(process, send, receive)
    try:
        page.open(path.resolve().as_uri())
        yield page
        page._session = None
        page.call("Browser.close")
        process.wait(timeout=20)
    finally:
        os.close(send)
        os.close(receive)
        if process.poll() is None:
            process.kill()
            process.wait()
