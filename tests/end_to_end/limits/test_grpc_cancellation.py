"""What a server learns of gRPC calls that nobody waits for: everything, or nothing.

The server of these tests responds when a test says so. A call with a long header takes the
streaming path.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from h2.errors import ErrorCodes

from gateway.protocol.grpc.framing import frame
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from tests.support.gateway import RunningGateway, no_leaks, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field as message_field
from tests.support.http2_client import Http2Client, connect_http2
from tests.support.http_messages import request
from tests.support.inference_messages import INFER as HTTP_INFER
from tests.support.servers.http2_server import Http2Peer, ReceivedStream, http2_script
from tests.support.servers.scripted_server import ScriptedServer

INFER, STREAM_INFER = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
CONFIG = f"/{SERVICE}/ModelConfig"
HEADERS = [("content-type", "application/grpc"), ("te", "trailers")]
OK = [("grpc-status", "0")]
DEADLINE = [("grpc-timeout", "100m")]
MESSAGE = frame(3) + message_field(1, b"m")

PATHS = {"fast path": [], "streaming path": [("x-long", "l" * 3000)]}
"""Headers by the path that a call with them takes."""


@dataclass
class Scene:
    """A server, the gateway and a client.

    The server responds to ModelConfig at once, and to other calls once it ``responds``.
    """

    calls: list[ReceivedStream] = field(default_factory=list)
    responds: asyncio.Event = field(default_factory=asyncio.Event)
    gateway: RunningGateway = field(init=False)
    client: Http2Client = field(init=False)

    async def play(self, peer: Http2Peer) -> None:
        answering: list[asyncio.Task[None]] = []
        number = 0
        try:
            while True:
                stream = await peer.stream(number)
                number += 1
                if stream.path == CONFIG:
                    await peer.respond(stream, frame(0), HEADERS[:1], OK)
                else:
                    self.calls.append(stream)
                    answering.append(asyncio.create_task(self._answer(peer, stream)))
        finally:
            for task in answering:
                task.cancel()

    async def _answer(self, peer: Http2Peer, stream: ReceivedStream) -> None:
        await self.responds.wait()
        if stream.reset is None:
            await peer.respond(stream, frame(2) + b"rr", HEADERS[:1], OK)

    @property
    def call(self) -> ReceivedStream:
        """Return its only call."""
        (call,) = self.calls
        return call

    @property
    def limit(self) -> ConcurrencyLimit:
        """Return the concurrency limit of the upstream."""
        (upstream,) = self.gateway.gateway.active_config.upstreams.values()
        assert upstream.concurrency_limit is not None
        return upstream.concurrency_limit

    async def begin(
        self,
        target: str = INFER,
        more: Iterable[tuple[str, str]] = (),
        *,
        end: bool = True,
        client: Http2Client | None = None,
    ) -> int:
        """Begin a call; return once the server has it."""
        client = client or self.client
        calls, count = self.calls, len(self.calls)
        stream = client.send_headers("POST", target, [*HEADERS, *more])
        await client.send_data(stream, MESSAGE, end_stream=end)
        await until(lambda: len(calls) > count and calls[-1].body)
        return stream

    async def let_server_respond(self) -> None:
        """Have the server respond, and check that nothing is left then."""
        assert (self.gateway.outstanding, self.limit.active) == (1, 1)
        self.responds.set()
        await self.gateway.until_idle()
        assert self.limit.active == 0
        reply = await self.client.call("POST", INFER, MESSAGE, HEADERS)
        assert reply.trailers == OK


@asynccontextmanager
async def running(cancellation: str = "drain", **limits: Any) -> AsyncIterator[Scene]:
    """Run the gateway with a concurrency limit; nothing may be left of it in the end."""
    scene = Scene()
    async with no_leaks(), ScriptedServer(http2_script(scene.play)) as server:
        settings = {"concurrency": {"max_requests": 4}, "grpc_cancellation": cancellation}
        async with (
            running_gateway(
                server.url.replace("http://", "grpc://"), upstream=settings, **limits
            ) as gateway,
            connect_http2(gateway.url) as client,
        ):
            # The fast path needs a connection that is there.
            await client.call("POST", CONFIG, MESSAGE, HEADERS)
            scene.gateway, scene.client = gateway, client
            yield scene


DEADLINE_EXCEEDED = ("grpc-status", "4")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("end", ["cancel", "leave", "deadline", "timeout"])
async def test_call_that_ends_early_is_read_to_its_end(end: str, path: str) -> None:
    more = [*PATHS[path], *(DEADLINE if end == "deadline" else [])]
    limits = {"request_timeout": "200ms"} if end == "timeout" else {}
    async with running(**limits) as test, connect_http2(test.gateway.url) as other:
        stream = await test.begin(more=more, client=other)
        if end == "cancel":
            other.reset_stream(stream)
        elif end == "leave":
            other.reset()
        else:
            reply = await other.response(stream)
            assert DEADLINE_EXCEEDED in [*reply.headers, *reply.trailers]
        await until(lambda: not test.gateway.gateway.listener._active_calls)
        # The gateway keeps the deadline itself.
        assert "grpc-timeout" not in dict(test.call.headers)
        await test.let_server_respond()
        assert (test.calls[0].ended, test.calls[0].reset) == (True, None)


async def test_cancelled_stream_ends_its_requests_and_is_read_to_its_end() -> None:
    async with running() as test:
        stream = await test.begin(STREAM_INFER, end=False)
        assert not test.call.ended
        test.client.reset_stream(stream)
        await until(lambda: test.call.ended)
        await test.let_server_respond()
        assert (bytes(test.calls[0].body), test.calls[0].reset) == (MESSAGE, None)


async def test_http_client_that_leaves_cancels_no_inference_over_grpc() -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
    async with running() as test:
        async with test.gateway.client() as client:
            await client.send(
                request("POST", HTTP_INFER, json.dumps({"inputs": [tensor]}).encode())
            )
            await until(lambda: test.calls)
        await until(lambda: not test.gateway.gateway.listener._active_calls)
        await test.let_server_respond()
        assert test.calls[0].reset is None


async def test_drained_calls_hold_their_slots() -> None:
    async with running() as test:
        for _ in range(4):
            test.client.reset_stream(await test.begin())
        await until(lambda: not test.gateway.gateway.listener._active_calls)
        assert (test.limit.active, test.gateway.outstanding) == (4, 4)
        waiting = await test.client.start("POST", INFER, MESSAGE, HEADERS)
        await until(lambda: test.limit.queued == 1)
        test.responds.set()
        assert (await test.client.response(waiting)).trailers == OK
        await test.gateway.until_idle()
        assert test.limit.active == 0


@pytest.mark.parametrize("path", PATHS)
async def test_server_that_survives_is_told(path: str) -> None:
    async with running("forward") as test:
        stream = await test.begin(more=[("grpc-timeout", "9S"), *PATHS[path]])
        test.client.reset_stream(stream)
        await until(lambda: test.call.reset is not None)
        assert test.call.reset == ErrorCodes.CANCEL
        assert "grpc-timeout" in dict(test.call.headers)
        await test.gateway.until_idle()
        assert test.limit.active == 0


async def test_gateway_that_stops_waits_for_no_drained_call() -> None:
    scene = Scene()
    async with no_leaks(), ScriptedServer(http2_script(scene.play)) as server:
        async with running_gateway(
            server.url.replace("http://", "grpc://"),
            upstream={"grpc_cancellation": "drain"},
            unchecked="its stop ends the call",
        ) as gateway:
            async with connect_http2(gateway.url) as client:
                stream = await client.start("POST", INFER, MESSAGE, HEADERS)
                await until(lambda: scene.calls)
                client.reset_stream(stream)
            await until(lambda: not gateway.gateway.listener._active_calls)
            assert not scene.call.reset
        await until(lambda: scene.call.reset is not None)
