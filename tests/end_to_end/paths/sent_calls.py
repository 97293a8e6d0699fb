"""Sends a generated call in several ways, and records what everybody saw of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.observe.call_record import CallRecord
from tests.end_to_end.paths.generated_calls import MODEL, GeneratedCall, ServerResponse
from tests.http1.splits import cut
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import Head, chunked, http_response, request, with_long_head
from tests.support.inference_messages import HEADER_LENGTH, binary_response
from tests.support.raw_client import TIMEOUT, RawClient
from tests.support.servers.scripted_server import (
    Connection,
    ReceivedRequest,
    Script,
    ScriptedServer,
)

_WARM_UP = "/v2/warm-up"
_WARM_UP_HEADER = {"X-Warm-Up": "1"}
_LEFT = (asyncio.IncompleteReadError, ConnectionError)
LIMITS = {"idle_timeout": 3, "max_request_bytes": 200_000}
_TURNS = 4
"""Time slices of the event loop in which bytes reach the other end of a connection."""


@dataclass(frozen=True)
class Way:
    """How a call is sent.

    With a long head it takes the streaming path. If it is cut, request and response arrive in
    pieces. An impatient gateway does not wait for the rest of small bodies, so that the pieces are
    not put together again. The body of a chunked inference request has no length, so that it is
    converted as it arrives.
    """

    name: str
    has_long_head: bool = False
    is_cut: bool = False
    is_impatient: bool = False
    is_chunked: bool = False


WHOLE = Way("whole")
LONG_HEAD = Way("long head", has_long_head=True)
SPLIT_WAYS = (
    Way("cut", is_cut=True),
    Way("cut, long head", has_long_head=True, is_cut=True),
    Way("cut, not waited for", is_cut=True, is_impatient=True),
    Way("cut, long head, not waited for", has_long_head=True, is_cut=True, is_impatient=True),
    Way("chunked", is_chunked=True),
)

Message = tuple[str, tuple[tuple[str, str], ...], bytes]


@dataclass(frozen=True)
class Outcome:
    """What client, servers and observers see of a call.

    The endpoints are named by the order in which they were tried: which one is first depends on the
    calls before.
    """

    first: str
    headers: tuple[tuple[str, str], ...]
    body: bytes | None
    """None if it was truncated."""
    goes_on: bool
    """Whether the client may reuse its connection."""
    received: tuple[Message, ...]
    """What the endpoints received, in this order."""
    mirrored: tuple[Message, ...]
    status: int
    upstream: tuple[str, str, int]
    """Upstream, endpoint and attempts, as recorded."""
    error: tuple[str, str, str]
    """The error, its kind, and what the server says of one, as recorded."""
    response_bytes: int


class CallServers:
    """Servers that respond to the attempts of a call in order, whichever endpoint gets them."""

    def __init__(self, call: GeneratedCall) -> None:
        self._call = call
        self._responses: list[ServerResponse] = []
        self._is_cut = False
        self.attempts: list[int] = []
        """The endpoints in the order in which they were tried."""

    def restart(self, *, is_cut: bool) -> None:
        """Start over with the first response."""
        self._responses = list(self._call.responses)
        self._is_cut = is_cut
        self.attempts.clear()

    async def respond(self, connection: Connection, *, endpoint: int) -> None:
        """Respond on a connection of an endpoint."""
        while True:
            received = await connection.request()
            if (fixed := self._fixed_response(received)) is not None:
                await connection.send(fixed)
                continue
            self.attempts.append(endpoint)
            response = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
            cuts = response.cuts if self._is_cut else ()
            for piece in cut(response.data, cuts):
                await connection.send(piece)
                await wait_for_arrival()
            if response.hangs:
                await connection.wait_for_close()
            if response.closes:
                return

    async def respond_to_mirror(self, connection: Connection) -> None:
        """Respond on a connection of the mirror."""
        while True:
            received = await connection.request()
            await connection.send(self._fixed_response(received) or http_response(b"{}"))

    def _fixed_response(self, received: ReceivedRequest) -> bytes | None:
        """Return the response to what is not part of the call."""
        target = received.head.target
        if target == _WARM_UP or received.head.all("X-Warm-Up"):
            return binary_response(bytes(4))
        if target.endswith("/config"):
            return http_response(b'{"max_batch_size":0}')
        if target in (MODEL, f"{MODEL}/versions/2"):
            return http_response(self._call.metadata)
        return None


class SentCalls:
    """Runs servers for a call, and sends it through a new gateway in each way."""

    def __init__(
        self, call: GeneratedCall, call_records: list[CallRecord], fast_path_requests: list[str]
    ) -> None:
        self._call = call
        self._call_records = call_records
        self._fast_path_requests = fast_path_requests
        self._script = CallServers(call)
        self._stack = AsyncExitStack()

    @property
    def took_fast_path(self) -> bool:
        """Whether the call took the fast path when it was sent last."""
        return any(target != _WARM_UP for target in self._fast_path_requests)

    async def __aenter__(self) -> SentCalls:
        """Start the servers."""
        script = self._script
        scripts: list[Script] = [
            partial(script.respond, endpoint=number) for number in range(self._call.endpoints)
        ]
        self._endpoints = [await self._start(each) for each in scripts]
        self._mirror = await self._start(script.respond_to_mirror)
        return self

    async def _start(self, script: Script) -> ScriptedServer:
        return await self._stack.enter_async_context(ScriptedServer(script))

    async def __aexit__(self, *error: object) -> None:
        """Stop the servers."""
        await self._stack.aclose()

    async def send(self, way: Way) -> Outcome:
        """Send the call in one of the ways."""
        self._script.restart(is_cut=way.is_cut)
        data = self._call.request
        if way.has_long_head:
            data = with_long_head(data)
        if way.is_chunked and self._call.is_inference:
            data = _with_chunks(data, self._call.cuts)
        parts = cut(data, _moved(self._call.cuts, way)) if way.is_cut else [data]
        async with running_gateway(
            *[server.url for server in self._endpoints], **self._settings
        ) as gateway:
            if way.is_impatient:
                _make_impatient(gateway)
            async with gateway.client() as client:
                await self._warm_up(client)
                await _until_mirrored(gateway)
                self._forget()
                for part in parts:
                    client.send_nowait(part)
                    await wait_for_arrival()
                head, body = await _read_response(client)
                goes_on = body is not None and await _goes_on(client)
            await gateway.until_idle()
            await _until_mirrored(gateway)
            await until(lambda: gateway.gateway.active_config.limits.memory_budget.total == 0)
        return self._outcome(head, body, goes_on)

    @property
    def _settings(self) -> dict[str, Any]:
        call = self._call
        route, others = dict(call.route), {}
        if call.is_mirrored:
            mirror = {"endpoints": [self._mirror.url], "dialect": call.dialect}
            route["mirror"], others["mirror"] = {"upstream": "mirror"}, mirror
        upstream = {"dialect": call.dialect}
        return {"route": route, "upstream": upstream, "others": others, **LIMITS, **call.limits}

    async def _warm_up(self, client: RawClient) -> None:
        """Open a connection to each endpoint, and have the model's metadata cached."""
        version = "/versions/2" if "/versions/2" in self._call.target else ""
        headers = {**_WARM_UP_HEADER, HEADER_LENGTH: "0"}
        await client.call("POST", f"{MODEL}{version}/infer", bytes(8), headers)
        for _ in range(self._call.endpoints):
            assert (await client.call("GET", _WARM_UP)).status == 200

    def _forget(self) -> None:
        """Forget what happened before the call."""
        self._call_records.clear()
        self._fast_path_requests.clear()
        for server in (*self._endpoints, self._mirror):
            for connection in server.connections:
                connection.requests.clear()

    def _outcome(self, head: Head, body: bytes | None, goes_on: bool) -> Outcome:
        record = self._call_records[0]
        assert record.target == self._call.target
        order = list(dict.fromkeys([*self._script.attempts, *range(self._call.endpoints)]))
        names = {record.request_id: "REQUEST-ID"} if record.request_id else {}
        for name, number in zip(("first-endpoint", "second-endpoint"), order, strict=False):
            names[self._endpoints[number].url.removeprefix("http://")] = name
        seen = _Renamed(names)
        received = [
            request
            for number in order
            for request in self._endpoints[number].requests
            if request.head.target != _WARM_UP
        ]
        return Outcome(
            head.first,
            seen.headers(head),
            None if body is None else seen.body(body),
            goes_on,
            tuple(map(seen.request, received)),
            tuple(map(seen.request, self._mirror.requests)),
            record.status,
            (record.upstream, seen.text(record.endpoint), record.attempts),
            (
                seen.text(record.error),
                "" if record.error_kind is None else record.error_kind.name,
                seen.text(record.server_error),
            ),
            record.response_bytes,
        )


