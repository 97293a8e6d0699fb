import asyncio
from dataclasses import replace

import pytest
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, TRITON, Dialect
from gateway.protocol.operations import parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.destination import Upstream
from gateway.proxy.interfaces import Call
from gateway.proxy.server_dialect import headers_with_type, prepare_dialect, wait_for_dialects
from gateway.upstream.pool.dialect import DialectState
from tests.support.doubles.cluster import UndetectedDialectState
from tests.support.doubles.streaming import (
    URL,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    make_destination,
)
from tests.support.inference_messages import HEADER_LENGTH, INFER


def _upstream(dialect_state: DialectState) -> Upstream:
    upstream = make_destination(ScriptedEndpoint(EventLog())).upstream
    return replace(upstream, dialect_state=dialect_state)


CURLS = "application/x-www-form-urlencoded"


def _request(method: str, target: str, **headers: str) -> ScriptedRequest:
    body = [b"{}"] if method == "POST" else []
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ScriptedRequest(EventLog(), method, target, named, body)


async def _prepare(method: str, target: str, upstream: Upstream) -> None:
    with Deadline(9, 9) as deadline:
        destination = replace(make_destination(), upstream=upstream)
        response, operation = ScriptedClientResponse(EventLog()), parse_operation(method, target)
        await prepare_dialect(
            Call(_request(method, target), response, operation, destination, deadline)
        )


def test_unknown_dialect_is_never_guessed() -> None:
    with pytest.raises(
        GatewayError, match="the dialect of upstream 'servers' is not known: it was not"
    ) as caught:
        _ = _upstream(UndetectedDialectState(TRITON, asyncio.Event())).dialect
    assert caught.value.kind is ErrorKind.NOT_READY


@pytest.mark.parametrize(
    ("method", "target", "waits"),
    [
        ("POST", INFER, True),
        ("GET", "/v2/models/m/versions/1/ready", True),
        ("POST", "/v2/models/m/generate", False),
    ],
)
async def test_call_that_needs_the_dialect_waits_for_it(
    method: str, target: str, waits: bool
) -> None:
    told = asyncio.Event()
    dialect_state = UndetectedDialectState(TRITON, told)
    task = asyncio.create_task(_prepare(method, target, _upstream(dialect_state)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert task.done() is not waits
    told.set()
    await task


async def test_wait_for_the_dialect_ends_with_the_deadline() -> None:
    async def wait() -> None:
        with Deadline(9, 0.01) as deadline:
            await wait_for_dialects(
                [_upstream(UndetectedDialectState(TRITON, asyncio.Event()))], deadline
            )

    with pytest.raises(GatewayError, match=f"waiting for {URL}: not done in 0.01 s") as caught:
        await wait()
    assert caught.value.kind is ErrorKind.SERVER_TIMEOUT


async def test_detected_dialect_does_not_reset_the_failures_of_an_endpoint() -> None:
    """The dialect may come from another endpoint."""
    upstream = _upstream(UndetectedDialectState(TRITON, None))
    upstream.pool.members[0].calls.failures = 2
    await _prepare("POST", INFER, upstream)
    state = upstream.pool.snapshot()[0]
    assert (state.consecutive_failures, state.requests_in_progress) == (2, 0)


async def test_upstream_without_endpoints_is_a_503() -> None:
    state = UndetectedDialectState(TRITON, asyncio.Event())
    upstream = replace(make_destination().upstream, dialect_state=state)
    with pytest.raises(GatewayError, match="the upstream has no endpoint"):
        await _prepare("POST", INFER, upstream)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/v2/models/m/versions/1/infer", "/v2/models/m/infer"),
        ("/v2/models/m/versions/1/ready?x", "/v2/models/m/ready"),
    ],
)
async def test_model_version_is_refused_by_a_server_without_versions(
    target: str, path: str
) -> None:
    method = "POST" if target.endswith("infer") else "GET"
    upstream = make_destination(
        ScriptedEndpoint(EventLog()), name="models", dialect=KSERVE
    ).upstream
    with pytest.raises(GatewayError) as caught:
        await _prepare(method, target, upstream)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    said = f"upstream 'models' (kserve) does not support model versions; use {path}"
    assert caught.value.message == said
    await _prepare(method, path, upstream)
    for dialect in (TRITON, OPENVINO, JSON):
        await _prepare(
            method, target, make_destination(ScriptedEndpoint(EventLog()), dialect=dialect).upstream
        )


@pytest.mark.parametrize(
    ("dialect", "request_", "expected"),
    [
        (KSERVE, _request("POST", "/x"), "application/json"),
        (JSON, _request("POST", "/x", Transfer_Encoding="chunked"), "application/json"),
        (JSON, _request("POST", "/x", **{HEADER_LENGTH: "2"}), "application/octet-stream"),
        (KSERVE, _request("POST", "/v2/logging", Content_Type=CURLS), "application/json"),
        (KSERVE, _request("POST", "/x", Content_Type=CURLS), CURLS),
        (TRITON, _request("POST", "/v2/logging", Content_Type=CURLS), CURLS),
        (JSON, _request("GET", "/x"), None),
        (TRITON, _request("POST", "/x"), None),
    ],
)
async def test_server_that_requires_a_json_type_gets_one(
    dialect: Dialect, request_: ScriptedRequest, expected: str | None
) -> None:
    upstream = make_destination(ScriptedEndpoint(EventLog()), dialect=dialect).upstream
    before = CIMultiDict(request_.headers)
    with Deadline(9, 9) as deadline:
        headers = await headers_with_type(request_, upstream, deadline)
    assert headers.getall("Content-Type", []) == ([expected] if expected else [])
    headers.popall("Content-Type", None)
    before.popall("Content-Type", None)
    assert headers == before
