"""Times and bytes belong to the endpoint, and to the call, of which they are; see Server-Timing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.observe import families
from gateway.observe.call_record import CallRecord
from gateway.observe.metric_store import CounterFamily
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import RunningGateway, running_gateway, served
from tests.support.http_messages import http_response, message, request, with_long_head
from tests.support.inference_messages import FLOATS, binary_response, infer_json
from tests.support.raw_client import ReceivedResponse
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

BODY = b"x" * 1000
AT_LEAST = 0.9
"""The part of a sleep that is measured at the least: event loops count in milliseconds."""
UPLOAD = request("POST", "/v2/models/m/generate", BODY)


class _Seen:
    """What a gateway has recorded."""

    def __init__(self, running: RunningGateway) -> None:
        self.running = running
        self._store = running.gateway.shared.metric_store

    async def ask(self, *requests: bytes) -> list[ReceivedResponse]:
        """Make calls over one connection; return once all of them have ended."""
        async with self.running.client() as client:
            replies = [await client.ask(data) for data in requests]
        await self.running.until_idle()
        return replies

    def calls(self, url: str) -> int:
        """Return the attempts whose duration was observed."""
        return int(sum(self._words(families.SERVER_DURATION, url)[1:]))

    def seconds(self, url: str) -> float:
        return self._words(families.SERVER_DURATION, url)[0]

    def heads(self, url: str) -> int:
        return int(sum(self._words(families.FIRST_BYTE, url)[1:]))

    def sizes(self, url: str) -> tuple[float, float]:
        """Return the bytes that were sent and received."""
        sent, received = families.SENT_BYTES, families.RECEIVED_BYTES
        return self._words(sent, url)[0], self._words(received, url)[0]

    def retries(self) -> float:
        return sum(count for (count,) in self._store.sums(families.RETRIES).values())

    def _words(self, family: Any, url: str) -> list[float]:
        empty = [0.0] if isinstance(family, CounterFamily) else [0.0] * family.words
        return self._store.sums(family).get(("servers", url), empty)


@asynccontextmanager
async def _gateway(*urls: str, **limits: Any) -> AsyncIterator[_Seen]:
    settings = {
        "upstream": {"load_balancing": {"policy": "round_robin"}},
        "route": {"retry_on": [502, 503, "no_response"]},
        **limits,
    }
    async with running_gateway(*urls, **settings) as running:
        yield _Seen(running)


def _late(response: bytes, seconds: float) -> Script:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await asyncio.sleep(seconds)
            await connection.send(response)

    return script


async def test_times_of_a_pipelined_call_are_its_own() -> None:
    """The call before it ends in a task, when the next one has begun already."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Content-Length": "100"}, b"x" * 40))
        await asyncio.sleep(0.15)  # longer than the gateway waits for the rest
        await connection.send(b"y" * 60)
        while True:
            await connection.request()
            await connection.send(http_response(b'[{"name":"m","state":"READY"}]'))

    async with ScriptedServer(script) as server, _gateway(server.url) as seen:
        async with seen.running.client() as client:
            await client.send(request("GET", "/v2/x1") + request("GET", "/v1/models"))
            for _ in range(2):
                assert (await client.read_response()).status == 200
        await seen.running.until_idle()
        assert (seen.calls(server.url), seen.heads(server.url)) == (2, 2)
        assert AT_LEAST * 0.15 < seen.seconds(server.url) < 10


async def test_retried_attempt_is_counted_at_its_endpoint(
    path: Callable[[bytes], bytes], call_records: list[CallRecord]
) -> None:
    busy = http_response(b"12345", status="503 Busy")
    async with (
        ScriptedServer(_late(busy, 0.2)) as slow,
        ScriptedServer(always_respond(http_response(b"123"))) as good,
        _gateway(slow.url, good.url) as seen,
    ):
        assert [each.status for each in await seen.ask(*[path(UPLOAD)] * 2)] == [200, 200]
        failed = len(slow.requests)
        assert failed >= 1
        assert (seen.calls(slow.url), seen.calls(good.url)) == (failed, 2)
        assert seen.seconds(slow.url) >= AT_LEAST * 0.2 * failed
        assert seen.seconds(good.url) < 0.2
        assert seen.sizes(slow.url) == (1000 * failed, 0)
        assert seen.sizes(good.url) == (2000, 6)
        assert seen.retries() == failed
    record = next(each for each in call_records if each.attempts == 2)
    assert (record.total_sent_bytes, record.total_received_bytes) == (2000, 3)


async def test_endpoint_that_does_not_respond_has_no_first_byte(
    path: Callable[[bytes], bytes],
) -> None:
    """The head of an earlier attempt is not its own."""
    busy = http_response(b"", status="503 Busy")
    async with (
        ScriptedServer(always_respond(busy)) as first,
        ScriptedServer(never_respond) as frozen,
        _gateway(first.url, frozen.url, request_timeout="300ms") as seen,
    ):
        await seen.ask(*[path(UPLOAD)] * 2)
        assert seen.heads(first.url) == seen.calls(first.url) >= 1
        assert (seen.heads(frozen.url), seen.calls(frozen.url)) == (0, 2)


@pytest.mark.parametrize("delay", [0.05, 0.15], ids=["waited for", "not waited for"])
async def test_first_byte_is_that_of_the_head(
    delay: float, path: Callable[[bytes], bytes], call_records: list[CallRecord]
) -> None:
    """The gateway waits a moment for the rest of a small body, to send it at once."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            await asyncio.sleep(delay)
            await connection.send(b"ab")

    async with ScriptedServer(script) as server, _gateway(server.url) as seen:
        assert [each.body for each in await seen.ask(path(UPLOAD))] == [b"ab"]
    (record,) = call_records
    assert record.server_seconds >= AT_LEAST * delay
    assert 0 < record.first_byte_seconds < record.server_seconds - AT_LEAST * 0.9 * delay


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
