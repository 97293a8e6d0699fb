import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.control_client import ControlResponse, send_control_request
from tests.support.http_messages import chunked, http_response, message
from tests.support.servers.scripted_server import ScriptedServer, always_respond
from tests.upstream.endpoints import EndpointAt
from tests.upstream.endpoints import endpoint_at as endpoint_at


async def test_response_is_buffered(endpoint_at: EndpointAt) -> None:
    head = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
    data = message("HTTP/1.1 404 Not Found", head, chunked(b"no", b" such"))
    async with ScriptedServer(always_respond(data)) as server:
        document = await send_control_request(endpoint_at(server.url), "GET", "/x?y", 100)
        assert document == ControlResponse(404, "text/plain", b"no such")
        (received,) = server.requests
        assert received.head.first == "GET /x?y HTTP/1.1"
        assert received.head.get("Host") == server.url.removeprefix("http://")
        assert received.head.get("Content-Length") is None


async def test_request_with_a_body_is_json(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer() as server:
        document = await send_control_request(endpoint_at(server.url), "POST", "/x", 100, b"{}")
        assert document == ControlResponse(200, "application/json", b'{"outputs":[]}')
        (received,) = server.requests
        assert (received.body, received.head.get("Content-Type")) == (b"{}", "application/json")


async def test_response_larger_than_the_limit_fails(endpoint_at: EndpointAt) -> None:
    async with ScriptedServer(always_respond(http_response(bytes(100)))) as server:
        endpoint = endpoint_at(server.url)
        assert len((await send_control_request(endpoint, "GET", "/x", 100)).body) == 100
        with pytest.raises(GatewayError) as caught:
            await send_control_request(endpoint, "GET", "/x", 99)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message == f"the response of {server.url} to GET /x is larger than 99 bytes"
