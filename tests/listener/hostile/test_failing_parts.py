"""Whatever part of the gateway fails, calls and connections give back all that they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest
from h2.exceptions import StreamClosedError

from gateway.listener.server import HttpListener
from gateway.listener.sockets import open_tcp_sockets
from gateway.observe.call_record import CallRecord
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.calls.dispatch import handle_request, proxy_call
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.proxy.filters.mirror import Mirror
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse
from gateway.proxy.router import Route, Router
from gateway.routing.endpoint_health import EjectionState, OutlierPolicy
from gateway.routing.matcher import Match
from gateway.routing.retry import RetryPolicy
from gateway.upstream.address import parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import (
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)
from tests.support.addresses import HOST, free_address
from tests.support.checks.nothing_left import find_left_in_listener
from tests.support.doubles.iterations import iterations
from tests.support.doubles.streaming import make_destination
from tests.support.gateway import no_leaks, until
from tests.support.http2_client import Http2Client, connect_http2
from tests.support.http_messages import chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    INFER,
    binary_response,
    infer_json,
    json_request,
)
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection, ScriptedServer

_MOST_CALLS = 300
"""Calls of parts that a scenario makes at most."""


class _Faults:
    """Counts the calls of all parts; the one of that number fails, but for innocent clients."""

    def __init__(self, failing: int) -> None:
        self.calls = 0
        self.is_over = False
        self._failing = failing

    def step(self) -> None:
        self.calls += not self.is_over
        if self.calls == self._failing and not self.is_over:
            self._failing = 0
            raise ZeroDivisionError("a part fails")

    def observe(self, record: CallRecord) -> None:
        self.step()

    def listen(self, endpoint: str, event: EjectionState | str) -> None:
        self.step()

    def random(self) -> float:
        self.step()
        return 0.0

    async def serve_mirrored(self, call: Call) -> None:
        self.step()
        await proxy_call(call)


class _FailingEndpoint(UpstreamEndpoint):
    """An endpoint whose methods may fail, before or after they did their work."""

    def __init__(self, inner: HttpEndpoint, faults: _Faults) -> None:
        self.url, self.name = inner.url, inner.name
        self._inner = inner
        self._faults = faults

    def try_reserve(self) -> ReservedConnection:
        self._faults.step()
        return _FailingReservation(self._inner.try_reserve(), self._faults)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        self._faults.step()
        return _FailingResponse(await self._inner.send(request), self._faults)

    async def close(self) -> None:
        await self._inner.close()


class _FailingReservation(ReservedConnection):
    def __init__(self, inner: ReservedConnection, faults: _Faults) -> None:
        self._inner = inner
        self._faults = faults

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        self._faults.step()
        self._inner.send(template, lines, body, receiver)
        self._faults.step()

    def close(self) -> None:
        self._inner.close()
        self._faults.step()


class _FailingResponse(UpstreamResponse):
    def __init__(self, inner: UpstreamResponse, faults: _Faults) -> None:
        self.status, self.reason, self.headers = inner.status, inner.reason, inner.headers
        self._inner = inner
        self._faults = faults

    @property
    def trailers(self) -> HeaderLines:
        self._faults.step()
        return self._inner.trailers

    @property
    def received_bytes(self) -> int:
        self._faults.step()
        return self._inner.received_bytes

    async def read(self) -> bytes | memoryview:
        self._faults.step()
        return await self._inner.read()

    def close(self) -> None:
        self._inner.close()
        self._faults.step()


class _World:
    """A listener before a server that works, and an address where none is."""

    def __init__(self, server: ScriptedServer, faults: _Faults) -> None:
        self.faults = faults
        self.limit = ConcurrencyLimit("all", 100, 10, 5)
        self.destination = make_destination(
            *(
                _FailingEndpoint(HttpEndpoint(parse_server_url(url), EndpointOptions(5)), faults)
                for url in (server.url, f"http://{free_address()}")
            )
        )
        policy = OutlierPolicy(consecutive_failures=1, base_ejection_time=0.01)
        pool = Pool(
            self.destination.upstream.pool.endpoints,
            policy,
            notify=faults.listen,
            on_failure=faults.listen,
        )
        self.destination = replace(
            self.destination,
            upstream=replace(self.destination.upstream, pool=pool),
            concurrency_limits=(self.limit,),
            retry_policy=RetryPolicy(statuses=frozenset((503,))),
        )
        self.buffers = self.destination.memory_budget.buffers
        self.mirror = Mirror(self.destination, 0.5, faults.serve_mirrored)
        route = Route(Match(), (self.destination,), mirror=self.mirror, server_timing=True)
        self.router = Router([route], faults.random)
        self.planner = Planner(self.router)
        self.closed = 0
        self.listener = HttpListener(
            self._handle, (faults.observe,), self._note_closed, self.buffers
        )
        self.listener.set_planner(self.planner)
        self.listener.forwarding = ForwardedPolicy(
            True, (), via=True, request_id=True, identity="x"
        )
        self.listener.trace_sampler = TraceSampler(0.5, faults.observe, faults.random)

    async def _handle(self, request: ClientRequest, response: ClientResponse) -> None:
        await handle_request(request, response, self.planner)

    def _note_closed(self) -> None:
        self.closed += 1

    @property
    def held(self) -> dict[str, int]:
        """Return all that calls and connections hold."""
        held = {
            **find_left_in_listener(self.listener),
            "on the fast path": self.planner.in_flight,
            "leases": sum(self.destination.upstream.pool.outstanding),
            "slots": self.limit.active + self.limit.queued,
            "copies": self.mirror.in_flight,
        }
        return {name: count for name, count in held.items() if count}

    async def until_idle(self) -> None:
        with suppress(AssertionError):
            await until(lambda: not self.held)
        assert self.held == {}

    async def close(self) -> None:
        await self.listener.drain(0.05, 0.0)
        await self.mirror.close()
        self.planner.close()
        await self.destination.upstream.pool.close()


async def _serve(connection: Connection) -> None:
    """Respond as the path of a request says."""
    while True:
        received = await connection.request()
        path = received.head.target
        if path == "/v2/never":
            await connection.wait_for_close()
            return
        if path == "/v2/dies":
            return
        if path == "/v2/half":
            await connection.send(http_response(b"abc")[:-1])
        elif path == "/v2/broken":
            await connection.send(b"HTTP/1.1 200 OK\r\n: no name\r\n\r\n")
        elif path == "/v2/busy":
            await connection.send(http_response(b"busy", status="503 Busy"))
        elif path == "/v2/streamed":
            await connection.send(message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}))
            await asyncio.sleep(0.01)
            await connection.send(chunked(b"abc"))
        elif path.endswith("/infer"):
            await connection.send(binary_response(FLOATS.tobytes()))
        else:
            await connection.send(http_response(b"hello"))


@asynccontextmanager
async def _world(failing: int) -> AsyncIterator[tuple[_World, str]]:
    """Run a world; the oracle is asked at its end."""
    async with no_leaks(), ScriptedServer(_serve) as server:
        world = _World(server, _Faults(failing))
        (sock,) = open_tcp_sockets(HOST, 0)
        url = "http://{}:{}".format(*sock.getsockname())
        world.listener.sockets.listen(sock)
        try:
            yield world, url
            world.faults.is_over = True
            await world.until_idle()
            async with connect(url) as innocent:
                assert (await innocent.call("GET", "/v2/x")).status == 200
            await world.until_idle()
        finally:
            await world.close()
        assert world.closed > 1


async def _streams(client: Http2Client) -> None:
    calls = [
        client.call("GET", "/v2/x"),
        client.call("POST", INFER, json_request()),
        client.call("GET", "/v2/streamed"),
        client.call("POST", "/v2/x", b"abc", (("x", "x" * 3000),)),
        client.call("GET", "/v2/busy"),
    ]
    await asyncio.gather(*calls, return_exceptions=True)


async def _streams_in_parts(client: Http2Client) -> None:
    for target in ("/v2/x", INFER):
        stream = client.send_headers("POST", target)
        body = json_request()
        await client.send_data(stream, body[:10], end_stream=False)
        await client.send_data(stream, body[10:])
        await client.response(stream)


async def _reset_streams(client: Http2Client) -> None:
    streams = [
        await client.start("GET", "/v2/never"),
        await client.start("GET", "/v2/never", headers=(("x", "x" * 3000),)),
        client.send_headers("POST", INFER),
    ]
    await iterations(20)
    for stream in streams:
        with suppress(StreamClosedError):  # the gateway has reset it
            client.reset_stream(stream)
    await client.call("GET", "/v2/x")


async def _left_streams(client: Http2Client) -> None:
    await client.start("GET", "/v2/never")
    await client.start("GET", "/v2/never", headers=(("x", "x" * 3000),))
    client.send_headers("POST", INFER)
    client.send_headers("POST", "/v2/x", (("host", "y"),), end_stream=True)
    await iterations(20)


_LONG = {"X": "x" * 3000}
"""Headers for the streaming path."""
_CHUNKED = message("POST /v2/x HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"})

Step = bytes | int | float
_STEPS: dict[str, tuple[Step, ...]] = {
    "fast": (request("GET", "/v2/x"), 1, infer_json(), 1),
    "pipelined": (request("GET", "/v2/x") * 3, 3),
    "deferred": (infer_json()[:-1], infer_json()[-1:], 1),
    "streamed": (_CHUNKED + chunked(b"abc", b"d"), 1, request("GET", "/v2/streamed"), 1),
    "streamed infer": (infer_json(headers=_LONG), 1),
    "failed": (
        *(request("GET", "/v2/busy"), 1, request("GET", "/v2/broken"), 1),
        *(request("GET", "/v2/dies"), 1),
    ),
    "failed while streamed": (
        *(request("GET", "/v2/busy", headers=_LONG), 1),
        *(request("GET", "/v2/broken", headers=_LONG), 1),
    ),
    "left on the fast path": (request("GET", "/v2/never"), 0.02),
    "left on the streaming path": (request("GET", "/v2/never", headers=_LONG), 0.02),
    # Longer than a response is deferred.
    "left with half a response": (request("GET", "/v2/half"), 0.15),
    "left with half a request": (infer_json()[:-1], 0.02),
    "malformed": (request("GET", "/v2/x") + b"GET /v2/x HTTP/1.1\r\n: no name\r\n\r\n", 2),
}
"""Bytes to send, the number of responses to read, and seconds to wait."""

_HTTP2_PLAYS = (_streams, _streams_in_parts, _reset_streams, _left_streams)


def _plays() -> Mapping[str, Callable[[str], Awaitable[None]]]:
    """Return what clients do at a URL."""

    async def take(steps: tuple[Step, ...], url: str) -> None:
        async with connect(url) as client:
            for step in steps:
                if isinstance(step, bytes):
                    await client.send(step)
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    for _ in range(step):
                        await client.read_response()

    async def play(over_http2: Callable[[Http2Client], Awaitable[None]], url: str) -> None:
        async with connect_http2(url) as client:
            await over_http2(client)

    plays = {name: partial(take, steps) for name, steps in _STEPS.items()}
    return plays | {each.__name__.strip("_"): partial(play, each) for each in _HTTP2_PLAYS}


@pytest.mark.parametrize("play", _plays().values(), ids=_plays())
async def test_part_that_fails_leaves_nothing_counted(
    play: Callable[[str], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each call of each part fails once: an observer, a sampler, an endpoint, a pool's listener."""
    for failing in range(1, _MOST_CALLS):
        async with _world(failing) as (world, url):
            with suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                async with asyncio.timeout(2):
                    await play(url)
        if world.faults.calls < failing:
            assert failing > 1
            break
    else:
        raise AssertionError("the scenario is too long")
    # What nobody catches is logged by the event loop.
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []
