"""The real KServe and MLServer behave as their rows in gateway/protocol/dialects.py say."""

import gzip
import json
import zlib
from collections.abc import Mapping

import pytest

from tests.integration.kserve.server import KServe
from tests.integration.mlserver.server import MLServer
from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.infer_messages import Request, read_outputs, tensor
from tests.integration.support.real_server import HOST, RealServer

JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": "application/octet-stream"}
BODY, _ = Request("identity_fp32", (tensor("INPUT0", "FP32", [0.1, 2, 3]),)).encoded()
TENSORS, LENGTH = Request(
    "identity_fp32", (tensor("INPUT0", "FP32", [0.1, 2, 3], binary=True),)
).encoded()


def infer(server: RealServer, model: str, body: bytes, headers: Mapping[str, str]) -> Response:
    """Ask over a connection of its own: these servers close one after some of their faults."""
    with Client(HOST, server.http_port) as client:
        return client.infer(model, body, headers)


def wanting(*outputs: tuple[str, bool | None], all_binary: bool | None = None) -> bytes:
    """Ask for these outputs."""
    sent = (tensor("INPUT0", "FP32", [0.1]),)
    return Request("identity_fp32", sent, outputs, binary_data_output=all_binary).encoded()[0]


@pytest.mark.kserve
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (BODY, JSON, 200),
        (BODY, {}, 400),
        (BODY, BINARY, 400),
        (TENSORS, LENGTH | BINARY, 200),
        (TENSORS, LENGTH, 200),
        (TENSORS, LENGTH | JSON, 400),
        (bytes(8), BINARY | {HEADER_LENGTH: "0"}, 400),
        (gzip.compress(BODY), JSON | {"Content-Encoding": "gzip"}, 400),
    ],
    ids=["JSON", "no type", "false type", "binary", "untyped", "as JSON", "raw", "gzip"],
)
def test_kserve_looks_at_content_types(
    kserve: KServe, body: bytes, headers: dict[str, str], status: int
) -> None:
    assert infer(kserve, "identity_fp32", body, headers).status == status


@pytest.mark.kserve
@pytest.mark.parametrize(
    ("body", "binary"),
    [
        (wanting(), False),
        (wanting(all_binary=True), True),
        (wanting(("OUTPUT0", None), all_binary=True), False),  # against the specification
        (wanting(("OUTPUT0", True)), True),
        (wanting(("OUTPUT0", False), all_binary=True), False),
    ],
)
def test_kserve_gives_listed_outputs_in_their_own_form(
    kserve: KServe, body: bytes, binary: bool
) -> None:
    response = infer(kserve, "identity_fp32", body, JSON)
    assert (response.header_length is not None) == binary
    if binary:
        assert response.headers["Content-Type"] is None
        assert response.headers["Transfer-Encoding"] == "chunked"


@pytest.mark.mlserver
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (BODY, JSON, 200),
        (BODY, {}, 200),
        (BODY, BINARY, 422),
        (TENSORS, LENGTH | JSON, 422),
        (BODY.replace(b"0.1", b"NaN"), JSON, 422),
        (gzip.compress(BODY), JSON | {"Content-Encoding": "gzip"}, 200),
        (zlib.compress(BODY), JSON | {"Content-Encoding": "deflate"}, 422),
    ],
    ids=["JSON", "no type", "false type", "binary", "NaN", "gzip", "deflate"],
)
def test_mlserver_takes_json_alone(
    mlserver: MLServer, body: bytes, headers: dict[str, str], status: int
) -> None:
    assert infer(mlserver, "identity_fp32", body, headers).status == status


@pytest.mark.mlserver
def test_mlserver_gives_json_alone_and_loses_nested_bytes(mlserver: MLServer) -> None:
    assert infer(mlserver, "identity_fp32", wanting(all_binary=True), JSON).header_length is None
    entry = {"name": "INPUT0", "datatype": "BYTES", "shape": [2, 1], "data": [["a"], ["b"]]}
    response = infer(mlserver, "identity_bytes", json.dumps({"inputs": [entry]}).encode(), JSON)
    (output,) = read_outputs(response)
    assert output.elements.tolist() == [b"", b""]
