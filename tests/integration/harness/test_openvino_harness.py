"""The fake OpenVINO Model Server behaves as the source of the real one."""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.infer_messages import Request, Tensor, read_outputs, tensor
from tests.support.servers.openvino.server import DATATYPES, HOST, OpenVino

NUMBERS = tensor("INPUT0", "FP32", [0.1, 2, 3])
BINARY_NUMBERS = tensor("INPUT0", "FP32", [0.1, 2, 3], binary=True)


@pytest.fixture
def client(openvino: OpenVino) -> Iterator[Client]:
    with Client(HOST, openvino.http_port) as client:
        yield client


def infer(client: Client, request: Request) -> Response:
    return client.infer(request.model, *request.encoded())


def pair(*, left: bool, right: bool) -> tuple[Tensor, ...]:
    return (
        tensor("INPUT0", "FP32", [3], binary=left),
        tensor("INPUT1", "FP32", [1], binary=right),
    )


def test_the_metadata_describes_the_server(client: Client) -> None:
    """Nothing of extensions, not even that there are none."""
    fields = client.get("/v2").fields
    assert list(fields) == ["name", "version"]
    assert fields["name"] == "OpenVINO Model Server"


def test_health_and_metadata(client: Client, openvino: OpenVino) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/add/versions/1/ready"):
        response = client.get(path)
        assert (response.status, response.body) == (200, b"")
    for model in openvino.models:
        fields = client.get(f"/v2/models/{model.name}").fields
        assert fields["inputs"] == [each.metadata() for each in model.inputs]
        assert fields["outputs"] == [each.metadata() for each in model.outputs]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_identity(client: Client, datatype: str, binary: bool) -> None:
    values = ["é".encode(), b""] if datatype == "BYTES" else [0, 1]
    sent = tensor("INPUT0", datatype, values, binary=binary)
    request = Request(f"identity_{datatype.lower()}", (sent,), (("OUTPUT0", binary),))
    (output,) = read_outputs(infer(client, request))
    assert (output.datatype, output.shape, output.binary) == (datatype, (2,), binary)
    assert output.data == sent.encoded()


@pytest.mark.parametrize(
    ("outputs", "wanted", "binary"),
    [
        ((), True, False),  # against the specification
        ((("OUTPUT0", None),), None, False),
        ((("OUTPUT0", None),), True, True),
        ((("OUTPUT0", True),), None, True),
        ((("OUTPUT0", False),), True, False),
    ],
)
def test_which_outputs_are_binary(
    client: Client, outputs: tuple[tuple[str, bool | None], ...], wanted: bool | None, binary: bool
) -> None:
    request = Request("identity_fp32", (NUMBERS,), outputs, binary_data_output=wanted)
    response = infer(client, request)
    assert (response.header_length is not None) == binary
    assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("names", [("SUM", "DIFFERENCE"), ("DIFFERENCE", "SUM")])
def test_of_the_outputs_listed_the_last_alone_is_binary(
    client: Client, names: tuple[str, ...]
) -> None:
    """And all come back, in the model's order."""
    listed = tuple((name, True) for name in names)
    outputs = read_outputs(infer(client, Request("add", pair(left=True, right=True), listed)))
    assert [each.name for each in outputs] == ["SUM", "DIFFERENCE"]
    assert [each.name for each in outputs if each.binary] == [names[-1]]
    assert [each.elements.tolist() for each in outputs] == [[4], [2]]


def test_an_empty_binary_output_is_not_told(client: Client) -> None:
    empty = tensor("INPUT0", "FP32", [], binary=True)
    response = infer(client, Request("identity_fp32", (empty,), (("OUTPUT0", True),)))
    assert response.header_length is None
    assert list(response.fields["outputs"][0]) == ["name", "shape", "datatype"]


