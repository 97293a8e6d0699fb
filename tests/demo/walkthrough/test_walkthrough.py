import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gateway.demo.server.server import DemoServer
from gateway.demo.walkthrough.client import ShowError
from gateway.demo.walkthrough.page import WIDTH
from gateway.demo.walkthrough.walkthrough import curl_commands, next_steps, run_show
from tests.support.addresses import free_address
from tests.support.gateway import running_gateway


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
        "[]",
        "{}",
        '{"outputs":[]}',
        '{"outputs":[{"name":"SUM","datatype":"FP32","shape":[3]}]}',
        '{"outputs":[{"name":"SUM","datatype":"FP32","shape":[3],"data":[11,22]}]}',
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


def test_curl_commands_fit_the_page_and_name_the_gateway() -> None:
    lines = curl_commands("http://127.0.0.1:18080/").splitlines()
    assert max(map(len, lines)) <= WIDTH
    commands = [line for line in lines if "curl" in line]
    assert commands
    assert all(" http://127.0.0.1:18080/v2" in command for command in commands)


def test_next_steps_name_all_addresses_and_the_commands() -> None:
    text = next_steps("http://127.0.0.1:18080", "http://127.0.0.1:18000", "http://127.0.0.1:9", "k")
    assert "The operator's page is http://127.0.0.1:9/ " in text
    assert 'Its panel "Try it" sends calls of your own: http://127.0.0.1:9/#try?model=add' in text
    assert "with the key k\n" in text
    assert "The gateway listens on http://127.0.0.1:18080\n" in text
    assert "The demo server listens on http://127.0.0.1:18000\n" in text
    assert text.endswith(curl_commands("http://127.0.0.1:18080"))
