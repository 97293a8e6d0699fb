"""Failed requests are retried at another server, as far as the route allows."""

import pytest

from tests.support.gateway import gateway_client
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import binary_response, infer_json, json_request
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

GOOD = binary_response(bytes(4))
ASKED = {
    "small JSON": infer_json(),
    "large JSON": infer_json(json_request(*range(50_000))),
    "GET": request("GET", "/v2/x"),
}


async def closes(connection: Connection) -> None:
    """Read a request, and close without a response."""
    await connection.request()


def _then(faulty: Script) -> Script:
    """Return a script that responds once, and then does something else."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(GOOD)
        await faulty(connection)

    return script


UNWANTED = http_response(b'{"error":"busy"}', status="503 Busy")
FAULTS = {"no_response": closes, "503": always_respond(UNWANTED)}


async def _warm(client: RawClient) -> None:
    """Give the gateway an idle connection to either server, so that it uses the fast path."""
    for _ in range(2):
        assert (await client.ask(request("GET", "/v2/warm"))).status == 200


@pytest.mark.parametrize("data", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("warm", [False, True], ids=["new", "kept"])
async def test_route_may_allow_more_retries(data: bytes, fault: str, warm: bool) -> None:
    script = _then(FAULTS[fault]) if warm else FAULTS[fault]
    allowed = [int(fault) if fault.isdigit() else fault]
    async with (
        ScriptedServer(script, FAULTS[fault]) as bad,
        ScriptedServer(always_respond(GOOD)) as good,
        gateway_client(bad.url, good.url, route={"retry_on": allowed}) as client,
    ):
        if warm:
            await _warm(client)
        for _ in range(4):
            assert (await client.ask(data)).status == 200
        sent = [each for each in good.requests if each.head.target != "/v2/warm"]
        assert len(sent) == 4
        failed = [each for each in bad.requests if each.head.target != "/v2/warm"]
        assert failed
        # A retry keeps target, headers and body.
        assert len({(each.head.first, each.body) for each in (*sent, *failed)}) == 1
