"""Errors tell clients the name of the upstream, and operators the address of the endpoint."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.observe.call_record import CallRecord
from tests.support.addresses import free_address
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, running_gateway
from tests.support.http_messages import with_long_head
from tests.support.inference_messages import infer_json
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

EXPOSED = {"expose_endpoints": True}


async def _closes(connection: Connection) -> None:
    await connection.request()


FAILURES = {
    "closes": (_closes, 502, "{} closed the connection before it responded"),
    "no HTTP": (
        always_respond(b"what?\r\n\r\n"),
        502,
        "{} sent an invalid HTTP response: this is not HTTP",
    ),
    "late": (never_respond, 504, "waiting for {}: nothing moved for 0.25 s (limits.idle_timeout)"),
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
    ("method", "target"), [("POST", "/v2/repository/models/m/load"), ("GET", "/v2/logging")]
)
async def test_operations_of_operators_name_the_endpoint(
    method: str, target: str, count: int
) -> None:
    urls = [f"http://{free_address()}" for _ in range(count)]
    async with running_gateway(*urls) as gateway, gateway.client() as client:
        reply = await client.call(method, target)
        assert reply.status == 503
        assert all(f"cannot connect to {url}: Connection refused" in reply.error for url in urls)


@pytest.mark.parametrize("path", ["/v2", "/v2/models/m"])
@pytest.mark.parametrize("count", [1, 2])
async def test_other_operations_name_the_upstream(path: str, count: int) -> None:
    urls = [f"http://{free_address()}" for _ in range(count)]
    async with running_gateway(*urls) as gateway, gateway.client() as client:
        reply = await client.call("GET", path)
        error = f"cannot connect to {UPSTREAM}: Connection refused"
        assert (reply.status, reply.error) == (503, error)
