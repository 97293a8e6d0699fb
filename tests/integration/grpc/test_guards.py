"""Requests of gRPC clients that confuse a server over gRPC are refused with INVALID_ARGUMENT."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.support.client_forms import open_channel, stub_of
from tests.integration.support.gateway import running_gateway
from tests.integration.support.real_server import RealServer

PATIENCE = 10.0
DATA = np.array([1, 2], np.float32)


def infer_request(size: int, *, raw: bool, typed: bool) -> Any:
    request = service_pb2.ModelInferRequest(model_name="identity_fp32")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[size])
    if typed:
        tensor.contents.fp32_contents.extend(DATA.tolist())
    if raw:
        request.raw_input_contents.append(DATA.tobytes())
    return request


@pytest.fixture(scope="module")
def stub(real_server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gateway in front of each of the servers in turn."""
    folder = tmp_path_factory.mktemp("gateway")
    with (
        running_gateway(folder, real_server.grpc_url, dialect="auto") as gateway,
        open_channel(gateway.address) as channel,
    ):
        yield stub_of(channel)


def check_refused(stub: Any, request: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        stub.ModelInfer(request, timeout=PATIENCE)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "INPUT0" in raised.value.details()


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
def test_shape_that_does_not_fit_the_data(stub: Any, raw: bool) -> None:
    check_refused(stub, infer_request(3, raw=raw, typed=not raw))


def test_raw_and_typed_contents_of_one_tensor(stub: Any) -> None:
    check_refused(stub, infer_request(2, raw=True, typed=True))


def test_stream_with_tensors_that_do_not_fit_their_data(stub: Any, real_server: RealServer) -> None:
    """KServe serves no streams."""
    if real_server.name != "mlserver":
        pytest.skip("the server checks them itself, or serves no streams")
    good, bad = (infer_request(size, raw=True, typed=False) for size in (2, 3))
    responses = stub.ModelStreamInfer(iter([good, bad]), timeout=PATIENCE)
    with pytest.raises(grpc.RpcError) as raised:
        list(responses)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "INPUT0" in raised.value.details()
