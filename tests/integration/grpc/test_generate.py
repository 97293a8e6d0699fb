"""Requests to generate get the same from a Triton over gRPC as from its own HTTP endpoint.

What differs on purpose:

- A request that is invalid by itself gets 400 in the words of the gateway, where Triton says 400 or
  500 in its own; so do integers out of range, which Triton wraps.
- ``generate`` gets 400 unless the model sends one response; Triton sends that error with the status
  of the first response, mostly 200. The gateway doesn't wait for more than two of them.
- FP16 and BF16 inputs are served.
- Numbers and control characters have another spelling with the same value.
- Bytes that are not UTF-8 are an error, as the policy says, where Triton sends invalid JSON.
- ``timeout``, ``priority``, ``sequence_id``, ``sequence_start`` and ``sequence_end`` mean what they
  mean over gRPC; as parameters of the model Triton's gRPC endpoint knows none of them, and none
  that begins with ``triton_``.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.support.client import Client, Response
from tests.integration.support.gateway import running_gateway
from tests.integration.triton.server import HOST, TritonServer

KINDS = ("generate", "generate_stream")


@pytest.fixture(scope="module")
def over_grpc(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A connection to a gateway that reaches the Triton server over gRPC."""
    url = f"grpc://{HOST}:{triton.grpc_port}"
    with (
        running_gateway(tmp_path_factory.mktemp("gateway"), url) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


def _path(model: str, kind: str) -> str:
    return f"/v2/models/{model}/{kind}"


def _text(**members: Any) -> dict[str, Any]:
    return {"text_input": "hi", **members}


SAME: list[tuple[str, Any]] = [
    ("decoupled", _text(id="42", parameters={"count": 1, "a": True, "s": "x"}, extra=7)),
    ("decoupled", _text(big=2**63 - 1, small=-(2**63), above=2**63, huge=1e300, whole=1.0)),
    ("decoupled", {"text_input": 'quotes " \\ / \n\t \u2028 \u007f é 😀'}),
    ("decoupled", {"text_input": [["in two"]]}),
    ("decoupled", {"parameters": {"text_input": "among the parameters"}}),
    ("decoupled", _text(count=1, fail_at=0)),
    ("decoupled", {}),
    ("nope", {}),
    ("versioned/versions/1", {"INPUT0": 1}),
    ("with_parameters", {"INPUT0": 1, "id": "7", "x": 3}),
    ("mixed", {"IN_FP32": [1, 2.5], "IN_INT64": 5, "IN_BYTES": ["a", "b"], "IN_BOOL": [True]}),
    ("mixed", {"IN_FP32": [], "IN_INT64": [], "IN_BYTES": "", "IN_BOOL": False}),
    ("batched_fp32", {"INPUT0": [1, 2, 3, 4, 5, 6, 7, 8]}),
    ("batched_bytes", {"INPUT0": ["a", "b"]}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("model", "document"), SAME)
def test_response_is_that_of_triton(
    direct: Client, over_grpc: Client, model: str, document: Any, kind: str
) -> None:
    body = json.dumps(document).encode()
    expected = direct.send("POST", _path(model, kind), body)
    found = over_grpc.send("POST", _path(model, kind), body)
    assert _seen(found) == _seen(expected)


STREAMS: list[tuple[str, Any]] = [
    ("stream", {"text_input": "café"}),
    ("decoupled", _text(count=0)),
    ("decoupled", _text(count=20, id="7")),
    ("decoupled", _text(count=3, fail_at=1)),
    ("decoupled", _text(count=3, fail_at=2)),
]


@pytest.mark.parametrize(("model", "document"), STREAMS)
def test_stream_is_that_of_triton(
    direct: Client, over_grpc: Client, model: str, document: Any
) -> None:
    body = json.dumps(document).encode()
    expected = direct.send("POST", _path(model, "generate_stream"), body)
    found = over_grpc.send("POST", _path(model, "generate_stream"), body)
    assert _seen(found) == _seen(expected)


def _seen(response: Response) -> tuple[int, str | None, list[Any] | bytes]:
    """Return what a client sees, with parameters in an order of their own.

    Triton's gRPC endpoint has them in a map.
    """
    kind = response.headers["Content-Type"]
    *events, rest = response.body.split(b"\n\n")
    if not events:
        return response.status, kind, _without_order(rest)
    assert not rest
    return response.status, kind, [_without_order(event) for event in events]


def _without_order(text: bytes) -> bytes:
    fields = json.loads(text.removeprefix(b"data: ") or b"null")
    if not isinstance(fields, dict):
        return text
    for name in ("parameters", "OUTPUT0"):
        value = fields.get(name)
        if isinstance(value, str) and value.startswith("{"):
            ordered = json.dumps(dict(sorted(json.loads(value).items()))).encode()
            text = text.replace(json.dumps(value, ensure_ascii=False).encode(), ordered)
    return text


@pytest.mark.parametrize("count", [0, 1000])
def test_generate_wants_one_response(direct: Client, over_grpc: Client, count: int) -> None:
    body = json.dumps(_text(count=count)).encode()
    expected = direct.send("POST", _path("decoupled", "generate"), body)
    found = over_grpc.send("POST", _path("decoupled", "generate"), body)
    assert (found.status, found.body) == (400, expected.body)
    assert expected.status == 200
