"""What the handlers of inference convert without waiting, and what is left to the streaming path.

That both convert alike is what ``tests.end_to_end.paths`` shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from multidict import CIMultiDict

from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.http1.head import parse_lines
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, TRITON, Dialect
from gateway.protocol.operations import parse_operation
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.proxy.calls.handler import HandlerScope, ServerRequest
from gateway.proxy.calls.infer import InferHandler, PredictHandler
from gateway.upstream.metadata_cache import RECHECK_INTERVAL, MetadataCache, UpstreamResponseError
from tests.support.checks.refused import refused_with
from tests.support.checks.time_slices import cancelled_after, others
from tests.support.doubles.clock import Clock
from tests.support.doubles.scripted_call import ScriptedCall, ServerStep
from tests.support.doubles.streaming import (
    LIMITS,
    URL,
    BodyStep,
    EventLog,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    client_head,
    make_destination,
)
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
    "too deep": lambda: ScriptedCall(
        body=[json_request(1).replace(b"[1]}", b"[" * 99 + b"1]" * 99)]
    ),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD)
async def test_invalid_request_reaches_no_server(make: Callable[[], ScriptedCall]) -> None:
    scene = make()
    with refused_with(ErrorKind.BAD_REQUEST):
        await scene.run()
    assert not scene.log.count_of("server")
    assert not scene.response.started


@pytest.mark.parametrize("surplus", [-1, 1])
@pytest.mark.parametrize(("size", "dialect"), [(8, TRITON), (200_000, JSON)])
async def test_chunked_body_of_a_wrong_size_never_reaches_the_server_whole(
    size: int, dialect: Dialect, surplus: int
) -> None:
    header = binary_header(size)
    headers = {HEADER_LENGTH: str(len(header)), **CHUNKED}
    scene = ScriptedCall(body=[header, bytes(size + surplus)], headers=headers, dialect=dialect)
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
    "large binary to JSON": lambda *_: JsonServer(
        _response(), **_binary(binary_header(80_000), bytes(40_000), bytes(40_000))
    ),
    "raw to JSON": lambda *_: JsonServer(
        METADATA, _response(), body=[b"1234", b"5678"], headers={HEADER_LENGTH: "0"}
    ),
}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
async def test_client_may_disconnect_at_any_time(make: Callable[..., ScriptedCall]) -> None:
    for moment in range(200):
        scene = make(ANSWER)
        if not await cancelled_after(moment, scene.run()):
            break
        await scene.destination.upstream.metadata.close()
        assert scene.log.count_of("server answers") == scene.log.count_of("server is let go")
    assert 8 <= moment < 199


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


OUTPUT = {"name": "OUT", "shape": [3], "datatype": "FP32", "data": FLOATS.tolist()}
OUTPUTS_TEXT = json.dumps({"model_name": "m", "outputs": [OUTPUT]}).encode()


def _response(
    body: bytes = OUTPUTS_TEXT, *more: BodyStep, status: int = 200
) -> ScriptedUpstreamResponse:
    steps: list[BodyStep] = [body[:9], body[9:]]
    return ScriptedUpstreamResponse(200, {"Content-Type": "application/json", "X": "1"}, steps)


class JsonServer(ScriptedCall):
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
    scene = JsonServer(_response(), **_binary(header, b"\1\0\0\0\xff"))
    with refused_with(ErrorKind.BAD_REQUEST, "input 'IN': element 0 is not UTF-8"):
        await scene.run()
    assert not scene.log.count_of("server")
    broken = JsonServer(**_binary(header, b"\7\0\0\0a"))
    with refused_with(ErrorKind.BAD_REQUEST):
        await broken.run()
    assert not broken.log.count_of("server")
    scene = JsonServer(
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
    scene = JsonServer(
        _response(),
        **_binary(binary_header(len(data)), data),
        policies=JsonPolicies(Nonfinite.ERROR),
    )
    with refused_with(ErrorKind.BAD_REQUEST, "input 'IN0': element 0 is nan"):
        await scene.run()
    assert scene.endpoint.bodies == []


# ---------------------------------------------------------------------------------------- responses

ASKING_BINARY = _binary(binary_header(12, binary_output=True), FLOATS.tobytes())


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"outputs":[{', "not valid JSON"),
        (OUTPUTS_TEXT + b" " * 20_000, "limits.max_inference_header_bytes"),
    ],
)
async def test_inconsistent_response_is_a_502_that_names_the_server(
    body: bytes, fault: str
) -> None:
    scene = JsonServer(_response(body), **ASKING_BINARY)
    with pytest.raises(GatewayError, match=fault) as caught:
        await scene.run()
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert caught.value.message.startswith(f"{URL}: ")
    assert not scene.response.started


async def test_response_over_the_cap_is_a_502() -> None:
    entry = {**OUTPUT, "shape": [5000], "data": [0] * 5000}
    body = json.dumps({"outputs": [entry]}).encode()
    scene = JsonServer(_response(body), **ASKING_BINARY, max_buffered_body_bytes=19_999)
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
            scene = JsonServer(_response(body), **request)
            await scene.run()
        assert waiting.turns > (len(data) + len(body)) / 65536
        assert scene.document["inputs"][0]["data"] == values.tolist()


TENSOR = FLOATS.tobytes()
IN = {"name": "IN", "datatype": "FP32", "shape": [-1]}
OUTPUTS = [{**IN, "name": "OUT0"}, {**IN, "name": "B"}]
LISTED = [{"name": name, "parameters": {"binary_data": True}} for name in ("OUT0", "B")]
BINARY = ScriptedUpstreamResponse(
    200,
    # As the server writes it.
    {HEADER_LENGTH: str(len(HEADER)), "Content-Type": "application/json"},
    [HEADER + TENSOR],
)
JSON_TEXT = b'{"model_name": "m", "outputs": [{"name": "OUT0", "data": [1.0]}]}'
IN_JSON = ScriptedUpstreamResponse(200, {"Content-Type": "application/json"}, [JSON_TEXT])


def _metadata(*outputs: object, **fields: object) -> ScriptedUpstreamResponse:
    document = {"name": "m", "inputs": [IN], "outputs": list(outputs), **fields}
    return ScriptedUpstreamResponse(200, {}, [json.dumps(document).encode()])


def _calls(*steps: ServerStep, dialect: Dialect = OPENVINO) -> ScriptedCall:
    """Return a server for calls one after the other."""
    return ScriptedCall(*steps, dialect=dialect)


def _split(text: bytes) -> list[BodyStep]:
    return [text[:9], text[9:]]


MIXED = binary_header(len(TENSOR))
LISTED_FORMS: dict[str, tuple[list[BodyStep], dict[str, str]]] = {
    "small JSON": ([json_request()], {}),
    "chunked JSON": (_split(json_request()), {"Transfer-Encoding": "chunked"}),
    "binary": ([MIXED + TENSOR], {HEADER_LENGTH: str(len(MIXED))}),
    "raw": ([TENSOR], {HEADER_LENGTH: "0"}),
}


@pytest.mark.parametrize(("body", "headers"), LISTED_FORMS.values(), ids=LISTED_FORMS)
async def test_all_outputs_are_listed(body: list[BodyStep], headers: dict[str, str]) -> None:
    scene = _calls(_metadata(*OUTPUTS), BINARY, BINARY)
    for _ in range(2):
        response = await scene.ask(*body, headers=headers)
        fields, tensors = scene.sent
        assert fields["outputs"] == LISTED
        assert tensors == TENSOR
        if headers.get(HEADER_LENGTH) == "0":
            assert response.body == HEADER + TENSOR
        else:
            (output,) = json.loads(response.body)["outputs"]
            assert np.array(output["data"], "<f4").tobytes() == TENSOR
            assert response.headers["Content-Type"] == "application/json"
    # Its metadata is fetched once, and its config, which it does not have, never.
    assert scene.targets == ["/v2/models/m", INFER, INFER]


@pytest.mark.parametrize("dialect", [OPENVINO, TRITON, KSERVE], ids=lambda each: each.name)
async def test_outputs_are_listed_by_the_client_or_for_openvino_alone(dialect: Dialect) -> None:
    text = {**json.loads(json_request()), "outputs": [{"name": "OUT0"}]}
    scene = _calls(BINARY, dialect=dialect)
    await scene.ask(json.dumps(text).encode())
    assert scene.sent[0]["outputs"] == LISTED[:1]
    assert scene.targets == [INFER]
    if dialect is not OPENVINO:
        scene = _calls(BINARY, dialect=dialect)
        await scene.ask(json_request())
        assert "outputs" not in scene.sent[0]
        assert scene.targets == [INFER]


@pytest.mark.parametrize("size", [10, 5000, 10_000])
async def test_invalid_element_before_a_broken_end_is_named_for_all_sizes_of_pieces(
    size: int,
) -> None:
    text = json_request().partition(b"[1")[0] + b"[" + b"1," * 3000 + b"{}" + b",1" * 300
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    with pytest.raises(GatewayError, match="element 3000 is an object"):
        await _calls().ask(*pieces, bad_request("broken"), headers={"Transfer-Encoding": "chunked"})


@pytest.mark.parametrize(
    "told",
    [
        _metadata(),
        _metadata(*OUTPUTS, inputs=[{**IN, "datatype": "INVALID"}]),
        ScriptedUpstreamResponse(404, {}, [b'{"error":"no such model"}']),
    ],
)
@pytest.mark.parametrize("form", ["small JSON", "binary"])
async def test_unknown_outputs_come_as_json(form: str, told: ScriptedUpstreamResponse) -> None:
    body, headers = LISTED_FORMS[form]
    scene = _calls(told, IN_JSON)
    response = await scene.ask(*body, headers=headers)
    assert "outputs" not in scene.sent[0]
    assert (response.status, response.body) == (200, JSON_TEXT)
    assert response.headers["Content-Type"] == "application/json"


async def test_raw_binary_request_with_unknown_outputs() -> None:
    """They come as JSON, and become the binary response to a raw binary request."""
    output = {"name": "OUT0", "datatype": "FP32", "shape": [3], "data": FLOATS.tolist()}
    told = ScriptedUpstreamResponse(200, {}, [json.dumps({"outputs": [output]}).encode()])
    scene = _calls(_metadata(), told)
    response = await scene.ask(TENSOR, headers={HEADER_LENGTH: "0"})
    assert "outputs" not in scene.sent[0]
    size = int(response.headers[HEADER_LENGTH])
    (entry,) = json.loads(response.body[:size])["outputs"]
    assert entry["parameters"] == {"binary_data_size": len(TENSOR)}
    assert response.body[size:] == TENSOR


async def test_server_that_cannot_be_queried_fails_the_request() -> None:
    scene = _calls(GatewayError(ErrorKind.UNREACHABLE, f"{URL}: Connection refused"))
    with pytest.raises(GatewayError, match=f"{URL}: Connection refused"):
        await scene.ask(json_request())
    assert scene.targets == ["/v2/models/m"]
    assert scene.destination.upstream.pool.outstanding == [0]


async def test_error_response_drops_cached_metadata() -> None:
    refusal = ScriptedUpstreamResponse(400, {}, [b'{"error":"no such output"}'])
    scene = _calls(_metadata(*OUTPUTS), refusal, _metadata(OUTPUTS[0]), BINARY)
    assert (await scene.ask(json_request())).status == 400
    assert (await scene.ask(json_request())).status == 200
    assert scene.sent[0]["outputs"] == LISTED[:1]


IN_DATA = np.arange(3, dtype="<f4").tobytes()
SPEC = TensorSpec("IN", DATATYPES["FP32"], (-1,))
MODEL = ModelMetadata("m", (SPEC,), None, (TensorSpec("OUT", DATATYPES["FP32"], (-1,)),))
IN_HEADER = binary_header(len(IN_DATA))
LISTING = IN_HEADER[:-1] + b',"outputs":[{"name":"OUT"}]}'
V1 = json.dumps({"instances": [0.5, 1, 2]}).encode()


class Cache(MetadataCache):
    """Metadata of the model, or none."""

    def __init__(self, model: ModelMetadata | None) -> None:
        super().__init__(60, 10, 30, lambda: 0.0)
        self._model = model

    def cached(self, *_: Any) -> ModelMetadata | None:
        return self._model


def convert(
    target: str,
    body: bytes,
    header_size: int | None = None,
    model: ModelMetadata | None = MODEL,
    dialect: Dialect = TRITON,
    headers: Mapping[str, str] | None = None,
) -> ServerRequest | None:
    """Return what becomes of a request without waiting."""
    operation = parse_operation("POST", target)
    head = client_head("POST", target, headers or {})
    scope = HandlerScope("POST", target, head.headers, operation, LIMITS)
    handler = InferHandler(scope, header_size, 10_000) if target == INFER else PredictHandler(scope)
    endpoint = ScriptedEndpoint(EventLog())
    destination = make_destination(endpoint, dialect=dialect, metadata=Cache(model))
    return handler.to_server(head, body, destination, "")


def test_requests_that_need_unknown_metadata_are_left_to_the_streaming_path() -> None:
    for model, is_converted in ((None, False), (MODEL, True)):
        for target, body, size in (
            (INFER, IN_DATA, 0),
            (INFER, json_request(), None),
            (PREDICT, V1, None),
        ):
            found = convert(target, body, size, model, OPENVINO)
            assert (found is not None) is is_converted
    assert convert(INFER, LISTING + IN_DATA, len(LISTING), None, OPENVINO) is not None


@pytest.mark.parametrize(("own", "sent"), [("abc", "abc"), ("", ""), ("caf\xe9", "")])
def test_v1_request_has_the_id_of_the_client_if_ids_are_off(own: str, sent: str) -> None:
    request = convert(PREDICT, V1, headers={"X-Request-Id": own} if own else {})
    assert request is not None
    size = int(CIMultiDict(parse_lines(request.lines))[HEADER_LENGTH])
    assert isinstance(request.body, list)
    assert json.loads(b"".join(request.body)[:size]).get("id") == sent
