from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.dialects import KSERVE, OPENVINO, Dialect
from gateway.upstream.metadata_cache import RECHECK_INTERVAL, MetadataCache
from tests.support.checks.refused import refused_with
from tests.support.checks.time_slices import cancelled_after, others
from tests.support.doubles.clock import Clock
from tests.support.doubles.scripted_call import ScriptedCall
from tests.support.doubles.streaming import ScriptedUpstreamResponse
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
    {HEADER_LENGTH: str(len(HEADER)), "Content-Length": str(len(HEADER) + 12)},
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
