"""The real MLServer of the integration tests works, and behaves as the gateway expects."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.mlserver.models import DATATYPES
from tests.integration.mlserver.server import MLServer
from tests.integration.support.client import HEADER_LENGTH, Client, Response
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


def test_each_model_version_is_ready(client: Client, mlserver: MLServer) -> None:
    for model in mlserver.models:
        for version in model.versions:
            path = f"/v2/models/{model.name}/versions/{version}/ready"
            assert client.get(path).status == 200


def test_health_has_no_body(client: Client) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/add/ready"):
        response = client.get(path)
        assert (response.status, response.body) == (200, b"")


def test_metadata(client: Client) -> None:
    fields = client.get("/v2/models/add").fields
    assert fields["inputs"] == [
        {"name": name, "datatype": "FP32", "shape": [-1]} for name in ("INPUT0", "INPUT1")
    ]
    assert (fields["versions"], fields["parameters"]) == ([], {})
    fields = client.get("/v2/models/undeclared").fields
    assert (fields["inputs"], fields["outputs"]) == ([], [])


@pytest.mark.parametrize("datatype", DATATYPES)
def test_identity(client: Client, datatype: str) -> None:
    """FP16 too has a JSON form here."""
    values = ["é".encode(), b""] if datatype == "BYTES" else [0, 1]
    sent = tensor("INPUT0", datatype, values)
    (output,) = read_outputs(infer(client, Request(f"identity_{datatype.lower()}", (sent,))))
    assert (output.datatype, output.shape, output.binary) == (datatype, (2,), False)
    assert output.data == sent.encoded()


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


@pytest.mark.parametrize(("body", "status"), [(bytes(8), 422), (b"\xff" * 8, 500)])
def test_raw_binary_is_refused(client: Client, body: bytes, status: int) -> None:
    response = client.infer("identity_fp32", body, {**BINARY, HEADER_LENGTH: "0"})
    assert response.status == status


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


def test_the_server_generates_a_missing_id(client: Client) -> None:
    request = Request("identity_fp32", (NUMBERS,))
    assert len(infer(client, request).fields["id"]) == 36
    request = Request("identity_fp32", (NUMBERS,), id="7")
    assert infer(client, request).fields["id"] == "7"


@pytest.mark.parametrize(
    ("version", "responses"), [("", 2), ("/versions/1", 1), ("/versions/2", 2)]
)
def test_versions(client: Client, version: str, responses: int) -> None:
    fields = infer(client, Request(f"versioned{version}", (NUMBERS,))).fields
    assert fields["outputs"][0]["data"] == [responses]
    assert fields["model_version"] == str(responses)


def test_outputs_come_in_the_order_of_the_request(client: Client) -> None:
    inputs = tensor("INPUT0", "FP32", [3]), tensor("INPUT1", "FP32", [1])
    for names in (("SUM", "DIFFERENCE"), ("DIFFERENCE", "SUM")):
        listed = tuple((name, None) for name in names)
        outputs = read_outputs(infer(client, Request("add", inputs, listed)))
        assert tuple(each.name for each in outputs) == names


@pytest.mark.parametrize(
    ("datatype", "data", "comes_back"),
    [
        ("FP32", "[null, 1]", [None, 1]),
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
        ("FP32", "[NaN, 1]", 422),
        ("BYTES", r'["\ud83d", ""]', 422),
        ("UINT8", "[300, 1]", 500),
        ("FP32", "[1]", 500),
    ],
)
def test_json_data_that_is_refused(client: Client, datatype: str, data: str, status: int) -> None:
    assert infer_json(client, datatype, data).status == status


def test_bytes_in_base64(client: Client) -> None:
    """A tensor says that it is by its content_type, and the response does likewise."""
    entry = {
        "name": "INPUT0",
        "datatype": "BYTES",
        "shape": [2],
        "parameters": {"content_type": "base64"},
        "data": ["/wBh", ""],
    }
    body = json.dumps({"inputs": [entry]}).encode()
    (output,) = client.infer("identity_bytes", body, JSON).fields["outputs"]
    assert output["parameters"] == {"content_type": "base64"}
    assert output["data"] == ["/wBh", ""]


@pytest.mark.parametrize(
    ("coding", "pack", "status"), [("gzip", gzip.compress, 200), ("deflate", zlib.compress, 422)]
)
def test_compressed_bodies(client: Client, coding: str, pack: Any, status: int) -> None:
    body, _ = Request("identity_fp32", (NUMBERS,)).encoded()
    response = client.infer("identity_fp32", pack(body), {**JSON, "Content-Encoding": coding})
    assert response.status == status


def test_responses_are_compressed_if_the_client_accepts_it(client: Client) -> None:
    body, _ = Request("identity_fp32", (tensor("INPUT0", "FP32", range(500)),)).encoded()
    response = client.infer("identity_fp32", body, {**JSON, "Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(response.body))["outputs"][0]["data"] == list(range(500))


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


@pytest.mark.parametrize(
    "path", ["/v2/models/add/config", "/v2/models/add/stats", "/v2/trace/setting", "/v2/logging"]
)
def test_unsupported_paths_are_refused(client: Client, path: str) -> None:
    response = client.get(path)
    assert (response.status, response.fields) == (404, {"detail": "Not Found"})


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


def test_it_can_be_stopped_and_leaves_nothing(mlserver: MLServer) -> None:
    with MLServer() as server:
        log = server.log_path
        assert server.is_alive()
        assert server.http_port != mlserver.http_port
    assert not log.exists()
    assert not server.is_alive()
