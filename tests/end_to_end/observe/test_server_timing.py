"""Routes that ask for it tell clients in Server-Timing where the time of their calls went."""

import re
from collections.abc import Callable

import pytest

from tests.support.gateway import served
from tests.support.http_messages import http_response, request, with_long_head
from tests.support.inference_messages import FLOATS, binary_response, infer_json
from tests.support.raw_client import ReceivedResponse
from tests.support.servers.scripted_server import Connection, Script, always_respond, never_respond

ROUTE = {"server_timing": True}
GET = request("GET", "/v2/models/m")
CONVERTED = always_respond(binary_response(FLOATS.tobytes()))
_METRIC = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+);dur=(\d+\.\d+)")


def _metrics(value: str) -> dict[str, float]:
    """Parse a value of Server-Timing."""
    found = [_METRIC.fullmatch(metric) for metric in value.split(", ")]
    return {each[1]: float(each[2]) for each in found if each is not None}


def _timing(reply: ReceivedResponse) -> dict[str, float]:
    (value,) = reply.head.all("Server-Timing")
    return _metrics(value)


@pytest.mark.parametrize(
    ("data", "path", "names"),
    [
        (infer_json(), bytes, ["queue", "convert-request", "server", "convert-response"]),
        (infer_json(), with_long_head, ["queue", "convert-request", "server"]),
        (GET, bytes, ["queue", "server"]),
        (GET, with_long_head, ["queue", "server"]),
    ],
    ids=["JSON fast", "JSON streaming", "GET fast", "GET streaming"],
)
async def test_response_tells_where_the_time_went(
    data: bytes, path: Callable[[bytes], bytes], names: list[str], fast_path_requests: list[str]
) -> None:
    async with served(CONVERTED, route=ROUTE) as (_, _, client):
        for _ in range(3):
            reply = await client.ask(path(data))
            assert reply.status == 200
            timing = _timing(reply)
            assert list(timing) == names
            assert timing["server"] > 0
        assert len(fast_path_requests) == (3 if path is bytes else 0)


async def test_timing_of_the_server_is_kept(path: Callable[[bytes], bytes]) -> None:
    own = "db;dur=53, app;dur=47.2"
    script = always_respond(http_response(b"{}", {"Server-Timing": own}))
    async with served(script, route=ROUTE) as (_, _, client):
        values = (await client.ask(path(GET))).head.all("Server-Timing")
        assert own in values
        (ours,) = [value for value in values if value != own]
        assert list(_metrics(ours)) == ["queue", "server"]


async def _breaks_off(connection: Connection) -> None:
    await connection.request()
    await connection.send(http_response(b"abc")[:-1])


@pytest.mark.parametrize(
    ("script", "data", "status", "names"),
    [
        (never_respond, infer_json(), 504, ["queue", "convert-request"]),
        (_breaks_off, GET, 502, ["queue"]),
        (always_respond(http_response(b"no", status="500 No")), GET, 500, ["queue", "server"]),
    ],
    ids=["late", "breaks off", "500"],
)
async def test_error_tells_what_came_before_it(
    script: Script, data: bytes, status: int, names: list[str], path: Callable[[bytes], bytes]
) -> None:
    async with served(script, route=ROUTE, idle_timeout=0.25) as (_, _, client):
        reply = await client.ask(path(data))
        assert reply.status == status
        assert [name for name in _timing(reply) if name != "convert-response"] == names
