import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.codec.offload_interface import Offloader, OffloadFuture
from gateway.codec.policies import JsonPolicies
from gateway.codec.v1.prediction_form import PredictionForm
from gateway.errors import GatewayError
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.v1 import V1Format, V1ResponseLayout
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.infer.convert_response import convert_response
from gateway.proxy.passthrough import ResponseRelay
from gateway.upstream.transport import UpstreamResponse
from tests.support.checks.time_slices import others
from tests.support.doubles.streaming import (
    SERVER,
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_destination,
)
from tests.support.inference_messages import FLOATS, HEADER_LENGTH, binary_response_header

ALL_JSON = OutputEncoding(False, {})
ALL_BINARY = OutputEncoding(True, {})


def _response(
    header: bytes, *parts: BodyStep, sized: bool = True, status: int = 200
) -> ScriptedUpstreamResponse:
    body: Sequence[BodyStep] = [header, *parts]
    headers = {
        HEADER_LENGTH: str(len(header)),
        "Content-Type": "application/octet-stream",
        "X": "1",
    }
    if sized:
        headers["Content-Length"] = str(sum(len(s) for s in body if isinstance(s, bytes)))
    return ScriptedUpstreamResponse(status, headers, body)


class _Relay:
    """One response on its way, and its log."""

    def __init__(self, policies: JsonPolicies | None = None) -> None:
        self.log = EventLog()
        self.client_response = ScriptedClientResponse(self.log)
        self.destination = make_destination(ScriptedEndpoint(self.log), policies=policies)

    async def run(
        self,
        response: ScriptedUpstreamResponse,
        form: OutputEncoding,
        layout: V1ResponseLayout | None = None,
    ) -> ScriptedClientResponse:
        there: UpstreamResponse = response.with_log(self.log)
        predicted = None if layout is None else PredictionForm(layout)
        with Deadline(9, 9) as deadline:
            await convert_response(
                ResponseRelay(
                    there, SERVER, self.client_response, self.destination, deadline, form, predicted
                )
            )
        return self.client_response


class _StuckThreads(Offloader, OffloadFuture):
    """Takes all jobs, and never finishes any."""

    done = False

    def __init__(self) -> None:
        self.jobs = 0
        self.awaited = asyncio.Event()

    def decode(self, *_: object) -> OffloadFuture:
        raise AssertionError("there is nothing to decode")

    def encode(self, *_: object) -> OffloadFuture:
        self.jobs += 1
        return self

    def take_result(self) -> bytes | None:
        raise AssertionError("it is never done")

    async def wait(self) -> None:
        self.awaited.set()
        await asyncio.Event().wait()


async def test_little_of_a_response_waits_for_busy_threads() -> None:
    relay, threads = _Relay(), _StuckThreads()
    relay.destination = replace(relay.destination, offloader=threads)
    values = bytes(4_000_000)
    header = binary_response_header(len(values))
    task = asyncio.create_task(relay.run(_response(header, values), ALL_JSON))
    await threads.awaited.wait()
    assert threads.jobs == 6
    assert relay.destination.memory_budget.total < 2 * 2**20
    task.cancel()
    await asyncio.wait([task])
    assert relay.destination.memory_budget.total == 0


async def test_small_chunked_response_is_complete_before_the_client_gets_anything() -> None:
    relay = _Relay()
    parts = binary_response_header(12), FLOATS.tobytes()[:5], FLOATS.tobytes()[5:]
    client_response = await relay.run(_response(*parts, sized=False), ALL_JSON)
    assert json.loads(client_response.body)["outputs"][0]["data"] == [1.5, -2, 3e30]
    assert client_response.headers["Content-Length"] == str(len(client_response.body))
    assert relay.log.count_of("client gets") == 2
    with pytest.raises(GatewayError, match="ends before"):
        await _Relay().run(_response(*parts[:2], sized=False), ALL_JSON)


async def test_conversion_yields_to_other_calls() -> None:
    values = np.zeros(2_000_000, "<f4").tobytes()
    with others() as waiting:
        await _Relay().run(_response(binary_response_header(len(values)), values), ALL_JSON)
    assert waiting.turns > len(values) / 65536


async def test_rows_yield_to_other_calls_while_they_are_sent() -> None:
    relay = _Relay()
    limits = replace(relay.destination.limits, max_buffered_body_bytes=1_000_000)
    relay.destination = replace(relay.destination, limits=limits)
    response = _response(binary_response_header(200_000, 200_000), bytes(400_000))
    turns: list[int] = []

    class Client(ScriptedClientResponse):
        async def write(self, data: bytes | memoryview) -> None:
            turns.append(waiting.turns)
            await super().write(data)

    relay.client_response = Client(relay.log)
    with others() as waiting:
        got = await relay.run(response, ALL_BINARY, V1ResponseLayout(V1Format.ROWS))
    assert len(got.body) > 1_000_000
    # All text of rows is made when the last of the data is there.
    assert turns[-1] - turns[0] >= len(got.body) // 65_536 - 1
