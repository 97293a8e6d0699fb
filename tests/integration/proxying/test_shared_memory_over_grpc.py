"""Tensors go to a Triton's gRPC address and back through shared memory, whoever the client is.

As in test_shared_memory.py, each call carries a pattern of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.proxying.shared_memory_calls import (
    binary_request,
    json_request,
    our_regions,
    pattern,
    raw_request,
    until,
)
from tests.integration.proxying.shared_memory_calls import call as call_over_http
from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, gateway_with_settings
from tests.integration.triton.models import Model, Tensor, named
from tests.integration.triton.server import HOST, TritonServer
from tests.support.addresses import free_address

pytestmark = pytest.mark.triton

_SIZE = 4 * 3 * 224 * 224
_COUNT = re.compile(
    r'^tensorgate_shared_memory_calls_total{.*lane="(\w+)",reason="(\w*)",tensors="(\w+)".*} (\d+)',
    re.MULTILINE,
)
FILLED = Model(
    "filled",
    "filled",
    (Tensor("INPUT0", "FP32", (1,)),),
    (Tensor("OUTPUT0", "FP32", (_SIZE // 4,)),),
)
"""It returns as many elements as an image has, each of which is its input."""
SHARED = {"inputs": ("shared_memory", ""), "outputs": ("shared_memory", "")}


class SharingGateway:
    """A gateway before a server, and what it tells of its shared memory."""

    def __init__(self, gateway: Gateway, admin: str) -> None:
        self.gateway = gateway
        self._admin = admin

    @property
    def memory(self) -> Mapping[str, Any]:
        """The memory of its endpoint."""
        host, _, port = self._admin.rpartition(":")
        with Client(host, int(port)) as client:
            upstream = client.get("/status").fields["upstreams"]["server"]
        (endpoint,) = upstream["endpoints"]
        found: Mapping[str, Any] = endpoint["shared_memory"]
        return found

    def counts(self) -> dict[tuple[str, str, str], int]:
        """Count how inputs and outputs went so far."""
        host, _, port = self._admin.rpartition(":")
        with Client(host, int(port)) as client:
            text = client.get("/metrics").body.decode()
        return {(tensors, lane, why): int(n) for lane, why, tensors, n in _COUNT.findall(text)}

    def client(self) -> Client:
        """Connect over HTTP/1.1."""
        return Client(self.gateway.host, self.gateway.port)

    def went(self, send: Callable[[], object]) -> dict[str, tuple[str, str]]:
        """Make one call; return lane and reason of its tensors."""
        before = self.counts()
        send()
        found: dict[str, tuple[str, str]] = {}

        def is_counted() -> bool:
            for (tensors, lane, why), n in self.counts().items():
                if n > before.get((tensors, lane, why), 0):
                    found[tensors] = lane, why
            return bool(found)

        until(is_counted)
        return found


@contextmanager
def gateway_over_grpc(
    folder: Path,
    server: TritonServer,
    *,
    both: bool = False,
    route: Mapping[str, Any] | None = None,
    **upstream: Any,
) -> Iterator[SharingGateway]:
    """Run a gateway that gets inference to a server over gRPC; nothing is left at its end."""
    folder.mkdir(exist_ok=True)
    grpc_url = f"grpc://{HOST}:{server.grpc_port}"
    endpoint: Any = {"http": server.http_url, "grpc": grpc_url} if both else grpc_url
    protocol = {"inference_protocol": "grpc"} if both else {}
    admin = free_address()
    settings = {
        "listen": f"{HOST}:0",
        "admin": admin,
        "upstreams": {
            "server": {
                "endpoints": [endpoint],
                "shared_memory": {"size": "16MiB", "min_bytes": "128KiB"},
                **protocol,
                **upstream,
            }
        },
        "routes": [{"upstream": "server", **(route or {})}],
    }
    with gateway_with_settings(folder, settings) as gateway:
        until(lambda: "shared memory" in gateway.log)
        sharing = SharingGateway(gateway, admin)
        yield sharing
        until(lambda: not sharing.memory["in_use"] and not sharing.memory["quarantined"])
        with sharing.client() as client:
            assert client.get("/v2/health/ready").status == 200
        assert server.is_alive()
        assert "Traceback" not in gateway.log


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer((*named("image", "identity_fp32", "slow"), FILLED)) as running:
        yield running


@pytest.fixture(scope="module", params=["grpc", "both"])
def shared(
    request: pytest.FixtureRequest,
    server: TritonServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SharingGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_over_grpc(folder, server, both=request.param == "both") as gateway:
        with gateway.client() as client:  # the first call has the metadata fetched
            assert call_over_http(client, pattern(0)) == 200
        until(partial(_is_shared, gateway, partial(_call_once, gateway)))
        yield gateway


def _call_once(gateway: SharingGateway) -> None:
    with gateway.client() as client:
        assert call_over_http(client, pattern(0)) == 200


@pytest.mark.parametrize("form", [binary_request, json_request, raw_request])
def test_tensors_of_http_clients_come_back_as_they_were_sent(
    shared: SharingGateway, server: TritonServer, form: Any
) -> None:
    with shared.client() as client:
        for number in range(5):
            assert shared.went(partial(_check, client, number, form)) == SHARED
    assert len(our_regions(server)) == 1


def _is_shared(gateway: SharingGateway, call: Callable[[], object]) -> bool:
    return gateway.went(call) == SHARED


def _check(client: Client, number: int, form: Any) -> None:
    assert call_over_http(client, pattern(number), form) == 200


# ------------------------------------------------------------------------------- gRPC clients


@contextmanager
def stub_of(gateway: SharingGateway, **options: Any) -> Iterator[Any]:
    """Connect over gRPC."""
    sizes = [(f"grpc.max_{each}_message_length", -1) for each in ("send", "receive")]
    with grpc.insecure_channel(gateway.gateway.address, options=sizes, **options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def message_of(values: Any, **more: Any) -> Any:
    message = service_pb2.ModelInferRequest(model_name="image", **more)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=values.shape)
    message.raw_input_contents.append(values.tobytes())
    return message


def call_over_grpc(stub: Any, values: Any, message: Any = None, **options: Any) -> Any:
    """Make a call; fail if it returns other values than were sent."""
    response = stub.ModelInfer(message or message_of(values), **options)
    (output,) = response.outputs
    assert list(output.shape) == list(values.shape)
    (data,) = response.raw_output_contents
    assert data == values.tobytes()
    return response


def test_tensors_of_grpc_clients_come_back_as_they_were_sent(shared: SharingGateway) -> None:
    with stub_of(shared) as stub:
        for number in range(5):
            assert shared.went(partial(call_over_grpc, stub, pattern(number))) == SHARED


def filled_message(number: float) -> Any:
    message = service_pb2.ModelInferRequest(model_name=FILLED.name)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1])
    message.raw_input_contents.append(np.float32(number).tobytes())
    return message


def call_filled(stub: Any, number: float) -> None:
    """Make a call of few bytes; fail if it does not return as many of this number as it should."""
    (data,) = stub.ModelInfer(filled_message(number)).raw_output_contents
    assert data == np.full(_SIZE // 4, number, np.float32).tobytes()


def test_large_outputs_of_small_messages_come_back_as_the_model_returns_them(
    shared: SharingGateway,
) -> None:
    alone = {"inputs": ("socket", "small"), "outputs": ("shared_memory", "")}
    with stub_of(shared) as stub:
        call_filled(stub, 0)  # it has the metadata fetched
        until(lambda: shared.went(partial(call_filled, stub, 0)) == alone)
        for number in range(5):
            call_over_grpc(stub, pattern(number))  # the slices have other bytes then
            assert shared.went(partial(call_filled, stub, number)) == alone


def test_id_parameters_and_listed_outputs_of_a_message_are_kept(shared: SharingGateway) -> None:
    values = pattern(1)
    message = message_of(values, id="mine", model_version="1")
    message.parameters["priority"].uint64_param = 1
    message.outputs.add(name="OUTPUT0")
    with stub_of(shared) as stub:
        response = call_over_grpc(stub, values, message)
    assert (response.model_name, response.model_version, response.id) == ("image", "1", "mine")
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("OUTPUT0", "FP32")
    assert not output.parameters


def test_error_of_a_message_in_shared_memory_is_that_of_the_server(
    shared: SharingGateway, server: TritonServer
) -> None:
    message = message_of(pattern(1))
    message.inputs[0].shape[:] = [1, 224, 224, 3]
    errors = []
    with (
        stub_of(shared) as stub,
        grpc.insecure_channel(f"{HOST}:{server.grpc_port}") as channel,
    ):
        for each in (stub, service_pb2_grpc.GRPCInferenceServiceStub(channel)):
            with pytest.raises(grpc.RpcError) as caught:
                each.ModelInfer(message)
            errors.append((caught.value.code(), caught.value.details()))
    assert errors[0] == errors[1]
    assert errors[0][0] is grpc.StatusCode.INVALID_ARGUMENT


def _other_messages() -> dict[str, Any]:
    """Return messages that do not go through shared memory."""
    values = pattern(1)
    typed = service_pb2.ModelInferRequest(model_name="image")
    tensor = typed.inputs.add(name="INPUT0", datatype="FP32", shape=values.shape)
    tensor.contents.fp32_contents.extend(values.ravel())
    small = service_pb2.ModelInferRequest(model_name="identity_fp32")
    small.inputs.add(name="INPUT0", datatype="FP32", shape=[1])
    small.raw_input_contents.append(b"1234")
    return {"typed": typed, "small": small}


@pytest.mark.parametrize("kind", ["typed", "small"])
def test_message_of_another_kind_passes_as_it_came(shared: SharingGateway, kind: str) -> None:
    before = shared.counts()
    with stub_of(shared) as stub:
        response = stub.ModelInfer(_other_messages()[kind])
        assert len(response.raw_output_contents[0]) == (4 if kind == "small" else _SIZE)
    assert shared.counts() == before


def test_compressed_message_passes_as_it_came(shared: SharingGateway) -> None:
    values = np.zeros((1, 3, 224, 224), np.float32)
    before = shared.counts()
    with stub_of(shared) as stub:
        call_over_grpc(stub, values, compression=grpc.Compression.Gzip)
    assert shared.counts() == before


def test_message_whose_contents_do_not_fit_gets_the_error_of_the_server(
    shared: SharingGateway,
) -> None:
    message = message_of(pattern(1))
    message.inputs[0].shape[:] = [2, 3, 224, 224]
    before = shared.counts()
    with stub_of(shared) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert shared.counts() == before


def test_tensors_of_a_model_that_the_route_renames_come_back_as_they_were_sent(
    server: TritonServer, tmp_path: Path
) -> None:
    route = {"rewrite": {"model": "image", "version": "1"}}
    with gateway_over_grpc(tmp_path, server, route=route) as gateway, stub_of(gateway) as stub:

        def call(number: int) -> None:
            values = pattern(number)
            message = message_of(values)
            message.model_name = "photo"
            call_over_grpc(stub, values, message)

        call(0)
        until(partial(_is_shared, gateway, partial(call, 0)))
        for number in range(5):
            assert _is_shared(gateway, partial(call, number))


def test_grpc_clients_of_a_server_over_http_share_memory(
    server: TritonServer, tmp_path: Path
) -> None:
    http = [server.http_url]
    with (
        gateway_over_grpc(tmp_path, server, endpoints=http) as gateway,
        stub_of(gateway) as stub,
    ):
        call_over_grpc(stub, pattern(0))
        until(partial(_is_shared, gateway, partial(call_over_grpc, stub, pattern(0))))
        for number in range(5):
            call_over_grpc(stub, pattern(number))


# ------------------------------------------------------------------------------- faults


def test_more_calls_than_slices_take_the_socket(shared: SharingGateway) -> None:
    def calls(worker: int) -> None:
        if worker % 2:
            with stub_of(shared) as stub:
                for i in range(10):
                    call_over_grpc(stub, pattern(100 * worker + i))
        else:
            with shared.client() as client:
                for i in range(10):
                    _check(client, 100 * worker + i, raw_request)

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(calls, range(24)))
    assert shared.counts()["inputs", "socket", "full"]


@pytest.mark.parametrize(
    "message", [message_of(pattern(1)), filled_message(1)], ids=["large", "small"]
)
@pytest.mark.parametrize("seconds", [0.001, 0.003, 0.006, 0.02])
def test_client_that_leaves_harms_no_other(
    shared: SharingGateway, seconds: float, message: Any
) -> None:
    with stub_of(shared) as leaving, stub_of(shared) as stub:
        for number in range(20):
            future = leaving.ModelInfer.future(message)
            with suppress(grpc.FutureTimeoutError):
                future.result(timeout=seconds)
            future.cancel()
            call_over_grpc(stub, pattern(number))
            call_filled(stub, number)


def test_deadline_of_a_client_harms_no_other(shared: SharingGateway) -> None:
    with stub_of(shared) as stub:
        for number in range(20):
            try:
                call_over_grpc(stub, pattern(1), timeout=0.004)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017
            call_over_grpc(stub, pattern(number))


def test_region_that_somebody_unregisters_is_replaced(
    shared: SharingGateway, server: TritonServer
) -> None:
    forgotten = {"inputs": ("socket", "forgotten"), "outputs": ("socket", "forgotten")}
    with stub_of(shared) as stub, shared.client() as client:
        calls: list[Callable[[], object]] = [
            partial(call_over_grpc, stub, pattern(1)),
            partial(_check, client, 2, binary_request),
            partial(_check, client, 3, json_request),
        ]
        for call in calls:
            before = our_regions(server)
            with Client(HOST, server.http_port) as other:
                assert other.send("POST", "/v2/systemsharedmemory/unregister", b"").status == 200
            assert shared.went(call) == forgotten
            until(lambda: our_regions(server))
            assert our_regions(server) != before
            until(partial(_is_shared, shared, call))


def test_server_that_is_restarted_gets_another_region(tmp_path: Path) -> None:
    with TritonServer(named("image")) as server, ExitStack() as stack:
        gateway = stack.enter_context(gateway_over_grpc(tmp_path, server))
        stub = stack.enter_context(stub_of(gateway))
        call_over_grpc(stub, pattern(1))
        server.stop(0)
        server.start()
        for number in range(3):
            call_over_grpc(stub, pattern(number), wait_for_ready=True)
        until(lambda: our_regions(server))
        call_over_grpc(stub, pattern(4))
