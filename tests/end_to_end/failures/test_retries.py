"""Failed requests are retried at another server, as far as the route allows."""

import pytest

from tests.support.addresses import free_address
from tests.support.gateway import gateway_client
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    json_request,
)
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

GOOD = always_respond(binary_response(bytes(4)))
GET = request("GET", "/v2/x")
WARM = request("GET", "/v2/warm")
LARGE_JSON = infer_json(json_request(*range(50_000)))
CHUNKED = request("POST", "/v2/x", None, {"Transfer-Encoding": "chunked"}) + b"1\r\na\r\n0\r\n\r\n"
LARGE_BINARY = infer_binary(binary_header(200_000), bytes(200_000))


@pytest.mark.parametrize(
    "data", [GET, infer_json(), CHUNKED, LARGE_BINARY], ids=["GET", "JSON", "chunked", "binary"]
)
async def test_dead_endpoint_is_not_noticed_by_clients(data: bytes) -> None:
    async with ScriptedServer(GOOD) as server:
        urls = [f"http://{free_address()}", server.url, f"http://{free_address()}"]
        async with gateway_client(*urls) as client:
            assert [(await client.ask(data)).status for _ in range(12)] == [200] * 12
        assert len(server.requests) == 12


async def test_endpoint_that_dies_on_a_reused_connection_is_retried_elsewhere() -> None:
    async def dying(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        first._server.close()

    async with ScriptedServer(dying) as first, ScriptedServer(GOOD) as second:
        async with gateway_client(first.url, second.url) as client:
            for data in (GET, GET, infer_json(), GET, infer_json()):
                assert (await client.ask(data)).status == 200
        (crossed,) = first.connections[0].requests[1:]
        ids = [each.head.get("X-Request-Id") for each in second.requests]
        assert (len(set(ids)), ids.count(crossed.head.get("X-Request-Id"))) == (4, 1)


async def closes(connection: Connection) -> None:
    """Read a request, and close without a response."""
    await connection.request()


FAULTS = {
    "no_response": closes,
    "503": always_respond(http_response(b'{"error":"busy"}', status="503 Busy")),
}


def _then(faulty: Script) -> Script:
    """Return a script that responds once, and then does something else."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await faulty(connection)

    return script


@pytest.mark.parametrize("data", [infer_json(), LARGE_JSON, GET], ids=["small", "large", "GET"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("warm", [False, True], ids=["new", "kept"])
async def test_route_may_allow_more_retries(data: bytes, fault: str, warm: bool) -> None:
    """With an idle connection to either server the call takes the fast path."""
    script = _then(FAULTS[fault]) if warm else FAULTS[fault]
    allowed = [int(fault) if fault.isdigit() else fault]
    async with (
        ScriptedServer(script, FAULTS[fault]) as bad,
        ScriptedServer(GOOD) as good,
        gateway_client(bad.url, good.url, route={"retry_on": allowed}) as client,
    ):
        for sent in (*([WARM] * 2 if warm else []), *[data] * 4):
            assert (await client.ask(sent)).status == 200
        sent_to_good, failed = (
            [each for each in server.requests if each.head.target != "/v2/warm"]
            for server in (good, bad)
        )
        assert len(sent_to_good) == 4
        assert failed
        # A retry keeps target, headers and body.
        assert len({(each.head.first, each.body) for each in (*sent_to_good, *failed)}) == 1
