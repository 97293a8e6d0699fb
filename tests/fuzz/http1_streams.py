"""Makes streams of HTTP/1.1 requests: from a grammar, and then broken by chance."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.fuzz.http1_comparison import Stream

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
