"""Clients do not notice a server that closes every idle connection as it is reused."""

from tests.support.gateway import gateway_client
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import INFER, json_request
from tests.support.servers.scripted_server import ScriptedServer, respond_in_turn


async def test_closed_idle_connection_is_not_noticed_by_clients(
    fast_path_requests: list[str],
) -> None:
    asked = [request("GET", "/v2/models/m"), request("POST", INFER, json_request())] * 10
    async with (
        ScriptedServer(respond_in_turn(http_response(b'{"outputs":[]}'), b"")) as server,
        gateway_client(server.url) as client,
    ):
        for data in asked:
            reply = await client.ask(data)
            assert (reply.status, reply.body) == (200, b'{"outputs":[]}')
        assert len(server.connections) == len(asked)
    assert len(fast_path_requests) == len(asked)
