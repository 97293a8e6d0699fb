"""What handlers get, and how their responses and errors reach the client."""

import asyncio

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, bad_request
from gateway.observe.call_record import CallRecord
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.listener.running_listener import echo, respond, running_listener
from tests.listener.running_listener import scheme as scheme
from tests.support.gateway import until
from tests.support.http_messages import chunked, message, request
from tests.support.raw_client import connect


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (request("GET", "/a?b"), b"GET /a?b 0 None "),
        (request("POST", "/a%2F", b""), b"POST /a%2F 0 None "),
        (request("POST", "/", b"body", {"X": "y"}), b"POST / 4 y body"),
        (request("PUT", "/", b"\x1f\x8b", {"Content-Encoding": "gzip"}), b"PUT / 2 None \x1f\x8b"),
        (
            message("PUT / HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})
            + chunked(b"bo", b"dy"),
            b"PUT / None None body",
        ),
        (b"GET / HTTP/1.0\r\n\r\n", b"GET / 0 None "),
        (request("GET", "hTTps://x"), b"GET / 0 None "),
    ],
)
async def test_handler_gets_the_request(data: bytes, told: bytes) -> None:
    async with running_listener(echo) as running, connect(running.url) as client:
        for _ in range(1 if b"HTTP/1.0" in data else 3):
            reply = await client.ask(data)
            assert (reply.status, reply.body) == (200, told)


async def test_response_without_length_is_chunked() -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if status := int(client.target.removeprefix("/") or "0"):
            await response.start(status, "", CIMultiDict({"Content-Length": "0"}))
            await response.finish()
            return
        assert not response.started
        headers = CIMultiDict([("X", "1"), ("X", "2"), ("Server", "mine")])
        await response.start(299, "So So", headers)
        assert response.started
        await response.write(b"one")
        await response.write(b"")
        await response.write(b"two")
        await response.finish()

    async with running_listener(handle) as running, connect(running.url) as client:
        for _ in range(2):
            reply = await client.call("GET", "/")
            assert reply.head.first == "HTTP/1.1 299 So So"
            assert reply.head.all("X") == ["1", "2"]
            assert reply.head.get("Server") == "mine"
            assert reply.head.get("Transfer-Encoding") == "chunked"
            assert reply.body == b"onetwo"
        # An empty reason becomes the standard phrase.
        for status, line in ((404, "HTTP/1.1 404 Not Found"), (799, "HTTP/1.1 799")):
            reply = await client.call("GET", f"/{status}")
            assert reply.head.first.rstrip() == line
            assert reply.head.get("Server") == "tensorgate"


async def test_response_to_head_has_no_body() -> None:
    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/chunked":
            await response.start(200, "", CIMultiDict())
            await response.write(b"body")
            await response.finish()
        elif client.target == "/error":
            raise bad_request("why")
        else:
            await respond(response, b"body")

    async with running_listener(handle) as running, connect(running.url) as client:
        for target in ("/sized", "/chunked", "/error") * 2:
            await client.send(request("HEAD", target))
            head = await client.head()
            assert head.status == (400 if target == "/error" else 200)
            assert head.get("Content-Length") == {"/sized": "4", "/error": "15"}.get(target)
        assert (await client.call("GET", "/sized")).body == b"body"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    "written",
    [b"", b"small pieces are sent with the next ones", b"begun" * 1000],
    ids=["nothing", "what waits", "a part"],
)
async def test_internal_error_is_logged_and_gets_500_unless_a_response_has_begun(
    version: str, written: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        if written:
            await response.start(200, "", CIMultiDict({"X-Of": "server"}))
            await response.write(written)
        raise ZeroDivisionError

    has_begun = len(written) > 1000
    records: list[CallRecord] = []
    async with running_listener(handle, records.append) as running, connect(running.url) as client:
        await client.send(f"GET /a HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        if has_begun:
            with pytest.raises(ConnectionResetError):
                await client.rest()
        else:
            reply = await client.read_response()
            assert (reply.status, reply.head.get("X-Of")) == (500, None)
            assert reply.error == "the gateway failed; its log says why"
            assert await client.rest() == b""
    status = 200 if has_begun else 500
    assert [(r.status, r.error_kind) for r in records] == [(status, ErrorKind.INTERNAL)]
    assert has_begun or records[0].error == reply.error
    assert "GET /a failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_aborted_response_resets_the_connection(version: str) -> None:
    async def handle(_: ClientRequest, response: ClientResponse) -> None:
        await response.start(200, "", CIMultiDict())
        await response.write(b"begun")
        await read.wait()
        for _again in range(2):
            response.abort()
            response.abort()
            await asyncio.sleep(0)

    read = asyncio.Event()
    async with running_listener(handle) as running, connect(running.url) as client:
        await client.send(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        await client.head()
        read.set()
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_each_call_is_observed_though_another_observer_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(record: CallRecord) -> None:
        raise RuntimeError("broken observer")

    records: list[CallRecord] = []

    async def handle(client: ClientRequest, response: ClientResponse) -> None:
        if client.target == "/bad":
            raise bad_request("no")
        if client.target == "/gone":
            await asyncio.Event().wait()
        await respond(response, b"12345")

    async with running_listener(handle, fail, records.append) as running:
        async with connect(running.url) as client:
            await client.call("GET", "/good?x=%20")
            await client.call("POST", "/bad", b"x")
            await client.send(request("GET", "/gone"))
            await until(lambda: running.listener._active_calls)
        await until(lambda: not running.listener._active_calls)
    assert caplog.text.count("RuntimeError: broken observer") == 3
    assert [(r.method, r.target, r.status, r.response_bytes, r.error) for r in records] == [
        ("GET", "/good?x=%20", 200, 5, ""),
        ("POST", "/bad", 400, 14, "no"),
        ("GET", "/gone", 0, 0, "the client closed the connection"),
    ]
