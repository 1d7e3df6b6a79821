"""Chromium without a window, driven over two pipes by its DevTools protocol: messages in JSON, each ended by a NUL."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless",
    "--no-sandbox",  # which root has not
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)
SECONDS = 60.0


class Browser:
    """A running Chromium. Answers and events come in one stream, of which the events are kept."""

    def __init__(self, commands: int, answers: int) -> None:
        """`commands` and `answers` are open file descriptors."""
        self._commands, self._answers = commands, answers
        self._numbers, self._rest = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def page(self, url: str) -> "Page":
        """A new page, loaded with nothing from any other."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, url)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], SECONDS)
            piece = os.read(self._answers, 2**20) if ready else b""
            assert piece, "the browser does not answer"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str, url: str) -> None:
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        made = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < end, f"{script} does not become true; the page says {self.text('body')}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """What is seen of an element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def colours(self, scheme: str) -> None:
        """`scheme` is "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def events(self, method: str) -> list[dict[str, Any]]:
        """The parameters of this page's events of one kind."""
        self.run("0")  # takes in those that have come
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] == method]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser whose profile is a new folder."""
    assert PROGRAM is not None
    (their_commands, commands), (answers, their_answers) = os.pipe(), os.pipe()
    shell = f'exec "$@" 3</dev/fd/{their_commands} 4>/dev/fd/{their_answers}'  # the numbers that it uses
    process = subprocess.Popen(
        ["sh", "-c", shell, "sh", PROGRAM, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(their_commands, their_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_commands)
    os.close(their_answers)
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(30)
        os.close(commands)
        os.close(answers)
