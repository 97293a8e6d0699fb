"""An operator sees which tensors go through shared memory, why others do not, and its bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from gateway.observe import families
from tests.support.gateway import UPSTREAM, RunningGateway, running_gateway, served, until
from tests.support.http_messages import http_response
from tests.support.inference_messages import binary_header, infer_binary
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import ReceivedRequest, ScriptedServer
from tests.support.servers.shared_memory_server import SharedMemoryModel

ELEMENTS = 16_384
TENSOR = np.arange(ELEMENTS, dtype="<f4").tobytes()
BYTES = 2 * len(TENSOR)
"""Of the slices of a call, for its inputs and its outputs."""
SIZE = 2**20
SHARED_BYTES = {"size": SIZE, "allocated": SIZE, "why_not": ""}
NONE = {"in_use": 0, "quarantined": 0}
SHARED = ("shared_memory", "")


def _request(data: bytes = TENSOR) -> bytes:
    return infer_binary(binary_header(len(data), binary_output=True), data)


class _Seen:
    """A gateway in front of a model, and what it tells."""

    def __init__(self, gateway: RunningGateway, client: RawClient) -> None:
        self.gateway = gateway
        self.client = client

    async def call(self, data: bytes = TENSOR) -> dict[str, tuple[str, str]]:
        """Make a call, which must return the tensor; return lane and reason of its tensors."""
        before = self._counts()
        reply = await self.client.ask(_request(data))
        assert reply.status == 200
        assert reply.body.endswith(data)
        await self.gateway.until_idle()
        found = {each: count - before.get(each, 0) for each, count in self._counts().items()}
        assert all(count in (0, 1) for count in found.values())
        return {tensors: (lane, why) for (tensors, lane, why), count in found.items() if count}

    def _counts(self) -> dict[tuple[str, ...], float]:
        sums = self.gateway.gateway.shared.metric_store.sums(families.SHARED_MEMORY_CALLS)
        for upstream, endpoint, *_ in sums:
            assert (upstream, endpoint) == ("servers", self.gateway.pool.endpoints[0].url)
        return {labels[2:]: count for labels, (count,) in sums.items()}

    @property
    def memory(self) -> dict[str, Any]:
        """Return what the status tells of the endpoint's memory."""
        (state,) = self.gateway.pool.snapshot()
        assert state.shared_memory is not None
        return state.shared_memory


@asynccontextmanager
async def _seen(model: SharedMemoryModel, dialect: str = "triton") -> AsyncIterator[_Seen]:
    """Run a gateway in front of a model; it has tried to register its memory."""
    upstream = {"dialect": dialect, "shared_memory": {"size": "1MiB", "min_bytes": "1KiB"}}
    async with served(model, upstream=upstream) as (_, gateway, client):
        seen = _Seen(gateway, client)
        await until(lambda: "not registered yet" not in seen.memory["why_not"])
        # No call waits for metadata: the first one has it fetched.
        assert (await client.ask(_request(b"1234"))).status == 200
        (server,) = gateway.gateway.active_config.upstreams.values()
        await until(lambda: server.metadata.cached("m", None))
        await gateway.until_idle()
        yield seen


async def test_tensors_in_shared_memory_are_counted() -> None:
    async with _seen(SharedMemoryModel(ELEMENTS)) as seen:
        assert await seen.call() == {"inputs": SHARED, "outputs": SHARED}
        assert seen.memory == {**SHARED_BYTES, **NONE}


async def test_outputs_whose_size_is_not_certain_are_unsuitable() -> None:
    async with _seen(SharedMemoryModel(-1)) as seen:
        assert await seen.call() == {"inputs": SHARED, "outputs": ("socket", "unsuitable")}


