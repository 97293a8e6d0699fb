"""A client, a server and the fast path between them, without sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

from multidict import CIMultiDict

from gateway.codec.policies import JsonPolicies
from gateway.observe.call_record import CallRecord
from gateway.proxy.calls.buffered import BufferedCall, CallPlan
from gateway.proxy.calls.planner import Planner
from gateway.proxy.destination import Destination, Limits
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryPolicy
from gateway.upstream.transport import ResponseReceiver
from tests.support.doubles.clock import Clock
from tests.support.doubles.fast_path import (
    DeliveredResponse,
    ReadyEndpoint,
    ScriptedClient,
    SentRequest,
)
from tests.support.doubles.streaming import (
    LIMITS,
    EventLog,
    client_head,
    make_destination,
    single_destination,
)
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_response_header,
    json_request,
)

JSON = json_request()
BINARY = {"Content-Type": "application/octet-stream"}


def plan_of(
    planner: Planner, method: str, target: str, headers: Mapping[str, str] | list[tuple[str, str]]
) -> CallPlan | None:
    """Return the plan for a head that is not one of gRPC."""
    plan = planner.plan(client_head(method, target, headers, planner.head_parser), target)
    assert plan is None or isinstance(plan, CallPlan)
    return plan


def make_plan(
    method: str,
    target: str,
    headers: Mapping[str, str] | list[tuple[str, str]],
    limits: Limits = LIMITS,
) -> CallPlan | None:
    """Return the plan for a head, with one server."""
    planner = Planner(single_destination(make_destination(ReadyEndpoint(), limits=limits)))
    try:
        return plan_of(planner, method, target, headers)
    finally:
        planner.close()


def start(
    planner: Planner,
    method: str,
    target: str,
    headers: Mapping[str, str] | list[tuple[str, str]],
    body: bytes,
    client: ScriptedClient,
) -> BufferedCall | None:
    """Start a call that has a plan; a Content-Length is added if there is a body."""
    lines = CIMultiDict(headers)
    if body:
        lines.setdefault("Content-Length", str(len(body)))
    head = client_head(method, target, lines, planner.head_parser)
    plan = planner.plan(head, target)
    assert plan is not None
    call = planner.prepare(plan, head, body, client)
    if call is not None:
        call.start()
    return call


class Scene:
    """A client, a server with an idle connection, and the fast path between them."""

    def __init__(
        self,
        limits: Limits = LIMITS,
        policies: JsonPolicies | None = None,
        retry: RetryPolicy = SAFE_RETRIES_ONLY,
    ) -> None:
        self.log = EventLog()
        self.clock = Clock()
        self.client = ScriptedClient(self.log)
        self.endpoint = ReadyEndpoint(self.log)
        destination = make_destination(self.endpoint, limits=limits, policies=policies)
        self.destination: Destination = replace(destination, retry_policy=retry)
        with mock.patch("asyncio.get_running_loop", return_value=self.clock):
            self.planner = Planner(single_destination(self.destination))

    def start(
        self,
        method: str = "POST",
        target: str = INFER,
        body: bytes = JSON,
        headers: Mapping[str, str] | list[tuple[str, str]] | None = None,
    ) -> BufferedCall | None:
        """Start a call; a Content-Length is added if there is a body."""
        self.client.record = CallRecord(method, target)
        return start(self.planner, method, target, headers or {}, body, self.client)

    def infer(self) -> BufferedCall:
        call = self.start()
        assert call is not None
        assert self.outstanding == 1
        return call

    def get(self) -> BufferedCall:
        call = self.start("GET", "/v2/x", b"")
        assert call is not None
        assert self.outstanding == 1
        return call

    @property
    def asked(self) -> SentRequest:
        return self.endpoint.asked[-1]

    @property
    def receiver(self) -> ResponseReceiver:
        return self.asked.receiver

    @property
    def responses(self) -> DeliveredResponse:
        assert len(self.client.responses) == 1
        return self.client.responses[0]

    @property
    def error(self) -> str:
        """Return the message of the error that the client got."""
        assert self.responses.headers == (("Content-Type", "application/json"),)
        fields = json.loads(self.responses.body)
        assert list(fields) == ["error"]
        return str(fields["error"])

    @property
    def outstanding(self) -> int:
        return sum(self.destination.upstream.pool.outstanding)


def binary_response(*tensors: bytes, **headers: str) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a response with tensors."""
    header = binary_response_header(*map(len, tensors))
    return {**BINARY, HEADER_LENGTH: str(len(header)), **headers}, header + b"".join(tensors)
