"""A browser that stays open: a page is opened, asked and resized while the world around it changes.

Chromium speaks its own protocol over two pipes: JSON texts that end with a zero byte. Nothing but the standard library is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.browser.browser import FLAGS, TIMEOUT, find_browser

_FLAGS = [flag for flag in FLAGS if not flag.startswith(("--virtual-time", "--dump-dom"))]


class Browser:
    """One page of a running browser; `errors` are what it wrote to its console or threw."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._waiting = b""
        self._last = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for room in ("Runtime", "Page", "Log"):
            self.call(f"{room}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def open(self, address: str, width: int = 1280, dark: bool = False) -> None:
        """Go to a page and forget the errors of the one before."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        for place in ("about:blank", address):  # what the page before had to say does not count
            self.errors.clear()
            self.call("Page.navigate", url=place)
            self.until("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 20) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.ask('document.body.innerText')}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key])

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            ready = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "the browser is silent"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._waiting += data
        line, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif event.get("method") == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {parameters['message']}")


_KEYS = {"Tab": 9, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A running browser with its profile in `folder`; it and its children are gone afterwards."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Chromium reads from 3 and writes to 4; the ends are moved up first so that they cannot be in the way.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]
    for end in (theirs_in, theirs_out):
        os.close(end)
    command = [str(find_browser()), *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"]
    line = f"exec {shlex.join(command)} 3<&{high[0]} 4>&{high[1]}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["bash", "-c", line], pass_fds=high, start_new_session=True, **quiet)
    for end in high:
        os.close(end)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        os.close(ours_out)
        os.close(ours_in)
