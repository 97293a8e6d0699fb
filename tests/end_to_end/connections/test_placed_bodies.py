"""Tensors land in shared memory straight from the socket, however they come.

Each call has values of its own, so that a byte of another one's would be seen. Each test ends with
the question whether anything is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from gateway.observe import families
from gateway.proxy.destination import Upstream
from gateway.upstream.transport import SharedMemory
from tests.support.gateway import RunningGateway, served, until
from tests.support.inference_messages import HEADER_LENGTH, binary_header, infer_binary, infer_raw
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import Connection, ReceivedRequest, ScriptedServer
from tests.support.servers.shared_memory_server import SharedMemoryModel

ELEMENTS = 65_536
SIZE = 4 * ELEMENTS
EMPTY = {"in_use": 0, "quarantined": 0}


def _tensor(number: int, elements: int = ELEMENTS) -> bytes:
    return np.full(elements, number, "<f4").tobytes()


def _binary(data: bytes) -> bytes:
    return infer_binary(binary_header(len(data), binary_output=True), data)


class _Site:
    """A gateway in front of a model with which it shares memory."""

    def __init__(self, model: SharedMemoryModel, gateway: RunningGateway) -> None:
        self.model = model
        self.gateway = gateway

    @property
    def upstream(self) -> Upstream:
        """Return the upstream of the model."""
        return self.gateway.gateway.active_config.upstreams["servers"]

    @property
    def memory(self) -> dict[str, Any]:
        """Return the bytes in use, and in quarantine."""
        (state,) = self.upstream.pool.snapshot()
        assert state.shared_memory is not None
        return {name: state.shared_memory[name] for name in EMPTY}

    @property
    def waits(self) -> int:
        """Return how many calls wait for the rest of their bodies before they start."""
        return self.gateway.gateway.listener.deferrals.size

    def ways(self) -> set[tuple[str, ...]]:
        """Return how inputs have gone, and why so."""
        sums = self.gateway.gateway.shared.metric_store.sums(families.SHARED_MEMORY_CALLS)
        return {labels[3:] for labels in sums if labels[2] == "inputs"}

    async def ends_well(self) -> None:
        """Check that nothing is left, and that somebody else is served."""
        await self.gateway.until_idle()
        await until(lambda: self.memory == EMPTY)
        async with self.gateway.client() as client:
            reply = await client.ask(_binary(_tensor(99)))
            assert (reply.status, reply.body[-SIZE:]) == (200, _tensor(99))
        await self.gateway.until_idle()
        assert self.memory == EMPTY
        assert not self.gateway.gateway.listener.buffers.total


@asynccontextmanager
async def _site(
    elements: int = ELEMENTS,
    size: str = "4MiB",
    model: SharedMemoryModel | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[_Site, RawClient]]:
    model = model or SharedMemoryModel(elements)
    upstream = {"shared_memory": {"size": size, "min_bytes": "64KiB"}}
    async with served(*[model] * 4, upstream=upstream, **settings) as (_, gateway, client):
        site = _Site(model, gateway)
        (endpoint,) = site.upstream.pool.endpoints
        lane = endpoint.shared_memory
        assert lane is not None
        await until(lambda: lane.size)
        await until(partial(_is_allocated, lane))
        # No call waits for metadata: the first one has it fetched.
        assert (await client.ask(_binary(b"1234"))).status == 200
        await until(lambda: site.upstream.metadata.cached("m", None))
        yield site, client


def _is_allocated(lane: SharedMemory) -> bool:
    """Tell whether all of the memory is allocated; have that done if not."""
    whole = lane.take(lane.size)
    if whole is not None:
        whole.release()
    return whole is not None


async def _at_once(site: _Site, client: RawClient, text: bytes) -> None:
    await client.send(text)


async def _after_its_head(site: _Site, client: RawClient, text: bytes) -> None:
    end = text.index(b"\r\n\r\n") + 4
    await client.send(text[:end])
    await until(lambda: site.memory["in_use"])  # before a byte of the body is there
    assert site.waits
    await client.send(text[end:])


async def _in_pieces(site: _Site, client: RawClient, text: bytes) -> None:
    end = text.index(b"\r\n\r\n") + 4
    cuts = [0, end + 1, end + 7, end + 100, len(text) - 1, len(text)]
    for start, stop in pairwise(cuts):
        await client.send(text[start:stop])
        await until(partial(_has_received, site, min(stop, len(text) - 1) - end))


async def _slowly(site: _Site, client: RawClient, text: bytes) -> None:
    middle = len(text) // 2
    await client.send(text[:middle])
    await until(lambda: site.memory["in_use"])
    await until(lambda: not site.waits)  # it has waited too long: a task serves the call
    await client.send(text[middle:])


def _has_received(site: _Site, size: int) -> bool:
    calls = site.gateway.gateway.listener._active_calls
    return not calls or max(call.record.request_bytes for call in calls) >= size


@pytest.mark.parametrize("send", [_at_once, _after_its_head, _in_pieces, _slowly])
@pytest.mark.parametrize("form", [_binary, infer_raw])
async def test_tensors_come_back_as_they_were_sent(form: Any, send: Any) -> None:
    async with _site() as (site, client):
        for number in range(3):
            await send(site, client, form(_tensor(number)))
            reply = await client.read_response()
            assert (reply.status, reply.body[-SIZE:]) == (200, _tensor(number))
        await site.ends_well()
        assert site.ways() == {("shared_memory", "")}


async def test_next_request_follows_a_placed_body_at_once() -> None:
    async with _site() as (site, client):
        first, second = _binary(_tensor(1)), _binary(_tensor(2))
        await client.send(first[:1000])
        await until(lambda: site.memory["in_use"])
        await client.send(first[1000:] + second[:500])
        assert (await client.read_response()).body[-SIZE:] == _tensor(1)
        await client.send(second[500:])
        assert (await client.read_response()).body[-SIZE:] == _tensor(2)
        await site.ends_well()


@pytest.mark.parametrize("sent", [0.0, 0.5])
async def test_client_that_leaves_during_its_body_gives_the_memory_back(sent: float) -> None:
    async with _site() as (site, _):
        text = _binary(_tensor(1))
        end = text.index(b"\r\n\r\n") + 4
        async with site.gateway.client() as client:
            await client.send(text[: end + int(sent * SIZE)])
            await until(lambda: site.memory["in_use"])
        await until(lambda: site.memory == EMPTY)  # no server has got anything of it
        await site.ends_well()


async def test_client_that_leaves_before_its_response_leaves_the_memory_to_the_server() -> None:
    async with _site() as (site, _):
        site.model.may_respond.clear()
        async with site.gateway.client() as client:
            await _after_its_head(site, client, _binary(_tensor(1)))
            await until(lambda: len(site.model.inferred) == 2)
        await until(lambda: site.memory["quarantined"])
        assert not site.memory["in_use"]
        site.model.may_respond.set()
        await site.ends_well()


@pytest.mark.parametrize("send", [_after_its_head, _slowly])
async def test_region_that_the_server_has_forgotten_is_read_over_the_socket(send: Any) -> None:
    async with _site() as (site, client):
        site.model.regions.clear()
        await send(site, client, _binary(_tensor(5)))
        reply = await client.read_response()
        assert (reply.status, reply.body[-SIZE:]) == (200, _tensor(5))
        assert site.ways() == {("socket", "forgotten")}
        await until(lambda: site.model.regions)
        await site.ends_well()


async def test_body_without_room_is_not_placed() -> None:
    async with _site() as (site, _):
        site.model.may_respond.clear()
        async with site.gateway.client() as other:
            (endpoint,) = site.gateway.pool.endpoints
            assert endpoint.shared_memory is not None
            taken = endpoint.shared_memory.take(endpoint.shared_memory.size)
            assert taken is not None
            text = _binary(_tensor(7))
            await other.send(text)
            await until(lambda: len(site.model.inferred) == 2)
            site.model.may_respond.set()
            assert (await other.read_response()).body[-SIZE:] == _tensor(7)
            taken.end_call()
        assert site.ways() == {("socket", "full")}
        await site.ends_well()


async def test_body_that_is_longer_than_its_tensors_is_refused() -> None:
    async with _site() as (site, client):
        header = binary_header(SIZE - 4, binary_output=True)
        await _after_its_head(site, client, infer_binary(header, _tensor(3)))
        reply = await client.read_response()
        assert reply.status == 400
        assert f"{SIZE} bytes follow" in reply.error
        await site.ends_well()


LARGE = 4 * ELEMENTS * 16
"""Elements of a response that is written from shared memory, and more than the kernel buffers."""


async def test_memory_of_a_response_is_the_calls_until_its_client_has_it() -> None:
    async with _site(LARGE, "64MiB") as (site, client):
        large = _tensor(8, LARGE)
        await client.send(_binary(large))
        head = await client.head()
        body = b""
        while site.gateway.outstanding:
            assert site.memory["in_use"] == 2 * len(large) + 4096
            body += await client.reader.readexactly(4096)
        async with site.gateway.client() as other:
            for number in range(5):
                reply = await other.ask(_binary(_tensor(number, LARGE)))
                assert (reply.status, reply.body[-len(large) :]) == (200, _tensor(number, LARGE))
        body += await client.reader.readexactly(int(head.get("Content-Length") or 0) - len(body))
        assert body[-len(large) :] == large
        await until(lambda: site.memory == EMPTY)


async def test_client_that_leaves_during_its_response_gives_the_memory_back() -> None:
    async with _site(LARGE, "64MiB") as (site, client):
        async with site.gateway.client() as leaving:
            await leaving.send(_binary(_tensor(8, LARGE)))
            await leaving.head()
        await until(lambda: site.memory == EMPTY)
        reply = await client.ask(_binary(_tensor(9, LARGE)))
        assert (reply.status, reply.body[-4 * LARGE :]) == (200, _tensor(9, LARGE))
        await site.gateway.until_idle()


class _SlowReader(SharedMemoryModel):
    """A model that reads a request with tensors in its body once it ``may_read``."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.may_read = asyncio.Event()
        self.head = asyncio.Event()
        self.values: set[float] = set()
        """The values in the body, whether it was whole or not."""

    async def __call__(self, connection: Connection) -> None:
        """Respond to each request, but for the slow one."""
        while True:
            head = await connection.head()
            size, header = int(head.get("Content-Length") or 0), int(head.get(HEADER_LENGTH) or 0)
            if header and size > SIZE:
                self.head.set()
                await self.may_read.wait()
                with suppress(ConnectionError):
                    await self._read(connection, header, size)
                return
            body = await connection.reader.readexactly(size)
            parts = head.target.strip("/").split("/")
            if parts[1] == "systemsharedmemory":
                await connection.send(self._manage(parts, body))
            elif parts[-1] == "infer":
                await connection.send(self._infer(ReceivedRequest(head, body)))
            else:
                await connection.send(self.metadata)

    async def _read(self, connection: Connection, header: int, size: int) -> None:
        body = b""
        while len(body) < size and (part := await connection.reader.read(2**20)):
            body += part
        data = body[header:]
        self.values = {
            float(x) for x in np.unique(np.frombuffer(data[: len(data) // 4 * 4], "<f4"))
        }


async def test_unsent_body_of_a_client_that_left_is_never_another_ones() -> None:
    model = _SlowReader(LARGE)
    async with _site(size="64MiB", model=model) as (site, _):
        size = 4 * LARGE
        # An empty input keeps all of them out of shared memory, but not the outputs.
        first = infer_binary(binary_header(size, 0, binary_output=True), _tensor(1, LARGE))
        second = _binary(_tensor(2, LARGE))
        async with site.gateway.client() as leaving:
            await _after_its_head(site, leaving, first)
            await model.head.wait()
        await until(lambda: not site.gateway.gateway.listener._active_calls)
        async with site.gateway.client() as other:
            await other.send(second[:-1])
            await until(partial(_has_received, site, size))
            model.may_read.set()
            await until(lambda: model.values)
            assert model.values == {1.0}
            await other.send(second[-1:])
            assert (await other.read_response()).body[-size:] == _tensor(2, LARGE)
        await until(lambda: site.memory == EMPTY)


async def test_body_is_not_placed_if_several_upstreams_may_get_it() -> None:
    other = SharedMemoryModel(ELEMENTS)
    async with ScriptedServer(other) as server:
        others = {"others": {"endpoints": [server.url], "dialect": "triton"}}
        weights = {"servers": 1_000_000, "others": 1}
        route = {"upstream": [{"name": each, "weight": n} for each, n in weights.items()]}
        async with _site(others=others, route=route) as (site, client):
            text = _binary(_tensor(1))
            end = text.index(b"\r\n\r\n") + 4
            await client.send(text[:end])
            await until(lambda: site.gateway.gateway.listener._active_calls)
            assert site.memory == EMPTY
            await client.send(text[end:])
            assert (await client.read_response()).body[-SIZE:] == _tensor(1)


async def test_large_body_that_goes_over_the_socket_is_streamed() -> None:
    model = _SlowReader(LARGE)
    async with _site(size="64MiB", model=model) as (site, client):
        size = 4 * LARGE
        text = infer_binary(binary_header(size, 0, binary_output=True), _tensor(1, LARGE))
        await _after_its_head(site, client, text)
        await model.head.wait()
        await until(partial(_has_received, site, size))
        buffers = site.gateway.gateway.listener.buffers
        assert buffers.buffered < size // 2  # what waits for the server is counted once
        model.may_read.set()
        assert (await client.read_response()).status == 502  # it reads, and closes
        assert model.values == {1.0}
        await until(lambda: site.memory == EMPTY)


async def test_body_that_is_announced_takes_no_room_of_others() -> None:
    limit = 8 * 2**20
    async with _site(size="8MiB", max_buffered_bytes=limit) as (site, client):
        size = limit - SIZE
        text = infer_binary(binary_header(size, binary_output=True), bytes(size))
        end = text.index(b"\r\n\r\n") + 4
        buffers = site.gateway.gateway.listener.buffers
        async with site.gateway.client() as other:
            await other.send(text[:end])
            await until(lambda: site.memory["in_use"] >= size)
            reply = await client.ask(_binary(_tensor(4)))
            assert (reply.status, reply.body[-SIZE:]) == (200, _tensor(4))
            await until(lambda: len(site.gateway.gateway.listener._active_calls) == 1)
            assert not buffers.reserved
            await other.send(text[end : end + SIZE])
            await until(partial(_has_received, site, SIZE))
            assert buffers.reserved >= SIZE
        await site.ends_well()
