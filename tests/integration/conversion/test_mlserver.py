"""Clients of a real MLServer, which takes only JSON, use every encoding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.mlserver.server import MLServer
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.infer_messages import (
    FLOATS,
    Array,
    Request,
    Tensor,
    read_outputs,
    tensor,
)
from tests.integration.support.round_trip import check_echo, send
from tests.integration.support.strategies import SIZES, elements, generated, requests
from tests.support.scale import scaled

pytestmark = pytest.mark.mlserver

MIXED = ("FP32", "INT64", "BYTES", "BOOL")
LARGE = 300_000


@pytest.fixture(scope="module")
def gateway(mlserver: MLServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    route = {"nonfinite": "string"}
    with running_gateway(
        folder, mlserver.http_url, dialect=mlserver.dialect, route=route
    ) as running:
        yield running


@pytest.fixture(scope="module")
def via_gateway(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.host, gateway.port) as client:
        yield client


def finite(values: Array, datatype: str) -> Array:
    """Replace what MLServer writes as null: infinities and NaN."""
    return np.nan_to_num(values, posinf=1, neginf=-1) if datatype in FLOATS else values


def with_plain_id(request: Request) -> Request:
    """Give a request an id that MLServer can put unescaped into a header."""
    return request if request.id is None else replace(request, id="7")


@generated(max_examples=scaled(80))
@given(data=st.data())
def test_several_datatypes_in_mixed_forms(via_gateway: Client, data: st.DataObject) -> None:
    inputs = []
    for datatype in MIXED:
        flat = finite(data.draw(elements(datatype, data.draw(SIZES))), datatype)
        inputs.append(Tensor(f"IN_{datatype}", datatype, flat, flat.shape))
    names = tuple(f"OUT_{datatype}" for datatype in MIXED)
    request = with_plain_id(data.draw(requests("mixed", tuple(inputs), names)))
    sent = {each.name.replace("IN_", "OUT_"): each for each in inputs}
    outputs = read_outputs(send(via_gateway, request))
    assert [each.name for each in outputs] == list(dict(request.outputs) or names)
    for output in outputs:
        check_echo((output,), sent[output.name])
        assert output.binary == request.wants_binary(output.name)


@pytest.mark.parametrize(("binary", "wanted"), [(True, False), (False, True)])
def test_large_tensors(via_gateway: Client, binary: bool, wanted: bool) -> None:
    values = np.random.default_rng(1).standard_normal(LARGE).astype("<f4")
    sent = Tensor("INPUT0", "FP32", values, (LARGE,), binary=binary)
    request = Request("identity_fp32", (sent,), binary_data_output=wanted)
    check_echo(read_outputs(send(via_gateway, request)), sent)


@pytest.mark.parametrize("binary", [True, False])
def test_nonfinite_values(via_gateway: Client, binary: bool) -> None:
    """It reads strings for such numbers, and has null for all of them."""
    sent = tensor("INPUT0", "FP32", [np.nan, np.inf, 1], binary=binary)
    request = Request("identity_fp32", (sent,), binary_data_output=True)
    (output,) = read_outputs(send(via_gateway, request))
    np.testing.assert_array_equal(output.elements, [np.nan, np.nan, 1])


def test_nested_bytes_arrive(via_gateway: Client) -> None:
    """Which MLServer alone loses without a word."""
    sent = tensor("INPUT0", "BYTES", [b"a", b"b"], [2, 1])
    check_echo(read_outputs(send(via_gateway, Request("identity_bytes", (sent,)))), sent)


def test_bytes_that_are_not_utf8(via_gateway: Client, mlserver: MLServer, tmp_path: Path) -> None:
    sent = tensor("INPUT0", "BYTES", [b"\xff\x00", b"", b"a"], binary=True)
    request = Request("identity_bytes", (sent,), binary_data_output=True)
    refused = send(via_gateway, request)
    assert refused.status == 400
    assert "input 'INPUT0': element 0 is not UTF-8" in refused.error
    route = {"bytes": "base64"}
    with (
        running_gateway(
            tmp_path, mlserver.http_url, dialect=mlserver.dialect, route=route
        ) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        check_echo(read_outputs(send(client, request)), sent)


def test_its_own_errors_pass(via_gateway: Client) -> None:
    sent = tensor("INPUT0", "FP32", [1], binary=True)
    response = send(via_gateway, Request("unknown", (sent,), binary_data_output=True))
    assert response.status == 404
    assert "unknown" in response.error
