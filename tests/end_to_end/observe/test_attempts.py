"""Times and bytes belong to the endpoint, and to the call, of which they are."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.call_metrics import (
    FIRST_BYTE,
    RECEIVED_BYTES,
    RETRIES,
    SENT_BYTES,
    SERVER_DURATION,
)
from gateway.observe.metric_store import CounterFamily
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.http_messages import http_response, message, request
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

    def __init__(self, running: RunningGateway, log: Path) -> None:
        self.running = running
        self._store = running.gateway.metric_store
        self._log = log

    async def ask(self, *requests: bytes) -> list[ReceivedResponse]:
        """Make calls over one connection; return once all of them have ended."""
        async with self.running.client() as client:
            replies = [await client.ask(data) for data in requests]
        await self.running.until_idle()
        return replies

    def calls(self, url: str) -> int:
        """Return the attempts whose duration was observed."""
        return int(sum(self._words(SERVER_DURATION, url)[1:]))

    def seconds(self, url: str) -> float:
        return self._words(SERVER_DURATION, url)[0]

    def heads(self, url: str) -> int:
        return int(sum(self._words(FIRST_BYTE, url)[1:]))

    def sizes(self, url: str) -> tuple[float, float]:
        """Return the bytes that were sent and received."""
        return self._words(SENT_BYTES, url)[0], self._words(RECEIVED_BYTES, url)[0]

    def retries(self) -> float:
        return sum(count for (count,) in self._store.sums(RETRIES).values())

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def _words(self, family: Any, url: str) -> list[float]:
        empty = [0.0] if isinstance(family, CounterFamily) else [0.0] * family.words
        return self._store.sums(family).get(("servers", url), empty)


@asynccontextmanager
async def _gateway(log: Path, *urls: str, **limits: Any) -> AsyncIterator[_Seen]:
    settings = {
        "upstream": {"load_balancing": {"policy": "round_robin"}},
        "route": {"retry_on": [502, 503, "no_response"]},
        "general": {"log": {"access": {"path": str(log), "format": "json"}}},
        **limits,
    }
    async with running_gateway(*urls, **settings) as running:
        yield _Seen(running, log)


def _late(response: bytes, seconds: float) -> Script:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await asyncio.sleep(seconds)
            await connection.send(response)

    return script


async def test_times_of_a_pipelined_call_are_its_own(tmp_path: Path) -> None:
    """The call before it ends in a task, when the next one has begun already."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Content-Length": "100"}, b"x" * 40))
        await asyncio.sleep(0.15)  # longer than the gateway waits for the rest
        await connection.send(b"y" * 60)
        while True:
            await connection.request()
            await connection.send(http_response(b'[{"name":"m","state":"READY"}]'))

    async with ScriptedServer(script) as server, _gateway(tmp_path / "log", server.url) as seen:
        async with seen.running.client() as client:
            await client.send(request("GET", "/v2/x1") + request("GET", "/v1/models"))
            for _ in range(2):
                assert (await client.read_response()).status == 200
        await seen.running.until_idle()
        assert (seen.calls(server.url), seen.heads(server.url)) == (2, 2)
        assert AT_LEAST * 0.15 < seen.seconds(server.url) < 10


async def test_retried_attempt_is_counted_at_its_endpoint(
    path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    busy = http_response(b"12345", status="503 Busy")
    async with (
        ScriptedServer(_late(busy, 0.2)) as slow,
        ScriptedServer(always_respond(http_response(b"123"))) as good,
        _gateway(tmp_path / "log", slow.url, good.url) as seen,
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
    line = next(each for each in seen.lines() if each["attempts"] == 2)
    assert (line["sent_bytes"], line["received_bytes"]) == (2000, 3)


async def test_endpoint_that_does_not_respond_has_no_first_byte(
    path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """The head of an earlier attempt is not its own."""
    busy = http_response(b"", status="503 Busy")
    async with (
        ScriptedServer(always_respond(busy)) as first,
        ScriptedServer(never_respond) as frozen,
        _gateway(tmp_path / "log", first.url, frozen.url, request_timeout="300ms") as seen,
    ):
        await seen.ask(*[path(UPLOAD)] * 2)
        assert seen.heads(first.url) == seen.calls(first.url) >= 1
        assert (seen.heads(frozen.url), seen.calls(frozen.url)) == (0, 2)


@pytest.mark.parametrize("delay", [0.05, 0.15], ids=["waited for", "not waited for"])
async def test_first_byte_is_that_of_the_head(
    delay: float, path: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """The gateway waits a moment for the rest of a small body, to send it at once."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            await asyncio.sleep(delay)
            await connection.send(b"ab")

    async with ScriptedServer(script) as server, _gateway(tmp_path / "log", server.url) as seen:
        assert [each.body for each in await seen.ask(path(UPLOAD))] == [b"ab"]
    (line,) = seen.lines()
    assert line["server_ms"] >= AT_LEAST * 1000 * delay
    assert 0 < line["first_byte_ms"] < line["server_ms"] - AT_LEAST * 900 * delay


@pytest.mark.parametrize("count", [1, 2])
async def test_operation_of_all_endpoints_is_counted_at_each(count: int, tmp_path: Path) -> None:
    load = request("POST", "/v2/repository/models/m/load", b"{}")
    async with (
        ScriptedServer(_late(http_response(b"{}"), 0.02)) as one,
        ScriptedServer(_late(http_response(b"{}"), 0.02)) as two,
    ):
        urls = [one.url, two.url][:count]
        async with _gateway(tmp_path / "log", *urls) as seen:
            assert [each.status for each in await seen.ask(load)] == [200]
            for url in urls:
                assert (seen.calls(url), seen.heads(url), seen.sizes(url)) == (1, 1, (2, 2))
                assert seen.seconds(url) >= AT_LEAST * 0.02
        (line,) = seen.lines()
        assert (line["sent_bytes"], line["received_bytes"]) == (2 * count, 2 * count)
        assert line["attempts"] == count
        assert line["server_ms"] >= AT_LEAST * 20
