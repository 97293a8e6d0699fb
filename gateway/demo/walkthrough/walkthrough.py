"""Makes six calls through the gateway and prints each as the client and the server see it.

After them it makes some calls a second, of every form, for the operator's page.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any, Final, TextIO

import numpy as np

from gateway.demo.server.server import DemoServer, RecordedCall
from gateway.demo.server.tensors import Array
from gateway.demo.server.wire import encode
from gateway.demo.walkthrough.client import INFER, CallResult, DemoClient, GrpcResult, ShowError
from gateway.demo.walkthrough.page import Page, milliseconds, summarize_body, summarize_json

ROUNDS: Final = 5  # calls of each kind in a comparison

_IMAGE_SHAPE: Final = (1, 3, 224, 224)
_TRACE: Final = "/v2/models/add/trace"
_LEFT: Final = np.array([1, 2, 3], np.float32)
_RIGHT: Final = np.array([10, 20, 30], np.float32)

_CURL_COMMANDS: Final = """\
# JSON in, JSON out
curl -sw '\\n' URL/v2/models/add/infer -d '{"inputs": [
  {"name": "INPUT0", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]},
  {"name": "INPUT1", "datatype": "FP32", "shape": [3], "data": [10, 20, 30]}]}'

# FP16 in JSON, which servers reject without the gateway
curl -sw '\\n' URL/v2/models/half/infer -d '{"inputs": [
  {"name": "INPUT0", "datatype": "FP16", "shape": [3], "data": [1, 2.5, -3]}]}'

# raw binary: the body is the tensor
printf 'hello' | curl -sw '\\n' URL/v2/models/upper/infer --data-binary @- \\
  -H 'Content-Type: application/octet-stream' -H 'Inference-Header-Content-Length: 0' --output -

# trace settings, at the path of the specification
curl -sw '\\n' URL/v2/models/add/trace
curl -sw '\\n' URL/v2/models/add/trace -d '{"trace_rate": "100"}'

# metadata of the server and of a model
curl -sw '\\n' URL/v2
curl -sw '\\n' URL/v2/models/image

# a response as a stream of events
curl -sN URL/v2/models/upper/generate_stream -d '{"INPUT0": "word by word"}'
"""


async def run_show(gateway_url: str, server: DemoServer, out: TextIO, color: bool) -> None:
    """Make the calls and print them; `server` is the gateway's upstream.

    Raises ShowError at the first call that fails or has a wrong response.
    """
    page = Page(out, color=color)
    page.row("gateway", gateway_url)
    page.row("demo server", server.url)
    async with DemoClient(server) as client:
        show = _Show(client, gateway_url.rstrip("/"), server.url, page)
        await show.show_small_json()
        await show.show_large_json()
        await show.show_fp16_json()
        await show.show_raw_binary()
        await show.show_trace()
        await show.show_grpc()


def curl_commands(gateway_url: str) -> str:
    """Make curl commands for a POSIX shell, in lines of at most 100 columns for a usual URL."""
    return _CURL_COMMANDS.replace("URL", gateway_url.rstrip("/"))


def next_steps(gateway_url: str, server_url: str, admin_url: str, key: str) -> str:
    """Say where the gateway and the server listen, with commands to try."""
    return f"""
The gateway listens on {gateway_url}
The demo server listens on {server_url}
The operator's page is {admin_url}/ and shows some calls a second, which the demo goes on making
Its panel "Try it" sends calls of your own: {admin_url}/#try?model=add with the key {key}

Commands to try:

