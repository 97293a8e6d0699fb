"""A client and a server without sockets, which act as scripted and note what is done to them.

All that happens goes into one log, in order: what the call asked for, and what it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from urllib.parse import urlsplit

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.policies import JsonPolicies
from gateway.errors import ServerName
from gateway.http1.head import HeadParser, RequestHead, encode_head
from gateway.observe.call_record import CallRecord
from gateway.protocol.dialects import TRITON, Dialect
from gateway.proxy.destination import Destination, Limits, Upstream
from gateway.proxy.filters.forwarded_headers import NOTED_HEADERS
from gateway.proxy.interfaces import ClientRequest, ClientResponse, HeaderLines
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool.checks import PoolSupervisor
from gateway.upstream.pool.dialect import DialectState
from gateway.upstream.pool.member import ReadyModels
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest, UpstreamResponse

BodyStep = bytes | BaseException | asyncio.Event
"""Bytes that come, an error that is raised, or something that has to happen first."""

URL = "http://server:8000"
SERVER = ServerName(URL, "upstream 'servers'")


def server_name(url: str) -> ServerName:
    """Return the name of a server whose upstream is called as its host."""
    return SERVER if url == URL else ServerName(url, f"upstream '{urlsplit(url).hostname}'")


class EventLog(list[str]):
    """What happened, in order."""

    def count_of(self, start: str) -> int:
        """Count the entries that start like this."""
        return sum(entry.startswith(start) for entry in self)


def ready(*models: str) -> ReadyModels:
    """List models as an endpoint does, each as ``name``, or ``name/version``."""
    parts = [model.partition("/") for model in models]
    names = {name for name, _, _ in parts}
    return ReadyModels(
        {
            name: frozenset(version for each, _, version in parts if each == name and version)
            for name in names
        }
    )


async def _play(steps: Sequence[BodyStep]) -> AsyncIterator[bytes]:
    for step in steps:
        await asyncio.sleep(0)
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif isinstance(step, BaseException):
            raise step
        else:
            yield step


def client_head(
    method: str,
    target: str,
    headers: Mapping[str, str] | list[tuple[str, str]],
    parser: HeadParser | None = None,
) -> RequestHead:
    """Make the head of a client's request, as a parser of its own reads it unless one is given."""
    lines = CIMultiDict(headers)
    lines.setdefault("Host", "h")
    head = encode_head(f"{method} {target} HTTP/1.1", lines.items())
    return (parser or HeadParser((), NOTED_HEADERS)).parse_request(head)


class ScriptedRequest(ClientRequest):
    """A client's request; its body comes as the steps say."""

    def __init__(
        self,
        log: EventLog,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        body: Sequence[BodyStep] = (),
    ) -> None:
        self.method = method
        self.target = target
        made = CIMultiDict(headers or {})
        if body and "Transfer-Encoding" not in made and "Content-Length" not in made:
            sizes = [len(step) for step in body if isinstance(step, bytes)]
            made["Content-Length"] = str(sum(sizes))
        self.headers = CIMultiDictProxy(made)
        self.head = client_head(method, target, made)
        length = made.get("Content-Length")
        self.content_length = int(length) if length is not None else None if body else 0
        self._log = log
        self._pieces = self._play(body)

    async def read(self) -> bytes:
        return await anext(self._pieces, b"")

    async def _play(self, body: Sequence[BodyStep]) -> AsyncIterator[bytes]:
        async for piece in _play(body):
            self._log.append(f"client sends {len(piece)}")
            yield piece
        self._log.append("client has sent all")


