"""What a kind of call does with requests and responses that are fully buffered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from multidict import CIMultiDictProxy

from gateway.codec.v2.buffered_response import ResponsePlan
from gateway.codec.v2.tensor_check import NoTensorsError
from gateway.errors import GatewayError, ServerName, describe_error, name_server
from gateway.observe.call_record import CallRecord
from gateway.protocol.dialects import Dialect
from gateway.protocol.grpc.framing import PREFIX_SIZE, is_one_message
from gateway.protocol.grpc.headers import STATUS, is_grpc_type, read_message, read_status
from gateway.protocol.grpc.status import GrpcStatus, http_status, status_name
from gateway.protocol.operations import Operation
from gateway.protocol.v1 import V1ResponseLayout
from gateway.proxy.destination import Destination, Limits, Upstream
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.convert_response import ResponseRelay
from gateway.proxy.interfaces import ClientHead, ResponseTemplate
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.sizes import CONVERT_CHUNK
from gateway.system.bounded_cache import BoundedCache
from gateway.upstream.quoted_response import quote_error
from gateway.upstream.transport import FieldLines, RequestTemplate, UpstreamResponseHead

ResponsePlans = BoundedCache[
    tuple[tuple[bytes, ...], tuple[object, ...], int], tuple[Dialect, ResponsePlan, Destination]
]
"""What becomes of responses, by their key, the encoding and the destination's identity."""

ClientMessage = tuple[ResponseTemplate, bytes, bytes | memoryview, FieldLines]
"""A response for a client: its template, the lines of further headers, its body and trailers."""

OK: Final[FieldLines] = ((b"grpc-status", b"0"),)
_OK_TRAILERS: Final = frozenset((OK, (*OK, (b"grpc-message", b""))))
"""The trailers of calls that went well, as servers on C++, Java, Go and Python write them."""


class ServerRequest:
    """A fully buffered request for a server; ``lines`` are the headers that depend on its body.

    ``received`` and ``layout`` tell how to convert the response: None if it is not converted.
    """

    def __init__(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        received: ReceivedRequest | None = None,
        layout: V1ResponseLayout | None = None,
        form: str = "",
        elements: int = 0,
        client_timeout: float | None = None,
        is_query: bool = False,
        is_grpc: bool = False,
    ) -> None:
        self.template: Final = template
        self.lines: Final = lines
        self.body: Final = body
        self.received: Final = received
        self.layout: Final = layout
        self.form: Final = form
        """json, binary or grpc; empty if it is the client's own."""
        self.elements: Final = elements
        """Elements that were converted for the server."""
        self.client_timeout = client_timeout
        """Seconds that the client of a gRPC call waits; None if it does not say."""
        self.is_query: Final = is_query
        """Whether it has no effect, whatever its method."""
        self.is_grpc: Final = is_grpc
        """Whether it goes to the server as a gRPC call."""
        self.wants_raw = True
        """Whether a gRPC client gets a converted response with raw contents."""

    @property
    def is_idempotent(self) -> bool:
        """Whether a server may execute the request twice; see UpstreamRequest."""
        return self.is_query or (self.received is not None and self.received.is_idempotent)


class ServerResponse:
    """A server's complete response to a request."""

    def __init__(
        self,
        request: ServerRequest,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        trailers: FieldLines,
    ) -> None:
        self.request: Final = request
        self.head: Final = head
        self.body: Final = body
        self.trailers: Final = trailers

    @property
    def final_status(self) -> int:
        """Return the HTTP status that says how the call went; see UpstreamResponse."""
        if not self.request.is_grpc:
            return self.head.status
        if self.trailers in _OK_TRAILERS:
            return 200
        code = self.grpc_status
        if code is None:
            return self.head.status
        return http_status(GrpcStatus.CANCELLED if code == GrpcStatus.DEADLINE_EXCEEDED else code)

    @property
    def error(self) -> str:
        """Return the status and the message of an error; see UpstreamResponse."""
        code = self.grpc_status if self.request.is_grpc else None
        if code is None:
            return quote_error(self.head.status, self.head.headers, self.body)
        return describe_error(status_name(code), read_message(self.status_fields))

    @property
    def grpc_status(self) -> int | None:
        """Return the status of a gRPC call, None without any."""
        return read_status(self.status_fields)

    @property
    def status_fields(self) -> list[tuple[str, str]]:
        """Return the fields with the status of a gRPC call: its trailers, or else its headers."""
        fields = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in self.trailers
        ]
        return fields or list(self.head.headers.items())

    @property
    def is_ok_message(self) -> bool:
        """Tell whether it is the one message of a gRPC call that went well."""
        return (
            self.trailers in _OK_TRAILERS
            and STATUS not in self.head.headers
            and is_one_message(self.body, len(self.body))
        )

    @property
    def plain_message(self) -> bytes | None:
        """Return that message, None if it is none, compressed, large or not said to be gRPC."""
        if not self.is_ok_message or self.body[0] or len(self.body) > CONVERT_CHUNK:
            return None
        if not is_grpc_type(self.head.headers.get("Content-Type", "")):
            return None
        return bytes(self.body[PREFIX_SIZE:])


class HandlerScope:
    """What a handler serves: requests with the same head, on one route.

    ``headers`` are those of the key that pass to a server. ``response_plans`` are kept for all.
    """

    def __init__(
        self,
        method: str,
        target: str,
        headers: CIMultiDictProxy[str],
        operation: Operation,
        limits: Limits,
        response_plans: ResponsePlans,
    ) -> None:
        self.method: Final = method
        self.target = target
        self.headers: Final = headers
        self.operation: Final = operation
        self.limits: Final = limits
        self.response_plans: Final = response_plans

    def with_request(
        self, method: str, target: str, headers: CIMultiDictProxy[str]
    ) -> HandlerScope:
        """Return the scope of requests that become others."""
        return HandlerScope(
            method, target, headers, self.operation, self.limits, self.response_plans
        )


class CallHandler(ABC):
    """Serves fully buffered calls with the same head."""

    max_size: int = CONVERT_CHUNK
    """Bytes of the largest request; larger ones take the streaming path."""
    is_grpc: bool = False
    """Whether the calls are gRPC calls."""

    def sends_grpc(self, upstream: Upstream) -> bool:
        """Tell whether servers of the upstream get the calls over gRPC."""
        return False

    @abstractmethod
    def to_server(
        self, head: ClientHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server; None if the call takes the streaming path."""

    @abstractmethod
    def passes_untouched(
        self, request: ServerRequest, head: UpstreamResponseHead, destination: Destination
    ) -> bool:
        """Tell by its head whether the client gets a response as it is."""

    @abstractmethod
    def to_client(
        self,
        response: ServerResponse,
        destination: Destination,
        server: ServerName,
        policy: ResponseHeaderPolicy | None,
        record: CallRecord,
    ) -> ClientMessage | None:
        """Return a complete response, and record what was converted; raises GatewayError.

        The status of a gRPC call is recorded, too. None leaves the response to the streaming path:
        it takes several time slices, or is one of gRPC without a status or its message.
        """

    @abstractmethod
    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts, as the streaming path does."""


def explain(error: GatewayError, server: ServerName, body: bytes | memoryview) -> GatewayError:
    """Add what codecs do not know to the error of an invalid response."""
    if isinstance(error, NoTensorsError):
        error = error.quoting(bytes(body[:CONVERT_CHUNK]))
    return name_server(server, error)
