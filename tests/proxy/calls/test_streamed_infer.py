"""Infer requests and V1 predictions that take the streaming path."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.dialects import KSERVE, OPENVINO, Dialect
from gateway.upstream.metadata_cache import RECHECK_INTERVAL, MetadataCache, UpstreamResponseError
from tests.support.checks.refused import refused_with
from tests.support.checks.time_slices import cancelled_after, others
from tests.support.doubles.clock import Clock
from tests.support.doubles.scripted_call import ScriptedCall, ServerStep
from tests.support.doubles.streaming import BodyStep, ScriptedUpstreamResponse
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    json_request,
    metadata,
)

HEADER = binary_response_header(12)
ANSWER = ScriptedUpstreamResponse(
    200,
    {HEADER_LENGTH: str(len(HEADER)), "Content-Length": str(len(HEADER) + 12), "X": "1"},
    [HEADER + FLOATS.tobytes()],
)
METADATA = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
NO_CONFIG = ScriptedUpstreamResponse(404)
CHUNKED = {"Transfer-Encoding": "chunked"}


async def test_small_binary_request_is_sent_fully_buffered() -> None:
    header = binary_header(8, binary_output=True)
    scene = ScriptedCall(
        ANSWER, body=[header, b"1234", b"5678"], headers={HEADER_LENGTH: str(len(header))}
    )
    await scene.run()
    assert scene.log.index("client has sent all") < scene.log.index(f"server is asked POST {INFER}")
    body = cast("list[bytes]", scene.endpoint.requests[0].body)
    assert b"".join(body) == header + b"12345678"


@pytest.mark.parametrize("dialect", [KSERVE, OPENVINO], ids=lambda each: each.name)
async def test_raw_binary_request_without_batches_fetches_no_config(dialect: Dialect) -> None:
    scene = ScriptedCall(
        METADATA, ANSWER, body=[b"12345678"], headers={HEADER_LENGTH: "0"}, dialect=dialect
    )
    await scene.run()
    assert [request.target for request in scene.endpoint.requests] == ["/v2/models/m", INFER]
    header, tensors = scene.sent
    # The leading -1 is a dimension of the tensor itself.
    assert header["inputs"] == [
        {"name": "IN", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    ]
    assert tensors == b"12345678"
    assert scene.endpoint.requests[-1].headers["Content-Type"] == "application/octet-stream"


@pytest.mark.parametrize("size", [4, 40_000])
async def test_raw_binary_request_streams_unless_small(size: int) -> None:
    body = [b"1" * size, b"2" * size]
    scene = ScriptedCall(METADATA, NO_CONFIG, ANSWER, body=body, headers={HEADER_LENGTH: "0"})
    await scene.run()
    sent = scene.log.index(f"server is asked POST {INFER}")
    assert (sent < scene.log.index(f"client sends {size}")) is (size > 4)
    assert scene.sent[1] == b"".join(body)


async def test_raw_binary_request_that_does_not_fit_is_read_by_new_metadata() -> None:
    documents = [ScriptedUpstreamResponse(200, {}, [metadata(size)]) for size in (1, 2, 3)]
    fetched = [each for document in documents for each in (document, NO_CONFIG)]
    clock = Clock()
    scene = ScriptedCall(*fetched, ANSWER, metadata=MetadataCache(60, 10, 30, clock.time))
    for _ in range(3):
        with pytest.raises(GatewayError, match="takes 8 bytes, got 12"):
            await scene.ask(FLOATS.tobytes(), headers={HEADER_LENGTH: "0"})
    assert len(scene.endpoint.requests) == 4
    clock.advance(RECHECK_INTERVAL)
    assert (await scene.ask(FLOATS.tobytes(), headers={HEADER_LENGTH: "0"})).status == 200


BAD: dict[str, Callable[[], ScriptedCall]] = {
    "no body": lambda: ScriptedCall(body=[]),
    "broken off": lambda: ScriptedCall(body=[b'{"inp', bad_request("broken")], headers=CHUNKED),
    "length": lambda: ScriptedCall(body=[b"{}"], headers={HEADER_LENGTH: "x"}),
    "chunked, length beyond": lambda: ScriptedCall(
        body=[b"{}"], headers={HEADER_LENGTH: "3", **CHUNKED}
    ),
    "chunked, surplus": lambda: ScriptedCall(
        body=[json_request(), b"x"], headers={HEADER_LENGTH: str(len(json_request())), **CHUNKED}
    ),
    "no header length": lambda: ScriptedCall(body=[binary_header(8), bytes(8)]),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
async def test_invalid_request_reaches_no_server(make: Callable[[], ScriptedCall]) -> None:
    scene = make()
    with refused_with(ErrorKind.BAD_REQUEST):
        await scene.run()
    assert not scene.log.count_of("server")
    assert not scene.response.started


@pytest.mark.parametrize("surplus", [0, 1])
async def test_chunked_body_of_a_wrong_size_never_reaches_the_server_whole(surplus: int) -> None:
    header = binary_header(8)
    size = 8 + surplus if surplus else 7
    headers = {HEADER_LENGTH: str(len(header)), **CHUNKED}
    scene = ScriptedCall(body=[header, bytes(size)], headers=headers)
    with refused_with(ErrorKind.BAD_REQUEST):
        await scene.run()
    assert scene.endpoint.bodies == []


async def test_large_body_yields_to_other_calls() -> None:
    text = json_request(*np.zeros(100_000).tolist())
    # While it arrives if the datatype is known; afterwards if the datatype follows the data.
    behind = text.replace(b'"datatype": "FP32", ', b"")[:-3] + b', "datatype": "FP32"}]}'
    entry = b'{"name":"a","datatype":"BYTES","shape":[100000],"data":[' + b'"",' * 99_999 + b'""]}'
    for body in (text, behind, b'{"inputs":[' + entry + b"]}"):
        scene = ScriptedCall(ANSWER, body=[body])
        with others() as waiting:
            await scene.run()
        assert waiting.turns > len(body) / 65536
        assert scene.sent[1] == bytes(400_000)


FORMS: dict[str, Callable[..., ScriptedCall]] = {
    "json": lambda *steps: ScriptedCall(*steps, body=[json_request()[:9], json_request()[9:]]),
    "binary": lambda *steps: ScriptedCall(
        *steps,
        body=[binary_header(8), b"1234", b"5678"],
        headers={HEADER_LENGTH: str(len(binary_header(8)))},
    ),
    "raw": lambda *steps: ScriptedCall(
        METADATA, NO_CONFIG, *steps, body=[b"1234", b"5678"], headers={HEADER_LENGTH: "0"}
    ),
    "V1": lambda *steps: _prediction(METADATA, NO_CONFIG, *steps, body=[BODY[:9], BODY[9:]]),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
async def test_client_may_disconnect_at_any_time(make: Callable[..., ScriptedCall]) -> None:
    for moment in range(100):
        scene = make(ANSWER)
        if not await cancelled_after(moment, scene.run()):
            break
        await scene.destination.upstream.metadata.close()
        assert scene.log.count_of("server answers") == scene.log.count_of("server is let go")
    assert moment >= 8


# ----------------------------------------------------------------------------------------------- V1


PREDICT = "/v1/models/m:predict"
NO_INPUTS = ScriptedUpstreamResponse(200, {}, [b'{"name":"m","inputs":[],"outputs":[]}'])
BODY: bytes = json.dumps({"instances": FLOATS.tolist()}).encode()


def _prediction(
    *steps: ServerStep, body: Sequence[BodyStep] = (BODY,), **others: Any
) -> ScriptedCall:
    return ScriptedCall(*steps, body=body, **{"target": PREDICT, **others})


@pytest.mark.parametrize(("given", "told"), [("a-7", "a-7"), ("", ""), ("\xe9", "")])
async def test_infer_request_has_the_version_the_query_and_the_id(given: str, told: str) -> None:
    headers = {"X-Request-Id": given, "Accept-Encoding": "gzip"}
    target = "/v1/models/m/versions/3:predict?x=:y"
    scene = _prediction(METADATA, NO_CONFIG, ANSWER, target=target, headers=headers)
    await scene.run()
    model = "/v2/models/m/versions/3"
    assert scene.targets == [model, f"{model}/config", f"{model}/infer?x=:y"]
    assert scene.sent[0]["id"] == told
    # The gateway reads the response.
    assert "Accept-Encoding" not in scene.endpoint.requests[-1].headers


WRONG = {
    "datatype": b'{"instances":["x"]}',
    "shape": b'{"instances":[[1],[2]]}',
    "name": b'{"inputs":{"OTHER":[1]}}',
}
"""Well-formed bodies that another model could take."""
MALFORMED = {"syntax": b"{", "fields": b'{"other":1}'}


async def _refetches(
    body: Sequence[BodyStep], age: float, refusal: ScriptedUpstreamResponse | None = None
) -> bool:
    """Tell whether the call after a failed one fetches metadata, as it did at that age."""
    clock = Clock()
    cache = MetadataCache(60, 10, 30, clock.time)
    own = [refusal] if refusal else []
    fetched = (METADATA, NO_CONFIG)
    scene = _prediction(*fetched, *fetched, *own, *fetched, body=body, metadata=cache)
    await cache.get("m", None, scene.endpoint)
    cache.recheck("m", None)
    await cache.get("m", None, scene.endpoint)
    clock.advance(age)
    if refusal is None:
        with pytest.raises(GatewayError):
            await scene.run()
    else:
        assert (await scene.run()).status == refusal.status
    requests = len(scene.endpoint.requests)
    await cache.get("m", None, scene.endpoint)
    return len(scene.endpoint.requests) > requests


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
async def test_prediction_for_another_model_has_old_metadata_fetched_again(body: bytes) -> None:
    assert await _refetches([body], RECHECK_INTERVAL)
    assert await _refetches([body[:9], body[9:]], RECHECK_INTERVAL)
    assert not await _refetches([body], RECHECK_INTERVAL - 0.1)


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_prediction_keeps_cached_metadata(body: bytes) -> None:
    assert not await _refetches([body], RECHECK_INTERVAL)


async def test_prediction_that_is_late_or_too_large_keeps_cached_metadata() -> None:
    late = GatewayError(ErrorKind.CLIENT_TIMEOUT, "late")
    assert not await _refetches([BODY[:9], late], RECHECK_INTERVAL)
    assert not await _refetches([b'{"instances":[', b"1," * 60_000], RECHECK_INTERVAL)


@pytest.mark.parametrize(
    ("status", "is_fetched"), [(400, True), (500, True), (413, False), (503, False)]
)
async def test_error_of_the_server_has_old_metadata_fetched_again(
    status: int, is_fetched: bool
) -> None:
    refusal = ScriptedUpstreamResponse(status)
    assert await _refetches([BODY], RECHECK_INTERVAL, refusal) == is_fetched
    assert not await _refetches([BODY], RECHECK_INTERVAL - 0.1, refusal)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"detail":"no"}', b'{"error":"no"}'),
        (b"", b'{"error":"Scripted"}'),
        (b"x" * 99_999, b'{"error":"' + b"x" * 1000 + b'"}'),
    ],
)
async def test_server_error_passes_in_v1_format(body: bytes, told: bytes) -> None:
    response = ScriptedUpstreamResponse(
        429, {"Content-Type": "text/html", "Retry-After": "1"}, [body]
    )
    client_response = await _prediction(METADATA, NO_CONFIG, response).run()
    assert (client_response.status, client_response.body) == (429, told)
    assert client_response.headers["Content-Type"] == "application/json"
    assert client_response.headers["Retry-After"] == "1"


async def test_unknown_model_passes_the_server_error() -> None:
    scene = _prediction(
        ScriptedUpstreamResponse(404, {"Content-Type": "text/plain"}, [b"no such model"])
    )
    with pytest.raises(UpstreamResponseError) as caught:
        await scene.run()
    refusal = caught.value
    assert (refusal.status, refusal.content_type) == (404, "application/json")
    assert refusal.body == b'{"error":"no such model"}'


async def test_model_without_inputs_in_its_metadata_is_refused() -> None:
    scene = _prediction(NO_INPUTS, NO_CONFIG)
    with refused_with(ErrorKind.BAD_REQUEST, "the metadata of model 'm' lists no inputs"):
        await scene.run()


@pytest.mark.parametrize("has_inputs", [False, True])
async def test_only_a_model_with_inputs_is_converted_for_a_v1_server(has_inputs: bool) -> None:
    told = ScriptedUpstreamResponse(200, {}, [b'{"predictions": [7]}'])
    steps = (METADATA, ANSWER) if has_inputs else (NO_INPUTS, told)
    scene = _prediction(*steps, dialect=KSERVE)
    assert (await scene.run()).status == 200
    assert scene.targets[-1] == (INFER if has_inputs else PREDICT)
    assert (scene.endpoint.bodies[-1] == BODY) is not has_inputs


async def test_large_prediction_yields_to_other_calls() -> None:
    numbers = np.arange(100_000) / 7
    for body in ({"instances": numbers.tolist()}, {"instances": [{"IN": x} for x in numbers]}):
        text = json.dumps(body).encode()[:999_000]
        text = text[: text.rindex(b",")] + b"]}"
        scene = _prediction(METADATA, NO_CONFIG, ANSWER, body=[text])
        with others() as waiting:
            await scene.run()
        assert waiting.turns > len(text) / 65536