class ScriptedClientResponse(ClientResponse):
    """What a client gets; it fails with ``fault`` or waits for ``ready`` when written to."""

    def __init__(
        self, log: EventLog, fault: BaseException | None = None, ready: asyncio.Event | None = None
    ) -> None:
        self.record = CallRecord("POST", "/")
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.body = b""
        self._log = log
        self._fault = fault
        self._ready = ready

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        assert not self.started
        await asyncio.sleep(0)
        self.started = True
        self.status = status
        if self.header_policy is not None:
            self.header_policy.apply(headers)
        self.headers = headers
        self._log.append(f"client gets {status}")

    async def write(self, data: bytes | memoryview) -> None:
        assert self.started
        await asyncio.sleep(0)
        if self._ready is not None:
            await self._ready.wait()
        if self._fault is not None:
            raise self._fault
        self.body += data
        self._log.append(f"client gets {len(data)}")

    async def finish(self, trailers: HeaderLines = ()) -> None:
        await asyncio.sleep(0)
        self._log.append("client has got all")

    def abort(self) -> None:
        self._log.append("client is cut off")


class ScriptedUpstreamResponse(UpstreamResponse):
    """A server's response; its body comes as the steps say."""

    def __init__(
        self,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        body: Sequence[BodyStep] = (),
    ) -> None:
        self.status = status
        self.reason = "Scripted"
        self.headers = CIMultiDictProxy(CIMultiDict(headers or {}))
        self._body = body
        self._log = EventLog()
        self._pieces = self._play()

    def with_log(self, log: EventLog) -> ScriptedUpstreamResponse:
        """Make the same anew, for one call."""
        again = ScriptedUpstreamResponse(self.status, self.headers, self._body)
        again._log = log
        return again

    async def read(self) -> bytes:
        return await anext(self._pieces, b"")

    async def _play(self) -> AsyncIterator[bytes]:
        async for piece in _play(self._body):
            self._log.append(f"server sends {len(piece)}")
            yield piece

    def close(self) -> None:
        self._log.append("server is let go")


class ScriptedEndpoint(UpstreamEndpoint):
    """A server; it reads each request, and then plays the next of its turns."""

    def __init__(
        self,
        log: EventLog,
        *turns: ScriptedUpstreamResponse | BaseException | asyncio.Event,
        url: str = URL,
    ) -> None:
        self.url = url
        self.name = server_name(url)
        self.requests: list[UpstreamRequest] = []
        self.bodies: list[bytes] = []
        self._log = log
        self._turns = list(turns)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        self._log.append(f"server is asked {request.method} {request.target}")
        self.requests.append(request)
        body = b""
        if isinstance(request.body, AsyncIterable):
            async for chunk in request.body:
                self._log.append(f"server gets {len(chunk)}")
                body += chunk
        elif request.body is not None:
            body = b"".join(request.body)
        self.bodies.append(body)
        while True:
            await asyncio.sleep(0)
            turn = self._turns.pop(0)
            if isinstance(turn, asyncio.Event):
                await turn.wait()
            elif isinstance(turn, BaseException):
                raise turn
            else:
                self._log.append(f"server answers {turn.status}")
                return turn.with_log(self._log)

    async def close(self) -> None:
        self._log.append("server is left")


LIMITS = Limits(
    max_request_bytes=1_000_000,
    max_inference_header_bytes=10_000,
    max_json_depth=64,
    max_buffered_body_bytes=10_000,
    idle_timeout=30,
    request_timeout=60,
)


def make_destination(
    *endpoints: UpstreamEndpoint,
    limits: Limits = LIMITS,
    policies: JsonPolicies | None = None,
    metadata: MetadataCache | None = None,
    supervisor: PoolSupervisor | None = None,
    name: str = "servers",
    dialect: Dialect = TRITON,
) -> Destination:
    """Make a route to servers that speak as Triton does, or as is said."""
    cache = metadata or MetadataCache(60, 10, 30, lambda: 0.0)
    upstream = Upstream(name, DialectState(dialect), Pool(endpoints, supervisor=supervisor), cache)
    return Destination(upstream, policies or JsonPolicies(), limits)


def single_destination(destination: Destination) -> Router:
    """Make the routes where all requests take this one."""
    return Router([Route(Match(), (destination,))])
