"""Requests to a real KServe get the same tensors through the gateway as directly."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.kserve.models import DATATYPES
from tests.integration.kserve.server import KServe
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.infer_messages import (
    FLOATS,
    Output,
    Request,
    Tensor,
    read_outputs,
    tensor,
)
from tests.integration.support.real_server import HOST
from tests.integration.support.round_trip import check_echo, send
from tests.integration.support.strategies import SIZES, elements, generated, requests
from tests.support.scale import scaled

pytestmark = pytest.mark.kserve

MIXED = ("FP32", "INT64", "BYTES", "BOOL")


@pytest.fixture(scope="module")
def gateway(kserve: KServe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, kserve.http_url, dialect=kserve.dialect) as running:
        yield running


@pytest.fixture(scope="module")
def via_gateway(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.host, gateway.port) as client:
        yield client


@pytest.fixture(scope="module")
def direct(kserve: KServe) -> Iterator[Client]:
    with Client(HOST, kserve.http_port) as client:
        yield client


def as_sent(output: Output) -> Tensor:
    """Make an input of an output, to compare another output with."""
    return Tensor(output.name, output.datatype, output.elements, output.shape)


def check_same(via_gateway: Client, direct: Client, request: Request) -> tuple[Output, ...]:
    """Check that the gateway answers what the server does to those who know the binary form.

    But in the forms that are asked for; what an id is that nobody sent is the server's own affair.
    """
    response, like = send(via_gateway, request), send(direct, request.all_binary())
    outputs, others = read_outputs(response), read_outputs(like)
    for output, other in zip(outputs, others, strict=True):
        assert output.name == other.name
        assert output.binary == request.wants_binary(output.name)
        check_echo((output,), as_sent(other))
    assert list(response.fields) == list(like.fields)
    kept = {"outputs": None} if request.id else {"outputs": None, "id": None}
    assert {**response.fields, **kept} == {**like.fields, **kept}
    return outputs


@generated(max_examples=scaled(80))
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
    sent = {each.name.replace("IN_", "OUT_"): each for each in inputs}
    outputs = check_same(via_gateway, direct, request)
    assert [each.name for each in outputs] == list(dict(request.outputs) or names)
    for output in outputs:
        check_echo((output,), sent[output.name])


@generated(max_examples=scaled(60))
@given(data=st.data())
def test_json_means_what_the_server_itself_says_in_json(
    via_gateway: Client, direct: Client, data: st.DataObject
) -> None:
    """But for its nulls: members that have no value, and numbers that JSON has no word for."""
    datatype = data.draw(st.sampled_from([each for each in DATATYPES if each != "FP16"]))
    flat = data.draw(elements(datatype, data.draw(SIZES)))
    if datatype in FLOATS:
        flat = np.nan_to_num(flat, posinf=1, neginf=-1)
    sent = Tensor("INPUT0", datatype, flat, flat.shape)
    request = Request(f"identity_{datatype.lower()}", (sent,), id="7")
    response = send(via_gateway, request)
    like = send(direct, request, "application/json")
    assert without_outputs(response.fields) == without_outputs(like.fields)
    (output,), (other,) = read_outputs(response), read_outputs(like)
    check_echo((output,), as_sent(other))


def without_outputs(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "outputs" and value is not None}


def test_nonfinite_values_have_a_json_form(via_gateway: Client) -> None:
    """Where KServe says null for all three."""
    sent = tensor("INPUT0", "FP32", [np.nan, np.inf, -np.inf, 1])
    response = send(via_gateway, Request("identity_fp32", (sent,)))
    assert b'"data":[NaN,Infinity,-Infinity,1.0]' in response.body


def test_surplus_bytes_are_refused(via_gateway: Client) -> None:
    """Which KServe ignores."""
    sent = tensor("INPUT0", "FP32", [0.1, 2], binary=True)
    body, headers = Request("identity_fp32", (sent,)).encoded()
    assert via_gateway.infer("identity_fp32", body + b"....", headers).status == 400


def test_models_without_metadata(via_gateway: Client) -> None:
    sent = tensor("INPUT0", "FP32", [0.1, 2])
    check_echo(read_outputs(send(via_gateway, Request("undeclared", (sent,)))), sent)


def test_models_that_give_the_id_back_get_one_from_clients_of_v1(
    via_gateway: Client, direct: Client
) -> None:
    """These send none, and the server answers them in V1 without."""
    headers = {"Content-Type": "application/json"}
    for client in (via_gateway, direct):
        target = "/v1/models/gives_id_back:predict"
        response = client.send("POST", target, b'{"instances": [0.5, 2]}', headers)
        assert (response.status, response.fields) == (200, {"predictions": [0.5, 2]})


def test_an_error_of_the_server_passes_unchanged(via_gateway: Client, direct: Client) -> None:
    """And does not hurt the next request, though KServe then closes the connection unannounced."""
    sent = tensor("INPUT0", "FP32", [0.1, 2])
    for _ in range(20):
        response = send(via_gateway, Request("fails", (sent,)))
        assert (response.status, response.error) == (500, "RuntimeError : this model always fails")
        check_echo(read_outputs(send(via_gateway, Request("identity_fp32", (sent,)))), sent)


def test_response_of_many_chunks(via_gateway: Client, direct: Client) -> None:
    sent = tensor("INPUT0", "INT32", [300_000])
    (output,) = check_same(via_gateway, direct, Request("zeros", (sent,)))
    assert output.data == bytes(4 * 300_000)
