"""Outputs come in the requested encoding, JSON or binary, from every server."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.kserve.server import KServe
from tests.integration.support.client import Client
from tests.integration.support.gateway import running_gateway
from tests.integration.support.infer_messages import Output, Request, Tensor, read_outputs, tensor
from tests.integration.support.round_trip import check_echo, send
from tests.integration.support.strategies import SIZES, elements, generated, requests
from tests.support.scale import scaled
from tests.support.servers.openvino.server import OpenVino

MIXED = ("FP32", "INT64", "BYTES", "BOOL")
NAMES = ("SUM", "DIFFERENCE")


@pytest.fixture(scope="module")
def before_openvino(
    openvino: OpenVino, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("gateway")
    with (
        running_gateway(folder, openvino.http_url, dialect=openvino.dialect) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def before_kserve(kserve: KServe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("gateway")
    with (
        running_gateway(folder, kserve.http_url, dialect=kserve.dialect) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


def answered(client: Client, request: Request) -> dict[str, Output]:
    """Return the outputs by name; each that was asked for has to have the form that was, too."""
    outputs = read_outputs(send(client, request))
    listed = dict(request.outputs)
    for output in outputs:
        # OpenVINO's server gives those that were not listed as well.
        if not listed or output.name in listed:
            assert output.binary == request.wants_binary(output.name)
    return {output.name: output for output in outputs}


@generated(max_examples=scaled(60))
@given(data=st.data())
def test_openvino_two_outputs(before_openvino: Client, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 8))
    # What is not finite it has no JSON for.
    finite = st.floats(-1000, 1000, width=32)
    left, right = (
        np.array(data.draw(st.lists(finite, min_size=size, max_size=size)), "<f4") for _ in range(2)
    )
    inputs = Tensor("INPUT0", "FP32", left, (size,)), Tensor("INPUT1", "FP32", right, (size,))
    outputs = answered(before_openvino, data.draw(requests("add", inputs, NAMES)))
    assert tuple(outputs) == NAMES  # all of them, in the model's order
    np.testing.assert_array_equal(outputs["SUM"].elements, left + right)
    np.testing.assert_array_equal(outputs["DIFFERENCE"].elements, left - right)


@generated(max_examples=scaled(80))
@given(data=st.data())
def test_openvino_several_datatypes(before_openvino: Client, data: st.DataObject) -> None:
    sent = {}
    for datatype in MIXED:
        flat = data.draw(elements(datatype, data.draw(SIZES)))
        if datatype == "FP32":
            flat = np.nan_to_num(flat, posinf=1, neginf=-1)
        sent[f"OUT_{datatype}"] = Tensor(f"IN_{datatype}", datatype, flat, flat.shape)
    request = data.draw(requests("mixed", tuple(sent.values()), tuple(sent)))
    for name, output in answered(before_openvino, request).items():
        check_echo((output,), sent[name])


@pytest.mark.parametrize("last", NAMES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_openvino_each_form_of_each_output(
    before_openvino: Client, last: str, first: bool, second: bool
) -> None:
    """Of which the one that is listed last comes in binary form, the other one as JSON."""
    other = next(name for name in NAMES if name != last)
    inputs = tensor("INPUT0", "FP32", [3, 0.5]), tensor("INPUT1", "FP32", [1, 0.25])
    request = Request("add", inputs, ((other, first), (last, second)))
    outputs = answered(before_openvino, request)
    assert outputs["SUM"].elements.tolist() == [4, 0.75]
    assert outputs["DIFFERENCE"].elements.tolist() == [2, 0.25]


@pytest.mark.parametrize("binary", [True, False])
def test_openvino_without_elements(before_openvino: Client, binary: bool) -> None:
    for model, names in (("identity_fp32", ("INPUT0",)), ("add", ("INPUT0", "INPUT1"))):
        inputs = tuple(tensor(name, "FP32", [], binary=binary) for name in names)
        outputs = answered(before_openvino, Request(model, inputs, binary_data_output=binary))
        assert len(outputs) == len(names)
        assert all(output.shape == (0,) for output in outputs.values())


@pytest.mark.parametrize("binary", [True, False])
def test_openvino_nonfinite_values_are_an_error_beside_another_output(
    before_openvino: Client, openvino: OpenVino, binary: bool
) -> None:
    """Its JSON is broken then; alone, or listed last, an output comes in binary form."""
    sent = tensor("INPUT0", "FP32", [np.nan, np.inf])
    request = Request("add", (sent, tensor("INPUT1", "FP32", [1, 1])), binary_data_output=binary)
    response = send(before_openvino, request)
    assert response.status == 502
    assert response.error.startswith("upstream 'server': ")
    alone = Request("identity_fp32", (sent,), binary_data_output=binary)
    check_echo(tuple(answered(before_openvino, alone).values()), sent)


def test_openvino_large_outputs(before_openvino: Client) -> None:
    """One of which is, as JSON, more than may stand around data."""
    values = np.random.default_rng(2).standard_normal(200_000).astype("<f4")
    inputs = tuple(
        Tensor(name, "FP32", values, values.shape, binary=True) for name in ("INPUT0", "INPUT1")
    )
    for binary in (True, False):
        outputs = answered(before_openvino, Request("add", inputs, binary_data_output=binary))
        np.testing.assert_array_equal(outputs["SUM"].elements, values + values)
        np.testing.assert_array_equal(outputs["DIFFERENCE"].elements, 0 * values)


def test_openvino_v1(before_openvino: Client) -> None:
    rows = [{"INPUT0": 3, "INPUT1": 1}, {"INPUT0": 0.5, "INPUT1": 0.25}]
    response = before_openvino.send(
        "POST", "/v1/models/add:predict", json.dumps({"instances": rows}).encode()
    )
    told = [{"SUM": 4, "DIFFERENCE": 2}, {"SUM": 0.75, "DIFFERENCE": 0.25}]
    assert (response.status, response.fields) == (200, {"predictions": told})
    row = {"IN_FP32": 0.5, "IN_INT64": 2**40, "IN_BYTES": "é", "IN_BOOL": True}
    response = before_openvino.send(
        "POST", "/v1/models/mixed:predict", json.dumps({"instances": [row]}).encode()
    )
    told_row = {name.replace("IN_", "OUT_"): value for name, value in row.items()}
    assert (response.status, response.fields) == (200, {"predictions": [told_row]})


@pytest.mark.kserve
@generated(max_examples=scaled(40))
@given(data=st.data())
def test_kserve_models_that_answer_in_json(before_kserve: Client, data: st.DataObject) -> None:
    flat = np.nan_to_num(data.draw(elements("FP32", data.draw(SIZES))), posinf=1, neginf=-1)
    sent = Tensor("INPUT0", "FP32", flat, flat.shape)
    request = data.draw(requests("always_json", (sent,), ("OUTPUT0",)))
    check_echo(tuple(answered(before_kserve, request).values()), sent)


@pytest.mark.kserve
def test_kserve_json_of_nonfinite_values(before_kserve: Client) -> None:
    """KServe writes null for it, which is NaN."""
    sent = tensor("INPUT0", "FP32", [np.nan, 1])
    request = Request("always_json", (sent,), binary_data_output=True)
    check_echo(tuple(answered(before_kserve, request).values()), sent)


@pytest.mark.kserve
def test_kserve_large_json(before_kserve: Client) -> None:
    values = np.random.default_rng(3).standard_normal(200_000).astype("<f4")
    sent = Tensor("INPUT0", "FP32", values, values.shape, binary=True)
    request = Request("always_json", (sent,), binary_data_output=True)
    (output,) = answered(before_kserve, request).values()
    assert output.data == values.tobytes()


@pytest.mark.kserve
def test_kserve_v1(before_kserve: Client) -> None:
    response = before_kserve.send(
        "POST", "/v1/models/always_json:predict", b'{"instances":[0.5, 2]}'
    )
    assert (response.status, response.fields) == (200, {"predictions": [0.5, 2]})
