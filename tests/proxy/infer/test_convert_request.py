"""A server like OpenVINO's, which sends only listed outputs in binary."""

import json

import numpy as np
import pytest

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.dialects import KSERVE, OPENVINO, TRITON, Dialect
from tests.support.doubles.scripted_call import ScriptedCall, ServerStep
from tests.support.doubles.streaming import URL, BodyStep, ScriptedUpstreamResponse
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response_header,
    json_request,
)

DATA = FLOATS.tobytes()
IN = {"name": "IN", "datatype": "FP32", "shape": [-1]}
OUTPUTS = [{**IN, "name": "OUT0"}, {**IN, "name": "B"}]
LISTED = [{"name": name, "parameters": {"binary_data": True}} for name in ("OUT0", "B")]
HEADER = binary_response_header(len(DATA))
BINARY = ScriptedUpstreamResponse(
    200,
    # As the server writes it.
    {HEADER_LENGTH: str(len(HEADER)), "Content-Type": "application/json"},
    [HEADER + DATA],
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


MIXED = binary_header(len(DATA))
FORMS: dict[str, tuple[list[BodyStep], dict[str, str]]] = {
    "small JSON": ([json_request()], {}),
    "chunked JSON": (_split(json_request()), {"Transfer-Encoding": "chunked"}),
    "binary": ([MIXED + DATA], {HEADER_LENGTH: str(len(MIXED))}),
    "raw": ([DATA], {HEADER_LENGTH: "0"}),
}


@pytest.mark.parametrize(("body", "headers"), FORMS.values(), ids=FORMS)
async def test_all_outputs_are_listed(body: list[BodyStep], headers: dict[str, str]) -> None:
    scene = _calls(_metadata(*OUTPUTS), BINARY, BINARY)
    for _ in range(2):
        response = await scene.ask(*body, headers=headers)
        fields, tensors = scene.sent
        assert fields["outputs"] == LISTED
        assert tensors == DATA
        if headers.get(HEADER_LENGTH) == "0":
            assert response.body == HEADER + DATA
        else:
            (output,) = json.loads(response.body)["outputs"]
            assert np.array(output["data"], "<f4").tobytes() == DATA
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
    body, headers = FORMS[form]
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
    response = await scene.ask(DATA, headers={HEADER_LENGTH: "0"})
    assert "outputs" not in scene.sent[0]
    size = int(response.headers[HEADER_LENGTH])
    (entry,) = json.loads(response.body[:size])["outputs"]
    assert entry["parameters"] == {"binary_data_size": len(DATA)}
    assert response.body[size:] == DATA


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
