"""Any response of a malicious server ends as a right one, an error that names it, or a cut one.

Whatever it sends, no client gets data that are wrong or cut short and looks whole, none waits
without end, and nothing is left of it in the gateway.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.protocol.dialects import DIALECTS
from tests.codec.reference import RefusedError as PlainRefusedError
from tests.codec.reference_v1 import predictions
from tests.fuzz.malicious_responses import ServerResponse, any_response, in_order
from tests.fuzz.strict_http1 import RefusedError
from tests.fuzz.strict_response import HEADER_LENGTH, Response, outputs_of, read_response
from tests.http1.splits import cut
from tests.support import inference_messages as messages
from tests.support.gateway import UPSTREAM, RunningGateway, gateway_before
from tests.support.http_messages import http_response, request
from tests.support.scale import fuzz_seconds
from tests.support.servers.scripted_server import Connection

pytestmark = pytest.mark.usefixtures("clean")

_CONCURRENCY = 12
"""Concurrent clients."""

_IDLE_TIME = 3.0
"""Seconds after which the gateway gives up on a server that says nothing more."""

_SETTLE_TIME = 0.002
"""Seconds until the bytes of a server have reached the gateway."""

_TIMEOUT = 20
"""Seconds after which a missing response is an error of the gateway."""

_METADATA = json.dumps(
    {
        "name": "m",
        "versions": ["1"],
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1]}],
        "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in ("OUT0", "OUT1")],
    }
).encode()

_MIXED = json.loads(messages.json_request(1, 2))
_MIXED["outputs"] = [{"name": "OUT0", "parameters": {"binary_data": True}}, {"name": "OUT1"}]
_LAST = {"Connection": "close"}
REQUESTS = {
    "JSON": messages.infer_json(messages.json_request(1, 2), _LAST),
    "mixed": messages.infer_json(json.dumps(_MIXED).encode(), _LAST),
    "binary": messages.infer_binary(messages.binary_header(8, binary_output=True), bytes(8), _LAST),
    "raw": messages.infer_raw(bytes(8), _LAST),
    "V1": request("POST", "/v1/models/m:predict", b'{"instances":[1,2]}', _LAST),
}
"""The request of a client of each kind, the only one on its connection."""


@dataclass(frozen=True)
class Case:
    """A kind of client, and the server's response to it."""

    kind: str
    served: ServerResponse


class MaliciousServer:
    """Answers one case after the other; ``sent`` tells that all of the last was sent."""

    def __init__(self) -> None:
        self.served = ServerResponse(b"")
        self.sent = asyncio.Event()

    async def script(self, connection: Connection) -> None:
        """Answer questions about models in order, and requests for inference as is said."""
        while True:
            target = (await connection.request()).head.target
            if not target.endswith("/infer"):
                config = target.endswith("/config")
                await connection.send(
                    http_response(b'{"max_batch_size":0}' if config else _METADATA)
                )
                continue
            served = self.served
            try:
                await connection.send(*cut(served.data, served.cuts))
            finally:
                self.sent.set()
            if served.ending == "reset":
                connection.reset()
            if served.ending == "hang":
                await connection.reader.read(1)  # until the gateway leaves, or asks again
            if served.ending != "keep":
                return


@dataclass(frozen=True)
class ClientResult:
    """A complete response, or the bytes before the connection broke."""

    response: Response | None
    size: int


@asynccontextmanager
async def malicious(dialect: str) -> AsyncIterator[tuple[MaliciousServer, RunningGateway]]:
    """Run a gateway before a malicious server, of which nothing may be left at the end.

    The next client is served then, as the server is a good one.
    """
    script = MaliciousServer()
    limits: dict[str, Any] = {"idle_timeout": _IDLE_TIME, "request_timeout": _TIMEOUT / 2}
    async with gateway_before(script.script, upstream={"dialect": dialect}, **limits) as (
        _,
        gateway,
    ):
        yield script, gateway
        await gateway.remains.until_nothing()
        script.served = ServerResponse(in_order("JSON"))
        served = (await _send_and_read(gateway, REQUESTS["JSON"])).response
        assert served is not None
        assert served.status == 200