class _Renamed:
    """What was seen of a call, with names for what is another in each call."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def text(self, text: str) -> str:
        """Return a text with these names."""
        for each, name in self._names.items():
            text = text.replace(each, name)
        return text

    def body(self, body: bytes) -> bytes:
        """Return a body with these names."""
        return self.text(body.decode("latin-1")).encode("latin-1")

    def headers(self, head: Head) -> tuple[tuple[str, str], ...]:
        """Return headers by name; those of the same name in their order."""
        lines = [
            (name, _metric_names(value) if name == "server-timing" else self.text(value))
            for name, value in head.headers
            if name != "x-long" and not (name == "date" and value.endswith("GMT"))
        ]
        return tuple(sorted(lines, key=lambda line: line[0]))

    def request(self, received: ReceivedRequest) -> Message:
        """Return a request."""
        return received.head.first, self.headers(received.head), self.body(received.body)


def _metric_names(timing: str) -> str:
    """Return the names in Server-Timing, but that of what the streaming path does not know."""
    names = [metric.partition(";")[0] for metric in timing.split(", ")]
    return ", ".join(name for name in names if name != "convert-response")


async def _until_mirrored(gateway: RunningGateway) -> None:
    """Wait until no copy of a request is under way."""
    for route in gateway.gateway.active_config.router.routes:
        if (mirror := route.mirror) is not None:
            await until(lambda mirror=mirror: not mirror.in_flight)  # type: ignore[misc]


async def wait_for_arrival() -> None:
    """Wait until what was sent has reached the other end of its connection."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _make_impatient(gateway: RunningGateway) -> None:
    deferrals = gateway.gateway.listener.deferrals
    deferrals._small._timeout = deferrals._large._timeout = 0.0
    for endpoint in gateway.gateway.active_config.upstreams["servers"].pool.endpoints:
        endpoint.deferrals._small._timeout = 0.0  # type: ignore[attr-defined]
        endpoint.deferrals._large._timeout = 0.0  # type: ignore[attr-defined]


