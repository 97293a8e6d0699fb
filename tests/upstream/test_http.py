import asyncio
from collections.abc import AsyncIterator

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.upstream.base import Body, UpstreamRequest, UpstreamResponse
from gateway.upstream.http import HttpEndpoint
from tests.servers.faulty_server import Connection, FaultyServer, Script, always, hang
from tests.servers.http_text import answer, chunk, chunked, message
from tests.servers.running_gateway import until
from tests.upstream.endpoints import EndpointAt


def _request(
    body: Body = None, headers: dict[str, str] | None = None, method: str = "POST"
) -> UpstreamRequest:
    return UpstreamRequest(method, "/v2/x?y", CIMultiDict(headers or {}), body)


async def _read(response: UpstreamResponse) -> bytes:
    try:
        body = b""
        while piece := await response.read():
            body += piece
        return body
    finally:
        response.close()


async def _pieces(*pieces: bytes | BaseException) -> AsyncIterator[bytes]:
    for piece in pieces:
        if isinstance(piece, BaseException):
            raise piece
        yield piece


async def test_the_request_is_what_was_given(endpoint_at: EndpointAt) -> None:
    async with FaultyServer() as server:
        endpoint = endpoint_at(server.url)
        await _read(await endpoint.send(_request([b"ab", b"c"], {"Content-Length": "3"})))
        (received,) = server.requests
        assert received.head.first == "POST /v2/x?y HTTP/1.1"
        assert received.body == b"abc"
        assert dict(received.head.headers) == {
            "host": server.url.removeprefix("http://"),
            "content-length": "3",
        }


@pytest.mark.parametrize(
    ("body", "headers", "length", "sent"),
    [
        (None, {}, "0", b""),
        ((b"",), {"Content-Length": "0"}, "0", b""),
        ([b"abc"], {"Content-Length": "3"}, "3", b"abc"),
        ([b"ab", b"", b"c"], {"Content-Length": "3"}, "3", b"abc"),
        ([], {"Content-Length": "0"}, "0", b""),
    ],
)
async def test_bodies_at_hand(
    endpoint_at: EndpointAt, body: Body, headers: dict[str, str], length: str, sent: bytes
) -> None:
    async with FaultyServer() as server:
        await _read(await endpoint_at(server.url).send(_request(body, headers)))
        (received,) = server.requests
        assert received.head.get("Content-Length") == length
        assert received.body == sent


async def test_get_has_no_length(endpoint_at: EndpointAt) -> None:
    async with FaultyServer() as server:
        await _read(await endpoint_at(server.url).send(_request(method="GET")))
        assert server.requests[0].head.get("Content-Length") is None


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "7"}])
async def test_bodies_to_come(endpoint_at: EndpointAt, headers: dict[str, str]) -> None:
    async with FaultyServer() as server:
        request = _request(_pieces(b"one", b"four"), headers)
        await _read(await endpoint_at(server.url).send(request))
        (received,) = server.requests
        assert received.body == b"onefour"
        assert received.head.get("Transfer-Encoding") == (None if headers else "chunked")


async def test_the_answer_is_what_was_sent(endpoint_at: EndpointAt) -> None:
    data = message("HTTP/1.1 299 So So", {"X-One": "1", "x-one": "2"}, b"")
    data = data[:-2] + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b"ab", b"c")
    async with FaultyServer(always(data)) as server:
        response = await endpoint_at(server.url).send(_request())
        assert (response.status, response.reason) == (299, "So So")
        assert response.headers.getall("X-One") == ["1", "2"]
        assert response.content_length is None
        assert await _read(response) == b"abc"


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Again", "401 Who", "407 Who"])
async def test_nothing_is_followed(endpoint_at: EndpointAt, status: str) -> None:
    data = answer(b"x", {"Location": "/else", "WWW-Authenticate": "Basic"}, status)
    async with FaultyServer(always(data)) as server:
        response = await endpoint_at(server.url).send(_request())
        assert response.status == int(status[:3])
        assert await _read(response) == b"x"
        assert len(server.requests) == 1


async def test_nothing_is_remembered(endpoint_at: EndpointAt) -> None:
    data = answer(b"", {"Set-Cookie": "a=b"})
    async with FaultyServer(always(data)) as server:
        endpoint = endpoint_at(server.url)
        for _ in range(2):
            await _read(await endpoint.send(_request()))
        assert server.requests[1].head.get("Cookie") is None


async def test_nothing_is_decompressed(endpoint_at: EndpointAt) -> None:
    data = answer(b"\x1f\x8bnot really", {"Content-Encoding": "gzip"})
    async with FaultyServer(always(data)) as server:
        response = await endpoint_at(server.url).send(_request())
        assert await _read(response) == b"\x1f\x8bnot really"


