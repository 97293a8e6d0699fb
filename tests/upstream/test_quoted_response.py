"""What a server says of its error is found in each form that servers write, and bounded."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from multidict import CIMultiDict

from gateway.errors import MAX_ERROR_START, read_server_error
from gateway.upstream.content_decoding import quote_error, quoted_response
from gateway.upstream.grpc.endpoint import DocumentResponse

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
