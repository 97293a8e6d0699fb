"""Responses in other encodings than the client wants: they are converted while they arrive."""

import asyncio
import base64
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.codec.offload_interface import Offloader, OffloadFuture
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.codec.v1.prediction_form import PredictionForm
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.dialects import BINARY, KSERVE, OPENVINO, TRITON, Dialect
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.v1 import V1Format, V1ResponseLayout
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.body_io import ResponseRelay
from gateway.proxy.infer.convert_response import convert_response
from gateway.upstream.transport import UpstreamResponse
from tests.support.checks.time_slices import others
from tests.support.doubles.scripted_call import ScriptedCall, ServerStep
from tests.support.doubles.streaming import (
    LIMITS,
    SERVER,
    URL,
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_destination,
)
from tests.support.inference_messages import FLOATS, HEADER_LENGTH, binary_response_header, metadata

ALL_JSON = OutputEncoding(False, {})
ALL_BINARY = OutputEncoding(True, {})


def _binary(
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

    def help(self) -> bool:
        raise AssertionError("nobody helps")

    def call_when_done(self, callback: Callable[[], None]) -> None:
        raise AssertionError("nobody asks to be called back")


async def test_little_of_a_response_waits_for_busy_threads() -> None:
    relay, threads = _Relay(), _StuckThreads()
    relay.destination = replace(relay.destination, offloader=threads)
    values = bytes(4_000_000)
    header = binary_response_header(len(values))
    task = asyncio.create_task(relay.run(_binary(header, values), ALL_JSON))
    await threads.awaited.wait()
    assert threads.jobs == 3
    assert relay.destination.memory_budget.total < 2 * 2**20
    task.cancel()
    await asyncio.wait([task])
    assert relay.destination.memory_budget.total == 0


async def test_parts_of_a_response_are_reserved_by_their_sizes() -> None:
    relay, threads = _Relay(), _StuckThreads()
    relay.destination = replace(relay.destination, offloader=threads)
    values = [bytes(16_384)] * 16
    header = binary_response_header(*map(len, values))
    task = asyncio.create_task(relay.run(_binary(header, *values), ALL_JSON))
    await threads.awaited.wait()
    assert relay.destination.memory_budget.total < 2**20
    task.cancel()
    await asyncio.wait([task])


class _LateThreads(_StuckThreads):
    """Finishes a job only once somebody waits for it, with nothing."""

    async def wait(self) -> None:
        self.done = True

    def take_result(self) -> None:
        return None


async def test_error_of_a_part_stands_before_what_ends_the_response_behind_it() -> None:
    relay = _Relay(JsonPolicies(Nonfinite.ERROR))
    relay.destination = replace(relay.destination, offloader=_LateThreads())
    values = np.full(1_000_000, np.nan, "<f4").tobytes()
    header = binary_response_header(len(values))
    with pytest.raises(GatewayError, match="element 0 is nan"):
        await relay.run(_binary(header, values[:300_000], bad_response("cut short")), ALL_JSON)


async def test_small_chunked_response_is_complete_before_the_client_gets_anything() -> None:
    relay = _Relay()
    parts = binary_response_header(12), FLOATS.tobytes()[:5], FLOATS.tobytes()[5:]
    client_response = await relay.run(_binary(*parts, sized=False), ALL_JSON)
    assert json.loads(client_response.body)["outputs"][0]["data"] == [1.5, -2, 3e30]
    assert client_response.headers["Content-Length"] == str(len(client_response.body))
    assert relay.log.count_of("client gets") == 2
    with pytest.raises(GatewayError, match="ends before"):
        await _Relay().run(_binary(*parts[:2], sized=False), ALL_JSON)


async def test_conversion_yields_to_other_calls() -> None:
    values = np.zeros(2_000_000, "<f4").tobytes()
    with others() as waiting:
        await _Relay().run(_binary(binary_response_header(len(values)), values), ALL_JSON)
    assert waiting.turns > len(values) / 65536


async def test_text_of_threads_yields_to_other_calls() -> None:
    class PromptThreads(_LateThreads):
        done = True

    class PromptClient(ScriptedClientResponse):
        async def write(self, data: bytes | memoryview) -> None:
            self.body += data

    relay = _Relay()
    relay.client_response = PromptClient(relay.log)
    relay.destination = replace(relay.destination, offloader=PromptThreads())
    values = bytes(8_000_000)
    with others() as waiting:
        await relay.run(_binary(binary_response_header(len(values)), values), ALL_JSON)
    assert waiting.turns > len(values) / 2**17


async def test_rows_yield_to_other_calls_while_they_are_buffered_and_sent() -> None:
    relay = _Relay()
    limits = replace(relay.destination.limits, max_buffered_body_bytes=1_000_000)
    relay.destination = replace(relay.destination, limits=limits)
    response = _binary(binary_response_header(200_000, 200_000), bytes(400_000))
    turns: list[int] = []

    class Client(ScriptedClientResponse):
        async def write(self, data: bytes | memoryview) -> None:
            turns.append(waiting.turns)
            await super().write(data)

    relay.client_response = Client(relay.log)
    with others() as waiting:
        got = await relay.run(response, ALL_BINARY, V1ResponseLayout(V1Format.ROWS))
    assert len(got.body) > 1_000_000
    # All text of rows is made when the last of the data is there; until then there is none to send.
    assert turns[0] >= 400_000 // 32_768
    assert turns[-1] - turns[0] >= len(got.body) // 65_536 - 1


DOUBTED = pytest.mark.parametrize(
    "dialect",
    [KSERVE, replace(OPENVINO, binary_only_if_listed=False), BINARY],
    ids=lambda each: each.name,
)
LEFT, RIGHT = np.array([1.5, -2], "<f4"), np.array([3, 4], "<i4")
TENSORS = {"L": LEFT, "R": RIGHT}
DATATYPES = {"L": "FP32", "R": "INT32"}


def _entry(name: str, *, binary: bool) -> dict[str, Any]:
    values = TENSORS[name]
    fields = {"name": name, "shape": [2], "datatype": DATATYPES[name]}
    if binary:
        return {**fields, "parameters": {"binary_data_size": values.nbytes}}
    return {**fields, "data": values.tolist()}


def _forwarded(
    binary: str, *, cut: int = 20, status: int = 200, **more: str
) -> ScriptedUpstreamResponse:
    """Return a response with the named outputs in binary, the others as JSON."""
    outputs = [_entry(name, binary=name in binary) for name in "LR"]
    header = json.dumps({"model_name": "m", "outputs": outputs}).encode()
    tensors = b"".join(TENSORS[name].tobytes() for name in "LR" if name in binary)
    return _response(header, tensors, cut=cut, status=status, **more)


def _response(
    header: bytes, tensors: bytes = b"", *, cut: int = 20, status: int = 200, **more: str
) -> ScriptedUpstreamResponse:
    headers = {"Content-Type": "application/json", "X": "1", **more}
    if tensors:
        headers[HEADER_LENGTH] = str(len(header))
    body = header + tensors
    return ScriptedUpstreamResponse(status, headers, [body[:cut], body[cut:]])


def _request(*, default: bool = False, **own: bool) -> bytes:
    entry = {"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}
    fields: dict[str, Any] = {"inputs": [entry]}
    fields["parameters"] = {"binary_data_output": default}
    if own:
        fields["outputs"] = [
            {"name": name, "parameters": {"binary_data": wanted}} for name, wanted in own.items()
        ]
    return json.dumps(fields).encode()


class _Scene(ScriptedCall):
    """One call to a server that may ignore the requested encoding."""

    def __init__(
        self,
        *steps: ServerStep,
        dialect: Dialect = KSERVE,
        max_buffered_body_bytes: int = LIMITS.max_buffered_body_bytes,
        **others: Any,
    ) -> None:
        limits = replace(LIMITS, max_buffered_body_bytes=max_buffered_body_bytes)
        super().__init__(*steps, dialect=dialect, limits=limits, **others)

    async def fault(self) -> str:
        with pytest.raises(GatewayError) as caught:
            await self.run()
        assert caught.value.kind is ErrorKind.BAD_RESPONSE
        assert not self.response.started
        return caught.value.message


def _forms(response: ScriptedClientResponse) -> dict[str, Any]:
    """Return the bytes or the JSON data of each output; check the framing."""
    length = response.headers.get(HEADER_LENGTH)
    fields = json.loads(response.body if length is None else response.body[: int(length)])
    rest = b"" if length is None else response.body[int(length) :]
    assert response.headers.getall("X") == ["1"]
    assert len(response.headers.getall("Content-Type")) == 1
    found: dict[str, Any] = {}
    for entry in fields["outputs"]:
        size = (entry.get("parameters") or {}).get("binary_data_size")
        found[entry["name"]] = entry.get("data") if size is None else rest[:size]
        rest = rest[size or 0 :]
    assert rest == b""
    return found


WANTED: dict[str, tuple[bytes, str]] = {
    "all binary": (_request(default=True), "LR"),
    "both listed": (_request(L=True, R=True), "LR"),
    "all JSON": (_request(), ""),
    "L binary": (_request(L=True, R=False), "L"),
    "R binary": (_request(default=True, L=False, R=True), "R"),
}


@DOUBTED
@pytest.mark.parametrize(("body", "binary"), WANTED.values(), ids=WANTED)
async def test_output_arrives_in_the_requested_encoding(
    dialect: Dialect, body: bytes, binary: str
) -> None:
    for came, cut in itertools.product(("", "L", "R", "LR"), (1, 20, 200, 10_000)):
        response = await _Scene(_forwarded(came, cut=cut), body=[body], dialect=dialect).run()
        assert response.status == 200
        expected = {
            name: values.tobytes() if name in binary else values.tolist()
            for name, values in TENSORS.items()
        }
        assert _forms(response) == expected, came


@DOUBTED
async def test_response_in_the_requested_encoding_passes_untouched(dialect: Dialect) -> None:
    """Even if the gateway could not parse it."""
    entry = _entry("L", binary=True) | {"datatype": "FP8", "parameters": {"binary_data_size": 5}}
    header = json.dumps({"outputs": [entry]}).encode()
    told = _response(header, b"12345", cut=9)
    scene = _Scene(told, body=[_request(default=True)], dialect=dialect)
    response = await scene.run()
    assert response.body == header + b"12345"
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers[HEADER_LENGTH] == str(len(header))


@pytest.mark.parametrize("tensors", [LEFT.tobytes()[:-1], LEFT.tobytes() + b"x"])
async def test_fitting_response_of_another_size_never_ends_well(tensors: bytes) -> None:
    header = json.dumps({"outputs": [_entry("L", binary=True)]}).encode()
    scene = _Scene(_response(header, tensors), body=[_request(default=True)])
    with pytest.raises(GatewayError) as caught:
        await scene.run()
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert "client has got all" not in scene.log


@pytest.mark.parametrize(("dialect", "asked"), [(KSERVE, False), (OPENVINO, False), (TRITON, True)])
async def test_server_gets_no_accept_encoding_when_its_response_is_inspected(
    dialect: Dialect, asked: bool
) -> None:
    headers = {"Accept-Encoding": "gzip"}
    scene = _Scene(
        _forwarded("LR"), body=[_request(L=True, R=True)], dialect=dialect, headers=headers
    )
    await scene.run()
    assert ("Accept-Encoding" in scene.endpoint.requests[0].headers) is asked


# ------------------------------------------------------------------------------------------- base64

TEXT = {"name": "T", "shape": [1], "datatype": "BYTES", "data": ["abcd"]}


def _wanted(*, as_base64: bool, **own: bool) -> bytes:
    fields = json.loads(_request(**own))
    for entry in fields.get("outputs", []):
        if entry["name"] == "T" and as_base64:
            entry["parameters"]["content_type"] = "base64"
    return json.dumps(fields).encode()


@DOUBTED
@pytest.mark.parametrize("by_route", [False, True], ids=["as asked", "as the route says"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(("came", "wanted"), [("", ""), ("R", ""), ("", "R")])
async def test_text_output_becomes_base64_when_requested(
    dialect: Dialect, wanted: str, came: str, large: bool, by_route: bool
) -> None:
    """A client that decodes plain text as base64 could get other bytes unnoticed."""
    text = {**TEXT, "data": ["abcd" * 5000]} if large else TEXT
    header = json.dumps({"outputs": [text, _entry("R", binary=bool(came))]}).encode()
    policies = JsonPolicies(bytes_encoding=BytesEncoding.BASE64) if by_route else None
    scene = _Scene(
        _response(header, RIGHT.tobytes() if came else b""),
        body=[_wanted(as_base64=not by_route, T=False, R=bool(wanted))],
        dialect=dialect,
        policies=policies,
        max_buffered_body_bytes=100_000,
    )
    response = await scene.run()
    expected = base64.b64encode(str(text["data"][0]).encode()).decode()
    assert _forms(response) == {"T": [expected], "R": RIGHT.tobytes() if wanted else RIGHT.tolist()}
    size = response.headers.get(HEADER_LENGTH)
    fields = json.loads(response.body[: int(size)] if size else response.body)
    assert fields["outputs"][0]["parameters"] == {"content_type": "base64"}


# ------------------------------------------------------------------------------------------- errors


def _broken(data: str) -> bytes:
    head = '{"name":"L","shape":[2],"datatype":"FP32","data":'
    return f'{{"outputs":[{head}{data}}},{json.dumps(_entry("R", binary=True))}]}}'.encode()


@pytest.mark.parametrize("body", [WANTED["all binary"][0], WANTED["L binary"][0]])
@pytest.mark.parametrize("behind", [RIGHT.tobytes(), b""])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("[, 1.0]", f"{URL}: output 'L': data is not a valid JSON array, near element 0"),
        ('["a", 1]', f"{URL}: output 'L': element 0 (\"a\") is not a number"),
    ],
)
async def test_invalid_output_data_is_a_502(
    data: str, message: str, behind: bytes, body: bytes
) -> None:
    scene = _Scene(_response(_broken(data), behind), body=[body])
    assert message in await scene.fault()


# ---------------------------------------------------------------------------------- large responses


def _large(count: int) -> tuple[ScriptedUpstreamResponse, bytes]:
    """Return a response whose JSON is larger than the cap without its data."""
    values = np.arange(count, dtype="<i4")
    data = {"name": "A", "shape": [count], "datatype": "INT32", "data": values.tolist()}
    header = json.dumps({"outputs": [data, _entry("R", binary=True)]}).encode()
    assert len(header) > LIMITS.max_inference_header_bytes
    return _response(header, RIGHT.tobytes()), values.tobytes()


async def test_tensor_data_does_not_count_as_header_bytes() -> None:
    told, data = _large(20_000)
    body = _request(default=True)
    response = await _Scene(told, body=[body], max_buffered_body_bytes=200_000).run()
    assert _forms(response) == {"A": data, "R": RIGHT.tobytes()}
    told, data = _large(20_000)
    response = await _Scene(told, body=[_request()], max_buffered_body_bytes=200_000).run()
    assert _forms(response) == {"A": list(range(20_000)), "R": RIGHT.tolist()}


@pytest.mark.parametrize("body", [_request(default=True), _request()])
async def test_buffered_response_has_a_cap(body: bytes) -> None:
    told, _ = _large(20_000)
    assert (
        "(limits.max_buffered_body_bytes)"
        in await _Scene(told, body=[body], max_buffered_body_bytes=50_000).fault()
    )


# ----------------------------------------------------------------------------------------------- V1


@DOUBTED
@pytest.mark.parametrize("came", ["", "L", "R", "LR"])
async def test_v1_client_gets_the_same_tensors(dialect: Dialect, came: str) -> None:
    known = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
    target = "/v1/models/m:predict"
    scene = _Scene(
        known, _forwarded(came), body=[b'{"inputs":[1]}'], dialect=dialect, target=target
    )
    response = await scene.run()
    assert json.loads(response.body) == {"outputs": {"L": LEFT.tolist(), "R": RIGHT.tolist()}}