async def check_cases(dialect: str, cases: Iterator[Case]) -> int:
    """Have clients ask, many at a time, and check what each gets; return how many asked.

    Each asks at a server of its own: what is surplus can spoil the next answer of a connection.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_check_each(dialect, cases)) for _ in range(_CONCURRENCY)]
    return sum(task.result() for task in tasks)


async def _check_each(dialect: str, cases: Iterator[Case]) -> int:
    count = 0
    async with malicious(dialect) as (script, gateway):
        for case in cases:
            count += 1
            script.served = case.served
            script.sent.clear()
            got = await _send_and_read(gateway, REQUESTS[case.kind])
            described = f"{dialect} {case.kind} {case.served}\n{got}"
            if wrong := _find_error(dialect, case, got):
                raise AssertionError(f"{wrong}\n{described}")
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await script.sent.wait()
            except TimeoutError:
                raise AssertionError(f"the server has not sent it all\n{described}") from None
            await asyncio.sleep(_SETTLE_TIME)
    return count


async def _send_and_read(gateway: RunningGateway, data: bytes) -> ClientResult:
    received = b""
    async with gateway.client() as client:
        await client.send(data)
        async with asyncio.timeout(_TIMEOUT):
            try:
                while piece := await client.reader.read(1 << 18):
                    received += piece
            except ConnectionResetError:
                received += client.reader._buffer  # type: ignore[attr-defined]  # it came before
    return ClientResult(read_response(received, closed=False), len(received))


def _find_error(dialect: str, case: Case, got: ClientResult) -> str:
    """Return what is wrong with the result of a client, or nothing."""
    served, response = case.served, got.response
    must_be_right = served.right and _has_a_form(dialect, case)
    if response is None and not got.size:
        return "it was aborted, where an error could have been told"
    if response is None:
        return "what is in order was aborted" if must_be_right else ""
    if response.status == 406 and (case.kind == "V1" or "is not UTF-8" in _error(response)):
        return ""  # what could be said in no JSON, or not in rows
    if response.status in (502, 503, 504) and UPSTREAM in _error(response):
        return "what is in order is an error" if must_be_right else ""
    try:
        said = read_response(served.data, closed=served.ending == "close")
        if said is None:
            return "a part was taken for the whole"
        if (response.status, *response.content) == (said.status, *said.content):
            return "" if case.kind != "V1" or said.status != 200 else "V1 is V2"
        # Of a server that speaks JSON alone, no tensors are asked for.
        return _difference(case.kind, said if DIALECTS[dialect].binary else said.as_json, response)
    except RefusedError as error:
        return f"it was taken though there is {error}"


def _has_a_form(dialect: str, case: Case) -> bool:
    """Return whether a valid response of the server has an encoding for the client."""
    if not DIALECTS[dialect].binary and HEADER_LENGTH in case.served.data.lower():
        return False
    return case.kind != "V1"


def _error(response: Response) -> str:
    try:
        return str(json.loads(response.body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""


def _difference(kind: str, said: Response, response: Response) -> str:
    """Return how a response differs from what the server said; raises RefusedError."""
    if said.status != 200:
        same = response.status == said.status and kind == "V1"
        return "" if same else "an error of the server came as another"
    if response.status != 200:
        return "a status of its own"
    if kind == "V1":
        wanted = _predictions(said)
        return "" if _same(json.loads(response.body), wanted) else f"V1 is not {wanted}"
    if _is_same_json(said, response):
        return ""  # it passed as it is
    return "" if outputs_of(response) == outputs_of(said) else "the outputs are others"


def _is_same_json(said: Response, response: Response) -> bool:
    """Return whether both are pure JSON with equal content."""
    if response.lengths or not all(length == b"%d" % len(said.body) for length in said.lengths):
        return False
    try:
        return _same(json.loads(said.body), json.loads(response.body))
    except (ValueError, RecursionError):
        return False


def _predictions(said: Response) -> Any:
    """Return the V1 predictions of a response; raises RefusedError."""
    entries, tensors = [], b""
    for name, datatype, shape, data in outputs_of(said):
        if data is None:
            raise RefusedError("an output without data")
        parameters = {"binary_data_size": len(data)}
        entry = {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}
        entries.append(entry)
        tensors += data
    header = json.dumps({"outputs": entries}).encode()
    try:
        return predictions(header + tensors, len(header), "instances", single=False)
    except (ValueError, PlainRefusedError) as error:
        raise RefusedError(f"no prediction: {error}") from None


def _same(one: Any, other: Any) -> bool:
    """Compare as text, in which NaN is NaN."""
    return json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize(
    ("kind", "ending"), [("JSON", "close"), ("binary", "close"), ("V1", "close"), ("JSON", "reset")]
)
@pytest.mark.parametrize("sizes", [(), (100, 7)], ids=["sized", "chunked"])
async def test_a_close_at_any_byte_of_a_response_is_detected(
    kind: str, ending: str, sizes: tuple[int, ...]
) -> None:
    data = in_order("two outputs", sizes)
    cases = (Case(kind, ServerResponse(data[:size], (), ending)) for size in range(1, len(data)))
    assert await check_cases("triton", cases) == len(data) - 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_any_response_is_right_or_an_error_or_cut(dialect: str) -> None:
    end = time.monotonic() + fuzz_seconds(4)
    chance = random.Random(dialect)

    def cases() -> Iterator[Case]:
        yield Case("JSON", any_response(chance))  # one, however slow the machine is
        while time.monotonic() < end:
            yield Case(chance.choice([*REQUESTS]), any_response(chance))

    assert await check_cases(dialect, cases()) > 0
