"""Fuzzing HTTP/1.1: a server sees the requests that a strict reader sees, and no others."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice

import pytest

from tests.end_to_end.connections.smuggled_requests import ACCEPTED, INNER, REFUSED
from tests.fuzz.strict_http1 import Reading, RefusedError, Request, next_request, read_all
from tests.http1.splits import cut
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.http_messages import http_response
from tests.support.raw_client import RawClient, ReceivedResponse
from tests.support.scale import fuzz_seconds
from tests.support.servers.scripted_server import Connection

pytestmark = pytest.mark.usefixtures("clean")

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
        sending = asyncio.create_task(_send(client, cut(stream.data, stream.cuts)))
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


_METHODS = [b"GET", b"POST", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"]

_BENIGN = [
    *(b"Accept: */*", b"X-Empty:", b"User-Agent: curl/8", b"Content-Type: application/json"),
    *(b"Expect: 100-continue", b"Connection: keep-alive", b"X:  spaces \t around \t"),
    *(b"X-Long: " + b"y" * 3000, b"Connection: X, Y", b"TE: trailers", b"Upgrade: h2c"),
]
_ODD = [
    *(b"Transfer-Encoding: chunked", b"Content-Length: 0", b"Content-Length: 5"),
    *(b"Content-Length: +5", b"Content-Length: 5, 5", b"Content-Length: 0x5", b"Content-Length:"),
    *(b"Transfer-Encoding: identity", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding:"),
    *(b"Transfer-Encoding : chunked", b"Transfer-Encoding:\x0bchunked", b" folded", b"\tfolded"),
    *(b"Host: y", b"Host:", b"Connection: close", b"Connection: Content-Length", b"no colon"),
    *(b"Connection: Transfer-Encoding", b": no name", b"X: a\x00b", b"X: \xff", b"X\xff: y"),
    *(b"X: a\rTransfer-Encoding: chunked", b"X: a\nContent-Length: 5", b"Expect: 200-ok"),
]
_SIZES = [
    *(b"%x", b"%X", b"0%x", b"000000%x", b"%x;a", b'%x;a="b;c"', b"%x;a=b;c", b"%x;a=b"),
    *(b"+%x", b"0x%x", b"%x ", b" %x", b"-%x", b"%x_", b"1%x", b"%x\t;a", b"%x;", b"%xg"),
]
_ALPHABET = b'\r\n\0 \t:;,="\\+-_x015aF/?#*\x0b\x0c\x1f\x7f\x80\xa0\xff'
_ENDS = [b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n ", b"\r\n\t", b"\r\n\r\n", b"", b"\0\r\n"]


def any_stream(chance: random.Random, number: int) -> Stream:
    """Make a stream of a few requests, two of three of them broken; ``number`` is in their paths.

    So it is known of each request at the server from which stream it came.
    """
    odds = chance.choice((0.0, 0.0, 0.3))
    data = b"".join(_request(chance, b"/c%d/%d" % (number, n), odds) for n in range(3))
    broken = chance.random() < 0.5
    if broken:
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            data = _broken(chance, data) or data[:1]
    cuts = sorted(chance.randint(1, len(data)) for _ in range(chance.choice((0, 0, 1, 2, 8))))
    if chance.random() < 0.1:
        cuts = list(range(1, min(len(data), 1500)))
    return Stream(data, tuple(cuts), plain=not odds and not broken)


def _request(chance: random.Random, path: bytes, odds: float) -> bytes:
    """Make a request, with ``odds`` for each of its parts that it is an odd one."""
    version = b"0" if chance.random() < 0.05 else b"1"
    target = chance.choice((path, path, path, path + b"?q=%20", b"http://y:80" + path))
    fields = [b"Host: x", *chance.sample(_BENIGN, chance.choice((0, 1, 3)))]
    if version == b"0":
        fields.append(b"Connection: keep-alive")
    content = _content(chance, path)
    framing, body = chance.choice(
        (
            ([], b""),
            ([b"Content-Length: %d" % len(content)], content),
            ([b"Transfer-Encoding: chunked"], _chunks(chance, content, odds)),
        )
        if version == b"1"
        else (([], b""), ([b"Content-Length: %d" % len(content)], content))
    )
    fields += framing
    if chance.random() < odds:
        fields.append(chance.choice(_ODD))
    chance.shuffle(fields)
    first = b"%s %s HTTP/1.%s" % (chance.choice(_METHODS), target, version)
    return b"\r\n".join((first, *fields, b"", body))


def _content(chance: random.Random, path: bytes) -> bytes:
    """Make what is in a body: often something that could be taken for the next request."""
    inner = b"GET %s/inner HTTP/1.1\r\nHost: x\r\n\r\n" % path
    return chance.choice(
        (b"", b"x", b"hello", b"0\r\n\r\n" + inner, inner, inner * 2, b"\r\n\r\n", b"y" * 20_000)
    )


def _chunks(chance: random.Random, content: bytes, odds: float) -> bytes:
    """Write content in chunks, with extensions and trailers."""
    made: list[bytes] = []
    while content:
        size = chance.choice((1, 3, 10, 1000, len(content)))
        piece, content = content[:size], content[size:]
        if len(made) > 50:
            piece, content = piece + content, b""
        forms = _SIZES if chance.random() < odds else _SIZES[:8]
        made.append(chance.choice(forms) % len(piece) + b"\r\n" + piece + b"\r\n")
    trailer = chance.choice((b"", b"", b"X: y\r\n", b"X: y\r\nY:\r\n"))
    return b"".join(made) + b"0\r\n" + trailer + b"\r\n"


def _broken(chance: random.Random, data: bytes) -> bytes:
    """Change, leave out, repeat or put in a few bytes, a line, or the end of one."""
    at = chance.randrange(len(data))
    match chance.randrange(5):
        case 0:
            end = min(len(data), at + chance.choice((1, 1, 2, 10)))
            odd = bytes(chance.choices(_ALPHABET, k=chance.choice((1, 1, 2))))
            part = chance.choice((odd, b"", data[at:end] * 2, odd + data[at:end]))
            data = data[:at] + part + data[end:]
        case 1:
            lines = data.split(b"\r\n")
            place = chance.randrange(len(lines))
            lines[place:place] = [chance.choice((*_ODD, *_BENIGN, lines[place]))]
            data = b"\r\n".join(lines)
        case 2:
            lines = data.split(b"\r\n")
            one, other = (chance.randrange(len(lines)) for _ in range(2))
            lines[one], lines[other] = lines[other], lines[one]
            data = b"\r\n".join(lines)
        case 3:
            found = data.find(b"\r\n", at)
            if found >= 0:
                data = data[:found] + chance.choice(_ENDS) + data[found + 2 :]
        case _:
            data = data[: at + 1] if chance.random() < 0.3 else data[:at].swapcase() + data[at:]
    return data or b"\r\n"


_PLACES = [
    b"@POST@ @/c%d@a@ @HTTP/@1@.@1@\r\n@Host@:@ @x@\r\n@Content-Length@:@ @5@\r\n@\r\n@hello@",
    b"POST /c%d HTTP/1.1\r\nHost: x\r\n@X@-@Y@:@ @a @b@\r\nTransfer-Encoding@:@chun@ked@\r\n\r\n"
    b'5@;@a@=@b@;c=@"@d@"@\r@\n@hello@\r@\n@0@;e@\r\n@X@:@ y@z@\r@\n@\r@\n',
]
_BYTES = bytes((*range(33), *b'"(),/:;<=>?@[\\]{}+-_.%#*', *b"0159aAfFgxX", 127, 128, 160, 255))
"""All that are no visible sign, those between words, and a few of the others."""


def with_odd_byte() -> Iterator[Stream]:
    """Give requests with an odd byte at any place where the grammar changes, and one behind."""
    number = 0
    for form in _PLACES:
        parts = form.split(b"@")
        for place in range(1, len(parts)):
            for odd in _BYTES:
                before = b"".join(parts[:place])
                text = before + b"@" + b"".join(parts[place:])
                data = (text % number).replace(b"@", bytes((odd,)))
                behind = b"GET /c%d/behind HTTP/1.1\r\nHost: x\r\n\r\n" % number
                yield Stream(data + behind)
                number += 1


def _post(*lines: bytes, body: bytes = b"", first: bytes = b"POST /a HTTP/1.1") -> bytes:
    """Write a request, and another one behind it."""
    head = b"\r\n".join((first, b"Host: x", *lines, b"", b""))
    return head + body + b"GET /behind HTTP/1.1\r\nHost: x\r\n\r\n"


def _coded(body: bytes, *lines: bytes) -> bytes:
    return _post(b"Transfer-Encoding: chunked", *lines, body=body)


# ------------------------------------------------------------------------------- the reader itself


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_the_strict_reader_refuses_what_is_refused(data: bytes) -> None:
    reading = read_all(data)
    assert (reading.requests, reading.end in ("refused", "cut")) == ([], True)


@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED)
async def test_the_strict_reader_reads_what_is_accepted(case: object) -> None:
    data, first, body = (getattr(case, name) for name in ("data", "first", "body"))
    (request,) = read_all(data).requests
    assert request.path is not None
    assert [request.method.decode(), request.path.decode(), "HTTP/1.1"] == first.split()
    assert request.body == body
    assert request.size == len(data.lstrip(b"\r\n"))


# ------------------------------------------------------------------------------- framings

# Beside those of test_malformed_http.py, which has what is refused.
SERVED = {
    "a body that begins as a request": _post(b"Content-Length: %d" % len(INNER), body=INNER),
    "an extension of 8 KB": _coded(b"5;a=" + b"b" * 8000 + b"\r\nhello\r\n0\r\n\r\n"),
    "Connection that names each framing header": _post(
        b"Connection: content-length, transfer-encoding, host, te, trailer",
        b"Content-Length: 5",
        body=b"hello",
    ),
    "126 headers": _post(*[b"X: y"] * 126),
    "a head of nearly 64 KiB": _post(*[b"X: " + b"y" * 8100] * 8),
    "HTTP/1.0 without a host": b"GET /a HTTP/1.0\r\n\r\nGET /behind HTTP/1.0\r\n\r\n",
    "many in a row": _post() * 60,
}


def _variants(data: bytes) -> Iterator[Stream]:
    """Send a stream as a whole, in two pieces, and byte by byte as far as that is worthwhile."""
    yield Stream(data, plain=True)
    yield Stream(data, (len(data) // 2,), plain=True)
    yield Stream(data, tuple(range(1, min(len(data), 2000))), plain=True)


@pytest.mark.parametrize("data", SERVED.values(), ids=SERVED)
async def test_a_valid_request_is_served(data: bytes) -> None:
    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, _variants(data))


# ------------------------------------------------------------------------------- by chance


async def test_an_odd_byte_anywhere_is_read_as_by_the_strict_reader() -> None:
    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, with_odd_byte())


async def test_generated_streams_are_read_as_by_the_strict_reader() -> None:
    end = time.monotonic() + fuzz_seconds(6)

    def streams() -> Iterator[Stream]:
        chance, number = random.Random(9112), 0
        while time.monotonic() < end:
            yield any_stream(chance, number)
            number += 1

    async with recording() as (recorder, gateway):
        await check_streams(recorder, gateway, streams())
