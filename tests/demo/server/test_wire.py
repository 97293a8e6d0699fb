import json
from typing import Any

import numpy as np
import pytest

from gateway.demo.server.errors import RequestError
from gateway.demo.server.tensors import Tensor
from gateway.demo.server.wire import (
    HEADER_LENGTH,
    HttpResponse,
    InferRequest,
    RequestedOutput,
    encode_infer_response,
    parse_infer_request,
)


def parse(document: object, binary: bytes = b"") -> InferRequest:
    header = document if isinstance(document, bytes) else json.dumps(document).encode()
    headers = {HEADER_LENGTH: str(len(header))} if binary else {}
    return parse_infer_request(headers, header + binary)


def entry(**members: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1], **members}


def sized(size: object) -> dict[str, Any]:
    return entry(parameters={"binary_data_size": size})


def tensor(name: str, *elements: float) -> Tensor:
    return Tensor(name, "FP32", np.array(elements, np.float32))


def parts(response: HttpResponse) -> tuple[dict[str, Any], bytes]:
    length = response.header_length
    header = json.loads(response.body[:length])
    return header, b"" if length is None else response.body[length:]


def test_json_and_binary_inputs_may_be_mixed() -> None:
    first, last = sized(4), {**sized(8), "name": "z", "shape": [2]}
    binary = np.array([1, 2, 3], np.float32).tobytes()
    request = parse({"inputs": [first, entry(name="y", data=[5]), last]}, binary)
    assert {t.name: t.array.tolist() for t in request.inputs} == {"x": [1], "y": [5], "z": [2, 3]}


def test_header_length_0_is_a_raw_binary_request() -> None:
    request = parse_infer_request({HEADER_LENGTH: "0"}, b"abcd")
    assert (request.raw, request.wants_binary("any output")) == (b"abcd", True)


def test_empty_body_is_a_raw_binary_request() -> None:
    assert parse_infer_request({}, b"").raw == b""


@pytest.mark.parametrize("length", ["xx", "", "-1", "+5", "5.0", "²", "99999", "9" * 5000])
def test_header_length_must_be_at_most_the_body_size(length: str) -> None:
    with pytest.raises(RequestError, match="inference header size"):
        parse_infer_request({HEADER_LENGTH: length}, b'{"inputs":[]}')


@pytest.mark.parametrize(
    "document",
    [
        b"{",
        b"[]",
        b"{} x",
        b"\xff",
        b'{"inputs":' + b"[" * 100_000,
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[' + b"1" * 5000 + b"]}]}",
        {},
        {"inputs": 3},
        {"inputs": [3]},
        {"inputs": [entry()]},
        {"inputs": [entry(data=[1], parameters={"binary_data_size": 4})]},
        {"inputs": [{"datatype": "FP32", "shape": [1], "data": [1]}]},
        {"inputs": [entry(name=3, data=[1])]},
        {"inputs": [entry(datatype="FP31", data=[1])]},
        {"inputs": [entry(shape=[-1], data=[1])]},
        {"inputs": [entry(shape=[1.0], data=[1])]},
        {"inputs": [entry(shape=[True], data=[1])]},
        {"inputs": [entry(shape=1, data=[1])]},
        {"inputs": [sized("4")]},
        {"inputs": [sized(-4)]},
        {"inputs": [sized(4)]},
        {"inputs": [], "id": 5},
        {"inputs": [], "outputs": {}},
        {"inputs": [], "outputs": ["x"]},
        {"inputs": [], "outputs": [{}]},
        {"inputs": [], "outputs": [{"name": "x", "parameters": {"binary_data": 1}}]},
        {"inputs": [], "outputs": [{"name": "x", "parameters": {"classification": -1}}]},
        {"inputs": [], "parameters": []},
        {"inputs": [], "parameters": {"binary_data_output": "yes"}},
        {"inputs": [], "parameters": {"triton_x": 1}},
        {"inputs": [], "parameters": {"x": {}}},
    ],
)
def test_invalid_request_gets_an_error(document: object) -> None:
    with pytest.raises(RequestError) as rejected:
        parse(document)
    assert rejected.value.status == 400


def test_surplus_bytes_are_rejected() -> None:
    with pytest.raises(RequestError, match="additional input data: 1 bytes"):
        parse({"inputs": [sized(4)]}, bytes(5))


def test_shared_memory_is_not_found() -> None:
    with pytest.raises(RequestError, match="region: 'r'") as rejected:
        parse({"inputs": [entry(parameters={"shared_memory_region": "r"})]})
    assert rejected.value.status == 404


def test_first_of_repeated_members_counts() -> None:
    twice = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1],"data":[2]}]}'
    assert parse(twice).inputs[0].array.tolist() == [1]


@pytest.mark.parametrize(
    ("document", "binary"),
    [
        ({}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"outputs": [], "parameters": {"binary_data_output": True}}, True),
        ({"outputs": [{"name": "x", "parameters": {"binary_data": True}}]}, True),
        # against the specification, as in Triton:
        ({"outputs": [{"name": "x"}], "parameters": {"binary_data_output": True}}, False),
    ],
)
def test_requested_outputs_are_binary(document: dict[str, Any], binary: bool) -> None:
    assert parse({"inputs": [], **document}).wants_binary("x") is binary


def test_response_members_are_in_tritons_order() -> None:
    response = encode_infer_response("m", "1", InferRequest(request_id="7"), [tensor("x", 1, 2)])
    assert response.body == (
        b'{"id":"7","model_name":"m","model_version":"1",'
        b'"outputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1.0,2.0]}]}'
    )
    assert response.headers == {"Content-Type": "application/json"}


def test_response_may_mix_json_and_binary() -> None:
    outputs = (RequestedOutput("x", binary=True), RequestedOutput("y"))
    response = encode_infer_response(
        "m", "1", InferRequest(outputs=outputs), [tensor("x", 1), tensor("y", 2)]
    )
    header, binary = parts(response)
    assert header["outputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"name": "y", "datatype": "FP32", "shape": [1], "data": [2.0]},
    ]
    assert binary == np.float32(1).tobytes()
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers[HEADER_LENGTH] == str(len(response.body) - 4)


def test_response_with_only_empty_binary_outputs_is_json() -> None:
    response = encode_infer_response("m", "1", InferRequest(binary_output=True), [tensor("x")])
    header, _ = parts(response)
    assert response.headers == {"Content-Type": "application/json"}
    assert header["outputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}}
    ]


def test_nan_and_infinity_are_bare_json_tokens() -> None:
    request = parse(
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[NaN,Infinity,-Infinity]}]}'
    )
    assert (
        b'"data":[NaN,Infinity,-Infinity]'
        in encode_infer_response("m", "1", request, request.inputs).body
    )
