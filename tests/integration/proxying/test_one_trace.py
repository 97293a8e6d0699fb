"""Client, gateway and Triton tell of a call in one trace.

The gateway's own spans, of retries, mirrored copies and canaries, are in tests/end_to_end/traces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
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

TRACE = "4bf92f3577b34da6a3ce929d0e0e4701"
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


def test_call_over_http_is_one_trace(gateway: Gateway, receiver: TraceReceiver) -> None:
    with Client(gateway.host, gateway.port) as client:
        # Triton's tracing is switched on through the gateway, as it runs.
        assert client.get("/v2/trace").fields["trace_level"] == ["OFF"]
        changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        changed = client.send("POST", "/v2/trace", json.dumps(changes).encode()).fields
        assert {name: changed[name] for name in changes} == changes
        assert changed["trace_mode"] == "opentelemetry"
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert client.send("POST", "/v2/models/add/infer", INFER, headers).status == 200
    end = time.monotonic() + 10
    while not _has(spans := receiver.trace(TRACE), GATEWAY, "POST /v2/models/{model}/infer") or (
        not _has(spans, TRITON, "InferRequest")
    ):
        assert time.monotonic() < end, "the spans never came"
        time.sleep(0.02)
    (call,) = [each for each in spans if each.service == GATEWAY and each.kind == SERVER]
    (attempt,) = [each for each in spans if each.kind == CLIENT]
    (seen,) = [each for each in spans if each.name == "InferRequest"]
    assert (call.parent_id, seen.parent_id) == (PARENT, attempt.span_id)
    assert attempt.start <= seen.start
    by_id = {each.span_id: each for each in spans}
    assert len(by_id) == len(spans)
    assert all(each is call or each.parent_id in by_id for each in spans)
    names = {each.name for each in spans if each.service == GATEWAY}
    assert names == {call.name, "convert request", "convert response"}
    assert {"InferRequest", "add", "compute"} == {e.name for e in spans if e.service == TRITON}


def _has(spans: list[ReceivedSpan], service: str, name: str) -> bool:
    return any((each.service, each.name) == (service, name) for each in spans)
