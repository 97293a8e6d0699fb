import json
from typing import Any

import numpy as np
import pytest

from gateway.demo.server.errors import RequestError
from gateway.demo.server.tensors import Tensor
from gateway.demo.server.wire import (
    HEADER_LENGTH,
    Answer,
    Request,
    RequestedOutput,
    encode_response,
    parse_request,
)


def parse(document: object, binary: bytes = b"") -> Request:
    header = document if isinstance(document, bytes) else json.dumps(document).encode()
    headers = {HEADER_LENGTH: str(len(header))} if binary else {}
    return parse_request(headers, header + binary)


def entry(**members: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1], **members}


def sized(size: object) -> dict[str, Any]:
    return entry(parameters={"binary_data_size": size})


def tensor(name: str, *elements: float) -> Tensor:
    return Tensor(name, "FP32", np.array(elements, np.float32))


def parts(answer: Answer) -> tuple[dict[str, Any], bytes]:
    length = answer.header_length
    header = json.loads(answer.body[:length])
    return header, b"" if length is None else answer.body[length:]


def test_json_and_binary_inputs_may_be_mixed() -> None:
    first, last = sized(4), {**sized(8), "name": "z", "shape": [2]}
    binary = np.array([1, 2, 3], np.float32).tobytes()
    request = parse({"inputs": [first, entry(name="y", data=[5]), last]}, binary)
    assert {t.name: t.array.tolist() for t in request.inputs} == {"x": [1], "y": [5], "z": [2, 3]}


def test_header_length_zero_is_a_raw_binary_request() -> None:
    request = parse_request({HEADER_LENGTH: "0"}, b"abcd")
    assert (request.raw, request.wants_binary("any output")) == (b"abcd", True)


def test_an_empty_body_is_a_raw_binary_request() -> None:
    assert parse_request({}, b"").raw == b""


@pytest.mark.parametrize("length", ["xx", "", "-1", "+5", "5.0", "²", "99999", "9" * 5000])
def test_a_header_length_is_a_number_up_to_the_body_size(length: str) -> None:
    with pytest.raises(RequestError, match="inference header size"):
        parse_request({HEADER_LENGTH: length}, b'{"inputs":[]}')


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
def test_a_wrong_request_is_the_client_s_fault(document: object) -> None:
    with pytest.raises(RequestError) as refused:
        parse(document)
    assert refused.value.status == 400


def test_surplus_bytes_are_refused() -> None:
    with pytest.raises(RequestError, match="additional input data: 1 bytes"):
        parse({"inputs": [sized(4)]}, bytes(5))


def test_shared_memory_is_not_found() -> None:
    with pytest.raises(RequestError, match="region: 'r'") as refused:
        parse({"inputs": [entry(parameters={"shared_memory_region": "r"})]})
    assert refused.value.status == 404


def test_of_members_with_the_same_name_the_first_counts() -> None:
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
def test_which_outputs_are_binary(document: dict[str, Any], binary: bool) -> None:
    assert parse({"inputs": [], **document}).wants_binary("x") is binary


def test_response_members_have_triton_s_order() -> None:
    answer = encode_response("m", "1", Request(request_id="7"), [tensor("x", 1, 2)])
    assert answer.body == (
        b'{"id":"7","model_name":"m","model_version":"1",'
        b'"outputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[1.0,2.0]}]}'
    )
    assert answer.headers == {"Content-Type": "application/json"}


def test_a_response_without_id_has_none() -> None:
    header, _ = parts(encode_response("m", "1", Request(), [tensor("x", 1)]))
    assert list(header) == ["model_name", "model_version", "outputs"]


def test_a_response_may_mix_json_and_binary() -> None:
    outputs = (RequestedOutput("x", binary=True), RequestedOutput("y"))
    answer = encode_response("m", "1", Request(outputs=outputs), [tensor("x", 1), tensor("y", 2)])
    header, binary = parts(answer)
    assert header["outputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
        {"name": "y", "datatype": "FP32", "shape": [1], "data": [2.0]},
    ]
    assert binary == np.float32(1).tobytes()
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers[HEADER_LENGTH] == str(len(answer.body) - 4)


def test_a_response_with_only_empty_binary_outputs_is_json() -> None:
    answer = encode_response("m", "1", Request(binary_output=True), [tensor("x")])
    header, _ = parts(answer)
    assert answer.headers == {"Content-Type": "application/json"}
    assert header["outputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}}
    ]


def test_nan_and_infinity_are_bare_tokens_both_ways() -> None:
    request = parse(
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[NaN,Infinity,-Infinity]}]}'
    )
    assert (
        b'"data":[NaN,Infinity,-Infinity]'
        in encode_response("m", "1", request, request.inputs).body
    )
