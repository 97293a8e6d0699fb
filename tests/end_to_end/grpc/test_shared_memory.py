"""Tensors go to a server over gRPC through shared memory, on the fast path and as they stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.observe import families
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE, GrpcClient, GrpcResponse, grpc_client
from tests.support.grpc.proto_file import ModelInferRequest, ModelInferResponse, infer_request
from tests.support.inference_messages import infer_binary
from tests.support.servers.grpc_server import grpc_server
from tests.support.servers.grpc_shared_memory import GrpcSharedMemoryModel

SMALL, LARGE = 8 * 1024, 256 * 1024
"""Elements of messages that take the fast path, and of such that stream."""
PATHS = pytest.mark.parametrize("elements", [SMALL, LARGE], ids=["fast path", "streaming path"])
SHARED = ("shared_memory", "")
FORGOTTEN = ("socket", "forgotten")
UNSUITABLE = ("socket", "unsuitable")
TOO_SMALL = ("socket", "small")
SIZE = 4 * 2**20
SETTING = {"size": "4MiB", "min_bytes": "1KiB"}


def tensor(elements: int) -> bytes:
    return np.arange(elements, dtype="<f4").tobytes()


def binary_request(data: bytes) -> bytes:
    size = {"binary_data_size": len(data)}
    spec = {"name": "IN", "datatype": "FP32", "shape": [len(data) // 4], "parameters": size}
    asks = {"inputs": [spec], "parameters": {"binary_data_output": True}}
    return infer_binary(json.dumps(asks).encode(), data)


class Seen:
    """A gateway in front of a model, and what it tells."""

    def __init__(
        self, gateway: RunningGateway, client: GrpcClient, model: GrpcSharedMemoryModel
    ) -> None:
        self.gateway = gateway
        self.client = client
        self.model = model

    async def infer(self, data: bytes, **options: Any) -> GrpcResponse:
        return await self.client.call("ModelInfer", infer_request("m", data), **options)

    async def call(self, data: bytes) -> dict[str, tuple[str, str]]:
        """Make a call, which must return the tensor; return lane and reason of its tensors."""

        async def send() -> None:
            response = ModelInferResponse.FromString((await self.infer(data)).message)
            assert response.id == "7"
            assert response.raw_output_contents == [data]

        return await self.went(send)

    async def call_over_http(self, data: bytes) -> dict[str, tuple[str, str]]:
        async def send() -> None:
            async with self.gateway.client() as client:
                reply = await client.ask(binary_request(data))
            assert (reply.status, reply.body[-len(data) :]) == (200, data)

        return await self.went(send)

    async def went(self, send: Callable[[], Any]) -> dict[str, tuple[str, str]]:
        before = self._counts()
        await send()
        await self.gateway.until_idle()
        found = {each: count - before.get(each, 0) for each, count in self._counts().items()}
        assert all(count in (0, 1) for count in found.values())
        return {tensors: (lane, why) for (tensors, lane, why), count in found.items() if count}

    def _counts(self) -> dict[tuple[str, ...], float]:
        sums = self.gateway.gateway.shared.metric_store.sums(families.SHARED_MEMORY_CALLS)
        return {labels[2:]: count for labels, (count,) in sums.items()}

    @property
    def memory(self) -> dict[str, Any]:
        """Return what the status tells of the endpoint's memory."""
        state, *_ = self.gateway.pool.snapshot()
        assert state.shared_memory is not None
        return state.shared_memory

    async def until_known(self, model: str, version: str | None) -> None:
        """Have the metadata fetched: no call waits for them."""
        await self.call(tensor(SMALL))
        (server,) = self.gateway.gateway.active_config.upstreams.values()
        await until(lambda: server.metadata.cached(model, version, has_config=True))
        await self.gateway.until_idle()


@asynccontextmanager
async def seen(
    *shape: int,
    upstream: dict[str, Any] | None = None,
    named: tuple[str, str | None] = ("m", None),
    **settings: Any,
) -> AsyncIterator[Seen]:
    """Run a gateway in front of a model that shares memory."""
    model = GrpcSharedMemoryModel(*shape)
    with grpc_server(unary=model.unary) as server:
        async with (
            running_gateway(
                server.url, upstream={"shared_memory": SETTING, **(upstream or {})}, **settings
            ) as gateway,
            grpc_client(gateway.url) as client,
        ):
            found = Seen(gateway, client, model)
            await until(lambda: not found.memory["why_not"])
            await found.until_known(*named)
            yield found
            model.may_respond.set()


