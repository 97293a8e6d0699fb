"""The real MLServer of the integration tests works, and behaves as the gateway expects."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.mlserver.server import MLServer
from tests.integration.support.client import Client, Response
from tests.integration.support.infer_messages import Request, read_outputs, tensor
from tests.integration.support.real_server import HOST

pytestmark = pytest.mark.mlserver

JSON = {"Content-Type": "application/json"}
BINARY = {"Content-Type": "application/octet-stream"}

NUMBERS = tensor("INPUT0", "FP32", [0.1, 2, 3])


@pytest.fixture
def client(mlserver: MLServer) -> Iterator[Client]:
    """A connection of its own for each test: MLServer closes one after some of its faults."""
    with Client(HOST, mlserver.http_port) as client:
        yield client


def infer(client: Client, request: Request) -> Response:
    body, headers = request.encoded()
    return client.infer(request.model, body, {**(BINARY if headers else JSON), **headers})


def infer_json(client: Client, datatype: str, data: str) -> Response:
    described = f'{{"name": "INPUT0", "datatype": "{datatype}", "shape": [2], "data": {data}}}'
    body = f'{{"inputs": [{described}]}}'.encode()
    return client.infer(f"identity_{datatype.lower()}", body, JSON)


def test_the_metadata_describes_the_server(client: Client) -> None:
    assert client.get("/v2").fields == {"name": "mlserver", "version": "1.7.1", "extensions": []}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_nested_bytes_are_lost_without_a_word(client: Client, datatype: str, flat: bool) -> None:
    """Where numbers may be nested or not."""
    values = [b"a", b"b"] if datatype == "BYTES" else [0.5, 1]
    sent = tensor("INPUT0", datatype, values, [2, 1])
    data = tensor("", datatype, values).values() if flat else sent.values()
    request = Request(f"identity_{datatype.lower()}", (replace(sent, data=data),))
    (output,) = read_outputs(infer(client, request))
    is_lost = datatype == "BYTES" and not flat
    assert output.elements.tolist() == ([b"", b""] if is_lost else values)


def test_frame_of_a_response(client: Client) -> None:
    """With members and headers of MLServer's own."""
    response = infer(client, Request("identity_fp32", (NUMBERS,)))
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["Content-Length"] == str(len(response.body))
    assert response.headers["Ce-Modelid"] == "identity_fp32"
    fields = response.fields
    assert list(fields) == ["model_name", "model_version", "id", "parameters", "outputs"]
    assert (fields["model_version"], fields["parameters"]) == ("1", {})
    (output,) = fields["outputs"]
    assert list(output) == ["name", "shape", "datatype", "parameters", "data"]
    assert output["parameters"] == {"content_type": "np"}


def test_its_own_codec_adds_a_dimension(client: Client) -> None:
    (output,) = read_outputs(infer(client, Request("reshaped", (NUMBERS,))))
    assert output.shape == (3, 1)


@pytest.mark.parametrize(
    ("outputs", "wanted"), [((), True), ((("OUTPUT0", True),), None), ((("OUTPUT0", None),), True)]
)
def test_no_output_is_binary(
    client: Client, outputs: tuple[tuple[str, bool | None], ...], wanted: bool | None
) -> None:
    """Whoever asks for that is not even told."""
    response = infer(
        client, Request("identity_fp32", (NUMBERS,), outputs, binary_data_output=wanted)
    )
    assert response.status == 200
    assert response.header_length is None


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream"])
@pytest.mark.parametrize(("value", "status"), [(0.0, 422), (0.1, 500)])
def test_binary_inputs_are_refused(client: Client, kind: str, value: float, status: int) -> None:
    """With 500 where the bytes are not UTF-8, as they are then not JSON for the error either."""
    sent = tensor("INPUT0", "FP32", [value], binary=True)
    body, headers = Request("identity_fp32", (sent,)).encoded()
    response = client.infer("identity_fp32", body, {**headers, "Content-Type": kind})
    assert response.status == (422 if kind == "application/json" else status)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("", 200),
        ("text/plain", 422),
        ("application/octet-stream", 422),
    ],
)
def test_json_must_not_say_that_it_is_something_else(
    client: Client, kind: str, status: int
) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    response = client.infer("identity_fp32", body, {"Content-Type": kind} if kind else {})
    assert response.status == status


@pytest.mark.parametrize(
    ("datatype", "data", "status"),
    [
        ("FP32", "[NaN, 1]", 422),
        ("BYTES", r'["\ud83d", ""]', 422),
        ("UINT8", "[300, 1]", 500),
        ("FP32", "[1]", 500),
    ],
)
def test_json_data_that_is_refused(client: Client, datatype: str, data: str, status: int) -> None:
    assert infer_json(client, datatype, data).status == status


@pytest.mark.parametrize(
    ("coding", "pack", "status"), [("gzip", gzip.compress, 200), ("deflate", zlib.compress, 422)]
)
def test_compressed_bodies(client: Client, coding: str, pack: Any, status: int) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    response = client.infer("identity_fp32", pack(body), {**JSON, "Content-Encoding": coding})
    assert response.status == status


def test_errors(client: Client) -> None:
    """In three forms."""
    response = infer(client, Request("nope", (NUMBERS,)))
    assert (response.status, response.error) == (404, "Model nope not found")
    response = client.infer("identity_fp32", b'{"inputs":', JSON)
    assert (response.status, list(response.fields)) == (422, ["detail"])
    response = infer(client, Request("fails", (NUMBERS,)))
    assert (response.status, response.body) == (500, b"Internal Server Error")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"


def test_the_server_closes_the_connection_after_an_internal_error(client: Client) -> None:
    response = infer(client, Request("fails", (NUMBERS,)))
    assert response.headers["Connection"] is None
    assert client.is_closed_by_server(within=4)


def test_an_idle_connection_is_closed_soon(client: Client) -> None:
    """After 5 s, where others have a minute and more."""
    assert client.get("/v2").status == 200
    assert client.is_closed_by_server(within=20)
