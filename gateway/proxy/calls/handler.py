"""What serves a kind of call: fully buffered, without a task, and as it streams, in a task.

The handlers of calls that pass through and of generate are here; others have modules of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.json.body_checks import nests_deeper
from gateway.codec.response_form import ResponseForm
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.tensor_check import NoTensorsError, tensor_check
from gateway.errors import GatewayError, ServerName, describe_error, name_server
from gateway.http1.head import STATUSES_WITHOUT_BODY, RequestHead, ResponseHead, parse_lines
from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc.framing import PREFIX_SIZE, is_one_message
from gateway.protocol.grpc.headers import STATUS, is_grpc_type, read_message, read_status
from gateway.protocol.grpc.status import GrpcStatus, http_status, status_name
from gateway.protocol.messages import ALL_BINARY, InferRequest, OutputEncoding
from gateway.protocol.operations import QUERIES, Operation, OperationKind
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.attempts.shared_memory_forms import SharedMemoryForm
from gateway.proxy.body_io import ResponseRelay, passthrough, relay_response, relay_tensors
from gateway.proxy.destination import Destination, Limits, Upstream
from gateway.proxy.headers import ResponseHeaderPolicy, connection_options, end_to_end, with_body
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.generate import generate
from gateway.proxy.interfaces import Call, ClientResponse, ResponseTemplate
from gateway.sizes import CACHED_HEADS, CONVERT_CHUNK
from gateway.system.bounded_cache import BoundedCache
from gateway.upstream.content_decoding import quote_error
from gateway.upstream.transport import (
    Body,
    FieldLines,
    RequestTemplate,
    UpstreamRequest,
    UpstreamResponse,
)

ClientMessage = tuple[ResponseTemplate, bytes, bytes | memoryview, FieldLines]
"""A response for a client: its template, the lines of further headers, its body and trailers."""

OK: Final[FieldLines] = ((b"grpc-status", b"0"),)
_OK_TRAILERS: Final = frozenset((OK, (*OK, (b"grpc-message", b""))))
"""The trailers of calls that went well, as servers on C++, Java, Go and Python write them."""


class ServerRequest:
    """A request for a server; ``lines`` are the headers beside those of its template.

    ``received`` tells how to convert the response: None if it is not converted. A buffered body is
    a list or a tuple.
    """

    def __init__(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Body,
        received: ReceivedRequest | None = None,
        form: str = "",
        elements: int = 0,
        client_timeout: float | None = None,
        is_query: bool = False,
        is_grpc: bool = False,
        shared: SharedMemoryForm | None = None,
    ) -> None:
        self.template: Final = template
        self.lines: Final = lines
        self.body: Final = body
        self.received: Final = received
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
        self.shared: Final = shared
        """How its tensors go through shared memory, if they may."""

    @property
    def is_idempotent(self) -> bool:
        """Whether a server may execute the request twice; see UpstreamRequest."""
        return self.is_query or (self.received is not None and self.received.is_idempotent)

    @property
    def response_form(self) -> ResponseForm | None:
        """Return how the response is written; None if as the protocol says."""
        return None if self.received is None else self.received.response_form

    @property
    def output_encoding(self) -> OutputEncoding:
        """Return how the client wants its outputs."""
        return ALL_BINARY if self.received is None else self.received.request.head.output_encoding

    def for_attempts(self, lines: bytes, *, waits_for_chunks: bool) -> UpstreamRequest:
        """Return the request as UpstreamCall sends it; ``lines`` are all beside the template's."""
        template, body = self.template, self.body
        headers = CIMultiDict([*template.headers, *parse_lines(lines)])
        if isinstance(body, Sequence) and not any(body) and "Content-Length" not in headers:
            body = None
        return UpstreamRequest(
            template.method,
            template.target,
            headers,
            body,
            waits_for_chunks,
            self.is_grpc,
            self.is_idempotent,
        )

    def relay_of(
        self,
        received: UpstreamResponse,
        server: ServerName,
        response: ClientResponse,
        destination: Destination,
        deadline: Deadline,
    ) -> ResponseRelay:
        """Return the relay of its response, in the encoding and form that the client wants."""
        encoding, form = self.output_encoding, self.response_form
        return ResponseRelay(received, server, response, destination, deadline, encoding, form)


class ServerResponse:
    """A server's complete response to a request, and the call that it is for.

    ``policy`` is what the call's route changes in the headers.
    """

    def __init__(
        self,
        request: ServerRequest,
        head: ResponseHead,
        body: bytes | memoryview,
        trailers: FieldLines,
        server: ServerName,
        destination: Destination,
        policy: ResponseHeaderPolicy | None,
        record: CallRecord,
    ) -> None:
        self.request: Final = request
        self.head: Final = head
        self.body: Final = body
        self.trailers: Final = trailers
        self.server: Final = server
        self.destination: Final = destination
        self.policy: Final = policy
        self.record: Final = record

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


@dataclass(frozen=True, slots=True)
class HandlerScope:
    """What a handler serves: one call that streams, or all requests with the same key on a route.

    ``headers`` are those that pass to a server: all of the call's, or those of the key.
    """

    method: str
    target: str
    headers: CIMultiDictProxy[str]
    operation: Operation
    limits: Limits


def scope_of(call: Call) -> HandlerScope:
    """Return the scope of one call."""
    request, limits = call.request, call.destination.limits
    return HandlerScope(request.method, request.target, request.headers, call.operation, limits)


