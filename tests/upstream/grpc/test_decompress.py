"""Messages that a server compresses although it is not asked to, within the limits of others."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.decompress import FREE_OUTPUT_BYTES
from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.upstream.content_decoding import decompress_message
from gateway.upstream.grpc.endpoint import DocumentResponse

SERVER = ServerName("grpc://10.0.0.1:8001", "upstream 'a'")
TEXT = random.Random(7).randbytes(200_000)
CAP = 2 * FREE_OUTPUT_BYTES


async def _decompress(
    message: bytes, encoding: str | None = "gzip", cap: int = CAP, max_ratio: int = 100
) -> bytes:
    headers = CIMultiDict({} if encoding is None else {"grpc-encoding": encoding})
    response = DocumentResponse(200, b"", CIMultiDictProxy(headers))
    return await decompress_message(message, response, SERVER, cap, max_ratio)


@pytest.mark.parametrize("text", [b"", b"a", TEXT])
async def test_message_is_decompressed(text: bytes) -> None:
    assert await _decompress(gzip.compress(text)) == text
    assert await _decompress(zlib.compress(text), "deflate") == text


BROKEN = [
    (b"", "gzip", "ends before its gzip data does"),
    (b"no gzip", "gzip", "is not valid gzip: incorrect header check"),
    (gzip.compress(b"a")[:-1], "gzip", "ends before its gzip data does"),
    (zlib.compress(b"a") + b"b", "deflate", "has data after its deflate data"),
    (gzip.compress(bytes(CAP)), "gzip", "is gzip, and grows to more than 100 times its size"),
    (gzip.compress(b"") * 1000, "gzip", "has too many tiny members"),
    (b"", "zstd", 'grpc-encoding "zstd"; the gateway reads gzip and deflate'),
    (b"", None, 'grpc-encoding "identity"'),
]


@pytest.mark.parametrize(("message", "encoding", "why"), BROKEN, ids=[each[2] for each in BROKEN])
async def test_error_names_the_server(message: bytes, encoding: str | None, why: str) -> None:
    with pytest.raises(GatewayError) as caught:
        await _decompress(message, encoding)
    error = caught.value
    assert error.kind is ErrorKind.BAD_RESPONSE
    assert why in error.message
    assert SERVER.url in error.message
    assert SERVER.public in error.public_message
    assert SERVER.url not in error.public_message


async def test_message_may_become_as_large_as_the_cap() -> None:
    assert len(await _decompress(gzip.compress(TEXT), cap=len(TEXT))) == len(TEXT)
    with pytest.raises(GatewayError, match="larger than 199999 bytes when it is decompressed"):
        await _decompress(gzip.compress(TEXT), cap=len(TEXT) - 1)


async def test_ratio_can_be_set() -> None:
    zeros = bytes(CAP)
    assert await _decompress(gzip.compress(zeros), max_ratio=2000) == zeros


async def test_pieces_are_reserved_before_they_are_kept() -> None:
    reserved = 0

    def reserve(size: int) -> None:
        nonlocal reserved
        reserved += size
        if reserved > 300_000:
            raise GatewayError(ErrorKind.OVERLOADED, "full")

    headers = CIMultiDictProxy(CIMultiDict({"grpc-encoding": "gzip"}))
    response = DocumentResponse(200, b"", headers)
    with pytest.raises(GatewayError) as caught:
        await decompress_message(gzip.compress(TEXT), response, SERVER, CAP, 100, reserve)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert reserved < 300_000 + 70_000
