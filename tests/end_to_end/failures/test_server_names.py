"""Errors tell clients the name of the upstream, and operators the address of the endpoint."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.observe.call_record import CallRecord
from tests.support.addresses import free_address
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, running_gateway
from tests.support.inference_messages import infer_json
from tests.support.servers.scripted_server import (
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
    respond_in_turn,
)

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

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
