import json

import pytest

from gateway.exchange.deadline import Deadline
from gateway.exchange.server_metadata import server_metadata
from tests.servers.doubles import (
    Log,
    ScriptedAnswer,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedResponse,
    route_to,
)

_LARGEST = 1024 * 1024


async def _answer(*body: bytes, status: int = 200) -> tuple[ScriptedAnswer, ScriptedEndpoint]:
    log = Log()
    headers = {"Content-Length": str(sum(map(len, body))), "X-Kept": "1"}
    endpoint = ScriptedEndpoint(log, ScriptedResponse(status, headers, body))
    asked = {"Accept-Encoding": "gzip", "X-Asked": "1", "Content-Length": "0"}
    request = ScriptedRequest(log, "GET", "/v2?q", asked)
    answer = ScriptedAnswer(log)
    route = route_to(endpoint)
    with Deadline(9, 9) as turns:
        await server_metadata(request, answer, route, turns)
    assert log[-2:] == ["client has got all", "server is let go"]
    assert answer.status == status
    assert answer.headers["X-Kept"] == "1"
    assert sum(route.upstream.pool.outstanding) == 0
    return answer, endpoint


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        ({}, ["binary_tensor_data"]),
        ({"extensions": []}, ["binary_tensor_data"]),
        ({"extensions": ["a", "b"]}, ["a", "b", "binary_tensor_data"]),
    ],
)
async def test_the_extension_is_added(said: dict[str, object], passed: list[str]) -> None:
    text = json.dumps({"name": "n", **said}).encode()
    answer, _ = await _answer(text[:5], text[5:])
    assert json.loads(answer.body) == {"name": "n", "extensions": passed}
    assert answer.headers["Content-Length"] == str(len(answer.body))


@pytest.mark.parametrize(
    "text",
    [b'{ "extensions" : ["binary_tensor_data"] }', b"{", b"", b"7", b'{"extensions":null}'],
)
async def test_other_text_is_untouched(text: bytes) -> None:
    answer, _ = await _answer(text)
    assert answer.body == text


async def test_what_is_too_large_is_untouched() -> None:
    text = b'{"x":"' + b"x" * _LARGEST + b'"}'
    answer, _ = await _answer(text[:_LARGEST], text[_LARGEST:])
    assert answer.body == text


async def test_errors_are_untouched() -> None:
    answer, _ = await _answer(b"{}", status=503)
    assert answer.body == b"{}"


async def test_the_question() -> None:
    _, endpoint = await _answer(b"{}")
    (request,) = endpoint.requests
    assert (request.method, request.target, request.body) == ("GET", "/v2?q", None)
    assert dict(request.headers) == {"X-Asked": "1"}