@PATHS
async def test_tensors_of_messages_are_not_sent(elements: int) -> None:
    async with seen(elements) as it:
        assert await it.call(tensor(elements)) == {"inputs": SHARED, "outputs": SHARED}
        assert not it.model.inferred[-1].raw_input_contents
        assert len(it.model.inferred[-1].outputs) == 1
        assert (it.memory["in_use"], it.memory["quarantined"]) == (0, 0)


@PATHS
async def test_tensors_of_http_clients_are_not_sent(elements: int) -> None:
    async with seen(elements) as it:
        found = await it.call_over_http(tensor(elements))
        assert found == {"inputs": SHARED, "outputs": SHARED}
        assert not it.model.inferred[-1].raw_input_contents


@pytest.mark.parametrize("elements", [8 * SMALL, LARGE], ids=["fast path", "streaming path"])
async def test_body_of_an_http_client_is_received_into_the_slice_of_its_inputs(
    elements: int,
) -> None:
    async with seen(elements) as it:
        before = len(it.model.inferred)
        it.model.may_respond.clear()
        async with it.gateway.client() as client:
            await client.send(binary_request(tensor(elements)))
            await until(lambda: len(it.model.inferred) > before)
            # The slice has the header, too: another page.
            assert it.memory["in_use"] == 8 * elements + 4096
            it.model.may_respond.set()
            reply = await client.read_response()
        assert reply.body[-4 * elements :] == tensor(elements)


@PATHS
async def test_outputs_whose_size_is_not_certain_are_sent(elements: int) -> None:
    async with seen(-1) as it:
        assert await it.call(tensor(elements)) == {"inputs": SHARED, "outputs": UNSUITABLE}
        assert not it.model.inferred[-1].outputs


@PATHS
@pytest.mark.parametrize("version", [None, "2"])
async def test_tensors_of_a_model_that_the_route_renames_are_not_sent(
    elements: int, version: str | None
) -> None:
    route = {"rewrite": {"model": "another", "version": version}}
    async with seen(elements, route=route, named=("another", version)) as it:
        assert await it.call(tensor(elements)) == {"inputs": SHARED, "outputs": SHARED}
        sent = it.model.inferred[-1]
        assert (sent.model_name, sent.model_version) == ("another", version or "")
        assert not sent.raw_input_contents


@PATHS
async def test_message_with_a_field_after_its_contents_passes_as_it_came(elements: int) -> None:
    async with seen(elements) as it:
        last = infer_request("m", tensor(elements)) + ModelInferRequest(id="8").SerializeToString()

        async def send() -> None:
            response = await it.client.call("ModelInfer", last)
            assert ModelInferResponse.FromString(response.message).id == "8"

        assert await it.went(send) == {}


# By its metadata, the model returns more than the requests of these tests have.
LARGE_OUTPUTS = {"shared_memory": {"size": "8MiB", "min_bytes": "2MiB"}}
MANY = 1024 * 1024


@PATHS
async def test_outputs_of_a_small_message_are_not_sent(elements: int) -> None:
    async with seen(MANY, upstream=LARGE_OUTPUTS) as it:
        found = await it.call(tensor(elements))
        assert found == {"inputs": TOO_SMALL, "outputs": SHARED}
        assert it.model.inferred[-1].raw_input_contents == [tensor(elements)]
        assert len(it.model.inferred[-1].outputs) == 1
        assert it.memory["in_use"] == 0


@PATHS
async def test_small_message_passes_as_it_came_if_its_outputs_are_small(elements: int) -> None:
    async with seen(elements, upstream=LARGE_OUTPUTS) as it:
        assert await it.call(tensor(elements)) == {}
        assert not it.model.inferred[-1].outputs


async def test_small_message_that_cannot_be_buffered_streams() -> None:
    async with seen(MANY, upstream=LARGE_OUTPUTS, max_buffered_body_bytes=2 * LARGE) as it:
        assert await it.call(tensor(LARGE)) == {}


@PATHS
async def test_region_that_the_server_has_forgotten_is_replaced(elements: int) -> None:
    async with seen(elements) as it:
        before = len(it.model.inferred)
        it.model.regions.clear()
        found = await it.call(tensor(elements))
        assert found == {"inputs": FORGOTTEN, "outputs": FORGOTTEN}
        assert len(it.model.inferred) == before + 1
        await until(lambda: not it.memory["why_not"])
        assert await it.call(tensor(elements)) == {"inputs": SHARED, "outputs": SHARED}