def _with_chunks(data: bytes, cuts: tuple[int, ...]) -> bytes:
    """Write a request with a chunked body."""
    head, end, body = data.partition(b"\r\n\r\n")
    length, chunks = b"\r\nContent-Length: %d" % len(body), b"\r\nTransfer-Encoding: chunked"
    assert head.count(length) == 1
    start = len(head) + len(end)
    parts = cut(body, [place - start for place in cuts if place > start])
    return head.replace(length, chunks) + end + chunked(*filter(None, parts))


def _moved(cuts: tuple[int, ...], way: Way) -> tuple[int, ...]:
    """Move cuts by what a long head adds, so that the same bytes of the body are cut."""
    added = len(with_long_head(b"\r\n")) - 2 if way.has_long_head else 0
    return tuple(cut + added for cut in cuts)


async def _read_response(client: RawClient) -> tuple[Head, bytes | None]:
    head = Head("", ())
    try:
        async with asyncio.timeout(TIMEOUT):
            head = await client.head()
            if head.status in (204, 304):
                return head, b""
            if head.all("Transfer-Encoding"):
                return head, await client.whole_body()
            return head, await client.reader.readexactly(int(head.get("Content-Length") or 0))
    except _LEFT:
        return head, None


async def _goes_on(client: RawClient) -> bool:
    try:
        return (await client.ask(request("GET", _WARM_UP))).status == 200
    except _LEFT:
        return False
