"""Drives a headless Chromium over its DevTools protocol, which needs no package but aiohttp."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

TIMEOUT = 30
"""Seconds after which a test fails that waits for a page."""

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    # A name that is looked up is a request to another host.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.*",
)
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowDown": 40}

Message = dict[str, Any]


class _Connection:
    """One DevTools connection; commands go to the session of a page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self.on_event: Callable[[str, Message], None] = lambda method, params: None

    async def receive(self) -> None:
        """Hand out responses and events, until the browser ends."""
        async for message in self._socket:
            document = json.loads(message.data)
            if "id" in document:
                waiting = self._waiting.pop(document["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(document)
            else:
                self.on_event(document["method"], document.get("params", {}))
        for waiting in self._waiting.values():
            waiting.cancel()

    async def send(self, method: str, session: str = "", **params: Any) -> Message:
        """Send a command, and return its result."""
        number = next(self._ids)
        command: Message = {"id": number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(command)
        async with asyncio.timeout(TIMEOUT):
            document = await waiting
        assert "error" not in document, f"{method}: {document['error']}"
        result: Message = document["result"]
        return result


class BrowserPage:
    """A page in the browser, with what it requested and what it complained about."""

    def __init__(self, connection: _Connection, context: str, session: str) -> None:
        self._connection = connection
        self._context = context
        self._session = session
        self.requests: list[str] = []
        self.errors: list[str] = []

    async def send(self, method: str, **params: Any) -> Message:
        """Send a DevTools command to this page."""
        return await self._connection.send(method, self._session, **params)

    def note(self, method: str, params: Message) -> None:
        """Note a request, or an error."""
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", "")
                self.errors.append(f"{details['text']} {thrown}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                said = [str(each.get("value", each)) for each in params["args"]]
                self.errors.append(" ".join(said))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                if entry["source"] != "network":  # responses that are errors, broken connections
                    self.errors.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")

    async def open(self, url: str) -> None:
        """Load a page from anew, also if only the hash differs."""
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete' && document.title !== ''")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        result = await self._run(expression)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        try:
            async with asyncio.timeout(TIMEOUT):
                while True:
                    result = await self._run(expression)
                    value = result["result"].get("value")
                    if value and "exceptionDetails" not in result:
                        return value
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"never true: {expression}\n{text}\n{self.errors}") from None

    async def _run(self, expression: str) -> Message:
        return await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )

    async def wait_for_text(self, text: str, selector: str = "body") -> None:
        """Wait until a visible text is there."""
        await self.wait_for(
            f"{elements(selector)}.some(each => each.innerText.includes({json.dumps(text)}))"
        )

    async def wait_for_count(self, count: int, selector: str) -> None:
        """Wait until so many elements match."""
        await self.wait_for(f"{elements(selector)}.length === {count}")

    async def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element that matches."""
        return str(await self.evaluate(f"{element(selector)}.innerText"))

    async def each(self, selector: str, name: str = "innerText") -> list[Any]:
        """Return a property of each element that matches."""
        found = await self.evaluate(f"{elements(selector)}.map(each => each.{name})")
        assert isinstance(found, list)
        return found

    async def count(self, selector: str) -> int:
        """Return how many elements match."""
        return len(await self.each(selector, "tagName"))

    async def focused(self, name: str) -> Any:
        """Return a property of the element that has the focus."""
        return await self.evaluate(f"document.activeElement.{name}")

    async def click(self, selector: str) -> None:
        """Click at the middle of the first element that matches, with the mouse."""
        place = await self.wait_for(
            f"(() => {{ const found = {element(selector)};"
            " if (!found) return null;"
            " found.scrollIntoView({block: 'center'});"
            " const box = found.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at: Message = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
            await self.send("Input.dispatchMouseEvent", type=kind, **at)

    async def press(self, key: str, selector: str = "") -> None:
        """Press a key, as Tab or Enter, at an element that matches, or where the focus is."""
        if selector:
            await self.wait_for(f"{element(selector)} && ({element(selector)}.focus(), true)")
        text = {"Enter": "\r", " ": " "}.get(key)
        common: Message = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        down = {**common, "text": text} if text else common
        await self.send("Input.dispatchKeyEvent", type="keyDown", **down)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def press_button(self, name: str, selector: str = "button") -> None:
        """Press the first button of a name, as users read it or hear it, by the keyboard."""
        found = (
            f"{elements(selector)}.find(each => [each.innerText, each.ariaLabel]"
            f".some(name => name?.startsWith({json.dumps(name)})))"
        )
        await self.wait_for(f"(found => found && (found.focus(), true))({found})")
        await self.press("Enter")

    async def type(self, text: str, selector: str = "") -> None:
        """Type a text into an element that matches, or into the one that has the focus."""
        if selector:
            await self.evaluate(f"{element(selector)}.focus()")
        await self.send("Input.insertText", text=text)

    async def fill(self, selector: str, value: str) -> None:
        """Set a field as a user does who types or chooses."""
        await self.evaluate(
            f"(() => {{ const field = {element(selector)}; field.value = {json.dumps(value)};"
            " field.dispatchEvent(new Event('input'));"
            " field.dispatchEvent(new Event('change')); })()"
        )

    async def choose_file(self, selector: str, file: Path) -> None:
        """Choose a file in a field for files."""
        result = await self.send("Runtime.evaluate", expression=element(selector))
        found = result["result"]["objectId"]
        await self.send("DOM.setFileInputFiles", files=[str(file)], objectId=found)

    async def save_downloads_in(self, folder: Path) -> None:
        """Let the browser save what users download."""
        place: Message = {"downloadPath": str(folder), "browserContextId": self._context}
        await self.send("Browser.setDownloadBehavior", behavior="allow", **place)

    async def fits_width(self) -> bool:
        """Tell whether the page is not wider than the window."""
        root = "document.documentElement"
        return bool(await self.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"))

    async def resize(self, width: int, height: int = 1000) -> None:
        """Set the size of the window."""
        size: Message = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)

    async def prefer(self, scheme: str) -> None:
        """Set which colour scheme the user prefers."""
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[wanted])

    async def screenshot(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        result = await self.send("Page.captureScreenshot", format="png")
        _write(file, base64.b64decode(result["data"]))


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def elements(selector: str) -> str:
    """Write the JavaScript of an array of all elements that match."""
    return f"[...document.querySelectorAll({json.dumps(selector)})]"


def element(selector: str) -> str:
    """Write the JavaScript of the first element that matches."""
    return f"document.querySelector({json.dumps(selector)})"


@contextmanager
def running_browser(profile: Path) -> Iterator[str]:
    """Run a browser with an empty folder for its profile; give the URL for its commands."""
    command = (CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank")
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as process:
        try:
            yield _devtools_url(profile / "DevToolsActivePort")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _devtools_url(file: Path) -> str:
    """Return where a browser that has just started takes commands: it writes that into a file."""
    end = time.monotonic() + TIMEOUT
    while len(lines := file.read_text().splitlines() if file.exists() else []) != 2:
        assert time.monotonic() < end, "the browser does not start"
        time.sleep(0.05)
    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"


@asynccontextmanager
async def browser_page(browser: str, width: int = 1600) -> AsyncIterator[BrowserPage]:
    """Open a page that shares nothing with others; ``browser`` is the URL of a running browser."""
    async with (
        aiohttp.ClientSession() as client,
        client.ws_connect(browser, max_msg_size=0) as socket,
    ):
        connection = _Connection(socket)
        receiver = asyncio.create_task(connection.receive())
        try:
            # The browser disposes of it when this connection ends.
            context = await connection.send("Target.createBrowserContext", disposeOnDetach=True)
            yield await _new_page(connection, context["browserContextId"], width)
        finally:
            await socket.close()
            await receiver


async def _new_page(connection: _Connection, context: str, width: int) -> BrowserPage:
    target = await connection.send(
        "Target.createTarget", url="about:blank", browserContextId=context
    )
    attached = await connection.send(
        "Target.attachToTarget", targetId=target["targetId"], flatten=True
    )
    page = BrowserPage(connection, context, attached["sessionId"])
    connection.on_event = page.note
    for domain in ("Page", "Runtime", "Log", "Network"):
        await page.send(f"{domain}.enable")
    await page.resize(width)
    return page
