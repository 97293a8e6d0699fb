"""Outputs come in the requested encoding, JSON or binary, from every server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.kserve.server import KServe
from tests.integration.support.client import Client
from tests.integration.support.gateway import running_gateway
from tests.integration.support.infer_messages import Output, Request, Tensor, read_outputs, tensor
from tests.integration.support.real_server import InferenceServer
from tests.integration.support.round_trip import check_echo, send
from tests.integration.support.strategies import SIZES, elements, generated, requests
from tests.support.scale import scaled
from tests.support.servers.openvino.server import OpenVino

MIXED = ("FP32", "INT64", "BYTES", "BOOL")
NAMES = ("SUM", "DIFFERENCE")


@contextmanager
def _client_before(server: InferenceServer, folder: Path) -> Iterator[Client]:
    with (
        running_gateway(folder, server.http_url, dialect=server.dialect) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def before_openvino(
    openvino: OpenVino, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    with _client_before(openvino, tmp_path_factory.mktemp("gateway")) as client:
        yield client


@pytest.fixture(scope="module")
def before_kserve(kserve: KServe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with _client_before(kserve, tmp_path_factory.mktemp("gateway")) as client:
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
@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
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
