"""One infer or predict call, with a scripted client and server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from gateway.protocol.operations import OperationKind, parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.infer.handler import infer
from gateway.proxy.infer.v1_predict import predict
from gateway.proxy.interfaces import Route
from tests.support.doubles.streaming import (
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_route,
)
from tests.support.inference_messages import HEADER_LENGTH, INFER

ServerStep = ScriptedUpstreamResponse | BaseException | asyncio.Event


class ScriptedCall:
    """One call, and its log; more is said to ``make_route``."""

    def __init__(
        self,
        *turns: ServerStep,
        body: Sequence[BodyStep],
        headers: dict[str, str] | None = None,
        target: str = INFER,
        **route: Any,
    ) -> None:
        self.log = EventLog()
        self.request = ScriptedRequest(self.log, "POST", target, headers, body)
        self.answer = ScriptedClientResponse(self.log)
        self.endpoint = ScriptedEndpoint(self.log, *turns)
        self.route: Route = make_route(self.endpoint, **route)

    async def run(self) -> ScriptedClientResponse:
        """Make the call; nothing is held of it afterwards, and nobody is at a server."""
        asked = parse_operation("POST", self.request.target)
        exchange = predict if asked.kind is OperationKind.PREDICT else infer
        try:
            with Deadline(9, 9) as turns:
                await exchange(self.request, self.answer, asked, self.route, turns)
        finally:
            assert sum(self.route.upstream.pool.outstanding) == 0
            assert self.route.held.total == 0
        return self.answer

    @property
    def sent(self) -> tuple[dict[str, Any], bytes]:
        """Return the header and the tensors of the last request that the server got."""
        size = int(self.endpoint.requests[-1].headers[HEADER_LENGTH])
        body = self.endpoint.bodies[-1]
        return json.loads(body[:size]), body[size:]
