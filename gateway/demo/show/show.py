"""The show: five calls through the gateway, and what each looks like on both of its sides."""

from statistics import median
from typing import Any, Final, TextIO

import numpy as np

from gateway.demo.server import documents
from gateway.demo.server.server import DemoServer
from gateway.demo.server.tensors import Array
from gateway.demo.show.client import Caller, Reply, ShowError, client_session
from gateway.demo.show.curl import curl_commands
from gateway.demo.show.digest import describe, digest
from gateway.demo.show.page import Page, milliseconds

__all__ = ["ShowError", "curl_commands", "run_show"]

ROUNDS: Final = 5  # timed calls of each kind where two ways are compared

_IMAGE_SHAPE: Final = (1, 3, 224, 224)
_TRACE: Final = "/v2/models/add/trace"


async def run_show(gateway_url: str, server: DemoServer, out: TextIO, color: bool) -> None:
    """Make the calls and print them; `server` is the one behind the gateway.

    Raises ShowError at the first call that fails or answers something wrong.
    """
    page = Page(out, color=color)
    page.row("gateway", gateway_url)
    page.row("demo server", server.url)
    async with client_session() as session:
        show = _Show(Caller(session, server), gateway_url.rstrip("/"), server.url, page)
        await show.small_json()
        await show.big_json()
        await show.half_precision()
        await show.raw_binary()
        await show.trace()


class _Show:
    def __init__(self, caller: Caller, gateway: str, server: str, page: Page) -> None:
        self._caller = caller
        self._gateway = gateway
        self._server = server
        self._page = page

    async def small_json(self) -> None:
        path = "/v2/models/add/infer"
        left = np.array([1, 2, 3], np.float32)
        right = np.array([10, 20, 30], np.float32)
        self._page.title("1  A small JSON call", f"POST {path}")
        body = _request(_input("INPUT0", "FP32", left), _input("INPUT1", "FP32", right))
        reply = await self._caller.post_json(self._gateway + path, body)
        _check(reply, SUM=left + right)
        self._print(reply)
        self._print_time(reply)

    async def big_json(self) -> None:
        path = "/v2/models/image/infer"
        image = _image()
        self._page.title(f"2  A big JSON call: an image of {image.size:,} numbers", f"POST {path}")
        body = _request(_input("INPUT", "FP32", image))
        reply = await self._caller.post_json(self._gateway + path, body)
        _check(reply, INVERTED=1 - image)
        self._print(reply)
        through, straight = await self._compare(path, body)
        self._page.bars("time", {"through the gateway": through, "without it": straight})
        ratio = straight / through
        self._page.row(
            "",
            f"{ratio:.1f} times sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later",
            "good" if ratio >= 1 else "bad",
        )
        self._page.details(
            [
                f"the middle one of {ROUNDS} calls each way, taken in turn",
                "without the gateway this server reads and writes with Python's json module",
            ]
        )

    async def half_precision(self) -> None:
        path = "/v2/models/half/infer"
        numbers = np.array([1, 2.5, -3], np.float16)
        self._page.title("3  FP16 in JSON", f"POST {path}")
        body = _request(_input("INPUT0", "FP16", numbers))
        refusal = await self._caller.post_json(self._server + path, body)
        refusal.expect(400)
        self._print_refusal(refusal)
        reply = await self._caller.post_json(self._gateway + path, body)
        _check(reply, OUTPUT0=numbers * np.float16(0.5))
        self._print(reply)
        self._print_time(reply)

    async def raw_binary(self) -> None:
        path = "/v2/models/image/infer"
        image = _image()
        self._page.title("4  Raw binary: the body is the tensor", f"POST {path}")
        reply = await self._caller.post_raw(self._gateway + path, image.tobytes())
        _check(reply, INVERTED=1 - image)
        self._print(reply)
        self._print_time(reply)
        as_json = len(_request(_input("INPUT", "FP32", image)))
        self._page.details([f"the same image in JSON is {as_json:,} bytes"])

    async def trace(self) -> None:
        self._page.title("5  Trace settings, as the specification spells them", f"GET {_TRACE}")
        refusal = await self._caller.get(self._server + _TRACE)
        refusal.expect(404)
        self._print_refusal(refusal)
        reply = await self._caller.get(self._gateway + _TRACE)
        _check_trace(reply, {})
        self._print(reply)
        self._print_time(reply)

        self._page.title("   The same, changed", f"POST {_TRACE}")
        settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "100"}
        body = documents.to_text(settings)
        reply = await self._caller.post_json(self._gateway + _TRACE, body)
        _check_trace(reply, settings)
        self._print(reply)
        self._print_time(reply)

    async def _compare(self, path: str, body: bytes) -> tuple[float, float]:
        """Time the same call through the gateway and without it; medians in seconds."""
        through: list[float] = []
        straight: list[float] = []
        for _ in range(ROUNDS):
            for url, times in ((self._gateway, through), (self._server, straight)):
                reply = await self._caller.post_json(url + path, body)
                reply.expect(200)
                times.append(reply.seconds)
        return median(through), median(straight)

    def _print(self, reply: Reply) -> None:
        page = self._page
        page.row("client sends", describe(reply.sent))
        page.details(digest(reply.sent_text))
        if reply.behind is None:
            page.row("server gets", "nothing", "bad")
        else:
            moved = "" if reply.behind.path == reply.path else f", at {reply.behind.path}"
            page.row("server gets", describe(reply.behind.request) + moved)
            page.details(digest(reply.behind.request.text))
            page.row("server answers", f"{reply.behind.status}, {describe(reply.behind.answer)}")
            page.details(digest(reply.behind.answer.text))
        page.row("client gets", f"{reply.status}, {describe(reply.got)}", "good")
        page.details(digest(reply.text))

    def _print_refusal(self, reply: Reply) -> None:
        self._page.row("server alone", f"{reply.status}, {reply.document().get('error')}", "bad")

    def _print_time(self, reply: Reply) -> None:
        text = milliseconds(reply.seconds)
        if reply.behind is not None:
            text += f", {milliseconds(reply.behind.seconds)} of it in the server"
        self._page.row("time", text)


def _input(name: str, datatype: str, array: Array) -> dict[str, Any]:
    data = array.ravel().tolist()
    return {"name": name, "datatype": datatype, "shape": array.shape, "data": data}


def _request(*inputs: dict[str, Any]) -> bytes:
    return documents.to_text({"inputs": inputs})


def _image() -> Array:
    """Return a smooth picture, each of its 8-bit pixels as an FP32 from 0 to 1."""
    channel, row, column = np.indices(_IMAGE_SHAPE[1:])
    pixels = (row * (channel + 1) + column) % 256
    image: Array = (pixels / 255).astype(np.float32)
    return image.reshape(_IMAGE_SHAPE)


def _check(reply: Reply, **expected: Array) -> None:
    reply.expect(200)
    outputs = reply.outputs()
    for name, array in expected.items():
        if name not in outputs or not np.array_equal(outputs[name], array):
            raise reply.failure(f"output {name} is not what it should be")


def _check_trace(reply: Reply, settings: dict[str, Any]) -> None:
    reply.expect(200)
    document = reply.document()
    if "trace_level" not in document or not settings.items() <= document.items():
        raise reply.failure("these are not the trace settings")
