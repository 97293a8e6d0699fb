"""The real KServe of the integration tests works, and behaves as the gateway expects."""

import gzip
from collections.abc import Iterator

import numpy as np
import pytest

from tests.integration.kserve.server import KServe
from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.infer_messages import Request, tensor
from tests.integration.support.real_server import HOST

pytestmark = pytest.mark.kserve

JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": "application/octet-stream"}

NUMBERS = tensor("INPUT0", "FP32", [0.1, 2, 3])
BINARY_NUMBERS = tensor("INPUT0", "FP32", [0.1, 2, 3], binary=True)


@pytest.fixture
def client(kserve: KServe) -> Iterator[Client]:
    """A connection of its own for each test: KServe closes one after some of its faults."""
    with Client(HOST, kserve.http_port) as client:
        yield client


def infer(client: Client, request: Request) -> Response:
    body, headers = request.encoded()
    return client.infer(request.model, body, {**(BINARY if headers else JSON), **headers})


def test_the_metadata_describes_the_server(client: Client) -> None:
    """Not that it takes the binary form."""
    assert client.get("/v2").fields == {
        "name": "kserve",
        "version": "0.21.0",
        "extensions": ["model_repository_extension"],
    }


def test_frame_of_a_binary_response(client: Client) -> None:
    """Without Content-Type, and chunked; with a null."""
    response = infer(client, Request("identity_fp32", (BINARY_NUMBERS,), binary_data_output=True))
    assert response.headers["Content-Type"] is None
    assert response.headers["Content-Length"] is None
    assert response.headers["Transfer-Encoding"] == "chunked"
    assert list(response.fields) == ["id", "model_name", "model_version", "outputs"]
    assert response.fields["model_version"] is None
    assert list(response.fields["outputs"][0]) == ["name", "shape", "datatype", "parameters"]


def test_frame_of_a_json_response(client: Client) -> None:
    """With nulls, and in another order."""
    response = infer(client, Request("identity_fp32", (BINARY_NUMBERS,)))
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Content-Length"] == str(len(response.body))
    fields = response.fields
    assert list(fields) == ["model_name", "model_version", "id", "parameters", "outputs"]
    assert (fields["model_version"], fields["parameters"]) == (None, None)
    (output,) = fields["outputs"]
    assert list(output) == ["name", "shape", "datatype", "parameters", "data"]
    assert output["parameters"] is None


def test_empty_binary_response_states_its_header_length(client: Client) -> None:
    """Unlike Triton's."""
    empty = tensor("INPUT0", "FP32", [], binary=True)
    response = infer(client, Request("identity_fp32", (empty,), binary_data_output=True))
    assert response.header_length == len(response.body)
    assert response.fields["outputs"][0]["parameters"] == {"binary_data_size": 0}


@pytest.mark.parametrize(
    ("outputs", "wanted", "binary"),
    [
        ((), None, False),
        ((), True, True),
        ((("OUTPUT0", None),), True, False),  # against the specification
        ((("OUTPUT0", True),), None, True),
        ((("OUTPUT0", False),), True, False),
    ],
)
def test_which_outputs_are_binary(
    client: Client, outputs: tuple[tuple[str, bool | None], ...], wanted: bool | None, binary: bool
) -> None:
    response = infer(
        client, Request("identity_fp32", (NUMBERS,), outputs, binary_data_output=wanted)
    )
    assert (response.header_length is not None) == binary
    assert ("data" in response.fields["outputs"][0]) != binary


@pytest.mark.parametrize("kind", ["", "text/plain", "application/octet-stream"])
def test_json_must_say_that_it_is_json(client: Client, kind: str) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    response = client.infer("identity_fp32", body, {"Content-Type": kind} if kind else {})
    assert response.status == 400
    assert "header is missing" in response.error


@pytest.mark.parametrize(
    ("kind", "status"), [("application/json", 400), ("application/octet-stream", 200), ("", 200)]
)
def test_binary_must_not_say_that_it_is_json(client: Client, kind: str, status: int) -> None:
    body, headers = Request("identity_fp32", (BINARY_NUMBERS,)).encoded()
    types = {"Content-Type": kind} if kind else {}
    assert client.infer("identity_fp32", body, headers | types).status == status


def test_surplus_bytes_are_ignored(client: Client) -> None:
    body, headers = Request("identity_fp32", (BINARY_NUMBERS,)).encoded()
    assert client.infer("identity_fp32", body + b"....", headers | BINARY).status == 200


def test_raw_binary_is_refused(client: Client) -> None:
    response = client.infer("identity_fp32", bytes(8), {**BINARY, HEADER_LENGTH: "0"})
    assert response.status == 400
    assert "Unrecognized request format" in response.error


@pytest.mark.parametrize("path", ["", "/ready", "/infer"])
def test_there_are_no_versions(client: Client, path: str) -> None:
    body = Request("add", (NUMBERS,)).encoded()[0] if path == "/infer" else None
    method = "POST" if body else "GET"
    response = client.send(method, f"/v2/models/add/versions/1{path}", body, JSON)
    assert (response.status, response.error) == (501, "Model versioning not supported yet.")


def test_nonfinite_values_are_null_in_json(client: Client) -> None:
    sent = tensor("INPUT0", "FP32", [np.inf, -np.inf, np.nan, 1], binary=True)
    response = infer(client, Request("identity_fp32", (sent,)))
    assert response.fields["outputs"][0]["data"] == [None, None, None, 1]


@pytest.mark.parametrize(("element", "status"), [("é\0a".encode(), 200), (b"\xff", 500)])
def test_bytes_have_to_be_text_even_in_binary_form(
    client: Client, element: bytes, status: int
) -> None:
    sent = tensor("INPUT0", "BYTES", [element], binary=True)
    response = infer(client, Request("identity_bytes", (sent,), binary_data_output=True))
    assert response.status == status


def test_compressed_bodies_are_refused(client: Client) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    packed = gzip.compress(body)
    response = client.infer("identity_fp32", packed, {**JSON, "Content-Encoding": "gzip"})
    assert (response.status, list(response.fields)) == (400, ["detail"])


def test_the_server_closes_the_connection_after_an_internal_error(client: Client) -> None:
    response = infer(client, Request("fails", (NUMBERS,)))
    assert (response.status, response.error) == (500, "RuntimeError : this model always fails")
    assert response.headers["Connection"] is None
    assert client.is_closed_by_server()
