"""Compares how the gateway and a strict reader take streams of HTTP/1.1 requests."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice

from tests.fuzz.strict_http1 import Reading, RefusedError, Request, next_request, read_all
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.http_messages import http_response
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.servers.scripted_server import Connection

_CONCURRENCY = 32
"""Streams that are sent at the same time."""

_SETTLE_TIME = 0.01
"""Seconds to wait for a request that must not reach the server."""

Seen = tuple[bytes, bytes | None, bytes]
"""Method, path and body of a request."""


_SHOWN = 1500
"""Bytes of a stream that a failed test shows."""


@dataclass(frozen=True)
class Stream:
    """What a client sends, and in which pieces; ``plain`` is such that all of it must be served."""

    data: bytes
    cuts: tuple[int, ...] = ()
    plain: bool = False

    def __repr__(self) -> str:
        more = f" and {len(self.data) - _SHOWN} more" if len(self.data) > _SHOWN else ""
        return f"<{self.data[:_SHOWN]!r}{more}, cut at {self.cuts[:20]}, plain={self.plain}>"

    @property
    def pieces(self) -> list[bytes]:
        """Return the pieces."""
        ends = zip((0, *self.cuts), (*self.cuts, len(self.data)), strict=True)
        return [self.data[start:end] for start, end in ends]


@dataclass(repr=False)
class Outcome:
    """What a client got."""

    replies: list[ReceivedResponse] = field(default_factory=list)
    closed: bool = False

    def __repr__(self) -> str:
        return f"<{[(each.status, each.body) for each in self.replies]}, closed={self.closed}>"


class Recorder:
    """Records what reaches a server, which reads it as strictly; answers tell what was asked."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.faults: list[str] = []

    async def script(self, connection: Connection) -> None:
        """Read requests from a connection and answer them."""
        data = b""
        while piece := await connection.reader.read(1 << 16):
            data += piece
            try:
                while data and (request := next_request(data)) is not None:
                    data = data[request.size :]
                    self.seen.append(_seen(request))
                    await connection.send(http_response(_response_to(request)))
            except RefusedError as error:
                self.faults.append(f"the gateway sends {data[:200]!r}: {error}")
                return


def _seen(request: Request) -> Seen:
    return request.method, request.path, request.body


def _response_to(request: Request) -> bytes:
    """Write what the server answers to a request: another request has another response."""
    line = b"%s %s %d %08x"
    return line % (
        request.method,
        request.path or b"-",
        len(request.body),
        zlib.crc32(request.body),
    )


@asynccontextmanager
async def recording() -> AsyncIterator[tuple[Recorder, RunningGateway]]:
    """Run a gateway before a server that records; an innocent client calls at the end."""
    recorder = Recorder()
    async with gateway_before(recorder.script) as (_, gateway):
        yield recorder, gateway
        await gateway.remains.until_nothing()
        async with gateway.client() as innocent:
            assert (await innocent.call("GET", "/innocent")).status == 200


async def check_streams(
    recorder: Recorder, gateway: RunningGateway, streams: Iterable[Stream]
) -> None:
    """Send streams, many at a time; whatever they are, each is taken as the strict reader does."""
    left = iter(streams)
    while batch := list(islice(left, _CONCURRENCY)):
        recorder.seen.clear()
        outcomes = await asyncio.gather(*(_outcome(gateway, stream) for stream in batch))
        await gateway.remains.until_nothing()
        served: list[Request] = []
        for stream, outcome in zip(batch, outcomes, strict=True):
            served += _check(stream, outcome)
        assert not recorder.faults, (recorder.faults, batch)
        expected, seen = Counter(map(_seen, served)), Counter(recorder.seen)
        assert seen == expected, (seen - expected, expected - seen, batch)


async def _outcome(gateway: RunningGateway, stream: Stream) -> Outcome:
    reading = read_all(stream.data)
    wanted = len(reading.requests) + (reading.end == "refused")
    outcome = Outcome()
    async with gateway.client() as client:
        sending = asyncio.create_task(_send(client, stream.pieces))
        try:
            while len(outcome.replies) < wanted and not outcome.closed:
                await _next_reply(client, outcome)
            if reading.end in ("refused", "last") and not outcome.closed:
                if rest := await client.rest():
                    raise AssertionError(f"{rest!r} comes behind {_what(stream, outcome)}")
                outcome.closed = True
        except TimeoutError:
            raise AssertionError(f"it hangs: {_what(stream, outcome)}") from None
        if reading.end == "cut":
            await asyncio.sleep(_SETTLE_TIME)
        await sending
    return outcome


async def _send(client: RawClient, pieces: Sequence[bytes]) -> None:
    with suppress(ConnectionError):  # the gateway may have had enough
        for piece in pieces:
            await client.send(piece)
            await asyncio.sleep(0)


async def _next_reply(client: RawClient, outcome: Outcome) -> None:
    try:
        reply = await client.read_response()
        while reply.status == 100:
            reply = await client.read_response()
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise AssertionError(f"a reply was cut short: {error.partial!r}") from None
        outcome.closed = True
    else:
        outcome.replies.append(reply)


def _what(stream: Stream, outcome: Outcome) -> str:
    """Say what happened, for a test that fails."""
    reading = read_all(stream.data)
    wanted = [_seen(request)[:2] for request in reading.requests]
    return f"\n{stream}\nis to be {wanted}, {reading.end}\nand is {outcome}"


def _check(stream: Stream, outcome: Outcome) -> list[Request]:
    """Compare what a client got with what it sent; return the requests that were served."""
    reading = read_all(stream.data)
    what = _what(stream, outcome)
    served = []
    for number, reply in enumerate(outcome.replies):
        if reply.status == 200:
            assert number < len(reading.requests), what
            request = reading.requests[number]
            assert reply.body == _response_to(request), what
            served.append(request)
        else:
            assert 400 <= reply.status < 500, what
            assert reply.error, what
    _check_end(stream, reading, outcome)
    return served


def _check_end(stream: Stream, reading: Reading, outcome: Outcome) -> None:
    """Check that no request went without a reply, but for those behind a refusal that closes."""
    what = _what(stream, outcome)
    missing = len(reading.requests) + (reading.end == "refused") - len(outcome.replies)
    if missing > 0 and not outcome.replies and _shows_no_http(stream.data):
        assert outcome.closed, what
    elif missing > 0:
        assert outcome.closed, what
        assert outcome.replies[-1:], what
        assert outcome.replies[-1].status != 200, what
    if stream.plain:
        assert reading.end in ("open", "last"), what
        assert [reply.status for reply in outcome.replies] == [200] * len(reading.requests), what


def _shows_no_http(data: bytes) -> bool:
    """Tell whether a stream begins with a line that has no version: it may get no response."""
    return b"HTTP/" not in data.lstrip(b"\r\n").partition(b"\n")[0].upper()