def test_inputs_are_all_binary_or_none(client: Client) -> None:
    for left, right in ((True, True), (False, False)):
        assert infer(client, Request("add", pair(left=left, right=right))).status == 200
    response = infer(client, Request("add", pair(left=True, right=False)))
    assert response.status == 400
    assert "Passing buffers both" in response.error


def test_surplus_bytes_are_ignored(client: Client) -> None:
    body, headers = Request("identity_fp32", (BINARY_NUMBERS,)).encoded()
    assert client.infer("identity_fp32", body + b"....", headers).status == 200
    assert client.infer("identity_fp32", body[:-1], headers).status == 400


def test_raw_binary_is_refused(client: Client) -> None:
    response = client.infer("identity_fp32", bytes(8), {HEADER_LENGTH: "0"})
    assert response.status == 412
    assert "not valid json" in response.error


def test_compressed_bodies_are_refused(client: Client) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    packed = gzip.compress(body)
    assert client.infer("identity_fp32", packed, {"Content-Encoding": "gzip"}).status == 412


def test_an_id_comes_back_if_it_was_sent(client: Client) -> None:
    assert "id" not in infer(client, Request("identity_fp32", (NUMBERS,))).fields
    assert infer(client, Request("identity_fp32", (NUMBERS,), id="7")).fields["id"] == "7"


@pytest.mark.parametrize("binary", [True, False])
def test_texts_in_json_end_at_a_nul(client: Client, binary: bool) -> None:
    sent = tensor("INPUT0", "BYTES", [b"a\0b"], binary=binary)
    (output,) = read_outputs(
        infer(client, Request("identity_bytes", (sent,), (("OUTPUT0", True),)))
    )
    assert output.elements.tolist() == [b"a\0b" if binary else b"a"]


def test_nonfinite_values_break_json(client: Client) -> None:
    sent = tensor("INPUT0", "FP32", [np.nan, 1, np.inf], binary=True)
    response = infer(client, Request("identity_fp32", (sent,)))
    assert b'"data": [, 1.0, ]' in response.body


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT64", "[2147483648]"),
        ("FP16", "[1]"),
        ("BOOL", "[1]"),
        ("BYTES", "[1]"),
        ("INT8", "[1.5]"),
    ],
)
def test_json_data_that_is_refused(client: Client, datatype: str, data: str) -> None:
    entry = f'{{"name": "INPUT0", "datatype": "{datatype}", "shape": [1], "data": {data}}}'
    response = client.infer(f"identity_{datatype.lower()}", b'{"inputs": [%s]}' % entry.encode())
    assert response.status == 400
    assert "Could not parse input content" in response.error


def test_half_floats_cannot_come_back(client: Client) -> None:
    sent = tensor("INPUT0", "FP16", [1], binary=True)
    response = infer(client, Request("identity_fp16", (sent,), (("OUTPUT0", True),)))
    assert response.status == 400


@pytest.mark.parametrize("value", [None, 0.5, 2**31, [1]])
def test_parameters_are_texts_or_small(client: Client, value: Any) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    fields = json.loads(body) | {"parameters": {"x": value}}
    response = client.infer("identity_fp32", json.dumps(fields).encode())
    assert (response.status, response.error) == (400, "Could not parse request parameters")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/nope", 404),
        ("/v2/models/add/versions/2", 404),
        ("/v2/models/add/config", 400),
        ("/v2/trace/setting", 400),
        ("/v2/models/add/trace/setting", 400),
    ],
)
def test_unsupported_paths_are_refused(client: Client, path: str, status: int) -> None:
    response = client.get(path)
    assert response.status == status
    assert response.error


def test_chunked_bodies(client: Client) -> None:
    body, headers = Request("identity_fp32", (BINARY_NUMBERS,)).encoded()
    assert client.infer("identity_fp32", iter([body[:9], body[9:]]), headers).status == 200


def test_other_methods(client: Client) -> None:
    assert client.send("HEAD", "/v2").status == 406
    assert client.send("PUT", "/v2").status == 406
