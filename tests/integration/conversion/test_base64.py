"""Bytes that are not UTF-8 pass through JSON as base64."""

import base64
import json
from typing import Any

import pytest

from tests.integration.support.client import Client

pytestmark = pytest.mark.triton

BASE64 = {"content_type": "base64"}


def jpeg(size: int) -> bytes:
    """Make what looks as a JPEG file does: markers, a comment, and bytes of every value."""
    comment = b"\xff\xfe\x00\x07hello"
    data = bytes(byte for number in range(size // 256) for byte in range(256)) or b"\x00\xff"
    return b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01" + comment + data + b"\xff\xd9"


def request(texts: list[str], *, out: bool = True, **more: Any) -> bytes:
    entry = {
        "name": "INPUT0",
        "shape": [len(texts)],
        "datatype": "BYTES",
        "parameters": BASE64,
        "data": texts,
    }
    outputs = [{"name": "OUTPUT0", "parameters": {**BASE64, **more}}] if out else []
    return json.dumps({"inputs": [entry], "outputs": outputs}).encode()


@pytest.mark.parametrize("sizes", [[0, 300], [3_000_000, 0, 5_000]])
@pytest.mark.parametrize("chunked", [False, True])
def test_pictures_there_and_back(via_gateway: Client, sizes: list[int], chunked: bool) -> None:
    pictures = [*map(jpeg, sizes), b""]
    texts = [base64.b64encode(picture).decode() for picture in pictures]
    body = request(texts)
    pieces = [body[i : i + 99_999] for i in range(0, len(body), 99_999)]
    response = via_gateway.infer("identity_bytes", iter(pieces) if chunked else body)
    assert response.status == 200, response.body[:1000]
    (output,) = response.fields["outputs"]
    assert output["parameters"] == BASE64
    assert list(map(base64.b64decode, output["data"])) == pictures
    # What came can be sent again as it is.
    assert output["data"] == texts


def test_only_bytes_become_base64(via_gateway: Client) -> None:
    entry = {"name": "INPUT0", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    fields = {"inputs": [entry], "outputs": [{"name": "OUTPUT0", "parameters": BASE64}]}
    response = via_gateway.infer("bad_bytes", json.dumps(fields).encode())
    assert response.fields["outputs"][0]["data"] == ["/2E="]
    # An output of numbers is written as ever.
    entry = {"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": [1, 2.5]}
    fields["inputs"] = [entry]
    response = via_gateway.infer("identity_fp32", json.dumps(fields).encode())
    (output,) = response.fields["outputs"]
    assert output["data"] == [1, 2.5]
    assert "parameters" not in output


def test_the_server_passes_over_content_types_itself(direct: Client, via_gateway: Client) -> None:
    """Triton refuses none, and obeys none: others than base64 may go to it."""
    entry = {
        "name": "INPUT0",
        "shape": [1],
        "datatype": "BYTES",
        "parameters": {"content_type": "str"},
        "data": ["YQ=="],
    }
    parameters = {"content_type": "str"}
    fields = {"inputs": [entry], "outputs": [{"name": "OUTPUT0", "parameters": parameters}]}
    for client in (direct, via_gateway):
        response = client.infer("identity_bytes", json.dumps(fields).encode())
        assert response.fields["outputs"][0]["data"] == ["YQ=="]
    response = direct.infer("identity_bytes", request(["YQ=="]))
    assert response.fields["outputs"][0]["data"] == ["YQ=="]
