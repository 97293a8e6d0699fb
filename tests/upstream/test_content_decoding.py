"""Responses that servers compress unasked are decoded within bounds, and their errors quoted."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.decompress import FREE_OUTPUT_BYTES
from gateway.errors import MAX_ERROR_START, ErrorKind, GatewayError, ServerName, read_server_error
from gateway.upstream.content_decoding import (
    decode_response,
    decompress_message,
    quote_error,
    quoted_response,
)
from gateway.upstream.grpc.endpoint import DocumentResponse
from gateway.upstream.transport import UpstreamResponse
from tests.support.doubles.streaming import EventLog, ScriptedUpstreamResponse

SERVER = ServerName("http://a:8000", "upstream 'servers'")
TEXT = b"".join(b'{"number": %d}' % number for number in range(20_000))
CODED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}


def _response(coding: str, *pieces: bytes) -> ScriptedUpstreamResponse:
    size = str(sum(map(len, pieces)))
    headers = {"Content-Encoding": coding, "Content-Length": size, "X-A": "1"}
    return ScriptedUpstreamResponse(200, headers, pieces)


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
    log = EventLog()
    source = _response(coding, *pieces).with_log(log)
    response = decode_response(source, SERVER)
    assert dict(response.headers) == {"X-A": "1"}
    assert response.content_length is None
    assert await _read(response) == TEXT
    response.close()
    assert log[-1] == "server is let go"


@pytest.mark.parametrize("coding", ["", "identity"])
def test_response_without_a_coding_stays_as_it_is(coding: str) -> None:
    response = _response(coding, b"x")
    assert decode_response(response, SERVER) is response


async def test_response_to_head_has_no_body() -> None:
    assert await _read(decode_response(_response("gzip"), SERVER)) == b""


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "a\x80b"])
def test_unknown_coding_is_named(coding: str) -> None:
    with pytest.raises(GatewayError) as raised:
        decode_response(_response(coding, b"x"), SERVER)
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
        await _read(decode_response(_response("gzip", body), SERVER))
    assert raised.value.kind is ErrorKind.BAD_RESPONSE
    assert SERVER.url in raised.value.message
    assert SERVER.url not in raised.value.public_message


OOM = "CUDA out of memory on device 0"


@pytest.mark.parametrize(
    "document",
    [
        {"error": OOM},
        {"detail": OOM},
        {"code": 500, "type": "InternalServerException", "message": OOM},
        {"error": {"message": OOM, "type": "server_error", "code": None}},
        {"detail": [{"loc": ["body", "inputs"], "msg": OOM, "type": "missing"}]},
        {"error": "", "detail": OOM},
        {"error": OOM, "predictions": None},
    ],
)
def test_message_of_a_json_object_is_found(document: Any) -> None:
    assert read_server_error(json.dumps(document).encode()) == OOM
    assert read_server_error(json.dumps(document, indent=2).encode()) == OOM


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", ""),
        (b"  \r\n", ""),
        (b"no healthy upstream\n", "no healthy upstream"),
        (b'{"status": "bad"}', '{"status": "bad"}'),
        (b'{"error": 5}', '{"error": 5}'),
        (b'["no"]', '["no"]'),
        (b'{"error": "a \\"b\\" \\u00e9", "more": "cut her', 'a "b" é'),
        (b'{"detail": "cut her', "cut her"),
        (b'{"x": 1, cut', '{"x": 1, cut'),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\x00\x01tensors", ""),
    ],
)
def test_message_of_any_other_body_is_its_text(body: bytes, message: str) -> None:
    assert read_server_error(body) == message


def test_message_of_a_page_is_its_text_without_tags() -> None:
    page = b"<html>\n<head><title>502 Bad Gateway</title></head>\n<body>nginx</body></html>"
    assert quote_error(502, CIMultiDict(), page) == "502: 502 Bad Gateway nginx"


def test_error_is_one_bounded_line_without_control_characters() -> None:
    body = json.dumps({"error": "no\n2026-01-01 ERROR \x1b[31m " + 3000 * "y"}).encode()
    error = quote_error(500, CIMultiDict(), body)
    assert error.startswith("500: no 2026-01-01 ERROR \\x1b[31m yyy")
    assert len(error) < 320
    assert len(quote_error(500, CIMultiDict(), b"\x1b" * 10_000)) < 320


def test_error_in_a_content_coding_is_decoded() -> None:
    body = gzip.compress(json.dumps({"error": OOM}).encode() + bytes(b" " * 10_000))
    assert quote_error(500, CIMultiDict({"Content-Encoding": "gzip"}), body) == f"500: {OOM}"
    assert quote_error(500, CIMultiDict({"Content-Encoding": "br"}), body) == "500"
    assert quote_error(500, CIMultiDict({"Content-Encoding": "gzip"}), b"no gzip") == "500"


async def test_only_the_start_of_a_body_is_kept() -> None:
    whole = quoted_response(DocumentResponse(500, b"x" * 10 * MAX_ERROR_START))
    assert whole.error == "500"
    assert len(await whole.read()) == 10 * MAX_ERROR_START
    assert await whole.read() == b""
    assert whole.error == f"500: {'x' * 300}..."


async def test_response_without_an_error_stays_as_it_is() -> None:
    response = DocumentResponse(200, b'{"error": "none"}')
    assert quoted_response(response) is response
    assert response.error == ""


RANDOM_TEXT = random.Random(7).randbytes(200_000)
MESSAGE_CAP = 2 * FREE_OUTPUT_BYTES


async def _decompress(
    message: bytes, encoding: str | None = "gzip", cap: int = MESSAGE_CAP, max_ratio: int = 100
) -> bytes:
    headers = CIMultiDict({} if encoding is None else {"grpc-encoding": encoding})
    response = DocumentResponse(200, b"", CIMultiDictProxy(headers))
    return await decompress_message(message, response, SERVER, cap, max_ratio)


@pytest.mark.parametrize("text", [b"", b"a", RANDOM_TEXT])
async def test_message_is_decompressed(text: bytes) -> None:
    assert await _decompress(gzip.compress(text)) == text
    assert await _decompress(zlib.compress(text), "deflate") == text


BROKEN = [
    (b"no gzip", "gzip", "is not valid gzip: incorrect header check"),
    (zlib.compress(b"a") + b"b", "deflate", "has data after its deflate data"),
    (b"", "zstd", 'grpc-encoding "zstd"; the gateway reads gzip and deflate'),
    (b"", None, 'grpc-encoding "identity"'),
]


@pytest.mark.parametrize(("message", "encoding", "why"), BROKEN, ids=[each[2] for each in BROKEN])
async def test_error_of_a_message_names_the_server(
    message: bytes, encoding: str | None, why: str
) -> None:
    with pytest.raises(GatewayError) as caught:
        await _decompress(message, encoding)
    error = caught.value
    assert error.kind is ErrorKind.BAD_RESPONSE
    assert why in error.message
    assert SERVER.url in error.message
    assert SERVER.public in error.public_message
    assert SERVER.url not in error.public_message


async def test_message_may_become_as_large_as_the_cap() -> None:
    assert len(await _decompress(gzip.compress(RANDOM_TEXT), cap=len(RANDOM_TEXT))) == len(
        RANDOM_TEXT
    )
    with pytest.raises(GatewayError, match="larger than 199999 bytes when it is decompressed"):
        await _decompress(gzip.compress(RANDOM_TEXT), cap=len(RANDOM_TEXT) - 1)


async def test_ratio_can_be_set() -> None:
    zeros = bytes(MESSAGE_CAP)
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
        await decompress_message(
            gzip.compress(RANDOM_TEXT), response, SERVER, MESSAGE_CAP, 100, reserve
        )
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert reserved < 300_000 + 70_000
