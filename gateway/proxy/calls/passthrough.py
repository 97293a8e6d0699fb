"""The handlers of calls that pass through, and of generate."""

from __future__ import annotations

from typing import Final

from gateway.codec.json.body_checks import nests_deeper
from gateway.codec.v2.tensor_check import tensor_check
from gateway.errors import GatewayError
from gateway.http1.head import RequestHead
from gateway.protocol.operations import QUERIES, OperationKind
from gateway.proxy.calls.handler import (
    BufferedHandler,
    ClientMessage,
    HandlerScope,
    ServerRequest,
    ServerResponse,
    explain,
    untouched_message,
)
from gateway.proxy.destination import Destination
from gateway.proxy.infer.generate import generate
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import ResponseRelay, passthrough, relay_response, relay_tensors
from gateway.upstream.transport import RequestTemplate


class PassthroughHandler(BufferedHandler):
    """Passes requests and responses untouched; JSON that is nested too deep is not sent.

    Queries have no effect, whatever their method.
    """

    def __init__(self, scope: HandlerScope) -> None:
        self._template: Final = RequestTemplate(
            scope.method, scope.target, tuple(scope.headers.items())
        )
        self._is_query: Final = scope.operation.kind in QUERIES

    def to_server(
        self, head: RequestHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server."""
        if body and nests_deeper(body, destination.limits.max_json_depth):
            return None
        lines = b""
        if any(field.lower == "content-length" for field in head.noted):
            # Written anew, so that no server can read another length in it.
            lines = b"Content-Length: %d\r\n" % len(body)
        elif self._template.method != "GET":
            return None  # the transport must state how the body is framed
        return ServerRequest(self._template, lines, (body,), is_query=self._is_query)

    def to_client(self, response: ServerResponse) -> ClientMessage:
        """Return a complete response."""
        return untouched_message(response.head, response.body, response.policy)

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        await passthrough(call)

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        await relay_response(relay)


class GenerateHandler(PassthroughHandler):
    """Passes requests to generate untouched over HTTP, and responses that hold text."""

    def to_client(self, response: ServerResponse) -> ClientMessage:
        """Return a complete response; raises GatewayError (502) if it holds no text."""
        head = response.head
        try:
            check = tensor_check(head.status, head.headers, OperationKind.GENERATE)
            if check is not None:
                check.check_whole(response.body)
        except GatewayError as error:
            raise explain(error, response) from error
        return super().to_client(response)

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        await generate(call)

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        await relay_tensors(relay, OperationKind.GENERATE)