{curl_commands(gateway_url)}"""


@dataclass(eq=False)
class _Show:
    """The calls of the show."""

    client: DemoClient
    gateway: str
    server: str
    page: Page

    async def show_small_json(self) -> None:
        path = "/v2/models/add/infer"
        self.page.title("1  JSON request and response", f"POST {path}")
        body = _request(_input("INPUT0", "FP32", _LEFT), _input("INPUT1", "FP32", _RIGHT))
        self._print(await self.client.post_json(self.gateway + path, body), SUM=_LEFT + _RIGHT)

    async def show_large_json(self) -> None:
        path = "/v2/models/image/infer"
        image, page = _image(), self.page
        page.title(f"2  A large JSON request: an image of {image.size:,} numbers", f"POST {path}")
        body = _request(_input("INPUT", "FP32", image))
        result = await self.client.post_json(self.gateway + path, body)
        _check_outputs(result, INVERTED=1 - image)
        self._print_call(result, timed=False)
        proxied, direct = await self._compare(path, body)
        page.bars("time", {"with the gateway": proxied, "server alone": direct})
        ratio, word, style = direct / proxied, "fast", "green"
        if ratio < 1:
            ratio, word, style = 1 / ratio, "slow", "yellow"
        page.row("", f"{ratio:.1f} times as {word} with the gateway", style)
        page.details(
            [
                f"the medians of {ROUNDS} calls each, made in turn",
                "the server alone parses and writes JSON with Python's json module",
            ]
        )

    async def show_fp16_json(self) -> None:
        path = "/v2/models/half/infer"
        numbers = np.array([1, 2.5, -3], np.float16)
        self.page.title("3  FP16 in JSON", f"POST {path}")
        body = _request(_input("INPUT0", "FP16", numbers))
        self._print_rejection(await self.client.post_json(self.server + path, body), 400)
        result = await self.client.post_json(self.gateway + path, body)
        self._print(result, OUTPUT0=numbers * np.float16(0.5))

    async def show_raw_binary(self) -> None:
        path = "/v2/models/image/infer"
        image = _image()
        self.page.title("4  Raw binary: the body is the tensor", f"POST {path}")
        result = await self.client.post_raw(self.gateway + path, image.tobytes())
        self._print(result, INVERTED=1 - image)
        as_json = len(_request(_input("INPUT", "FP32", image)))
        self.page.details([f"the same image in JSON is {as_json:,} bytes"])

    async def show_trace(self) -> None:
        self.page.title("5  Trace settings at the path of the specification", f"GET {_TRACE}")
        self._print_rejection(await self.client.send("GET", self.server + _TRACE), 404)
        self._print_trace(await self.client.send("GET", self.gateway + _TRACE), {})
        self.page.title("   Change the trace settings", f"POST {_TRACE}")
        settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "100"}
        result = await self.client.post_json(self.gateway + _TRACE, encode(settings))
        self._print_trace(result, settings)

    async def show_grpc(self) -> None:
        page = self.page
        page.title("6  A gRPC call to a server that speaks HTTP only", INFER)
        arrays = {"INPUT0": _LEFT, "INPUT1": _RIGHT}
        result = await self.client.infer_grpc(self.gateway, "add", arrays)
        _check_outputs(result, SUM=_LEFT + _RIGHT)
        page.row("client → gateway", f"gRPC message, {len(result.request):,} bytes")
        page.details(_summarize(result.inputs))
        self._print_server_call(result.server_call, "")
        page.row("gateway → client", f"gRPC message, {len(result.response):,} bytes", "green")
        page.details(_summarize(result.outputs))
        self._print_time(result)

    async def _compare(self, path: str, body: bytes) -> tuple[float, float]:
        """Measure a call with and without the gateway; the medians, in seconds."""
        times: dict[str, list[float]] = {self.gateway: [], self.server: []}
        for _ in range(ROUNDS):
            for url, seconds in times.items():
                result = await self.client.post_json(url + path, body)
                result.expect_status(200)
                seconds.append(result.seconds)
        return median(times[self.gateway]), median(times[self.server])

    def _print(self, result: CallResult, **expected: Array) -> None:
        _check_outputs(result, **expected)
        self._print_call(result)

    def _print_trace(self, result: CallResult, settings: dict[str, Any]) -> None:
        result.expect_status(200)
        document = result.response_document()
        if "trace_level" not in document or not settings.items() <= document.items():
            raise result.error("the trace settings are wrong")
        self._print_call(result)

    def _print_call(self, result: CallResult, *, timed: bool = True) -> None:
        page = self.page
        page.row("client → gateway", summarize_body(result.request))
        page.details(summarize_json(result.request.text))
        self._print_server_call(result.server_call, result.path)
        page.row("gateway → client", f"{result.status}, {summarize_body(result.response)}", "green")
        page.details(summarize_json(result.response.text))
        if timed:
            self._print_time(result)

    def _print_server_call(self, call: RecordedCall | None, path: str) -> None:
        """Print what the server saw, with its path unless the client's was the same."""
        page = self.page
        if call is None:
            page.row("gateway → server", "nothing", "yellow")
            return
        other_path = "" if call.path == path else f", at {call.path}"
        page.row("gateway → server", summarize_body(call.request) + other_path)
        page.details(summarize_json(call.request.text))
        page.row("server → gateway", f"{call.status}, {summarize_body(call.response)}")
        page.details(summarize_json(call.response.text))

    def _print_rejection(self, result: CallResult, status: int) -> None:
        result.expect_status(status)
        text = f"{result.status}, {result.response_document().get('error')}"
        self.page.row("without gateway", text, "yellow")

    def _print_time(self, result: CallResult | GrpcResult) -> None:
        text = milliseconds(result.seconds)
        if call := result.server_call:
            text += f", {milliseconds(call.seconds)} of it in the server"
        self.page.row("time", text)


