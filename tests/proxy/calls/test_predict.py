import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import KSERVE
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
    binary_response_header,
    metadata,
)

PREDICT = "/v1/models/m:predict"
HEADER = binary_response_header(12)
ANSWER = ScriptedUpstreamResponse(
    200,
    {HEADER_LENGTH: str(len(HEADER)), "Content-Length": str(len(HEADER) + 12), "X": "1"},
    [HEADER + FLOATS.tobytes()],
)
METADATA = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
NO_INPUTS = ScriptedUpstreamResponse(200, {}, [b'{"name":"m","inputs":[],"outputs":[]}'])
NO_CONFIG = ScriptedUpstreamResponse(404)
BODY = json.dumps({"instances": FLOATS.tolist()}).encode()


def _scene(*steps: ServerStep, body: Sequence[BodyStep] = (BODY,), **others: Any) -> ScriptedCall:
    return ScriptedCall(*steps, body=body, **{"target": PREDICT, **others})


@pytest.mark.parametrize(("given", "told"), [("a-7", "a-7"), ("", ""), ("\xe9", "")])
async def test_infer_request_has_the_version_the_query_and_the_id(given: str, told: str) -> None:
    headers = {"X-Request-Id": given, "Accept-Encoding": "gzip"}
    target = "/v1/models/m/versions/3:predict?x=:y"
    scene = _scene(METADATA, NO_CONFIG, ANSWER, target=target, headers=headers)
    await scene.run()
    model = "/v2/models/m/versions/3"
    assert scene.targets == [model, f"{model}/config", f"{model}/infer?x=:y"]
    assert scene.sent[0]["id"] == told
    # The gateway reads the response.
    assert "Accept-Encoding" not in scene.endpoint.requests[-1].headers


BAD_REQUEST = ScriptedUpstreamResponse(400)
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
    scene = _scene(*fetched, *fetched, *own, *fetched, body=body, metadata=cache)
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
    client_response = await _scene(METADATA, NO_CONFIG, response).run()
    assert (client_response.status, client_response.body) == (429, told)
    assert client_response.headers["Content-Type"] == "application/json"
    assert client_response.headers["Retry-After"] == "1"


async def test_unknown_model_passes_the_server_error() -> None:
    scene = _scene(
        ScriptedUpstreamResponse(404, {"Content-Type": "text/plain"}, [b"no such model"])
    )
    with pytest.raises(UpstreamResponseError) as caught:
        await scene.run()
    refusal = caught.value
    assert (refusal.status, refusal.content_type) == (404, "application/json")
    assert refusal.body == b'{"error":"no such model"}'


async def test_model_without_inputs_in_its_metadata_is_refused() -> None:
    scene = _scene(NO_INPUTS, NO_CONFIG)
    with refused_with(ErrorKind.BAD_REQUEST, "the metadata of model 'm' lists no inputs"):
        await scene.run()


@pytest.mark.parametrize("has_inputs", [False, True])
async def test_only_a_model_with_inputs_is_converted_for_a_v1_server(has_inputs: bool) -> None:
    told = ScriptedUpstreamResponse(200, {}, [b'{"predictions": [7]}'])
    steps = (METADATA, ANSWER) if has_inputs else (NO_INPUTS, told)
    scene = _scene(*steps, dialect=KSERVE)
    assert (await scene.run()).status == 200
    assert scene.targets[-1] == (INFER if has_inputs else PREDICT)
    assert (scene.endpoint.bodies[-1] == BODY) is not has_inputs


async def test_large_body_yields_to_other_calls() -> None:
    numbers = np.arange(100_000) / 7
    for body in ({"instances": numbers.tolist()}, {"instances": [{"IN": x} for x in numbers]}):
        text = json.dumps(body).encode()[:999_000]
        text = text[: text.rindex(b",")] + b"]}"
        scene = _scene(METADATA, NO_CONFIG, ANSWER, body=[text])
        with others() as waiting:
            await scene.run()
        assert waiting.turns > len(text) / 65536


async def test_client_may_disconnect_at_any_time() -> None:
    for moment in range(100):
        scene = _scene(METADATA, NO_CONFIG, ANSWER, body=[BODY[:9], BODY[9:]])
        if not await cancelled_after(moment, scene.run()):
            break
        await scene.destination.upstream.metadata.close()
        assert scene.log.count_of("server answers") == scene.log.count_of("server is let go")
    assert moment >= 8
