"""One infer or predict exchange, as a script of what client and server do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from gateway.protocol.operations import parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.calls.handler import scope_of
from gateway.proxy.calls.kinds import one_server_kind
from gateway.proxy.destination import Destination
from gateway.proxy.interfaces import Call
from tests.support.doubles.streaming import (
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)
from tests.support.inference_messages import HEADER_LENGTH, INFER

ServerStep = ScriptedUpstreamResponse | BaseException | asyncio.Event


async def serve(call: Call) -> None:
    """Serve a call from one server, in this task."""
    await one_server_kind(call.operation.kind).http(scope_of(call)).serve(call)


class ScriptedCall:
    """One call and its log; ``route`` are arguments of ``make_destination``."""

    def __init__(
        self,
        *turns: ServerStep,
        body: Sequence[BodyStep] = (),
        headers: dict[str, str] | None = None,
        target: str = INFER,
        **destination: Any,
    ) -> None:
        self.log = EventLog()
        self.request = ScriptedRequest(self.log, "POST", target, headers, body)
        self.response = ScriptedClientResponse(self.log)
        self.endpoint = ScriptedEndpoint(self.log, *turns)
        self.destination: Destination = make_destination(self.endpoint, **destination)

    async def ask(
        self, *body: BodyStep, headers: dict[str, str] | None = None
    ) -> ScriptedClientResponse:
        """Run another call to the same server."""
        self.request = ScriptedRequest(self.log, "POST", INFER, headers, body)
        self.response = ScriptedClientResponse(self.log)
        return await self.run()

    async def run(self) -> ScriptedClientResponse:
        """Run the call; check that it releases its memory and its endpoint."""
        operation = parse_operation("POST", self.request.target)
        try:
            with Deadline(9, 9) as deadline:
                await serve(
                    Call(self.request, self.response, operation, self.destination, deadline)
                )
        finally:
            assert sum(self.destination.upstream.pool.outstanding) == 0
            assert self.destination.memory_budget.total == 0
        return self.response

    @property
    def targets(self) -> list[str]:
        """Return the targets of all requests that the server got."""
        return [request.target for request in self.endpoint.requests]

    @property
    def sent(self) -> tuple[dict[str, Any], bytes]:
        """Give the header and the tensors of the last request that the server got."""
        size = int(self.endpoint.requests[-1].headers[HEADER_LENGTH])
        body = self.endpoint.bodies[-1]
        length = self.endpoint.requests[-1].headers.get("Content-Length")
        assert length is None or int(length) == len(body)
        return json.loads(body[:size]), body[size:]
