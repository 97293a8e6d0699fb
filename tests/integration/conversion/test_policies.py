"""The JSON policies decide about values that JSON cannot hold; each is in tests/codec/elements."""

import base64
import json
from collections.abc import Iterator

import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import running_gateway
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton

NONFINITE = (
    b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [5], '
    b'"data": [0.5, NaN, Infinity, -Infinity, 1]}]}'
)
TEXTS = b'{"inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [2], "data": ["a", "bc"]}]}'


def in_binary(body: bytes) -> bytes:
    return body[:-1] + b', "parameters": {"binary_data_output": true}}'


@pytest.fixture(scope="module")
def client(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A connection to a gateway with policies of its own."""
    route = {"nonfinite": "error", "bytes": "base64"}
    with (
        running_gateway(
            tmp_path_factory.mktemp("gateway"), triton.http_url, route=route
        ) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


def test_nonfinite_values_are_an_error_in_json_alone(client: Client) -> None:
    response = client.infer("identity_fp32", NONFINITE)
    assert response.status == 406
    for words in ("'OUTPUT0'", "element 1", "nan", "binary"):
        assert words in response.error
    assert client.infer("identity_fp32", in_binary(NONFINITE)).status == 200


def test_bytes_are_base64_in_json_alone(client: Client) -> None:
    response = client.infer("bad_bytes", TEXTS)
    assert response.fields["outputs"][0]["data"] == ["/2E=", "/2Jj"]
    response = client.infer("identity_bytes", TEXTS)
    assert response.fields["outputs"][0]["data"] == ["YQ==", "YmM="]
    response = client.infer("bad_bytes", in_binary(TEXTS))
    assert response.body.endswith(b"\x02\0\0\0\xffa\x03\0\0\0\xffbc")


def test_bytes_are_base64_in_v1(client: Client) -> None:
    element = {"b64": base64.b64encode(bytes(range(256)) * 1000).decode()}
    body = json.dumps({"instances": [element, "a"]}).encode()
    response = client.send("POST", "/v1/models/identity_bytes:predict", body)
    assert response.fields == {"predictions": [element, {"b64": "YQ=="}]}
