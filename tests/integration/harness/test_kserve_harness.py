"""The real KServe of the integration tests works, and behaves as the gateway expects."""

import gzip
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.integration.kserve.models import DATATYPES
from tests.integration.kserve.server import KServe
from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.infer_messages import Request, Tensor, read_outputs, tensor
from tests.integration.support.real_server import HOST, ServerError

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


def infer_json(client: Client, datatype: str, data: str) -> Response:
    described = f'{{"name": "INPUT0", "datatype": "{datatype}", "shape": [2], "data": {data}}}'
    body = f'{{"inputs": [{described}]}}'.encode()
    return client.infer(f"identity_{datatype.lower()}", body, JSON)


def test_the_metadata_describes_the_server(client: Client) -> None:
    """Not that it takes the binary form."""
    assert client.get("/v2").fields == {
        "name": "kserve",
        "version": "0.21.0",
        "extensions": ["model_repository_extension"],
    }


def test_each_model_is_ready(client: Client, kserve: KServe) -> None:
    for model in kserve.models:
        response = client.get(f"/v2/models/{model.name}/ready")
        assert response.fields == {"name": model.name, "ready": True}


def test_metadata(client: Client) -> None:
    fields = client.get("/v2/models/add").fields
    assert fields["inputs"] == [
        {"name": name, "datatype": "FP32", "shape": [-1]} for name in ("INPUT0", "INPUT1")
    ]
    assert fields["versions"] is None
    fields = client.get("/v2/models/undeclared").fields
    assert (fields["inputs"], fields["outputs"]) == ([], [])


@pytest.mark.parametrize("datatype", DATATYPES)
def test_identity_in_binary_form(client: Client, datatype: str) -> None:
    values = ["é".encode(), b""] if datatype == "BYTES" else [0, 1]
    sent = tensor("INPUT0", datatype, values, binary=True)
    request = Request(f"identity_{datatype.lower()}", (sent,), binary_data_output=True)
    (output,) = read_outputs(infer(client, request))
    assert (output.datatype, output.shape, output.binary) == (datatype, (2,), True)
    assert output.data == sent.encoded()


@pytest.mark.parametrize("datatype", [each for each in DATATYPES if each != "FP16"])
def test_identity_in_json(client: Client, datatype: str) -> None:
    values = ["é".encode(), b""] if datatype == "BYTES" else [0, 1]
    sent = tensor("INPUT0", datatype, values)
    response = infer(client, Request(f"identity_{datatype.lower()}", (sent,)))
    assert response.fields["outputs"][0]["data"] == sent.values()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("sent", [NUMBERS, BINARY_NUMBERS], ids=["JSON", "binary"])
def test_a_model_that_returns_the_id_needs_one(client: Client, sent: Tensor, wanted: bool) -> None:
    """A model that gives back that of the request needs one."""
    request = Request("gives_id_back", (sent,), binary_data_output=wanted, id="7")
    assert infer(client, request).fields["id"] == "7"
    response = infer(client, replace(request, id=None))
    assert response.status == 500
    assert "InferenceResponse" in response.error


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


def test_some_models_answer_in_json_whatever_is_asked_for(client: Client) -> None:
    response = infer(client, Request("always_json", (BINARY_NUMBERS,), binary_data_output=True))
    assert response.header_length is None
    assert "data" in response.fields["outputs"][0]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("names", [("SUM", "DIFFERENCE"), ("DIFFERENCE", "SUM")])
def test_outputs_come_in_the_order_of_the_request(
    client: Client, names: tuple[str, ...], binary: bool
) -> None:
    inputs = tensor("INPUT0", "FP32", [3]), tensor("INPUT1", "FP32", [1])
    listed = tuple((name, binary) for name in names)
    outputs = read_outputs(infer(client, Request("add", inputs, listed)))
    assert tuple(each.name for each in outputs) == names


@pytest.mark.parametrize("binary", [True, False])
def test_the_server_generates_a_missing_id(client: Client, binary: bool) -> None:
    request = Request("identity_fp32", (NUMBERS,), binary_data_output=binary)
    assert len(infer(client, request).fields["id"]) == 36
    request = Request("identity_fp32", (NUMBERS,), binary_data_output=binary, id="7")
    assert infer(client, request).fields["id"] == "7"


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


@pytest.mark.parametrize(
    ("datatype", "data", "comes_back"),
    [
        ("FP32", "[NaN, 1]", [None, 1]),
        ("FP32", "[1e40, 1]", [None, 1]),
        ("FP32", '["1.5", 1]', [1.5, 1]),
        ("INT32", "[1.5, 2]", [1, 2]),
        ("BOOL", "[1, 0]", [True, False]),
    ],
)
def test_json_data_that_is_taken(
    client: Client, datatype: str, data: str, comes_back: list[Any]
) -> None:
    response = infer_json(client, datatype, data)
    assert response.fields["outputs"][0]["data"] == comes_back


