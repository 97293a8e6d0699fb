"""Responses that servers compress unasked are decoded within bounds, whatever their pieces."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.upstream.content_decoding import decode_response
from gateway.upstream.transport import UpstreamResponse

SERVER = ServerName("http://a:8000", "upstream 'servers'")
TEXT = b"".join(b'{"number": %d}' % number for number in range(20_000))
CODED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}


class _Response(UpstreamResponse):
    def __init__(self, coding: str, *pieces: bytes) -> None:
        self.status, self.reason = 200, "OK"
        self._pieces = list(pieces)
        self.is_closed = False
        size = str(sum(map(len, pieces)))
        self.headers = CIMultiDictProxy(
            CIMultiDict({"Content-Encoding": coding, "Content-Length": size, "X-A": "1"})
        )

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def close(self) -> None:
        self.is_closed = True


async def _read(response: UpstreamResponse) -> bytes:
    body = bytearray()
    while piece := await response.read():
        body += piece
    assert await response.read() == b""
    return bytes(body)


@pytest.mark.parametrize("coding", CODED)
@pytest.mark.parametrize("size", [1, 100, 1_000_000])
async def test_body_is_decoded(coding: str, size: int) -> None:
    packed = CODED[coding](TEXT)
    pieces = [packed[start : start + size] for start in range(0, len(packed), size)]
    source = _Response(coding, *pieces)
    response = decode_response(source, SERVER)
    assert dict(response.headers) == {"X-A": "1"}
    assert response.content_length is None
    assert await _read(response) == TEXT
    response.close()
    assert source.is_closed


@pytest.mark.parametrize("coding", ["", "identity"])
def test_response_without_a_coding_stays_as_it_is(coding: str) -> None:
    response = _Response(coding, b"x")
    assert decode_response(response, SERVER) is response


async def test_response_to_head_has_no_body() -> None:
    assert await _read(decode_response(_Response("gzip"), SERVER)) == b""


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "a\x80b"])
def test_unknown_coding_is_named(coding: str) -> None:
    with pytest.raises(GatewayError) as raised:
        decode_response(_Response(coding, b"x"), SERVER)
    assert raised.value.kind is ErrorKind.BAD_RESPONSE
    assert f'with Content-Encoding "{coding}"' in raised.value.message
    assert "reads gzip and deflate" in raised.value.message
    assert raised.value.message.startswith(SERVER.url)
    assert raised.value.public_message.startswith(SERVER.public)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (gzip.compress(TEXT)[:-1], "ends before its gzip data does"),
        (b'{"outputs":[]}', "is not valid gzip"),
        (gzip.compress(bytes(10_000_000)), "limits.max_decompression_ratio"),
    ],
)
async def test_invalid_body_is_an_error_of_the_server(body: bytes, why: str) -> None:
    with pytest.raises(GatewayError, match=why) as raised:
        await _read(decode_response(_Response("gzip", body), SERVER))
    assert raised.value.kind is ErrorKind.BAD_RESPONSE
    assert SERVER.url in raised.value.message
    assert SERVER.url not in raised.value.public_message
