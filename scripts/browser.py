"""A headless Chromium, driven by its DevTools protocol through two pipes. No package is needed.

The protocol: chromedevtools.github.io/devtools-protocol. Messages are JSON with a zero byte behind each.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SOON = 20.0  # seconds within which what is waited for must come
KEYS = {  # name: (code of the key, its text)
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "Space": (32, " "),
    "Backspace": (8, ""),
}
SHIFT = 8


class BrowserError(Exception):
    """What a page or the browser did wrong."""


class Browser:
    """A Chromium with a profile of its own, which is gone at the end."""

    def __init__(self, program: str, profile: Path) -> None:
        """Start it."""
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()

        def place_pipes() -> None:  # in the child: Chromium reads commands from 3 and writes answers to 4
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        flags = (
            "--headless=new --remote-debugging-pipe --no-first-run --disable-gpu --disable-dev-shm-usage --no-sandbox"
        )
        quiet = "--disable-background-networking --disable-component-update --disable-sync --disable-default-apps"
        command = [program, *flags.split(), *quiet.split(), f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=place_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_commands)
        os.close(write_answers)
        self._next = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}  # by the session of a tab
        self._ended = False
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command's answer.

        Raises:
            BrowserError: it failed, or there is no answer.
        """
        with self._changed:
            self._next += 1
            number = self._next
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        with self._writing:
            while data:
                data = data[os.write(self._write, data) :]
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._answers or self._ended, 60):
                raise BrowserError(f"{method}: no answer")
            if number not in self._answers:
                raise BrowserError("the browser has ended")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, context: str | None = None, **emulation: Any) -> "Tab":
        """A new tab at an address, when it has loaded. Tabs of one context share what they store."""
        own = {} if context is None else {"browserContextId": context}
        target = self.send("Target.createTarget", url="about:blank", **own)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, target, session)
        self._listeners[session] = tab.note
        for domain in ("Page", "Network", "Runtime", "Log"):
            tab.send(f"{domain}.enable")
        tab.emulate(**emulation)
        tab.go(url)
        return tab

    def new_context(self) -> str:
        """Another profile, which stores nothing when it is gone."""
        return str(self.send("Target.createBrowserContext")["browserContextId"])

    def close(self) -> None:
        """End it."""
        with suppress(BrowserError, OSError):
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)

    def _receive(self) -> None:
        rest = b""
        while part := os.read(self._read, 1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    with self._changed:
                        self._answers[message["id"]] = message
                        self._changed.notify_all()
                elif (listener := self._listeners.get(message.get("sessionId", ""))) is not None:
                    listener(message["method"], message["params"])
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Tab:
    """A page in a browser.

    Attributes:
        requests, bodies: every address that was asked for, and what was sent to it.
        problems: errors and warnings of the page, as its console has them.
    """

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.requests: list[str] = []
        self.bodies: list[str] = []
        self.problems: list[str] = []
        self._browser, self._target, self._session = browser, target, session
        self._canned = ""

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        """One of the browser's events; called in its thread."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
            self.bodies.append(parameters["request"].get("postData", ""))
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in parameters["args"]))
        elif method == "Fetch.requestPaused":  # in another thread: this one reads the answer
            threading.Thread(target=self._fulfill, args=(parameters["requestId"],), daemon=True).start()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of this page."""
        return self._browser.send(method, self._session, **parameters)

    def answer_with(self, pattern: str, text: str) -> None:
        """Answer requests to addresses of a pattern with this event stream, in the server's place.

        An empty one: no longer.
        """
        self._canned = base64.b64encode(text.encode()).decode()
        if text:
            self.send("Fetch.enable", patterns=[{"urlPattern": pattern}])
        else:
            self.send("Fetch.disable")

    def _fulfill(self, request: str) -> None:
        headers = [{"name": "Content-Type", "value": "text/event-stream"}]
        with suppress(BrowserError):
            self.send(
                "Fetch.fulfillRequest", requestId=request, responseCode=200, responseHeaders=headers, body=self._canned
            )

    def go(self, url: str) -> None:
        """Load an address."""
        failed = self.send("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserError(f"{url}: {failed}")
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        """Load the page again."""
        self.run("window.before = true")
        self.send("Page.reload")
        self.wait("!window.before && document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of an expression, waited for if it is a promise.

        Raises:
            BrowserError: it threw.
        """
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = SOON) -> Any:
        """Wait until an expression is true. Returns its value.

        Raises:
            BrowserError: it was not in time.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if found := self.run(expression):
                    return found
            except BrowserError as error:
                if "context" not in str(error):  # the page is being replaced
                    raise
            time.sleep(0.03)
        text = self.run("document.body.innerText.slice(0, 2000)")
        raise BrowserError(f"not within {seconds:g} seconds: {expression}\nThe page:\n{text}\n{self.problems}")

    def click(self, selector: str) -> None:
        """Click what a selector finds, where it is shown."""
        box = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "if (!found?.checkVisibility({visibilityProperty: true, contentVisibilityAuto: true})) return null;"
            "found.scrollIntoView({block: 'nearest'}); const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        if box is None:
            raise BrowserError(f"{selector} is not shown")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key of KEYS."""
        code, text = KEYS[key]
        own = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": modifiers,
        }
        self.send(
            "Input.dispatchKeyEvent",
            type="keyDown" if text else "rawKeyDown",
            **own,
            **({"text": text} if text else {}),
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", **own)

    def emulate(
        self, width: int = 1360, height: int = 860, dark: bool = False, calm: bool = False, phone: bool = False
    ) -> None:
        """A screen, in CSS pixels, and what its user prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = {"prefers-color-scheme": "dark" if dark else "light"}
        features["prefers-reduced-motion"] = "reduce" if calm else "no-preference"
        self.send(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )

    def screenshot(self, path: Path) -> None:
        """A picture of what is shown."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def front(self) -> None:
        """Show this tab; others are hidden."""
        self.send("Page.bringToFront")

    def close(self) -> None:
        """Close the tab."""
        self._browser.send("Target.closeTarget", targetId=self._target)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for a while.

    Raises:
        BrowserError: none is installed.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise BrowserError("there is no Chromium; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, Path(profile))
        try:
            yield browser
        finally:
            browser.close()