async def test_outputs_that_were_larger_than_metadata_say_are_unsuitable() -> None:
    async with _seen(SharedMemoryModel(ELEMENTS // 2)) as seen:
        assert (await seen.client.ask(_request())).status == 500
        await seen.gateway.until_idle()
        assert await seen.call() == {"inputs": SHARED, "outputs": ("socket", "unsuitable")}


async def test_small_outputs_are_counted_with_large_inputs_alone() -> None:
    async with _seen(SharedMemoryModel(1)) as seen:
        assert await seen.call() == {"inputs": SHARED, "outputs": ("socket", "small")}
        assert await seen.call(b"1234") == {}


async def test_memory_without_room_is_full() -> None:
    async with _seen(SharedMemoryModel(SIZE)) as seen:
        assert await seen.call() == {"inputs": SHARED, "outputs": ("socket", "full")}
        streamed = {"inputs": ("socket", "full"), "outputs": ("socket", "unsuitable")}
        assert await seen.call(bytes(2 * SIZE)) == streamed


async def test_call_counts_nothing_and_fetches_nothing_while_the_server_refuses() -> None:
    model = SharedMemoryModel(ELEMENTS)
    model.is_on = False
    async with served(model, upstream={"shared_memory": "auto"}) as (server, gateway, client):
        seen = _Seen(gateway, client)
        await until(lambda: "--allow-client-shm" in seen.memory["why_not"])
        before = len(server.requests)
        assert await seen.call() == {}
        assert [each.head.target for each in server.requests[before:]] == ["/v2/models/m/infer"]
        assert (seen.memory["size"], seen.memory["in_use"]) == (0, 0)


async def test_memory_that_one_of_two_servers_refuses_is_unavailable_there() -> None:
    models = [SharedMemoryModel(ELEMENTS), SharedMemoryModel(ELEMENTS)]
    models[1].is_on = False
    upstream = {"shared_memory": {"size": "1MiB", "min_bytes": "1KiB"}}
    async with (
        ScriptedServer(models[0]) as shares,
        ScriptedServer(models[1]) as refuses,
        running_gateway(shares.url, refuses.url, upstream=upstream) as gateway,
        gateway.client() as client,
    ):
        shared, refused = [each.shared_memory for each in gateway.pool.endpoints]
        assert shared is not None
        assert refused is not None
        await until(lambda: shared.size and "501" in str(refused.describe()))
        while not all(each.inferred for each in models):
            assert (await client.ask(_request())).status == 200
        await gateway.until_idle()
        sums = gateway.gateway.shared.metric_store.sums(families.SHARED_MEMORY_CALLS)
        inputs = {(url, *why) for _, url, tensors, *why in sums if tensors == "inputs"}
        assert inputs == {(shares.url, *SHARED), (refuses.url, "socket", "unavailable")}


@pytest.mark.parametrize(
    ("dialect", "extensions", "why_not"),
    [
        ("auto", ["binary_tensor_data"], "the server does not list the extension"),
        ("auto", [], "the server does not list the extension"),
        ("kserve", ["system_shared_memory"], "servers of the dialect kserve have none"),
        ("json", ["system_shared_memory"], "servers of the dialect json have none"),
    ],
)
async def test_server_without_the_extension_is_not_asked_for_it(
    dialect: str, extensions: list[str], why_not: str
) -> None:
    model = SharedMemoryModel(ELEMENTS)
    model.itself = {"name": "other", "extensions": extensions}
    upstream = {"dialect": dialect, "shared_memory": {"size": "1MiB"}}
    async with served(model, upstream=upstream) as (server, gateway, client):
        seen = _Seen(gateway, client)
        await until(lambda: seen.memory["why_not"].startswith(why_not))
        assert not model.managed
        assert len(server.requests) == (dialect == "auto")


ELSEWHERE = "http://192.0.2.1:8000"
NOT_HERE = "its address is not on this machine"


async def test_server_elsewhere_is_told_of_only_where_the_settings_ask_for_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with running_gateway(ELSEWHERE, upstream={"shared_memory": "auto"}) as gateway:
        (state,) = gateway.pool.snapshot()
        assert state.shared_memory is None
    assert "memory" not in caplog.text
    async with running_gateway(ELSEWHERE, upstream={"shared_memory": {"size": "1MiB"}}) as gateway:
        (state,) = gateway.pool.snapshot()
        assert state.shared_memory == {"size": 0, "allocated": 0, **NONE, "why_not": NOT_HERE}
        await until(lambda: f"{ELSEWHERE}: no shared memory: {NOT_HERE}" in caplog.messages)


async def test_server_without_the_extension_is_no_news_where_nobody_asks_for_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model = SharedMemoryModel(ELEMENTS)
    model.itself = {"name": "other", "extensions": ["binary_tensor_data"]}
    upstream = {"dialect": "auto", "shared_memory": "auto"}
    async with served(model, upstream=upstream) as (server, gateway, client):
        await until(lambda: gateway.pool.snapshot()[0].dialect)
        assert (await client.ask(_request())).status == 200
        assert gateway.pool.snapshot()[0].shared_memory is None
    for why_not in ({"dialect": "kserve"}, {"dialect": "json"}, {"retry_stale": "safe"}):
        upstream = {**why_not, "shared_memory": "auto"}
        async with running_gateway(server.url, upstream=upstream) as gateway:
            assert gateway.pool.snapshot()[0].shared_memory is None
    assert "memory" not in caplog.text


async def test_triton_that_refuses_is_told_of_where_nobody_asks_for_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model = SharedMemoryModel(ELEMENTS)
    model.is_on = False
    upstream = {"dialect": "auto", "shared_memory": "auto"}
    async with served(model, upstream=upstream) as (server, gateway, client):
        seen = _Seen(gateway, client)
        await until(lambda: gateway.pool.snapshot()[0].shared_memory)
        await until(lambda: "--allow-client-shm" in seen.memory["why_not"])
        (line,) = [each for each in caplog.messages if "memory" in each]
        assert line == f"{server.url}: no shared memory: {seen.memory['why_not']}"


async def test_server_at_a_resolved_address_gets_memory_where_nobody_asks_for_it() -> None:
    model, data = SharedMemoryModel(1), bytes(2**18)
    upstream = {"shared_memory": "auto", "dns_refresh": "10s"}
    async with ScriptedServer(*[model] * 30) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        async with running_gateway(url, upstream=upstream) as gateway, gateway.client() as client:
            await until(lambda: model.regions)
            assert (await client.ask(_request(data))).status == 200
            (tensor,) = model.inferred[-1]["inputs"]
            assert tensor["parameters"]["shared_memory_region"] in model.regions


async def test_server_that_lists_the_extension_gets_memory() -> None:
    async with _seen(SharedMemoryModel(ELEMENTS), "auto") as seen:
        await until(lambda: not seen.memory["why_not"])
        assert await seen.call() == {"inputs": SHARED, "outputs": SHARED}


@pytest.mark.parametrize(("shared", "counted"), [("auto", 4 * SIZE), ({"size": "1MiB"}, 0)])
async def test_memory_without_a_size_is_part_of_what_may_be_buffered(
    shared: object, counted: int
) -> None:
    upstream = {"shared_memory": shared}
    async with served(SharedMemoryModel(ELEMENTS), upstream=upstream) as (_, gateway, client):
        seen = _Seen(gateway, client)
        await until(lambda: not seen.memory["why_not"])
        assert gateway.gateway.status()["buffered_bytes"] == counted


async def test_memory_that_the_server_has_forgotten_is_so_once() -> None:
    model = SharedMemoryModel(ELEMENTS)
    async with _seen(model) as seen:
        model.regions.clear()
        forgotten = ("socket", "forgotten")
        assert await seen.call() == {"inputs": forgotten, "outputs": forgotten}
        await until(lambda: not seen.memory["why_not"])
        assert await seen.call() == {"inputs": SHARED, "outputs": SHARED}


async def test_outputs_may_be_in_another_region_which_the_server_has_forgotten() -> None:
    model = SharedMemoryModel(ELEMENTS)
    async with _seen(model) as seen:
        (memory,) = [each.shared_memory for each in seen.gateway.pool.endpoints]
        assert memory is not None
        (before,) = model.regions
        sent = _request()
        await seen.client.send(sent[: -len(TENSOR) // 2])
        await until(lambda: seen.memory["in_use"])
        memory.forget_region(before)
        await until(lambda: len(model.regions) == 2)
        await until(lambda: not seen.memory["why_not"])
        (after,) = model.regions.keys() - {before}
        del model.regions[after]
        await seen.client.send(sent[-len(TENSOR) // 2 :])
        reply = await seen.client.read_response()
        assert (reply.status, reply.body[-len(TENSOR) :]) == (200, TENSOR)


async def test_memory_of_a_call_whose_client_left_is_in_quarantine_until_the_server_is_done() -> (
    None
):
    model = SharedMemoryModel(ELEMENTS)
    async with _seen(model) as seen:
        model.may_respond.clear()
        async with seen.gateway.client() as client:
            await client.send(_request())
            await until(lambda: seen.memory["in_use"] == BYTES)
            assert seen.memory == {**SHARED_BYTES, "in_use": BYTES, "quarantined": 0}
        await until(lambda: seen.memory["quarantined"])
        assert seen.memory == {**SHARED_BYTES, "in_use": 0, "quarantined": BYTES}
        model.may_respond.set()
        await until(lambda: not seen.memory["quarantined"])
        assert seen.memory == {**SHARED_BYTES, **NONE}


async def test_request_in_memory_goes_elsewhere_if_its_server_cannot_be_reached() -> None:
    upstream = {"shared_memory": {"size": "1MiB", "min_bytes": "1KiB"}}
    scripts = [SharedMemoryModel(ELEMENTS)] * 30
    async with AsyncExitStack() as stack:
        living = await stack.enter_async_context(ScriptedServer(*scripts))
        dying = ScriptedServer(*scripts)
        dies = await stack.enter_async_context(AsyncExitStack())
        await dies.enter_async_context(dying)
        gateway = await stack.enter_async_context(
            running_gateway(dying.url, living.url, upstream=upstream)
        )
        memories = [each.shared_memory for each in gateway.pool.endpoints]
        await until(lambda: all(each is not None and each.size for each in memories))
        await dies.aclose()
        for _ in range(3):
            async with gateway.client() as client:
                reply = await client.ask(_request())
                assert (reply.status, reply.body[-len(TENSOR) :]) == (200, TENSOR)


class _Faulty(SharedMemoryModel):
    """A model that answers the next infer request with ``answer``, or closes if it is empty."""

    answer: bytes | None = None

    def _infer(self, received: ReceivedRequest) -> bytes:
        answer, self.answer = self.answer, None
        if answer == b"":
            raise ConnectionResetError
        return super()._infer(received) if answer is None else answer


async def test_call_that_is_not_sent_again_after_a_close_was_in_shared_memory() -> None:
    model = _Faulty(ELEMENTS)
    async with _seen(model) as seen:
        model.answer = b""
        header = json.loads(binary_header(len(TENSOR), binary_output=True))
        header["parameters"]["sequence_id"] = 1
        reply = await seen.client.ask(infer_binary(json.dumps(header).encode(), TENSOR))
        assert (reply.status, "may have executed" in reply.error) == (502, True)
        await seen.gateway.until_idle()
        assert set(seen._counts()) == {("inputs", *SHARED), ("outputs", *SHARED)}


@pytest.mark.parametrize("wait", [0.0, 0.2])
async def test_error_of_outputs_that_are_not_there_names_the_server(wait: float) -> None:
    model = _Faulty(ELEMENTS)
    async with _seen(model) as seen:
        model.answer = http_response(b'{"model_name":"m","outputs":[]}')
        request = _request()
        await seen.client.send(request[:-1])
        await asyncio.sleep(wait)  # the fast path waits less for the rest
        await seen.client.send(request[-1:])
        reply = await seen.client.read_response()
        assert reply.status == 502
        assert (
            reply.error == f"{UPSTREAM}: the server's response does not have the requested outputs"
        )
