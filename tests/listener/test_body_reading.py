"""Bodies that are read while they arrive give the same as bodies that are fed to a reader."""

from __future__ import annotations

import asyncio
import random

import orjson
import pytest

from gateway.codec.offload_interface import Offloader, OffloadFuture
from gateway.codec.v2.request import InferRequestReader
from gateway.errors import GatewayError
from gateway.http1.connection import BodyBuffer
from gateway.listener.body_reading import BodyReading
from gateway.offload.threads import OffloadThreads
from gateway.protocol.messages import InferRequest
from gateway.proxy.admission.memory_budget import MemoryBudget
from tests.support.gateway import until
from tests.support.inference_messages import json_request

HEADER_CAP, DEPTH_CAP = 100_000, 8
BREAKS = (b",,", b"]", b"[", b'"', b"{", b"x", b" ", b"1e999", b"\0", b",[1,2],", b"")


class _Scene:
    """A body in memory, and what became of it."""

    def __init__(self, body: bytes, offloader: Offloader | None = None) -> None:
        self.body = body
        self.budget = MemoryBudget(2**30)
        self.ended: asyncio.Future[InferRequest | None] = asyncio.get_running_loop().create_future()
        of_body = self.budget.reserve()
        self.drops: list[str] = []
        self.memory = BodyBuffer(
            len(body), of_body.resize_unchecked, lambda: self.drops.append("dropped")
        )
        reader = InferRequestReader(HEADER_CAP, DEPTH_CAP, offloader)
        self.reading = BodyReading(
            reader, self.budget.reserve(), self.memory, "", self.ended.set_result
        )
        self.arrived = 0

    def arrive(self, size: int) -> None:
        start, end = self.arrived, min(len(self.body), self.arrived + size)
        self.memory.view[start:end] = self.body[start:end]
        self.memory.count(end)
        self.arrived = end
        self.reading.arrive(end - start)

    async def arrive_in_pieces(self, rng: random.Random, most: int) -> None:
        while self.arrived < len(self.body) and not self.ended.done():
            self.arrive(rng.randint(1, most))
            if rng.random() < 0.3:
                await asyncio.sleep(0)


def _plainly(body: bytes) -> tuple[object, bytes] | None:
    """Return the head and the data of a request, None if it is invalid."""
    reader = InferRequestReader(HEADER_CAP, DEPTH_CAP)
    try:
        reader.feed(body, last=True)
        return _told(reader.finish())
    except GatewayError:
        return None


def _told(request: InferRequest | None) -> tuple[object, bytes] | None:
    return None if request is None else (request.head, b"".join(request.chunks))


@pytest.mark.parametrize("threads", [0, 2])
async def test_request_is_the_same_however_it_arrives(threads: int) -> None:
    rng = random.Random(threads)
    offloader = OffloadThreads(threads) if threads else None
    for number in range(40):
        body = json_request(*[rng.uniform(-9, 9) for _ in range(rng.choice((10, 40_000, 70_000)))])
        if number % 2:
            at = rng.randrange(len(body))
            body = body[:at] + rng.choice(BREAKS) + body[at + rng.randrange(3) :]
        scene = _Scene(body, offloader)
        await scene.arrive_in_pieces(rng, rng.choice((5_000, 100_000, 700_000)))
        assert _told(await scene.ended) == _plainly(body)
        scene.memory.drop()
        assert scene.budget.total == 0
    if offloader is not None:
        offloader.close()


async def test_reading_that_is_stopped_tells_nothing_and_gives_everything_back() -> None:
    body = json_request(*[0.1] * 100_000)
    scene = _Scene(body)
    scene.arrive(300_000)
    await until(lambda: scene.budget.total > 300_000)  # the reader has something
    scene.reading.stop()
    scene.arrive(len(body))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not scene.ended.done()
    assert scene.budget.total == len(body)
    scene.memory.drop()
    scene.memory.drop()
    assert (scene.budget.total, scene.drops) == (0, ["dropped"])


async def test_request_with_binary_tensors_to_come_is_left_to_others() -> None:
    entry = {"name": "IN", "shape": [2], "datatype": "FP32"}
    scene = _Scene(orjson.dumps({"inputs": [entry | {"parameters": {"binary_data_size": 8}}]}))
    reader = InferRequestReader(HEADER_CAP, DEPTH_CAP)
    reader.feed(scene.body, last=True)
    assert reader.finish().missing_size == 8
    scene.arrive(len(scene.body))
    assert await scene.ended is None


class _BrokenOffloader(Offloader):
    """Has a fault of the gateway's own."""

    def decode(self, *_: object) -> OffloadFuture | None:
        raise ZeroDivisionError("a fault")

    def encode(self, *_: object) -> OffloadFuture | None:
        raise AssertionError("there is nothing to encode")


async def test_fault_of_the_gateway_is_logged_and_the_body_left_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = _Scene(json_request(*[0.5] * 100_000), _BrokenOffloader())
    scene.arrive(len(scene.body))
    assert await scene.ended is None
    assert "reading a body failed" in caplog.text
    scene.memory.drop()
    assert scene.budget.total == 0
