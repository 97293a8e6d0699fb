"""Requests of gRPC clients that confuse a server over gRPC are refused with INVALID_ARGUMENT."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


def infer_request(size: int, typed: Sequence[float] = ()) -> Any:
    request = service_pb2.ModelInferRequest(model_name="identity_fp32")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=[size])
    tensor.contents.fp32_contents.extend(typed)
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


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as raised:
        yield
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "INPUT0" in raised.value.details()


def test_raw_and_typed_contents_of_one_tensor(stub: Any) -> None:
    with refused():
        stub.ModelInfer(infer_request(2, DATA.tolist()), timeout=PATIENCE)


def test_stream_with_tensors_that_do_not_fit_their_data(stub: Any, real_server: RealServer) -> None:
    """KServe serves no streams."""
    if real_server.name != "mlserver":
        pytest.skip("the server checks them itself, or serves no streams")
    with refused():
        list(stub.ModelStreamInfer(map(infer_request, (2, 3)), timeout=PATIENCE))
