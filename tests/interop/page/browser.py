"""Drives a headless Chromium over its DevTools protocol, which needs no package but aiohttp."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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

    def __init__(self, connection: _Connection, session: str) -> None:
        self._connection = connection
        self._session = session
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.network_errors: list[str] = []
        """Responses that are errors, and connections that broke."""

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
                text = f"{entry['source']}: {entry['text']} {entry.get('url', '')}"
                is_network = entry["source"] == "network"
                (self.network_errors if is_network else self.errors).append(text)

    async def open(self, url: str) -> None:
        """Load a page from anew, also if only the hash differs."""
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete' && document.title !== ''")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        result = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = TIMEOUT) -> Any:
        """Wait until an expression is true, and return its value."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    if value := await self._try(expression):
                        return value
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"never true: {expression}\n{text}\n{self.errors}") from None

    async def _try(self, expression: str) -> Any:
        result = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return result.get("result", {}).get("value") if "exceptionDetails" not in result else None

    async def wait_for_text(self, text: str, selector: str = "body") -> None:
        """Wait until a visible text is there."""
        await self.wait_for(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".some(each => each.innerText.includes({json.dumps(text)}))"
        )

    async def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element that matches."""
        found = await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return str(found)

    async def click(self, selector: str) -> None:
        """Click at the middle of the first element that matches, with the mouse."""
        place = await self.wait_for(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " if (!found) return null;"
            " found.scrollIntoView({block: 'center'});"
            " const box = found.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                clickCount=1,
            )

    async def press(self, key: str) -> None:
        """Press a key, as Tab or Enter."""
        text = {"Enter": "\r", " ": " "}.get(key)
        common: Message = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        down = {**common, "text": text} if text else common
        await self.send("Input.dispatchKeyEvent", type="keyDown", **down)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        """Type a text into the element that has the focus."""
        await self.send("Input.insertText", text=text)

    async def choose_file(self, selector: str, file: Path) -> None:
        """Choose a file in a field for files."""
        result = await self.send(
            "Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})"
        )
        await self.send(
            "DOM.setFileInputFiles", files=[str(file)], objectId=result["result"]["objectId"]
        )

    async def fits_width(self) -> bool:
        """Tell whether the page is not wider than the window."""
        root = "document.documentElement"
        return bool(await self.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"))

    async def resize(self, width: int, height: int = 1000) -> None:
        """Set the size of the window."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, **features: str) -> None:
        """Set what the user prefers, as ``color_scheme="dark"``."""
        await self.send(
            "Emulation.setEmulatedMedia",
            features=[
                {"name": f"prefers-{name.replace('_', '-')}", "value": value}
                for name, value in features.items()
            ],
        )

    async def screenshot(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        result = await self.send("Page.captureScreenshot", format="png")
        _write(file, base64.b64decode(result["data"]))


@asynccontextmanager
async def browser_page(profile: Path, width: int = 1600) -> AsyncIterator[BrowserPage]:
    """Run a browser with one page; ``profile`` is an empty folder of its own."""
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        url = await _devtools_url(profile / "DevToolsActivePort")
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(url, max_msg_size=0) as socket,
        ):
            connection = _Connection(socket)
            receiver = asyncio.create_task(connection.receive())
            try:
                yield await _new_page(connection, width)
            finally:
                await socket.close()
                await receiver
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


async def _devtools_url(file: Path) -> str:
    """Return where a browser that has just started takes commands: it writes that into a file."""
    async with asyncio.timeout(TIMEOUT):
        while True:
            if len(lines := _lines(file)) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(0.05)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


async def _new_page(connection: _Connection, width: int) -> BrowserPage:
    target = await connection.send("Target.createTarget", url="about:blank")
    attached = await connection.send(
        "Target.attachToTarget", targetId=target["targetId"], flatten=True
    )
    page = BrowserPage(connection, attached["sessionId"])
    connection.on_event = page.note
    for domain in ("Page", "Runtime", "Log", "Network"):
        await page.send(f"{domain}.enable")
    await page.resize(width)
    return page
