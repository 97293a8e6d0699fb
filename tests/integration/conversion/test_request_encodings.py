"""Requests to a real Triton get the same tensors through the gateway as directly."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.gateway import Gateway
from tests.integration.support.infer_messages import (
    DTYPES,
    HALVES,
    Output,
    Request,
    Tensor,
    read_outputs,
    tensor,
)
from tests.integration.support.round_trip import check_echo, send
from tests.integration.support.strategies import SIZES, elements, generated, rearranged, requests
from tests.support.scale import scaled

pytestmark = pytest.mark.triton


def check_frame(response: Response, like: Response) -> None:
    """Check all but the outputs: the HTTP headers, and the members around the outputs."""
    assert (response.status, response.reason) == (like.status, like.reason)
    assert response.headers["Content-Type"] == like.headers["Content-Type"]
    assert response.headers["Content-Length"] == str(len(response.body))
    assert (HEADER_LENGTH in response.headers) == (HEADER_LENGTH in like.headers)
    assert list(response.fields) == list(like.fields)
    assert {**response.fields, "outputs": None} == {**like.fields, "outputs": None}


def check_outputs(outputs: tuple[Output, ...], like: tuple[Output, ...], request: Request) -> None:
    as_json = any(not each.binary for each in request.inputs)
    for output, other in zip(outputs, like, strict=True):
        if output.datatype == "FP64" and (as_json or not output.binary):
            # Triton's own parser and printer are off by a unit in the last place at times.
            np.testing.assert_allclose(output.elements, other.elements, rtol=2**-51)
            other = replace(other, data=output.data)
        assert output == other


def check_same(via_gateway: Client, direct: Client, request: Request) -> tuple[Output, ...]:
    """Check that the gateway answers as the server does, and return the outputs."""
    response, like = send(via_gateway, request), send(direct, request.spelled_out())
    outputs = read_outputs(response)
    check_outputs(outputs, read_outputs(like), request)
    check_frame(response, like)
    return outputs


SERVER_DATATYPES = [datatype for datatype in DTYPES if datatype not in HALVES]


@pytest.mark.parametrize("datatype", SERVER_DATATYPES)
@generated(max_examples=scaled(60))
@given(data=st.data())
def test_one_tensor(
    via_gateway: Client, direct: Client, datatype: str, data: st.DataObject
) -> None:
    flat = data.draw(elements(datatype, data.draw(SIZES)))
    sent = Tensor("INPUT0", datatype, flat, flat.shape)
    sent = replace(sent, data=data.draw(rearranged(sent.values())))
    request = data.draw(requests(f"identity_{datatype.lower()}", (sent,), ("OUTPUT0",)))
    check_echo(check_same(via_gateway, direct, request), request.inputs[0])


@pytest.mark.parametrize("datatype", DTYPES)
@generated(max_examples=scaled(25))
@given(data=st.data())
def test_one_tensor_binary_both_ways(
    via_gateway: Client, direct: Client, datatype: str, data: st.DataObject
) -> None:
    flat = data.draw(elements(datatype, data.draw(SIZES), text=False))
    sent = Tensor("INPUT0", datatype, flat, flat.shape, binary=True)
    request = Request(f"identity_{datatype.lower()}", (sent,), binary_data_output=True)
    (output,) = check_same(via_gateway, direct, request)
    assert output.data == sent.encoded()
    assert send(via_gateway, request).body == send(direct, request).body


@pytest.mark.parametrize("datatype", HALVES)
@generated(max_examples=scaled(60))
@given(data=st.data())
def test_half_floats_have_a_json_form(
    via_gateway: Client, direct: Client, datatype: str, data: st.DataObject
) -> None:
    flat = data.draw(elements(datatype, data.draw(SIZES)))
    sent = Tensor("INPUT0", datatype, flat, flat.shape)
    request = data.draw(requests(f"identity_{datatype.lower()}", (sent,), ("OUTPUT0",)))
    response, like = send(via_gateway, request), send(direct, request.all_binary())
    (output,) = read_outputs(response)
    check_echo((output,), request.inputs[0])
    check_echo(read_outputs(like), replace(request.inputs[0], binary=True))
    assert output.binary == request.wants_binary("OUTPUT0")
    last = "parameters" if output.binary else "data"
    assert output.keys == ("name", "datatype", "shape", last)
    assert list(response.fields) == list(like.fields)
    is_binary = output.binary and output.data != b""
    kind = "application/octet-stream" if is_binary else "application/json"
    assert response.headers["Content-Type"] == kind
    assert response.headers["Content-Length"] == str(len(response.body))
    assert (HEADER_LENGTH in response.headers) == is_binary


@pytest.mark.parametrize(
    ("model", "datatype", "rank"),
    [
        ("identity_fp32_2d", "FP32", 2),
        ("identity_bytes_2d", "BYTES", 2),
        ("two_variable", "FP32", 2),
        ("batched_var", "FP32", 3),
        ("batched_fp32", "FP32", 2),
    ],
)
@generated(max_examples=scaled(40))
@given(data=st.data())
def test_more_dimensions(
    via_gateway: Client, direct: Client, model: str, datatype: str, rank: int, data: st.DataObject
) -> None:
    batched = model.startswith("batched")
    shape = [data.draw(st.integers(batched, 4)) for _ in range(rank)]
    if batched:
        shape[-1] = 4
    flat = data.draw(elements(datatype, int(np.prod(shape))))
    sent = Tensor("INPUT0", datatype, flat, tuple(shape))
    flat_values = replace(sent, shape=flat.shape).values()
    sent = replace(sent, data=data.draw(st.none() | rearranged(flat_values)))
    request = data.draw(requests(model, (sent,), ("OUTPUT0",)))
    check_echo(check_same(via_gateway, direct, request), request.inputs[0])


@generated(max_examples=scaled(60))
@given(data=st.data())
def test_half_floats_in_two_dimensions(
    via_gateway: Client, direct: Client, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.tuples(*[st.integers(0, 4)] * 2)))
    flat = data.draw(elements("FP16", shape[0] * shape[1]))
    sent = Tensor("INPUT0", "FP16", flat, shape)
    request = data.draw(requests("identity_fp16_2d", (sent,), ("OUTPUT0",)))
    check_echo(read_outputs(send(via_gateway, request)), request.inputs[0])
    like = read_outputs(send(direct, request.all_binary()))
    check_echo(like, replace(request.inputs[0], binary=True))


@generated(max_examples=scaled(200))
@given(data=st.data())
def test_several_inputs_and_outputs(
    via_gateway: Client, direct: Client, data: st.DataObject
) -> None:
    size = data.draw(st.integers(0, 8))
    left, right = (data.draw(elements("FP32", size)) for _ in range(2))
    inputs = Tensor("INPUT0", "FP32", left, (size,)), Tensor("INPUT1", "FP32", right, (size,))
    request = data.draw(requests("add", inputs, ("SUM", "DIFFERENCE")))
    outputs = check_same(via_gateway, direct, request)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = {"SUM": left + right, "DIFFERENCE": left - right}
    for output in outputs:
        assert output.binary == request.wants_binary(output.name)
        np.testing.assert_array_equal(output.elements, expected[output.name])


MIXED = ("FP32", "INT64", "BYTES", "BOOL")


@generated(max_examples=scaled(250))
@given(data=st.data())
def test_several_datatypes_in_mixed_forms(
    via_gateway: Client, direct: Client, data: st.DataObject
) -> None:
    inputs = []
    for datatype in MIXED:
        flat = data.draw(elements(datatype, data.draw(SIZES)))
        inputs.append(Tensor(f"IN_{datatype}", datatype, flat, flat.shape))
    names = tuple(f"OUT_{datatype}" for datatype in MIXED)
    request = data.draw(requests("mixed", tuple(inputs), names))
    sent = {each.name.replace("IN_", "OUT_"): each for each in request.inputs}
    outputs = check_same(via_gateway, direct, request)
    assert {output.name for output in outputs} == set(dict(request.outputs) or names)
    for output in outputs:
        assert output.binary == request.wants_binary(output.name)
        check_echo((output,), sent[output.name])


def one_of_each(size: int, *, empty: str) -> Request:
    """Ask for FP32 in JSON and INT64 in binary form, of which one may be empty."""
    sizes = {f"IN_{datatype}": size for datatype in MIXED} | {empty: 0}
    values = {"FP32": 0.5, "INT64": 7, "BYTES": b"a", "BOOL": True}
    inputs = tuple(
        tensor(
            f"IN_{datatype}",
            datatype,
            [values[datatype]] * sizes[f"IN_{datatype}"],
            [sizes[f"IN_{datatype}"]],
        )
        for datatype in MIXED
    )
    return Request("mixed", inputs, (("OUT_FP32", False), ("OUT_INT64", True)))


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("empty", ["IN_FP32", "IN_INT64", "IN_BYTES"])
def test_empty_outputs_in_mixed_forms(
    via_gateway: Client, direct: Client, size: int, empty: str
) -> None:
    """Where every binary output is empty, the server answers as if all were JSON."""
    outputs = check_same(via_gateway, direct, one_of_each(size, empty=empty))
    assert {output.name: output.binary for output in outputs} == {
        "OUT_FP32": False,
        "OUT_INT64": True,
    }


@pytest.mark.parametrize("first", [True, False])
def test_an_output_listed_twice(via_gateway: Client, direct: Client, first: bool) -> None:
    sent = tensor("INPUT0", "FP32", [1, 2])
    listed = (("OUTPUT0", first), ("OUTPUT0", not first))
    body, _ = Request("identity_fp32", (sent,), listed).encoded()
    response, like = via_gateway.infer("identity_fp32", body), direct.infer("identity_fp32", body)
    check_frame(response, like)
    assert response.body == like.body


def test_many_clients_at_once(gateway: Gateway) -> None:
    def talk(number: int) -> None:
        with Client(gateway.host, gateway.port) as client:
            for size in range(40):
                values = [number + each / 1000 for each in range(size * 50)]
                sent = tensor("INPUT0", "FP32", values, binary=(number + size) % 2 == 0)
                flag = (number + size) % 3 == 0
                request = Request(
                    "identity_fp32", (sent,), binary_data_output=flag, id=f"{number}-{size}"
                )
                response = send(client, request)
                assert response.fields["id"] == request.id
                check_echo(read_outputs(response), sent)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(talk, range(8)))


def test_classification_comes_back_as_bytes(via_gateway: Client, direct: Client) -> None:
    sent = tensor("INPUT0", "FP32", [0.5, 3, -1]).values()
    fields = {"name": "INPUT0", "datatype": "FP32", "shape": [3], "data": sent}
    for binary in (False, True):
        wanted = {"name": "OUTPUT0", "parameters": {"classification": 2, "binary_data": binary}}
        body = json.dumps({"inputs": [fields], "outputs": [wanted]}).encode()
        response, like = (
            via_gateway.infer("identity_fp32", body),
            direct.infer("identity_fp32", body),
        )
        assert response.body == like.body
        assert response.headers["Content-Type"] == like.headers["Content-Type"]
        (output,) = read_outputs(response)
        assert output.elements.tolist() == [b"3.000000:1", b"0.500000:0"]
