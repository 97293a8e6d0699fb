"""Client, gateway and Triton tell of a call in one trace, over HTTP and over gRPC.

The gateway's own spans, of retries, mirrored copies and canaries, are in tests/end_to_end/traces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import Gateway, gateway_with_settings
from tests.integration.triton.models import MODELS
from tests.integration.triton.server import TritonServer
from tests.support.servers.trace_receiver import (
    CLIENT,
    SERVER,
    ReceivedSpan,
    TraceReceiver,
    trace_receiver,
)

pytestmark = pytest.mark.triton

TRACE = "4bf92f3577b34da6a3ce929d0e0e47{:02x}"
PARENT = "00f067aa0ba902b7"
INPUTS = [
    {"name": name, "datatype": "FP32", "shape": [2], "data": [1, 2]}
    for name in ("INPUT0", "INPUT1")
]
INFER = json.dumps({"inputs": INPUTS}).encode()
TRITON, GATEWAY = "triton-inference-server", "tensorgate"


class _TracingTriton(TritonServer):
    """Exports over OTLP to a receiver, and samples nothing by itself."""

    def __init__(self, receiver: TraceReceiver) -> None:
        super().__init__([model for model in MODELS if model.name == "add"])
        self._receiver = receiver.endpoint

    def _arguments(self, folder: Path) -> list[str]:
        others = [each for each in super()._arguments(folder) if "--trace-config" not in each]
        return [
            *others,
            "--trace-config=mode=opentelemetry",
            "--trace-config=level=OFF",
            "--trace-config=rate=1000000",
            f"--trace-config=opentelemetry,url={self._receiver}/v1/traces",
            "--trace-config=opentelemetry,bsp_schedule_delay=50",
        ]


@pytest.fixture(scope="module")
def receiver() -> Iterator[TraceReceiver]:
    """A receiver of the spans of the gateway and of Triton."""
    with trace_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def triton(receiver: TraceReceiver) -> Iterator[TritonServer]:
    """A Triton in its OpenTelemetry mode."""
    with _TracingTriton(receiver) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(
    receiver: TraceReceiver, triton: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway that traces the calls of clients that do."""
    settings: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "upstreams": {"server": {"endpoints": [triton.http_url], "dialect": "triton"}},
        "tracing": {"endpoint": receiver.endpoint, "sample": "0%"},
    }
    with gateway_with_settings(tmp_path_factory.mktemp("gateway"), settings) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def switched_on(gateway: Gateway) -> None:
    """Triton's tracing is switched on through the gateway, as it runs."""
    with _client(gateway) as client:
        assert client.get("/v2/trace").fields["trace_level"] == ["OFF"]
        changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        changed = client.send("POST", "/v2/trace", json.dumps(changes).encode()).fields
    assert {name: changed[name] for name in changes} == changes
    assert changed["trace_mode"] == "opentelemetry"


@contextmanager
def _client(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.host, gateway.port) as client:
        yield client


def _parent(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE.format(number)}-{PARENT}-01"}


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "the spans never came"
        time.sleep(0.02)


def _trace(receiver: TraceReceiver, number: int, requests: int) -> list[ReceivedSpan]:
    """Return the spans of a trace once the gateway and Triton have exported theirs."""
    trace_id = TRACE.format(number)

    def is_complete() -> bool:
        spans = receiver.trace(trace_id)
        of_gateway = [each for each in spans if each.service == GATEWAY and each.kind == SERVER]
        return len(of_gateway) == 1 and len(_requests(spans)) == requests

    _until(is_complete)
    return receiver.trace(trace_id)


def _requests(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """Return Triton's spans of whole requests."""
    return [each for each in spans if each.service == TRITON and each.name == "InferRequest"]


def _check_joined(spans: list[ReceivedSpan], attempts: int) -> list[ReceivedSpan]:
    """Check that all spans nest below the client's; return the attempts that Triton has seen."""
    (call,) = [each for each in spans if each.service == GATEWAY and each.kind == SERVER]
    assert call.parent_id == PARENT
    by_id = {each.span_id: each for each in spans}
    assert len(by_id) == len(spans)
    for each in spans:
        assert each is call or each.parent_id in by_id
    sent = [each for each in spans if each.kind == CLIENT]
    assert len(sent) == attempts
    seen = [by_id[each.parent_id] for each in _requests(spans)]
    assert all(each.kind == CLIENT and each.service == GATEWAY for each in seen)
    for request in _requests(spans):
        attempt = by_id[request.parent_id]
        assert attempt.start <= request.start
    return seen


def test_call_over_http_is_one_trace(gateway: Gateway, receiver: TraceReceiver) -> None:
    with _client(gateway) as client:
        assert client.send("POST", "/v2/models/add/infer", INFER, _parent(1)).status == 200
    spans = _trace(receiver, 1, 1)
    assert len(_check_joined(spans, 1)) == 1
    names = {each.name for each in spans if each.service == GATEWAY}
    assert names == {"POST /v2/models/{model}/infer", "convert request", "convert response"}
    assert {"InferRequest", "add", "compute"} == {e.name for e in spans if e.service == TRITON}
