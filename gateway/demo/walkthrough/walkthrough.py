"""Makes six calls through the gateway and prints each as the client and the server see it."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final, TextIO

import numpy as np

from gateway.demo.server import documents
from gateway.demo.server.recorder import RecordedCall
from gateway.demo.server.server import DemoServer
from gateway.demo.server.tensors import Array
from gateway.demo.walkthrough import grpc_client
from gateway.demo.walkthrough.client import CallResult, DemoClient, ShowError, http_session
from gateway.demo.walkthrough.page import Page, milliseconds, summarize_body, summarize_json

ROUNDS: Final = 5  # calls of each kind in a comparison

_IMAGE_SHAPE: Final = (1, 3, 224, 224)
_TRACE: Final = "/v2/models/add/trace"

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
    async with http_session() as session:
        show = _Show(DemoClient(session, server), gateway_url.rstrip("/"), server.url, page)
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


class _Show:
    """The calls of the show."""

    def __init__(self, client: DemoClient, gateway: str, server: str, page: Page) -> None:
        self._client = client
        self._gateway = gateway
        self._server = server
        self._page = page

    async def show_small_json(self) -> None:
        path = "/v2/models/add/infer"
        left = np.array([1, 2, 3], np.float32)
        right = np.array([10, 20, 30], np.float32)
        self._page.title("1  JSON request and response", f"POST {path}")
        body = _request(_input("INPUT0", "FP32", left), _input("INPUT1", "FP32", right))
        result = await self._client.post_json(self._gateway + path, body)
        _check(result, SUM=left + right)
        self._print_call(result)
        self._print_time(result.seconds, result.server_call)

    async def show_large_json(self) -> None:
        path = "/v2/models/image/infer"
        image = _image()
        self._page.title(
            f"2  A large JSON request: an image of {image.size:,} numbers", f"POST {path}"
        )
        body = _request(_input("INPUT", "FP32", image))
        result = await self._client.post_json(self._gateway + path, body)
        _check(result, INVERTED=1 - image)
        self._print_call(result)
        proxied, direct = await self._compare(path, body)
        self._page.bars("time", {"with the gateway": proxied, "server alone": direct})
        ratio = direct / proxied
        self._page.row(
            "",
            f"{ratio:.1f} times as fast with the gateway"
            if ratio >= 1
            else f"{1 / ratio:.1f} times as slow with the gateway",
            "good" if ratio >= 1 else "bad",
        )
        self._page.details(
            [
                f"the medians of {ROUNDS} calls each, made in turn",
                "the server alone parses and writes JSON with Python's json module",
            ]
        )

    async def show_fp16_json(self) -> None:
        path = "/v2/models/half/infer"
        numbers = np.array([1, 2.5, -3], np.float16)
        self._page.title("3  FP16 in JSON", f"POST {path}")
        body = _request(_input("INPUT0", "FP16", numbers))
        rejected = await self._client.post_json(self._server + path, body)
        rejected.expect_status(400)
        self._print_rejection(rejected)
        result = await self._client.post_json(self._gateway + path, body)
        _check(result, OUTPUT0=numbers * np.float16(0.5))
        self._print_call(result)
        self._print_time(result.seconds, result.server_call)

    async def show_raw_binary(self) -> None:
        path = "/v2/models/image/infer"
        image = _image()
        self._page.title("4  Raw binary: the body is the tensor", f"POST {path}")
        result = await self._client.post_raw(self._gateway + path, image.tobytes())
        _check(result, INVERTED=1 - image)
        self._print_call(result)
        self._print_time(result.seconds, result.server_call)
        as_json = len(_request(_input("INPUT", "FP32", image)))
        self._page.details([f"the same image in JSON is {as_json:,} bytes"])

    async def show_trace(self) -> None:
        self._page.title("5  Trace settings at the path of the specification", f"GET {_TRACE}")
        rejected = await self._client.get(self._server + _TRACE)
        rejected.expect_status(404)
        self._print_rejection(rejected)
        result = await self._client.get(self._gateway + _TRACE)
        _check_trace(result, {})
        self._print_call(result)
        self._print_time(result.seconds, result.server_call)

        self._page.title("   Change the trace settings", f"POST {_TRACE}")
        settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "100"}
        body = documents.encode(settings)
        result = await self._client.post_json(self._gateway + _TRACE, body)
        _check_trace(result, settings)
        self._print_call(result)
        self._print_time(result.seconds, result.server_call)

    async def show_grpc(self) -> None:
        left = np.array([1, 2, 3], np.float32)
        right = np.array([10, 20, 30], np.float32)
        page = self._page
        page.title("6  A gRPC call to a server that speaks HTTP only", grpc_client.INFER)
        result = await self._client.infer_grpc(
            self._gateway, "add", {"INPUT0": left, "INPUT1": right}
        )
        _check_outputs(result.outputs, {"SUM": left + right}, result.error)
        page.row("client → gateway", f"gRPC message, {len(result.request):,} bytes")
        page.details(tensor.summary for tensor in result.inputs)
        self._print_server_call(result.server_call, "")
        page.row("gateway → client", f"gRPC message, {len(result.response):,} bytes", "good")
        page.details(tensor.summary for tensor in result.tensors)
        self._print_time(result.seconds, result.server_call)

    async def _compare(self, path: str, body: bytes) -> tuple[float, float]:
        """Measure a call with and without the gateway; the medians, in seconds."""
        proxied: list[float] = []
        direct: list[float] = []
        for _ in range(ROUNDS):
            for url, times in ((self._gateway, proxied), (self._server, direct)):
                result = await self._client.post_json(url + path, body)
                result.expect_status(200)
                times.append(result.seconds)
        return median(proxied), median(direct)

    def _print_call(self, result: CallResult) -> None:
        page = self._page
        page.row("client → gateway", summarize_body(result.request))
        page.details(summarize_json(result.request_text))
        self._print_server_call(result.server_call, result.path)
        page.row("gateway → client", f"{result.status}, {summarize_body(result.response)}", "good")
        page.details(summarize_json(result.response_text))

    def _print_server_call(self, call: RecordedCall | None, path: str) -> None:
        """Print what the server saw, with its path unless the client's was the same."""
        page = self._page
        if call is None:
            page.row("gateway → server", "nothing", "bad")
            return
        other_path = "" if call.path == path else f", at {call.path}"
        page.row("gateway → server", summarize_body(call.request) + other_path)
        page.details(summarize_json(call.request.text))
        page.row("server → gateway", f"{call.status}, {summarize_body(call.response)}")
        page.details(summarize_json(call.response.text))

    def _print_rejection(self, result: CallResult) -> None:
        self._page.row(
            "without gateway", f"{result.status}, {result.response_document().get('error')}", "bad"
        )

    def _print_time(self, seconds: float, call: RecordedCall | None) -> None:
        text = milliseconds(seconds)
        if call is not None:
            text += f", {milliseconds(call.seconds)} of it in the server"
        self._page.row("time", text)


def _input(name: str, datatype: str, array: Array) -> dict[str, Any]:
    data = array.ravel().tolist()
    return {"name": name, "datatype": datatype, "shape": array.shape, "data": data}


def _request(*inputs: dict[str, Any]) -> bytes:
    return documents.encode({"inputs": inputs})


def _image() -> Array:
    """Make a smooth image: 8-bit pixels, each as an FP32 from 0 to 1."""
    channel, row, column = np.indices(_IMAGE_SHAPE[1:])
    pixels = (row * (channel + 1) + column) % 256
    image: Array = (pixels / 255).astype(np.float32)
    return image.reshape(_IMAGE_SHAPE)


def _check(result: CallResult, **expected: Array) -> None:
    result.expect_status(200)
    _check_outputs(result.outputs(), expected, result.error)


def _check_outputs(
    outputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    error: Callable[[str], ShowError],
) -> None:
    for name, array in expected.items():
        if name not in outputs or not np.array_equal(outputs[name], array):
            raise error(f"output {name} has wrong values")


def _check_trace(result: CallResult, settings: dict[str, Any]) -> None:
    result.expect_status(200)
    document = result.response_document()
    if "trace_level" not in document or not settings.items() <= document.items():
        raise result.error("the trace settings are wrong")
