"""The JSON policies decide about values that JSON cannot hold."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def client_of(triton: TritonServer, folder: Path, **route: str) -> Iterator[Client]:
    with (
        running_gateway(folder, triton.http_url, route=route) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("policy", "data"),
    [
        ("literal", "[0.5,NaN,Infinity,-Infinity,1.0]"),
        ("null", "[0.5,null,null,null,1.0]"),
        ("string", '[0.5,"NaN","Infinity","-Infinity",1.0]'),
    ],
)
def test_nonfinite(triton: TritonServer, tmp_path: Path, policy: str, data: str) -> None:
    with client_of(triton, tmp_path, nonfinite=policy) as client:
        response = client.infer("identity_fp32", NONFINITE)
        assert response.status == 200
        assert response.body.endswith(f'"data":{data}}}]}}'.encode())


def test_nonfinite_as_an_error(triton: TritonServer, tmp_path: Path) -> None:
    with client_of(triton, tmp_path, nonfinite="error") as client:
        response = client.infer("identity_fp32", NONFINITE)
        assert response.status == 406
        for words in ("'OUTPUT0'", "element 1", "nan", "binary"):
            assert words in response.error
        # A client that asks for the binary form gets them.
        wanted = NONFINITE[:-1] + b', "parameters": {"binary_data_output": true}}'
        assert client.infer("identity_fp32", wanted).status == 200


def test_bytes_as_base64(triton: TritonServer, tmp_path: Path) -> None:
    with client_of(triton, tmp_path, bytes="base64") as client:
        response = client.infer("bad_bytes", TEXTS)
        assert response.fields["outputs"][0]["data"] == ["/2E=", "/2Jj"]
        response = client.infer("identity_bytes", TEXTS)
        assert response.fields["outputs"][0]["data"] == ["YQ==", "YmM="]
        # Asked for in binary form, they are what they are.
        wanted = json.dumps({**json.loads(TEXTS), "parameters": {"binary_data_output": True}})
        response = client.infer("bad_bytes", wanted.encode())
        assert response.body.endswith(b"\x02\0\0\0\xffa\x03\0\0\0\xffbc")