@PATHS
async def test_outputs_larger_than_the_metadata_say_fail_once(elements: int) -> None:
    async with seen(elements // 2) as it:
        before = len(it.model.inferred)
        response = await it.infer(tensor(elements))
        assert response.code is grpc.StatusCode.INTERNAL
        assert "shared memory size" in response.text
        assert len(it.model.inferred) == before + 1  # the model has run
        await it.gateway.until_idle()
        assert await it.call(tensor(elements)) == {"inputs": SHARED, "outputs": UNSUITABLE}


ENDINGS = [
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
]


@PATHS
@pytest.mark.parametrize("code", ENDINGS)
async def test_memory_of_a_call_that_may_still_run_stays_in_quarantine(
    elements: int, code: grpc.StatusCode
) -> None:
    async with seen(elements) as it:
        it.model.ending = code, "over"
        assert (await it.infer(tensor(elements))).code is code
        await it.gateway.until_idle()
        assert it.memory["quarantined"] == 8 * elements
        it.model.ending = grpc.StatusCode.INVALID_ARGUMENT, "over"
        assert (await it.infer(tensor(elements))).code is grpc.StatusCode.INVALID_ARGUMENT
        await it.gateway.until_idle()
        assert it.memory["quarantined"] == 8 * elements
        assert it.memory["in_use"] == 0


@PATHS
async def test_call_whose_client_left_counts_until_the_server_is_done(elements: int) -> None:
    limit = {"concurrency": {"max_requests": 1, "max_queue": 0}}
    async with seen(elements, upstream=limit) as it:
        before = len(it.model.inferred)
        it.model.may_respond.clear()
        infer = it.client.channel.unary_unary(f"/{SERVICE}/ModelInfer")
        leaving = infer.future(infer_request("m", tensor(elements)))
        await until(lambda: len(it.model.inferred) > before)
        leaving.cancel()
        await until(lambda: it.memory["quarantined"])
        assert (await it.infer(tensor(elements))).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        it.model.may_respond.set()
        await until(lambda: not it.memory["quarantined"])
        assert await it.call(tensor(elements)) == {"inputs": SHARED, "outputs": SHARED}


def two_inputs(first: int, second: int, sizes: Sequence[int] | None = None) -> bytes:
    request = ModelInferRequest(model_name="m", id="7")
    for name, elements in (("IN", first), ("IN1", second)):
        request.inputs.add(name=name, datatype="FP32", shape=[elements])
    for size in sizes or (first, second):
        request.raw_input_contents.append(tensor(size))
    return bytes(request.SerializeToString())


@PATHS
async def test_several_inputs_are_in_one_slice(elements: int) -> None:
    async with seen(-1) as it:
        message = two_inputs(elements // 4, elements // 2)
        response = await it.client.call("ModelInfer", message)
        found = ModelInferResponse.FromString(response.message)
        assert found.raw_output_contents == [tensor(elements // 4), tensor(elements // 2)]
        assert not it.model.inferred[-1].raw_input_contents


async def test_contents_that_do_not_fit_pass_on_the_fast_path_and_are_refused_in_a_stream() -> None:
    async with seen(-1) as it:
        sizes = (SMALL // 4, SMALL // 2)
        response = await it.client.call("ModelInfer", two_inputs(*sizes, sizes[::-1]))
        assert response.code is grpc.StatusCode.OK  # this server does not mind
        assert it.model.inferred[-1].raw_input_contents
        before = len(it.model.inferred)
        sizes = (LARGE // 4, LARGE // 2)
        response = await it.client.call("ModelInfer", two_inputs(*sizes, sizes[::-1]))
        assert response.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "raw_input_contents" in response.text
        assert len(it.model.inferred) == before
        await it.gateway.until_idle()
        await until(lambda: not it.memory["in_use"])


@PATHS
async def test_message_in_memory_goes_elsewhere_if_its_server_cannot_be_reached(
    elements: int, gone: str
) -> None:
    model = GrpcSharedMemoryModel(elements)
    with grpc_server(unary=model.unary) as server:
        async with (
            running_gateway(gone, server.url, upstream={"shared_memory": SETTING}) as gateway,
            grpc_client(gateway.url) as client,
        ):
            memories = [each.shared_memory for each in gateway.pool.endpoints]
            await until(lambda: memories[1] is not None and memories[1].size)
            for _ in range(4):
                response = await client.call("ModelInfer", infer_request("m", tensor(elements)))
                found = ModelInferResponse.FromString(response.message)
                assert found.raw_output_contents == [tensor(elements)]