async def test_connections_are_used_again(endpoint_at: EndpointAt) -> None:
    async with FaultyServer() as server:
        endpoint = endpoint_at(server.url)
        for _ in range(3):
            await _read(await endpoint.send(_request([b"x"], {"Content-Length": "1"})))
        assert len(server.connections) == 1


async def test_a_connection_is_dropped_with_an_answer_half_read(
    endpoint_at: EndpointAt,
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(bytes(100_000))[:-1])
        await hang(connection)

    async with FaultyServer(script) as server:
        response = await endpoint_at(server.url).send(_request())
        response.close()
        async with asyncio.timeout(5):
            await (await server.connection()).left.wait()


async def test_a_connection_is_dropped_with_a_body_half_sent(
    endpoint_at: EndpointAt,
) -> None:
    never = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"begun"
        await never.wait()

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(answer(b"no"))
        await hang(connection)

    async with FaultyServer(script) as server:
        response = await endpoint_at(server.url).send(_request(body()))
        assert await _read(response) == b"no"
        async with asyncio.timeout(5):
            await (await server.connection()).left.wait()


async def test_an_error_of_the_body_is_passed_on(endpoint_at: EndpointAt) -> None:
    fault = bad_request("the client stumbled")
    async with FaultyServer(hang) as server:
        with pytest.raises(GatewayError) as caught:
            await endpoint_at(server.url).send(_request(_pieces(b"begun", fault)))
        assert caught.value is fault
        async with asyncio.timeout(5):
            await (await server.connection()).left.wait()


async def test_an_error_of_the_body_within_the_answer(endpoint_at: EndpointAt) -> None:
    stumble = asyncio.Event()
    fault = bad_request("the client stumbled")

    async def body() -> AsyncIterator[bytes]:
        yield b"begun"
        await stumble.wait()
        raise fault

    async def script(connection: Connection) -> None:
        await connection.head()
        head = {"Transfer-Encoding": "chunked"}
        await connection.send(message("HTTP/1.1 200 OK", head, chunk(b"begun")))
        await hang(connection)

    async with FaultyServer(script) as server:
        response = await endpoint_at(server.url).send(_request(body()))
        assert await response.read() == b"begun"
        stumble.set()
        with pytest.raises(GatewayError) as caught:
            await response.read()
        assert caught.value is fault
        response.close()
        async with asyncio.timeout(5):
            await (await server.connection()).left.wait()


async def test_leaving_drops_the_connection(endpoint_at: EndpointAt) -> None:
    async with FaultyServer(hang) as server:
        sending = asyncio.create_task(endpoint_at(server.url).send(_request()))
        connection = await server.connection()
        sending.cancel()
        async with asyncio.timeout(5):
            await connection.left.wait()
        with pytest.raises(asyncio.CancelledError):
            await sending


async def _kind(endpoint: HttpEndpoint) -> tuple[ErrorKind, str]:
    with pytest.raises(GatewayError) as caught:
        await _read(await endpoint.send(_request()))
    return caught.value.kind, caught.value.message


async def test_errors_name_the_server(endpoint_at: EndpointAt) -> None:
    async def nothing(connection: Connection) -> None:
        await connection.request()

    async def half(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(b"whole")[:-1])

    faults: dict[str, Script] = {
        "closed the connection before it answered": nothing,
        "answered what is not HTTP: ": always(b"what?\r\n\r\n"),
        "answered 101 Switching Protocols": always(answer(status="101 Switching Protocols")),
        "answered what is not HTTP: Invalid header value": always(answer(headers={"X": "\x01"})),
        "closed the connection before the end of its answer": half,
    }
    for saying, script in faults.items():
        async with FaultyServer(script) as server:
            kind, text = await _kind(endpoint_at(server.url))
            assert kind is ErrorKind.BAD_ANSWER
            assert text.startswith(f"{server.url} {saying}")
    kind, text = await _kind(endpoint_at(server.url))
    assert kind is ErrorKind.UNREACHABLE
    assert text == f"cannot connect to {server.url}: Connection refused"


async def test_many_at_once_have_a_connection_each(endpoint_at: EndpointAt) -> None:
    async def script(connection: Connection) -> None:
        received = await connection.request()
        await until(lambda: len(server.connections) == 150)
        await connection.send(answer(received.body))

    async with FaultyServer(script) as server:
        endpoint = endpoint_at(server.url)

        async def one(number: int) -> None:
            body = b"%d" % number
            request = _request([body], {"Content-Length": str(len(body))})
            assert await _read(await endpoint.send(request)) == body

        await asyncio.gather(*map(one, range(150)))
