"""A server that fails: errors name it, and retries go elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.observe.call_record import CallRecord
from tests.support.addresses import free_address
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, gateway_client, running_gateway, served
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    json_request,
)
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
    respond_in_turn,
)

GET = request("GET", "/v2/models/m")


async def test_response_may_arrive_before_the_body_was_sent() -> None:
    """The server refuses the body, and does not read it."""

    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.send(http_response(b'{"error":"too large"}', status="413 Too Large"))
        await never_respond(connection)

    async with served(script) as (server, _, client):
        head = request("POST", "/v2/x", headers={"Content-Length": "5000000"})
        await client.send(head + bytes(2_500_000))
        reply = await client.read_response()
        assert reply.status == 413
        assert reply.error == "too large"
        await (await server.connection()).left.wait()


async def test_server_that_closes_during_the_request_body_is_a_502() -> None:
    async def script(connection: Connection) -> None:
        await connection.head()
        await connection.reader.readexactly(100_000)
        connection.reset()

    async with served(script) as (server, _, client):
        client.send_nowait(request("POST", "/v2/x", bytes(20_000_000)))
        reply = await client.read_response()
        assert reply.status == 502
        assert UPSTREAM in reply.error
        assert server.url not in reply.error


EXPOSED = {"expose_endpoints": True}

FAILURES: dict[str, tuple[Script | None, int, str]] = {
    "closes": (respond_in_turn(b""), 502, "{} closed the connection before it responded"),
    "no HTTP": (
        always_respond(b"what?\r\n\r\n"),
        502,
        "{} sent an invalid HTTP response: this is not HTTP",
    ),
    "late": (never_respond, 504, "waiting for {}: nothing moved for 0.25 s (limits.idle_timeout)"),
    "down": (None, 503, "cannot connect to {}: Connection refused"),
}


@asynccontextmanager
async def _server(script: Script | None) -> AsyncIterator[str]:
    """Run a server with a script, and yield its URL; without a script nobody listens there."""
    if script is None:
        yield f"http://{free_address()}"
        return
    async with ScriptedServer(script) as server:
        yield server.url


@pytest.mark.parametrize("exposed", [False, True], ids=["hidden", "exposed"])
@pytest.mark.parametrize("name", FAILURES)
async def test_client_learns_the_upstream_and_the_operator_the_endpoint(
    name: str, path: Callable[[bytes], bytes], exposed: bool, call_records: list[CallRecord]
) -> None:
    script, status, text = FAILURES[name]
    general = EXPOSED if exposed else {}
    async with (
        _server(script) as url,
        running_gateway(url, general=general, idle_timeout=0.25) as gateway,
        gateway.client() as client,
    ):
        reply = await client.ask(path(infer_json()))
        assert reply.status == status
        assert reply.error.startswith(text.format(url if exposed else UPSTREAM))
        assert (url in reply.error) is exposed
        (member,) = gateway.pool.members
        assert (member.calls.last_error or "").startswith(text.format(url))
    (record,) = call_records
    assert record.error.startswith(text.format(url))
    assert (record.upstream, record.endpoint) == ("servers", url)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("method", "target", "is_for_operators"),
    [
        ("POST", "/v2/repository/models/m/load", True),
        ("GET", "/v2/logging", True),
        ("GET", "/v2", False),
        ("GET", "/v2/models/m", False),
    ],
)
async def test_only_operations_of_operators_name_the_endpoint(
    method: str, target: str, is_for_operators: bool, count: int
) -> None:
    urls = [f"http://{free_address()}" for _ in range(count)]
    async with running_gateway(*urls) as gateway, gateway.client() as client:
        reply = await client.call(method, target)
    error = "cannot connect to {}: Connection refused"
    assert reply.status == 503
    if is_for_operators:
        assert all(error.format(url) in reply.error for url in urls)
    else:
        assert reply.error == error.format(UPSTREAM)


GOOD = always_respond(binary_response(bytes(4)))
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
