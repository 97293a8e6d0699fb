"""The demo server over real HTTP."""

import gzip
import json
import zlib
from typing import Any

import aiohttp
import pytest

from gateway.demo.server.server import DemoServer
from gateway.demo.server.wire import HEADER_LENGTH

UPPER = b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1],"data":["hello"]}]}'
URL = "/v2/models/upper/infer"


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("deflate", zlib.compress(UPPER), 200),
        ("identity", UPPER, 200),
        ("gzip", UPPER, 400),
        ("gzip", gzip.compress(UPPER)[:-9], 400),
        ("br", UPPER, 501),
    ],
)
async def test_compressed_requests_are_decompressed(
    client: aiohttp.ClientSession, encoding: str, body: bytes, status: int
) -> None:
    async with client.post(URL, data=body, headers={"Content-Encoding": encoding}) as response:
        document = await response.json(content_type=None)
    assert response.status == status
    assert ("outputs" in document) == (status == 200)


@pytest.mark.parametrize("compress", [False, True])
async def test_body_over_the_limit_gets_413(compress: bool) -> None:
    body = gzip.compress(bytes(20_000)) if compress else bytes(20_000)
    headers = {"Content-Encoding": "gzip"} if compress else {}
    async with DemoServer(max_body=10_000) as server, aiohttp.ClientSession() as client:
        async with client.post(server.url + URL, data=body, headers=headers) as response:
            assert (response.status, list(await response.json())) == (413, ["error"])
        async with client.get(server.url + "/v2/health/live") as response:
            assert response.status == 200


async def test_generate_stream_sends_events_one_by_one() -> None:
    async with DemoServer(event_delay=0.01) as server, aiohttp.ClientSession() as client:
        url = f"{server.url}/v2/models/upper/generate_stream"
        async with client.post(url, json={"INPUT0": "one two three"}) as response:
            chunks = [chunk async for chunk in response.content.iter_any()]
    assert response.content_type == "text/event-stream"
    assert len(chunks) > 1
    events = b"".join(chunks).decode().removesuffix("\n\n").split("\n\n")
    assert [json.loads(event.removeprefix("data: ")) for event in events] == [
        {"OUTPUT0": word, "model_name": "upper", "model_version": "1"}
        for word in ("ONE", "TWO", "THREE")
    ]


async def test_client_may_leave_during_the_events(
    server: DemoServer, client: aiohttp.ClientSession
) -> None:
    words = {"INPUT0": "word " * 10_000}
    async with client.post("/v2/models/upper/generate_stream", json=words) as response:
        assert (await response.content.readany()).startswith(b"data: ")
        response.close()
    async with client.get("/v2/health/live") as alive:
        assert alive.status == 200


async def test_last_call_is_recorded(server: DemoServer, client: aiohttp.ClientSession) -> None:
    async with client.post(URL, data=b"hello", headers={HEADER_LENGTH: "0"}) as response:
        body = await response.read()
    await client.get("/v2/models/upper")  # other calls do not replace it
    recorded: Any = server.last_call
    assert (recorded.method, recorded.path, recorded.status) == ("POST", URL, 200)
    assert (recorded.request.form, recorded.request.body) == ("raw binary", b"hello")
    assert (recorded.response.form, recorded.response.body) == ("binary", body)
    assert recorded.response.text.encode() + b"\5\0\0\0HELLO" == body
    assert recorded.seconds > 0
    await client.get("/v2/trace/setting")
    recorded = server.last_call
    assert recorded.request.form == "empty"
