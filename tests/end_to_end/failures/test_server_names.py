"""Errors tell clients the name of the upstream, and operators the address of the endpoint."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway.observe.call_record import CallRecord
from tests.support.addresses import free_address
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, running_gateway
from tests.support.http_messages import http_response, with_long_head
from tests.support.inference_messages import HEADER_LENGTH, binary_response, infer_json
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

LOAD = "/v2/repository/models/m/load"
EXPOSED = {"expose_endpoints": True}


async def _closes(connection: Connection) -> None:
    await connection.request()


async def _breaks_off(connection: Connection) -> None:
    await connection.request()
    await connection.send(binary_response(bytes(8))[:-4])


FAILURES = {
    "closes": (_closes, 502, "{} closed the connection before it responded"),
    "breaks off": (_breaks_off, 502, "{} closed the connection before the end of its response"),
    "no HTTP": (
        always_respond(b"what?\r\n\r\n"),
        502,
        "{} sent an invalid HTTP response: this is not HTTP",
    ),
    "no tensors": (
        always_respond(http_response(b"{]", headers={HEADER_LENGTH: "2"})),
        502,
        "{}: the server's response is not valid JSON",
    ),
    "late": (
        never_respond,
        504,
        "waiting for {}: nothing moved for 0.25 s (limits.idle_timeout)",
    ),
    "down": (None, 503, "cannot connect to {}: Connection refused"),
}
PATHS: dict[str, Callable[[bytes], bytes]] = {"fast": bytes, "streaming": with_long_head}


@asynccontextmanager
async def _server(script: object) -> AsyncIterator[str]:
    """Run a server with a script, and yield its URL; without a script nobody listens there."""
    if script is None:
        yield f"http://{free_address()}"
        return
    async with ScriptedServer(script) as server:  # type: ignore[arg-type]
        yield server.url


@pytest.mark.parametrize("exposed", [False, True], ids=["hidden", "exposed"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FAILURES)
async def test_client_learns_the_upstream_and_the_operator_the_endpoint(
    name: str, path: str, exposed: bool, call_records: list[CallRecord]
) -> None:
    script, status, text = FAILURES[name]
    general = EXPOSED if exposed else {}
    async with (
        _server(script) as url,
        running_gateway(url, general=general, idle_timeout=0.25) as gateway,
        gateway.client() as client,
    ):
        reply = await client.ask(PATHS[path](infer_json()))
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
    ("method", "target"),
    [
        ("POST", LOAD),
        ("GET", "/v2/logging"),
        ("POST", "/v2/trace/setting"),
        ("GET", "/v2/models/stats"),
    ],
)
async def test_operations_of_operators_name_the_endpoint(
    method: str, target: str, count: int
) -> None:
    urls = [f"http://{free_address()}" for _ in range(count)]
    async with running_gateway(*urls) as gateway, gateway.client() as client:
        reply = await client.call(method, target)
        assert reply.status == 503
        assert all(f"cannot connect to {url}: Connection refused" in reply.error for url in urls)


@pytest.mark.parametrize("path", ["/v2", "/v2/models/m", "/v2/models/m/stats"])
@pytest.mark.parametrize("count", [1, 2])
async def test_other_operations_name_the_upstream(path: str, count: int) -> None:
    urls = [f"http://{free_address()}" for _ in range(count)]
    async with running_gateway(*urls) as gateway, gateway.client() as client:
        reply = await client.call("GET", path)
        error = f"cannot connect to {UPSTREAM}: Connection refused"
        assert (reply.status, reply.error) == (503, error)


async def test_list_of_models_names_upstreams_once_each() -> None:
    """Endpoints of one upstream have the same name for clients."""
    async with AsyncExitStack() as stack:
        failing = always_respond(http_response(b'{"error":"no"}', status="500 No"))
        urls = [(await stack.enter_async_context(ScriptedServer(failing))).url for _ in range(2)]
        fine = always_respond(http_response(b"[]"))
        other = await stack.enter_async_context(ScriptedServer(fine))
        others = {"others": {"endpoints": [other.url], "dialect": "triton"}}
        route = {
            "upstream": [{"name": "servers", "weight": 1}, {"name": "others", "weight": 1}],
        }
        gateway = await stack.enter_async_context(
            running_gateway(*urls, upstream={"model_discovery": True}, others=others, route=route)
        )
        client = await stack.enter_async_context(gateway.client())
        reply = await client.call("POST", "/v2/repository/index")
        assert (reply.status, reply.error) == (
            502,
            "POST /v2/repository/index succeeded at upstream 'others'; failed: "
            f"{UPSTREAM} returned 500: no",
        )


@pytest.mark.parametrize("exposed", [False, True], ids=["hidden", "exposed"])
async def test_client_learns_which_upstream_is_not_ready(exposed: bool) -> None:
    address = free_address()
    general = {"expose_endpoints": exposed}
    async with (
        running_gateway(f"http://{address}", general=general) as gateway,
        gateway.client() as client,
    ):
        reply = await client.call("GET", "/v2/health/ready")
        assert reply.status == 503
        assert reply.error.startswith("not ready: upstream servers")
        assert (address in reply.error) is exposed
