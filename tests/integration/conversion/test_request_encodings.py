"""Requests to a real Triton get the same tensors through the gateway as directly."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.infer_messages import (
    DTYPES,
    HALVES,
    Output,
    Request,
    Tensor,
    read_outputs,
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


# Model, datatype, dimensions.
MODELS = [
    *((f"identity_{each.lower()}", each, 1) for each in sorted({*DTYPES} - {*HALVES})),
    ("identity_fp32_2d", "FP32", 2),
    ("identity_bytes_2d", "BYTES", 2),
    ("two_variable", "FP32", 2),
    ("batched_var", "FP32", 3),
    ("batched_fp32", "FP32", 2),
]


@generated(max_examples=scaled(360))
@given(described=st.sampled_from(MODELS), data=st.data())
def test_one_tensor(
    via_gateway: Client, direct: Client, described: tuple[str, str, int], data: st.DataObject
) -> None:
    model, datatype, rank = described
    batched = model.startswith("batched")
    shape = [data.draw(st.integers(batched, 8 // rank)) for _ in range(rank)]
    if batched:
        shape[-1] = 4
    flat = data.draw(elements(datatype, int(np.prod(shape))))
    sent = Tensor("INPUT0", datatype, flat, tuple(shape))
    flat_values = replace(sent, shape=flat.shape).values()
    sent = replace(sent, data=data.draw(st.none() | rearranged(flat_values)))
    request = data.draw(requests(model, (sent,), ("OUTPUT0",)))
    check_echo(check_same(via_gateway, direct, request), request.inputs[0])


MIXED = ("FP32", "INT64", "BYTES", "BOOL")


@generated(max_examples=scaled(200))
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
