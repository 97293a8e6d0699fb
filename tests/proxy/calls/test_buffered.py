"""The responses of fast path calls, until every resource is released."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from gateway.codec.policies import JsonPolicies, Nonfinite
from gateway.errors import bad_response
from gateway.proxy.calls import infer as calls_infer
from gateway.proxy.calls.planner import FastPath
from tests.proxy.calls.scene import VALUES, Scene, binary_response, start
from tests.support.compiled import needs_source
from tests.support.doubles.fast_path import (
    DeliveredResponse,
    ReadyEndpoint,
    ScriptedClient,
    response_head,
)
from tests.support.doubles.streaming import (
    LIMITS,
    SERVER,
    URL,
    EventLog,
    ScriptedClientResponse,
    ScriptedUpstreamResponse,
    make_destination,
    single_destination,
)
from tests.support.inference_messages import FLOATS, HEADER_LENGTH, INFER, binary_response_header


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("status", "ejections"), [(500, 0), (503, 1)])
async def test_response_status_is_recorded_for_its_endpoint(
    status: int, ejections: int, begun: bool
) -> None:
    bad, good = ReadyEndpoint(url="http://bad"), ReadyEndpoint(url="http://good")
    destination = make_destination(bad, good)
    fast_path = FastPath(single_destination(destination))
    for _ in range(10):
        client = ScriptedClient()
        assert start(fast_path, "GET", "/v2/x", {}, b"", client) is not None
        for asked in (*bad.asked, *good.asked):
            if begun:
                asked.receiver.on_headers(
                    ScriptedUpstreamResponse(status if bad.asked else 200, {}, [b"x"])
                )
                await client.begin_task(ScriptedClientResponse(EventLog()))
            else:
                asked.receiver.on_complete(response_head(status if bad.asked else 200), b"")
        bad.asked.clear()
        good.asked.clear()
    assert [each.ejection.ejections for each in destination.upstream.pool.members] == [ejections, 0]
    fast_path.close()


@pytest.mark.parametrize("stalls", [False, True], ids=["broken off", "stalled"])
async def test_endpoint_whose_response_never_ends_has_failed(stalls: bool) -> None:
    scene = Scene(replace(LIMITS, idle_timeout=0.1))
    other = ReadyEndpoint(url="http://other")
    scene.destination.upstream.pool.set_endpoints([scene.endpoint, other])
    scene.get()
    fault = asyncio.Event() if stalls else bad_response("it fell over")
    scene.receiver.on_headers(ScriptedUpstreamResponse(200, {}, [b"begun", fault]))
    await scene.client.begin_task(ScriptedClientResponse(scene.log))
    members = scene.destination.upstream.pool.members
    assert [member.ejection.failures for member in members] == [1, 0]


# ------------------------------------------------------------------------------- complete responses


async def test_binary_tensors_become_json() -> None:
    headers, body = binary_response(FLOATS.tobytes(), X="1")
    headers |= {"Content-Length": str(len(body)), "Connection": "x-HOP, X-Gone"}
    headers |= {"X-Hop": "1", "X": "1", "x-gone": "1"}
    scene = Scene()
    scene.infer()
    scene.receiver.on_complete(response_head(headers=headers), body)
    assert (scene.responses.status, scene.responses.reason, scene.responses.last) == (
        200,
        "OK",
        False,
    )
    assert sorted(scene.responses.headers) == [("Content-Type", "application/json"), ("X", "1")]
    (output,) = json.loads(scene.responses.body)["outputs"]
    assert output == {"name": "OUT0", "shape": [3], "datatype": "FP32", "data": VALUES}
    assert scene.outstanding == 0


@pytest.mark.parametrize("policy", [Nonfinite.NULL, Nonfinite.ERROR])
async def test_json_policies_hold(policy: Nonfinite) -> None:
    scene = Scene(policies=JsonPolicies(nonfinite=policy))
    scene.infer()
    nan = b"\0\0\xc0\x7f"
    headers, body = binary_response(nan)
    scene.receiver.on_complete(response_head(headers=headers), body)
    if policy is Nonfinite.ERROR:
        assert scene.responses.status == 406
        assert "OUT0" in scene.error
        assert URL not in scene.error
    else:
        (value,) = json.loads(scene.responses.body)["outputs"][0]["data"]
        assert value is None


EMPTY = binary_response_header(0)


@pytest.mark.parametrize(
    "body",
    [
        b'{"outputs":[ ]}',
        b'{"outputs":[{"parameters":{"binary_data_size":4}}]}',
        EMPTY.ljust(LIMITS.max_inference_header_bytes + 1),
    ],
)
async def test_response_without_tensors_passes(body: bytes) -> None:
    scene = Scene()
    scene.infer()
    scene.receiver.on_complete(response_head(headers={"Content-Type": "x/y", "X": "1"}), body)
    assert scene.responses.status == 200
    assert scene.responses.headers == (("Content-Type", "x/y"), ("X", "1"))
    assert scene.responses.body == body


@pytest.mark.parametrize(
    ("way", "status"), [*itertools.product(["infer", "get"], [304, 404]), ("get", 204)]
)
async def test_error_response_passes_untouched(way: str, status: int) -> None:
    scene = Scene()
    getattr(scene, way)()
    headers = {"Content-Length": "4", HEADER_LENGTH: "x", "X": "1", "Keep-Alive": "timeout=5"}
    scene.receiver.on_complete(response_head(status, headers, "So So"), b"body")
    # The client's Content-Length is that of the body, unless there is none by the status.
    length = [("Content-Length", "4")] if status in (204, 304) else []
    assert scene.responses == DeliveredResponse(
        status, "So So", ((HEADER_LENGTH, "x"), ("X", "1"), *length), b"body", last=False
    )


INCONSISTENT = {
    "no number": ({HEADER_LENGTH: "x"}, b"{}", HEADER_LENGTH),
    "too long": (
        {HEADER_LENGTH: str(len(binary_response_header(8)))},
        binary_response_header(8) + bytes(9),
        "more bytes",
    ),
}


@pytest.mark.parametrize(("headers", "body", "fault"), INCONSISTENT.values(), ids=INCONSISTENT)
async def test_inconsistent_response_is_a_502_that_names_the_server(
    headers: dict[str, str], body: bytes, fault: str
) -> None:
    scene = Scene()
    head = response_head(headers=headers)
    for _ in range(2):
        scene.client.responses.clear()
        scene.infer()
        scene.receiver.on_complete(head, body)
        assert scene.responses.status == 502
        assert scene.error.startswith(f"{SERVER.public}: ")
        assert fault in scene.error
        assert not scene.responses.last
        assert scene.outstanding == 0


@needs_source
async def test_unexpected_error_is_logged_and_becomes_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(calls_infer, "convert_whole", fails)
    scene = Scene()
    scene.infer()
    headers, body = binary_response(bytes(4))
    scene.receiver.on_complete(response_head(headers=headers), body)
    assert (scene.responses.status, scene.responses.last) == (500, True)
    assert scene.error == "the gateway failed; its log says why"
    assert scene.outstanding == 0
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("tensorgate.proxy", "ERROR")
    assert f"POST {INFER} failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_connection_is_released_before_the_response_is_sent() -> None:
    """The client's next request may need the connection to the server."""
    scene = Scene()
    scene.get()
    scene.receiver.on_complete(response_head(), b"")
    scene.get()
    scene.receiver.on_error(bad_response("it fell over"))
    assert scene.log == [
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 200",
        "server is asked GET /v2/x",
        "server is let go",
        "client gets 502",
    ]