def _input(name: str, datatype: str, array: Array) -> dict[str, Any]:
    data = array.ravel().tolist()
    return {"name": name, "datatype": datatype, "shape": array.shape, "data": data}


def _request(*inputs: dict[str, Any]) -> bytes:
    return encode({"inputs": inputs})


def _image() -> Array:
    """Make a smooth image: 8-bit pixels, each as an FP32 from 0 to 1."""
    channel, row, column = np.indices(_IMAGE_SHAPE[1:])
    pixels = (row * (channel + 1) + column) % 256
    image: Array = (pixels / 255).astype(np.float32)
    return image.reshape(_IMAGE_SHAPE)


def _summarize(arrays: Mapping[str, Array]) -> list[str]:
    """Describe the FP32 tensors of a gRPC message."""
    return [
        f"{name}  FP32 [{','.join(map(str, array.shape))}]  raw contents {array.nbytes:,}"
        for name, array in arrays.items()
    ]


def _check_outputs(result: CallResult | GrpcResult, **expected: Array) -> None:
    if isinstance(result, CallResult):
        result.expect_status(200)
    outputs = result.outputs
    for name, array in expected.items():
        if name not in outputs or not np.array_equal(outputs[name], array):
            raise result.error(f"output {name} has wrong values")


def _infer(model: str, *inputs: tuple[str, str, list[Any]]) -> tuple[str, bytes]:
    body = _request(*(_input(name, datatype, np.array(data)) for name, datatype, data in inputs))
    return f"/v2/models/{model}/infer", body


PAUSE: Final = 0.25  # seconds between two calls
_ROUND: Final = 8  # calls between two that fail
_NUMBERS: Final = [1.5, 2, 3]
_RAW: Final = b"hello"
_GOOD: Final = (
    _infer("add", ("INPUT0", "FP32", _NUMBERS), ("INPUT1", "FP32", _NUMBERS)),
    _infer("half", ("INPUT0", "FP16", _NUMBERS)),
    ("/v2/models/upper/infer", _RAW),
    ("/v2/models/upper/generate", encode({"INPUT0": "word by word"})),
)
_BAD: Final = (
    _infer("add", ("INPUT0", "FP32", ["not a number"])),
    _infer("missing", ("INPUT0", "FP32", _NUMBERS)),
)


async def make_traffic(gateway_url: str, server: DemoServer) -> None:
    """Make calls until cancelled; now and then one that the gateway or the server refuses."""
    good, bad, url = cycle(_GOOD), cycle(_BAD), gateway_url.rstrip("/")
    async with DemoClient(server) as client:
        while True:
            for path, body in (*[next(good) for _ in range(_ROUND - 1)], next(bad)):
                post = client.post_raw if body is _RAW else client.post_json
                try:
                    await post(url + path, body)
                except ShowError:
                    await asyncio.sleep(1)  # the gateway stops
                await asyncio.sleep(PAUSE)