@pytest.mark.parametrize(
    ("datatype", "data", "status"),
    [
        ("UINT8", "[300, 1]", 500),
        ("FP32", "[1]", 500),
        ("BYTES", r'["\ud83d", ""]', 500),
        ("FP16", "[1, 2]", 400),
    ],
)
def test_json_data_that_is_refused(client: Client, datatype: str, data: str, status: int) -> None:
    response = infer_json(client, datatype, data)
    assert response.status == status
    assert response.error


def test_nonfinite_values_are_null_in_json(client: Client) -> None:
    sent = tensor("INPUT0", "FP32", [np.inf, -np.inf, np.nan, 1], binary=True)
    response = infer(client, Request("identity_fp32", (sent,)))
    assert response.fields["outputs"][0]["data"] == [None, None, None, 1]


def test_half_floats_have_no_json_form(client: Client) -> None:
    sent = tensor("INPUT0", "FP16", [1, 2], binary=True)
    response = infer(client, Request("identity_fp16", (sent,)))
    assert response.status == 400
    assert "FP16 data via JSON is not supported" in response.error


@pytest.mark.parametrize(("element", "status"), [("é\0a".encode(), 200), (b"\xff", 500)])
def test_bytes_have_to_be_text_even_in_binary_form(
    client: Client, element: bytes, status: int
) -> None:
    sent = tensor("INPUT0", "BYTES", [element], binary=True)
    response = infer(client, Request("identity_bytes", (sent,), binary_data_output=True))
    assert response.status == status


def test_bf16_is_unknown(client: Client) -> None:
    sent = tensor("INPUT0", "BF16", [1, 2], binary=True)
    response = infer(client, Request("identity_fp16", (sent,), binary_data_output=True))
    assert (response.status, response.error) == (400, "invalid datatype None in the input")


def test_compressed_bodies_are_refused(client: Client) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    packed = gzip.compress(body)
    response = client.infer("identity_fp32", packed, {**JSON, "Content-Encoding": "gzip"})
    assert (response.status, list(response.fields)) == (400, ["detail"])


def test_errors(client: Client) -> None:
    response = infer(client, Request("nope", (NUMBERS,)))
    assert (response.status, response.error) == (404, "Model with name nope does not exist.")
    response = infer(client, Request("identity_fp32", (NUMBERS,), (("NOPE", True),)))
    assert response.status == 400
    assert "Unexpected inference output 'NOPE'" in response.error
    response = client.infer("identity_fp32", b'{"inputs":', JSON)
    assert (response.status, list(response.fields)) == (422, ["detail"])


def test_the_server_closes_the_connection_after_an_internal_error(client: Client) -> None:
    response = infer(client, Request("fails", (NUMBERS,)))
    assert (response.status, response.error) == (500, "RuntimeError : this model always fails")
    assert response.headers["Connection"] is None
    assert client.is_closed_by_server()


@pytest.mark.parametrize(
    "path", ["/v2/models/add/config", "/v2/models/add/stats", "/v2/trace/setting", "/v2/logging"]
)
def test_unsupported_paths_are_refused(client: Client, path: str) -> None:
    response = client.get(path)
    assert (response.status, response.fields) == (404, {"detail": "Not Found"})


def test_zeros(client: Client) -> None:
    sent = tensor("INPUT0", "INT32", [1000], binary=True)
    (output,) = read_outputs(infer(client, Request("zeros", (sent,), binary_data_output=True)))
    assert output.data == bytes(4000)


def test_mixed(client: Client) -> None:
    values: dict[str, list[Any]] = {
        "FP32": [0.5],
        "INT64": [-(2**63), 2**53 + 1],
        "BYTES": [b"a", "é".encode(), b""],
        "BOOL": [True, False],
    }
    inputs = tuple(tensor(f"IN_{name}", name, each) for name, each in values.items())
    fields = infer(client, Request("mixed", inputs)).fields
    assert {each["name"]: each["data"] for each in fields["outputs"]} == {
        each.name.replace("IN_", "OUT_"): each.values() for each in inputs
    }


def test_it_can_be_stopped_and_leaves_nothing(kserve: KServe) -> None:
    with KServe() as server:
        log = server.log_path
        assert server.is_alive()
        assert server.http_port != kserve.http_port
        with pytest.raises(ServerError, match="is running already"):
            server.start()
    assert not log.exists()
    assert not server.is_alive()