class CallHandler(ABC):
    """Serves calls of one kind."""

    @abstractmethod
    async def serve(self, call: Call) -> None:
        """Serve a call in a task; its request may stream, and may have to wait for metadata.

        Raises GatewayError, and UpstreamResponseError with a server's response to a request of
        the gateway's own.
        """


class OwnHandler(CallHandler):
    """Serves calls that the gateway answers itself, or over several servers."""

    def __init__(self, serve: Callable[[Call], Awaitable[None]], _: HandlerScope) -> None:
        self._serve = serve

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        await self._serve(call)


MakeHandler = Callable[[HandlerScope], CallHandler]
"""Makes the handler of a scope; raises GatewayError (400) for headers that are not valid."""


class BufferedHandler(CallHandler):
    """Serves fully buffered calls without a task, too."""

    max_size: int = CONVERT_CHUNK
    """Bytes of the largest request; larger ones take the streaming path."""
    is_grpc: bool = False
    """Whether the calls are gRPC calls."""
    tensors_start: int | None = None
    """Where the tensors of a body begin, which may be received into shared memory; None if they are
    not as servers get them."""

    def sends_binary(self, upstream: Upstream) -> bool:
        """Tell whether servers of the upstream get tensors as they are in binary form."""
        return False

    def sends_grpc(self, upstream: Upstream) -> bool:
        """Tell whether servers of the upstream get the calls over gRPC."""
        return False

    @abstractmethod
    def to_server(
        self,
        head: RequestHead,
        body: bytes | memoryview,
        destination: Destination,
        request_id: str,
    ) -> ServerRequest | None:
        """Return the request for a server; None if the call takes the streaming path."""

    def reader(self, size: int, destination: Destination) -> InferRequestReader | None:
        """Return what reads a body of ``size`` bytes while it arrives; None if nothing does."""
        return None

    def as_read(
        self, head: RequestHead, read: InferRequest, destination: Destination
    ) -> ServerRequest | None:
        """Return the request for a server, whose body was read while it arrived; see above."""
        return None

    def passes_untouched(
        self, request: ServerRequest, head: ResponseHead, destination: Destination
    ) -> bool:
        """Tell by its head whether the client gets a response as it is."""
        return request.received is None

    @abstractmethod
    def to_client(self, response: ServerResponse) -> ClientMessage | None:
        """Return a complete response, and record what was converted; raises GatewayError.

        The status of a gRPC call is recorded, too. None leaves the response to ``relay``: it takes
        several time slices, or is one of gRPC without a status or its message.
        """

    @abstractmethod
    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""


def explain(error: GatewayError, response: ServerResponse) -> GatewayError:
    """Add what codecs do not know to the error of an invalid response."""
    if isinstance(error, NoTensorsError):
        error = error.quoting(bytes(response.body[:CONVERT_CHUNK]))
    return name_server(response.server, error)


_templates: BoundedCache[tuple[object, ...], ResponseTemplate] = BoundedCache(CACHED_HEADS)


def response_template(
    head: ResponseHead,
    policy: ResponseHeaderPolicy | None,
    content_type: str | None = None,
    *,
    has_new_body: bool = False,
) -> ResponseTemplate:
    """Return the template of responses with the same key.

    A new body has another size, and another ``content_type`` if one is given.
    """
    key = head.key, policy, content_type, has_new_body
    if (template := _templates.get(key)) is not None:
        return template
    keyed = CIMultiDictProxy(CIMultiDict(head.keyed_headers))
    if has_new_body:
        headers = with_body(keyed, {} if content_type is None else {"Content-Type": content_type})
    else:
        headers = end_to_end(keyed)
    return _templates.put(key, make_template(head, headers, policy))


def make_template(
    head: ResponseHead,
    headers: CIMultiDict[str],
    policy: ResponseHeaderPolicy | None,
    *,
    states_length: bool = True,
) -> ResponseTemplate:
    """Make a template of ``headers``, which are those of the head that pass to the client."""
    lines = tuple(headers.items())
    if policy is not None:
        lines = policy.apply_to_lines(lines)
    dropped = connection_options(head.headers)
    return ResponseTemplate(head.status, head.reason, lines, dropped, states_length)


def untouched_message(
    head: ResponseHead, body: bytes | memoryview, policy: ResponseHeaderPolicy | None
) -> ClientMessage:
    """Return a server's response as it is."""
    template = response_template(head, policy)
    lines = passed_lines(head, template)
    if head.status in STATUSES_WITHOUT_BODY and "Content-Length" in head.headers:
        # It is that of a body that is not sent: RFC 9110, section 8.6.
        lines += b"Content-Length: %s\r\n" % head.headers["Content-Length"].encode()
    return template, lines, body, ()


def passed_lines(head: ResponseHead, template: ResponseTemplate) -> bytes:
    """Return the lines that pass to the client as they came."""
    if not template.dropped:
        return head.passed
    return b"".join(
        line + b"\r\n"
        for line in head.passed.split(b"\r\n")
        if line and line.partition(b":")[0].decode("latin-1").lower() not in template.dropped
    )


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
        self,
        head: RequestHead,
        body: bytes | memoryview,
        destination: Destination,
        request_id: str,
    ) -> ServerRequest | None:
        """Return the request for a server."""
        body = bytes(body)
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
