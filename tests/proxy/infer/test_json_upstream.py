"""Calls to a server that accepts only JSON."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import JSON
from tests.support.checks.refused import refused_with
from tests.support.checks.time_slices import cancelled_after, others
from tests.support.doubles.scripted_call import ScriptedCall, ServerStep
from tests.support.doubles.streaming import LIMITS, URL, BodyStep, ScriptedUpstreamResponse
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    binary_header,
    json_request,
    metadata,
)

OUTPUT = {"name": "OUT", "shape": [3], "datatype": "FP32", "data": FLOATS.tolist()}
BODY = json.dumps({"model_name": "m", "outputs": [OUTPUT]}).encode()
METADATA = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
CHUNKED = {"Transfer-Encoding": "chunked"}


def _response(body: bytes = BODY, *more: BodyStep, status: int = 200) -> ScriptedUpstreamResponse:
    steps: list[BodyStep] = [body[:9], body[9:], *more]
    return ScriptedUpstreamResponse(status, {"Content-Type": "application/json", "X": "1"}, steps)


class _Scene(ScriptedCall):
    """One infer call to a server that accepts only JSON."""

    def __init__(
        self, *steps: ServerStep, max_buffered_body_bytes: int = 1_000_000, **others: Any
    ) -> None:
        limits = replace(
            LIMITS, max_buffered_body_bytes=max_buffered_body_bytes, max_request_bytes=10_000_000
        )
        super().__init__(*steps, dialect=JSON, limits=limits, **others)

    @property
    def document(self) -> Any:
        """Return the JSON that the server got last."""
        headers = self.endpoint.requests[-1].headers
        assert headers.getall("Content-Type") == ["application/json"]
        assert HEADER_LENGTH not in headers
        return json.loads(self.endpoint.bodies[-1])


def _binary(header: bytes, *tensors: BodyStep, **headers: str) -> dict[str, Any]:
    return {"body": [header, *tensors], "headers": {HEADER_LENGTH: str(len(header)), **headers}}


# ----------------------------------------------------------------------------------------- requests


BYTES_INPUT = {
    "inputs": [
        {"name": "IN", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}
    ]
}


async def test_bytes_that_are_not_utf8_are_refused() -> None:
    header = json.dumps(BYTES_INPUT).encode()
    scene = _Scene(_response(), **_binary(header, b"\1\0\0\0\xff"))
    with refused_with(ErrorKind.BAD_REQUEST, "input 'IN': element 0 is not UTF-8"):
        await scene.run()
    assert not scene.log.count_of("server")
    scene = _Scene(
        _response(),
        **_binary(header, b"\1\0\0\0\xff"),
        policies=JsonPolicies(bytes_encoding=BytesEncoding.BASE64),
    )
    await scene.run()
    (entry,) = scene.document["inputs"]
    assert (entry["data"], entry["parameters"]) == (["/w=="], {"content_type": "base64"})


@pytest.mark.parametrize("count", [2, 100_000])
async def test_value_against_the_policy_is_refused(count: int) -> None:
    data = np.full(count, np.nan, "<f4").tobytes()
    scene = _Scene(
        _response(),
        **_binary(binary_header(len(data)), data),
        policies=JsonPolicies(Nonfinite.ERROR),
    )
    with refused_with(ErrorKind.BAD_REQUEST, "input 'IN0': element 0 is nan"):
        await scene.run()
    assert scene.endpoint.bodies == []


BAD: dict[str, Callable[[], _Scene]] = {
    "too deep": lambda: _Scene(body=[json_request(1).replace(b"[1]}", b"[" * 99 + b"1]" * 99)]),
    "broken text": lambda: _Scene(**_binary(json.dumps(BYTES_INPUT).encode(), b"\7\0\0\0a")),
    "no header length": lambda: _Scene(body=[binary_header(8), bytes(8)]),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
async def test_invalid_request_reaches_no_server(make: Callable[[], _Scene]) -> None:
    scene = make()
    with refused_with(ErrorKind.BAD_REQUEST):
        await scene.run()
    assert not scene.log.count_of("server")


@pytest.mark.parametrize("surplus", [-1, 1])
async def test_large_body_of_a_wrong_size_never_reaches_the_server_whole(surplus: int) -> None:
    data = bytes(200_000 + surplus)
    scene = _Scene(**_binary(binary_header(200_000), data, **CHUNKED))
    with refused_with(ErrorKind.BAD_REQUEST):
        await scene.run()
    assert scene.endpoint.bodies == []


# ---------------------------------------------------------------------------------------- responses

ASKING_BINARY = _binary(binary_header(12, binary_output=True), FLOATS.tobytes())


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"outputs":[{', "not valid JSON"),
        (BODY + b" " * 20_000, "limits.max_inference_header_bytes"),
    ],
)
async def test_inconsistent_response_is_a_502_that_names_the_server(
    body: bytes, fault: str
) -> None:
    scene = _Scene(_response(body), **ASKING_BINARY)
    with pytest.raises(GatewayError, match=fault) as caught:
        await scene.run()
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message.startswith(f"{URL}: ")
    assert not scene.response.started


async def test_response_over_the_cap_is_a_502() -> None:
    entry = {**OUTPUT, "shape": [5000], "data": [0] * 5000}
    body = json.dumps({"outputs": [entry]}).encode()
    scene = _Scene(_response(body), **ASKING_BINARY, max_buffered_body_bytes=19_999)
    with pytest.raises(GatewayError, match=r"limits\.max_buffered_body_bytes") as caught:
        await scene.run()
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message.startswith(URL)


# ---------------------------------------------------------------------------------- both directions


async def test_conversion_yields_to_other_calls() -> None:
    values = np.arange(200_000, dtype="<f4")
    data = values.tobytes()
    entry = {**OUTPUT, "shape": [200_000], "data": values.tolist()}
    body = json.dumps({"outputs": [entry]}).encode()
    held = json_request(*values.tolist())
    for request in (_binary(binary_header(len(data), binary_output=True), data), {"body": [held]}):
        with others() as waiting:
            scene = _Scene(_response(body), **request)
            await scene.run()
        assert waiting.turns > (len(data) + len(body)) / 65536
        assert scene.document["inputs"][0]["data"] == values.tolist()


FORMS: dict[str, Callable[..., _Scene]] = {
    "json": lambda *steps: _Scene(*steps, body=[json_request()[:9], json_request()[9:]]),
    "large binary": lambda *steps: _Scene(
        *steps, **_binary(binary_header(80_000), bytes(40_000), bytes(40_000))
    ),
    "raw": lambda *steps: _Scene(
        METADATA, *steps, body=[b"1234", b"5678"], headers={HEADER_LENGTH: "0"}
    ),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
async def test_client_may_disconnect_at_any_time(make: Callable[..., _Scene]) -> None:
    for moment in range(200):
        scene = make(_response())
        if not await cancelled_after(moment, scene.run()):
            break
        await scene.destination.upstream.metadata.close()
        assert scene.log.count_of("server answers") == scene.log.count_of("server is let go")
    assert 8 <= moment < 199
