"""Generates responses of a malicious server to inference requests, broken in many ways."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from tests.codec.reference import pack_bytes
from tests.support.http_messages import chunk, http_response, message
from tests.support.inference_messages import FLOATS, HEADER_LENGTH

ENDINGS = (*["close"] * 24, *["keep"] * 24, *["reset"] * 8, "hang")
"""What the server does behind its response."""


@dataclass(frozen=True)
class ServerResponse:
    """What a server sends in answer to an inference request, and does then."""

    data: bytes
    cuts: tuple[int, ...] = ()
    ending: str = "keep"
    right: bool = False
    """It is a response that is in order."""

    def __repr__(self) -> str:
        return f"<{self.data[:1500]!r} ({len(self.data)}), cut at {self.cuts[:20]}, {self.ending}>"


_MAX_CHUNKS = 500
"""Chunks of a body; what is left goes into one more."""

_MAX_CUTS = 200
"""Bytes of a response that are sent each on its own: the gateway waits for them a limited time."""

# ------------------------------------------------------------------------------- what is in order

Fields = dict[str, Any]
_TEXTS = pack_bytes([b"hello", b"", "é".encode()])


def _binary(name: str, datatype: str, shape: list[int], size: int) -> Fields:
    parameters = {"binary_data_size": size}
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}


def _document(*outputs: Fields) -> Fields:
    return {"model_name": "m", "model_version": "1", "id": "7", "outputs": list(outputs)}


_FLOATS = _binary("OUT0", "FP32", [3], 12)
_JSON = {"name": "OUT0", "datatype": "FP32", "shape": [3], "data": [1.5, -2.0, 0.25]}
_COUNTS = {"name": "OUT1", "datatype": "INT64", "shape": [2, 1], "data": [1, -(2**63)]}

RESPONSES: dict[str, tuple[Fields, bytes]] = {
    "binary": (_document(_FLOATS), FLOATS.tobytes()),
    "two outputs": (
        _document(_FLOATS, _binary("OUT1", "INT64", [3], 24)),
        FLOATS.tobytes() + bytes(range(24)),
    ),
    "texts": (_document(_binary("OUT0", "BYTES", [3], len(_TEXTS))), _TEXTS),
    "halves": (_document(_binary("OUT0", "FP16", [1, 3], 6)), bytes(range(6))),
    "booleans": (_document(_binary("OUT0", "BOOL", [4], 4)), b"\0\1\1\0"),
    "no elements": (_document(_binary("OUT0", "FP32", [0, 3], 0)), b""),
    "large": (_document(_binary("OUT0", "INT16", [35_000], 70_000)), bytes(range(250)) * 280),
    "JSON": (_document(_JSON), b""),
    "JSON and binary": (_document(_COUNTS, _FLOATS), FLOATS.tobytes()),
}


def written(
    document: bytes, tensors: bytes, length: str | None = None, sizes: tuple[int, ...] = ()
) -> bytes:
    """Write a response; ``length`` is what it says of its JSON; chunked where there are sizes."""
    headers = {"Content-Type": "application/octet-stream"}
    if length is not None:
        headers[HEADER_LENGTH] = length
    body = document + tensors
    if not sizes:
        return http_response(body, headers)
    parts: list[bytes] = []
    while body:
        size = sizes[len(parts) % len(sizes)] if len(parts) < _MAX_CHUNKS else len(body)
        parts.append(chunk(body[:size]))
        body = body[size:]
    headers["Transfer-Encoding"] = "chunked"
    return message("HTTP/1.1 200 OK", headers, b"".join(parts) + chunk(b""))


def in_order(name: str, sizes: tuple[int, ...] = ()) -> bytes:
    """Write a response that is in order, by its name."""
    fields, tensors = RESPONSES[name]
    document = json.dumps(fields).encode()
    return written(document, tensors, str(len(document)) if tensors else None, sizes)


# ------------------------------------------------------------------------------- what is not

_ODD_LENGTHS = [
    *("0", "1", "-1", "+9", "9" * 19, "9" * 40, "many", "", " ", "1e2", "0x60", "\xb2", "96, 96"),
    *("00096", "96.0", "96\x0b", "9_6", "18446744073709551616"),
]
_ODD_VALUES: list[Any] = [
    *(None, True, "8", 8.0, -1, 0, 1, 11, 13, 2**31, 2**63, 2**64, 10**30, [], {}, [8], 1e300, ""),
    *([2**62, 2**62], [-1], [3, 0], [1.5], ["3"], [True], [[3]], [3] * 100, "FP31", "fp32"),
    *("BYTES", "FP64", "INT64", "BOOL", "BF16", {"binary_data_size": -4}, float("nan")),
]
_ODD_NAMES = ["", "OUT1", "\0", "é", '"', "\ud800", "x" * 10_000]
_ODD_TEXT = [
    *(b"[" * 100_000, b'{"a":' * 10_000, b"\xff", b"\xef\xbb\xbf", b"\0", b'"\\ud800"', b"1e999"),
    *(b'"outputs":[],', b'"data":[1],', b'"parameters":{},', b'"name":"OUT0",', b"}", b"]", b","),
    *(b"-0", b"NaN", b"0123", b"'", b"//", b'"\\u0000"', b'"binary_data_size":4,'),
]
_ODD_HEAD = [
    *(b"Content-Length: 5", b"Content-Length: -5", b"Content-Length: 99999999999999999999999"),
    *(b"Content-Length: 0", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip"),
    *(b"Content-Encoding: gzip", b"Connection: close", b"X: a\x00b", b" folded", b"no colon"),
    *(b"X" * 70_000, b"Content-Type: text/html", b"Connection: " + HEADER_LENGTH.encode()),
    b"X: \xff",
    *(HEADER_LENGTH.encode() + b": 5", b"Upgrade: h2c", b"Set-Cookie: a=b", b"Content-Length:"),
]
_INTERIM = [
    *(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    *(b"HTTP/1.1 102 Processing\r\nContent-Length: 50\r\n\r\n", b"HTTP/1.1 101 Switch\r\n\r\n"),
]
_SURPLUS = [b"x", b"\r\n", b"\0" * 100, in_order("JSON"), in_order("binary"), b"HTTP/1.1 200"]


def any_response(chance: random.Random) -> ServerResponse:
    """Make a response: one of four is in order."""
    recipe = chance.choice(_GENERATORS)
    data, right = recipe(chance), recipe is _right
    places = range(1, len(data))
    cuts = sorted(chance.sample(places, min(len(places), chance.choice((0, 0, 1, 2, 8)))))
    if not right and chance.random() < 0.1:
        cuts = list(places[:_MAX_CUTS])
    ending = "keep" if right else chance.choice(ENDINGS)
    return ServerResponse(data, tuple(cuts), ending, right)


def _sizes(chance: random.Random) -> tuple[int, ...]:
    return chance.choice(((), (), (1000,), (1, 7), (100, 1)))


def _right(chance: random.Random) -> bytes:
    return in_order(chance.choice(list(RESPONSES)), _sizes(chance))


def _wrong_length(chance: random.Random) -> bytes:
    fields, tensors = RESPONSES[chance.choice(list(RESPONSES))]
    document = json.dumps(fields).encode()
    near = str(len(document) + chance.choice((-1, 1, 4, -4, len(tensors), len(tensors) + 1)))
    return written(document, tensors, chance.choice((*_ODD_LENGTHS, near, near)), _sizes(chance))


def _wrong_fields(chance: random.Random) -> bytes:
    """Put an odd value anywhere in the JSON."""
    fields, tensors = RESPONSES[chance.choice(list(RESPONSES))]
    fields = json.loads(json.dumps(fields))
    for _ in range(chance.choice((1, 1, 2))):
        place: Any = fields
        while isinstance(place, dict | list) and place:
            key: Any = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.2:
                break
            place = place[key]
        if chance.random() < 0.2:
            del place[key]
        else:
            odd = chance.choice(_ODD_NAMES if key == "name" else _ODD_VALUES)
            place[key] = deepcopy(odd)  # or what is put into it would stay there
    document = json.dumps(fields).encode()
    return written(document, tensors, str(len(document)), _sizes(chance))


def _wrong_text(chance: random.Random) -> bytes:
    """Put odd text anywhere in the JSON, or cut it."""
    fields, tensors = RESPONSES[chance.choice(list(RESPONSES))]
    document = json.dumps(fields).encode()
    at = chance.randrange(len(document))
    starts = [place for place, sign in enumerate(document) if sign in b"{[,"]
    at = chance.choice((at, 1 + chance.choice(starts)))
    odd = chance.choice(_ODD_TEXT)
    document = chance.choice((document[:at] + odd + document[at:], document[:at], document + odd))
    length = None if chance.random() < 0.1 else str(len(document))
    return written(document, tensors, length, _sizes(chance)) or b"x"


def _wrong_tensors(chance: random.Random) -> bytes:
    fields, tensors = RESPONSES[chance.choice(list(RESPONSES))]
    document = json.dumps(fields).encode()
    odd = chance.choice((tensors[:-1], tensors + b"\0", tensors[4:], b"", tensors * 2, b"\xff" * 4))
    changed = bytearray(tensors or b"x")
    changed[chance.randrange(len(changed))] ^= 0xFF
    tensors = chance.choice((odd, bytes(changed)))
    return written(document, tensors, str(len(document)), _sizes(chance))


def _wrong_head(chance: random.Random) -> bytes:
    data = in_order(chance.choice(list(RESPONSES)), _sizes(chance))
    head, end, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    match chance.randrange(4):
        case 0:
            lines.insert(chance.randrange(len(lines) + 1), chance.choice(_ODD_HEAD))
        case 1:
            del lines[chance.randrange(len(lines))]
        case 2:
            status = chance.choice(
                (b"204 No", b"304 Not", b"404 No", b"503 Later", b"200", b"99 x")
            )
            lines[0] = chance.choice((b"HTTP/1.1 ", b"HTTP/1.0 ", b"HTTP/2.0 ", b"ICY ")) + status
        case _:
            size = chance.choice((0, 1, len(body) - 1, len(body) + 1, 10**6, 2**62))
            lines = [line for line in lines if not line.startswith(b"Content-Length")]
            lines.append(b"Content-Length: %d" % max(0, size))
    return b"\r\n".join(lines) + end + body


def _interim(chance: random.Random) -> bytes:
    few = b"".join(chance.choice(_INTERIM[:3]) for _ in range(chance.choice((1, 3, 99, 101, 150))))
    odd = chance.choice((few, few, _INTERIM[0] * 20_000, _INTERIM[3]))
    return odd + in_order(chance.choice(list(RESPONSES)))


def _surplus(chance: random.Random) -> bytes:
    return in_order(chance.choice(list(RESPONSES)), _sizes(chance)) + chance.choice(_SURPLUS)


def _cut(chance: random.Random) -> bytes:
    data = in_order(chance.choice(list(RESPONSES)), _sizes(chance))
    return data[: 1 + chance.randrange(len(data))]


def _mutated(chance: random.Random) -> bytes:
    data = bytearray(in_order(chance.choice(list(RESPONSES)), _sizes(chance)))
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(min(len(data), 600) or 1)
        end = at + chance.choice((1, 1, 2, 10))
        odd = bytes(chance.choices(b'\r\n\0":{}[],.-09a\xff ;x', k=chance.choice((1, 2))))
        data[at:end] = chance.choice((odd, b"", data[at:end] * 2, odd + data[at:end]))
    return bytes(data) or b"x"


_GENERATORS: list[Callable[[random.Random], bytes]] = [
    *(_right, _right, _right, _wrong_length, _wrong_fields, _wrong_text, _wrong_tensors),
    *(_wrong_head, _wrong_head, _interim, _surplus, _cut, _mutated, _mutated),
]
