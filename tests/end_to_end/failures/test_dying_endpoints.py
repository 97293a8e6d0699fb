"""Upstreams with several endpoints, some of which die."""

import asyncio
import json

import pytest

from tests.support.addresses import free_address
from tests.support.gateway import UPSTREAM, gateway_client, running_gateway
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, binary_header, json_request
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

GET = request("GET", "/v2/models/m")
POST = request("POST", INFER, json_request())
CHUNKED = request("POST", "/v2/x", None, {"Transfer-Encoding": "chunked"}) + b"1\r\na\r\n0\r\n\r\n"


def _binary(size: int) -> bytes:
    header = binary_header(size)
    return request("POST", INFER, header + bytes(size), {HEADER_LENGTH: str(len(header))})


def _named(name: bytes) -> Script:
    return always_respond(http_response(b'{"name":"%b","outputs":[]}' % name))


@pytest.mark.parametrize(
    "data", [GET, POST, CHUNKED, _binary(8), _binary(200_000)], ids=lambda data: len(data)
)
async def test_dead_endpoint_is_not_noticed_by_clients(data: bytes) -> None:
    async with ScriptedServer(_named(b"here")) as server:
        urls = [f"http://{free_address()}", server.url, f"http://{free_address()}"]
        async with gateway_client(*urls) as client:
            for _ in range(12):
                reply = await client.ask(data)
                assert (reply.status, reply.json["name"]) == (200, "here")
        assert len(server.requests) == 12


async def test_error_names_the_upstream_if_all_endpoints_are_dead() -> None:
    urls = [f"http://{free_address()}" for _ in range(3)]
    async with gateway_client(*urls) as client:
        for data in (GET, POST, _binary(8)) * 4:
            reply = await client.ask(data)
            assert reply.status == 503
            assert reply.error == f"cannot connect to {UPSTREAM}: Connection refused"


async def test_endpoint_that_dies_on_a_reused_connection_is_retried_elsewhere() -> None:
    async def dying(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response(b'{"name":"first","outputs":[]}'))
        await connection.request()
        first._server.close()

    async with ScriptedServer(dying) as first, ScriptedServer(_named(b"second")) as second:
        async with gateway_client(first.url, second.url) as client:
            replies = [await client.ask(data) for data in (GET, GET, POST, GET, POST)]
        assert [reply.status for reply in replies] == [200] * 5
        assert [reply.json["name"] for reply in replies] == ["first", *["second"] * 4]


async def test_one_of_three_endpoints_dies_under_load(caplog: pytest.LogCaptureFixture) -> None:
    """No client notices: the requests crossed the end of the server."""
    count, callers = 60, 6
    names: list[str] = []
    failures: list[str] = []

    async def call(number: int) -> None:
        async with gateway.client() as client:
            for step in range(count):
                reply = await client.ask(POST if (step + number) % 2 else GET)
                if reply.status == 200:
                    names.append(reply.json["name"])
                else:
                    failures.append(reply.error)
                await asyncio.sleep(0)

    async def one_of_them(connection: Connection) -> None:
        while len(names) < count:
            await connection.request()
            await connection.send(http_response(b'{"name":"dies","outputs":[]}'))
        servers[0]._server.close()

    async with (
        ScriptedServer(one_of_them) as dies,
        ScriptedServer(_named(b"b")) as second,
        ScriptedServer(_named(b"c")) as third,
    ):
        servers = (dies, second, third)
        async with running_gateway(*[server.url for server in servers]) as gateway:
            await asyncio.gather(*map(call, range(callers)))
    assert len(names) + len(failures) == count * callers
    assert set(names) == {"dies", "b", "c"}
    assert not failures
    assert names.count("dies") <= count + callers
    assert f"{dies.url} failed 5 times in a row: ejected for 10 s" in caplog.text


async def test_endpoint_that_sends_invalid_http_is_ejected() -> None:
    """A client whose request may have had an effect gets an error; few clients do."""
    async with (
        ScriptedServer(always_respond(b"what?\r\n\r\n")) as bad,
        ScriptedServer(_named(b"good")) as good,
    ):
        async with gateway_client(bad.url, good.url) as client:
            replies = [await client.ask(GET) for _ in range(30)]
        failed = [reply for reply in replies if reply.status != 200]
        assert [reply.status for reply in failed] == [502] * 5
        assert all(UPSTREAM in json.loads(reply.body)["error"] for reply in failed)
        assert len(good.requests) == 25
