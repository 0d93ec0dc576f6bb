"""A real browser without a window, spoken to over two pipes in Chromium's own protocol: no driver, no port."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
NAVIGATED = "Inspected target navigated"
SECONDS_TO_ANSWER = 120  # on a small machine that others use too


class Browser:
    """One page at a time: opened, looked at by JavaScript, photographed."""

    def __init__(self, profile: Path):
        to_child, self.output = os.pipe()
        self.input, from_child = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        flags += ["--disable-extensions", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        # The protocol's pipes are the child's files 3 and 4, whatever their numbers are here.
        shell = f'exec "$@" 3<&{to_child} 4>&{from_child}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *flags],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_child)
        os.close(from_child)
        self.poll = select.poll()  # select takes no numbers of files from 1,024 on
        self.poll.register(self.input, select.POLLIN)
        self.buffer, self.last_id, self.session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.output)
        os.close(self.input)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The protocol's answer; events that come before it are kept."""
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive(SECONDS_TO_ANSWER)
            assert answer is not None, f"no answer to {method} in {SECONDS_TO_ANSWER} s"
            if answer.get("id") == self.last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if there is none in time."""
        deadline = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            if not self.poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                return None
            read = os.read(self.input, 1 << 20)
            assert read, "the browser has ended"
            self.buffer += read
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def open(self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Opens a page and waits until it is loaded, with the window and the system's colours as given."""
        self.events.clear()
        self.resize(width, height)
        self.set_dark(is_dark)
        self.call("Page.navigate", url=url)
        self.wait_until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def set_dark(self, is_dark: bool) -> None:
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, waited for if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, condition: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self._holds(condition):
            assert time.monotonic() < deadline, f"after {seconds} s there is still no: {condition}"
            time.sleep(0.05)

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.ask(condition))
        except AssertionError as error:
            if NAVIGATED in str(error):  # asked while one page gave way to the next
                return False
            raise

    def rest(self) -> None:
        """Until what the last event asked for has been drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """With the left button of the mouse, in pixels of the window."""
        middle = tuple((a + b) / 2 for a, b in zip(start, end, strict=True))
        for kind, (x, y) in [
            ("mouseMoved", start), ("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end),
            ("mouseReleased", end),
        ]:  # fmt: skip
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def photograph(self, path: Path, *, whole: bool = True) -> None:
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def list_complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and what the page's policy has refused."""
        self.ask("1")  # after which all that has happened before has been reported
        found = []
        for event in self.events:
            name, params = event.get("method"), event.get("params", {})
            if name == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif name == "Log.entryAdded":
                found.append(str(params["entry"]["text"]))
            elif name == "Runtime.consoleAPICalled":
                found.append(" ".join(str(value.get("value", value.get("description"))) for value in params["args"]))
        return found

    def list_requests(self) -> list[str]:
        """What the page has asked for: addresses, but for data that it has in itself."""
        self.ask("1")
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]
