"""The fake OpenVINO Model Server behaves as the source of the real one."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.infer_messages import Request, Tensor, read_outputs, tensor
from tests.support.servers.openvino.server import HOST, OpenVino

NUMBERS = tensor("INPUT0", "FP32", [0.1, 2, 3])


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


def test_raw_binary_is_refused(client: Client) -> None:
    response = client.infer("identity_fp32", bytes(8), {HEADER_LENGTH: "0"})
    assert response.status == 412
    assert "not valid json" in response.error


def test_nonfinite_values_break_json(client: Client) -> None:
    sent = tensor("INPUT0", "FP32", [np.nan, 1, np.inf], binary=True)
    response = infer(client, Request("identity_fp32", (sent,)))
    assert b'"data": [, 1.0, ]' in response.body


def test_half_floats_cannot_come_back(client: Client) -> None:
    sent = tensor("INPUT0", "FP16", [1], binary=True)
    response = infer(client, Request("identity_fp16", (sent,), (("OUTPUT0", True),)))
    assert response.status == 400
