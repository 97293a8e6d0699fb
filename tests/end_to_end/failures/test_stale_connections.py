"""A server that closes every connection just as it is used again is not noticed by its clients."""

from tests.support.gateway import client_of
from tests.support.http_messages import answer, request
from tests.support.inference_messages import INFER, json_request
from tests.support.servers.scripted_server import FaultyServer, answering


async def test_no_client_sees_a_connection_that_was_closed_meanwhile(
    went_straight: list[str],
) -> None:
    asked = [request("GET", "/v2/models/m"), request("POST", INFER, json_request())] * 10
    async with (
        FaultyServer(answering(answer(b"{}"), b"")) as server,
        client_of(server.url) as client,
    ):
        for data in asked:
            reply = await client.ask(data)
            assert (reply.status, reply.body) == (200, b"{}")
        assert len(server.connections) == len(asked)
    # The first one found no connection.
    assert len(went_straight) == len(asked) - 1
