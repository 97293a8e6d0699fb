"""The show: its calls, its page, and the traffic after it."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import grpc
import numpy as np
import pytest
from aiohttp import web

from gateway.demo.server.server import DemoServer
from gateway.demo.walkthrough import walkthrough
from gateway.demo.walkthrough.client import DemoClient, GrpcResult, ShowError
from gateway.demo.walkthrough.page import WIDTH, Page, summarize_json
from gateway.demo.walkthrough.walkthrough import curl_commands, next_steps, run_show
from gateway.settings.schema import Settings
from tests.support.addresses import free_address
from tests.support.gateway import gateway_of, no_leaks, running_gateway, until
from tests.support.servers.grpc_server import fail, grpc_server


async def show(gateway: str, server: DemoServer) -> str:
    out = io.StringIO()
    await run_show(gateway, server, out, color=False)
    return out.getvalue()


@asynccontextmanager
async def serve(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Run a server with one handler for all requests; yield its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def test_show_prints_all_six_calls(server: DemoServer) -> None:
    async with running_gateway(server.url) as gateway:
        text = await show(gateway.url, server)
    assert re.findall(r"^([1-6])  ", text, re.MULTILINE) == list("123456")
    for told in (
        "SUM  FP32 [3]  data [11, 22, 33]",
        "times",
        "receiving FP16 data via JSON is not supported",
        "OUTPUT0  FP16 [3]  data [0.5, 1.25, -1.5]",
        "raw binary, 602,112 bytes",
        "INPUT  FP32 [1,3,224,224]  binary_data_size 602,112",
        "404, Not Found",
        "at /v2/models/add/trace/setting",
        '"trace_rate": "100"',
        "gRPC message, 71 bytes",
        "INPUT1  FP32 [3]  raw contents 12",
        "INPUT1  FP32 [3]  binary_data_size 12",
        "at /v2/models/add/infer",
        "SUM  FP32 [3]  raw contents 12",
    ):
        assert told in text
    assert max(map(len, text.splitlines())) <= WIDTH


async def test_show_fails_if_the_gateway_converts_nothing(server: DemoServer) -> None:
    with pytest.raises(ShowError, match=r"half/infer: status 400.* FP16 data via JSON"):
        await show(server.url, server)


async def test_show_fails_without_a_gateway(server: DemoServer) -> None:
    with pytest.raises(ShowError, match=r"add/infer: no response"):
        await show(f"http://{free_address()}", server)


@pytest.mark.parametrize(
    "response",
    [
        "no JSON",
        "{}",
        '{"outputs":[]}',
        '{"outputs":[{"name":"SUM","datatype":"FP32","shape":[3]}]}',
        '{"outputs":[{"name":"SUM","datatype":"FP32","shape":[3],"data":[11,22,34]}]}',
        '{"outputs":[{"name":"SUM","datatype":"??","shape":[3],"data":[11,22,33]}]}',
    ],
)
async def test_show_fails_on_a_wrong_response(server: DemoServer, response: str) -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(text=response)

    async with serve(handle) as gateway:
        with pytest.raises(ShowError, match="add/infer: ") as failed:
            await show(gateway, server)
    assert response in str(failed.value)


def test_next_steps_name_all_addresses_and_the_commands() -> None:
    text = next_steps("http://a:18080", "http://b:18000", "http://127.0.0.1:9", "k")
    for told in (
        "The gateway listens on http://a:18080\n",
        "The demo server listens on http://b:18000\n",
        "The operator's page is http://127.0.0.1:9/ ",
        'Its panel "Try it" sends calls of your own: http://127.0.0.1:9/#try?model=add',
        "with the key k\n",
    ):
        assert told in text
    commands = curl_commands("http://127.0.0.1:18080/")
    assert max(map(len, commands.splitlines())) <= WIDTH
    calls = [line for line in commands.splitlines() if "curl" in line]
    assert all(" http://127.0.0.1:18080/v2" in call for call in calls)
    assert text.endswith(curl_commands("http://a:18080"))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            '{"inputs":[{"name":"x","datatype":"FP32","shape":[2,3],"data":[0.1,1,2,3,4,5]}]}',
            ["x  FP32 [2,3]  data [0.1, 1, 2, … 6 in all]"],
        ),
        ('{"error":"no"}', ['{"error": "no"}']),
        ("[1]", ["[1]"]),
        ('{"cut":', ['{"cut":']),
        ("", []),
    ],
)
def test_json_is_summarized(text: str, lines: list[str]) -> None:
    assert summarize_json(text) == lines


def test_page_is_as_wide_as_said_and_has_the_characters_that_the_terminal_has() -> None:
    def page(color: bool, encoding: str = "utf-8") -> str:
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding=encoding)
        page = Page(out, color=color)
        page.title("A title", "its side")
        page.row("label", "long " * 100, "green")
        page.details(["one\x1b[31m\ntwo"])
        page.bars("time", {"fast": 0.00004, "slow": 0.1234})
        return raw.getvalue().decode()

    plain = page(color=False)
    assert all(each.isprintable() or each == "\n" for each in plain)
    *_, fast, slow = plain.splitlines()
    assert "fast    0.04 ms  █" in fast
    assert "slow   123.4 ms  " + "█" * 40 in slow
    assert max(map(len, plain.splitlines())) <= WIDTH
    colored = page(color=True)
    assert "\x1b[32m" in colored
    without = [re.sub(r"\x1b\[[0-9]*m", "", line).rstrip() for line in colored.splitlines()]
    assert without == plain.splitlines()
    assert "123.4 ms  ???" in page(color=False, encoding="ascii")


ARRAYS = {
    "IN0": np.arange(300, dtype=np.float32).reshape(2, 150),
    "IN1": np.array([0.5], np.float32),
}


async def _infer(server: DemoServer, address: str) -> GrpcResult:
    async with DemoClient(server) as client:
        return await client.infer_grpc(f"http://{address}", "m", ARRAYS)


async def test_server_on_grpcio_is_called(server: DemoServer) -> None:
    with grpc_server() as upstream:
        result = await _infer(server, upstream.address)
    assert [*result.inputs] == ["IN0", "IN1"]
    for given, array in zip(result.outputs.values(), ARRAYS.values(), strict=True):
        assert np.array_equal(given, array)


@pytest.fixture
def refusing() -> Iterator[str]:
    refuse = fail(grpc.StatusCode.INTERNAL, "out of memory")
    with grpc_server(unary={"ModelInfer": refuse}) as upstream:
        yield upstream.address


async def test_call_without_a_response_is_an_error(server: DemoServer, refusing: str) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(b"\0\0\5\0\0\0\0\0\1ab")
        writer.close()

    leaving = await asyncio.start_server(leave, "127.0.0.1", 0)
    async with leaving:
        host, port = leaving.sockets[0].getsockname()
        for address, said in [
            (refusing, "out of memory"),
            (free_address(), "Connection refused"),
            (f"{host}:{port}", "does not speak HTTP/2"),
        ]:
            with pytest.raises(ShowError, match=said):
                await _infer(server, address)


@pytest.mark.parametrize(
    "message",
    [
        b"\x2a\x05",  # a field that is cut off
        b"\x2a\x03\x0a\x01x\x32\x00",  # a tensor without a datatype
        b"\x2a\x0c\x0a\x01x\x12\x04FP32\x1a\x01\x03\x32\x01a",  # contents that do not fit
        b"\x32\x00",  # contents without a tensor
    ],
)
def test_other_messages_are_errors(message: bytes) -> None:
    with pytest.raises(ShowError, match="the response was"):
        _ = GrpcResult("", {}, b"", message, 0.0, None).outputs


async def test_traffic_has_every_form_and_some_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walkthrough, "PAUSE", 0.0)
    async with no_leaks(), DemoServer() as server:
        settings = Settings.model_validate(
            {"listen": "127.0.0.1:0", "upstreams": {"demo": {"endpoints": [server.url]}}}
        )
        async with gateway_of(settings) as gateway:
            task = asyncio.create_task(walkthrough.make_traffic(gateway.addresses[0], server))
            seen: set[tuple[str, str, int]] = set()
            wanted = {
                ("infer", "json", 200),
                ("infer", "raw", 200),
                ("generate", "", 200),
                ("infer", "json", 400),
            }
            observe = gateway.call_metrics.observe
            gateway.listener.observers = (
                observe,
                lambda record: seen.add(
                    (record.labels.operation, record.labels.client_form, record.status)
                ),
            )
            await until(lambda: wanted <= seen)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
