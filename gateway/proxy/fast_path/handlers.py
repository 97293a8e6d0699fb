"""What the fast path sends for calls of each kind: requests to servers, responses to clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.json.nesting import nests_deeper
from gateway.codec.v1.buffered_response import convert_buffered_v1_response
from gateway.codec.v2.buffered_response import (
    ConvertedResponse,
    ResponsePlan,
    convert_body,
    convert_large_body,
)
from gateway.codec.v2.tensor_check import NoTensorsError, tensor_check
from gateway.errors import GatewayError, ServerName, name_server
from gateway.http1.head import STATUSES_WITHOUT_BODY
from gateway.observe.call_record import CallRecord
from gateway.protocol.dialects import Dialect
from gateway.protocol.messages import InferRequestHead
from gateway.protocol.operations import Operation, OperationKind
from gateway.protocol.response_header import ResponseAction
from gateway.protocol.v1 import V1ResponseLayout, infer_path
from gateway.proxy.destination import Destination
from gateway.proxy.headers import connection_options, end_to_end, with_body
from gateway.proxy.infer.convert_buffered_request import (
    ReceivedRequest,
    cached_outputs_to_list,
    is_accepted,
    read_buffered,
    read_buffered_prediction,
)
from gateway.proxy.infer.convert_response import ResponseRelay, convert_response
from gateway.proxy.infer.response_plan import plan_response
from gateway.proxy.infer.server_form import check_metadata, write_for_server
from gateway.proxy.interfaces import ClientHead, ResponseTemplate
from gateway.proxy.passthrough import relay_response, relay_tensors
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.sizes import CACHED_HEADS, CONVERT_CHUNK, MAX_FAST_RESPONSE, MAX_UNSCHEDULED
from gateway.system.bounded_cache import BoundedCache
from gateway.upstream.quoted_response import quote_error
from gateway.upstream.transport import FieldLines, RequestTemplate, UpstreamResponseHead

ClientMessage = tuple[ResponseTemplate, bytes, bytes | memoryview]
"""A response for a client: its template, the lines of further headers, and its body."""

ResponsePlans = BoundedCache[
    tuple[tuple[bytes, ...], tuple[object, ...], int], tuple[Dialect, ResponsePlan, Destination]
]
"""What becomes of responses, by their key, the encoding and the destination's identity."""

_MAX_CACHED_OUTPUTS = 32
"""Outputs that a request may list if what becomes of its responses is cached."""


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
    ) -> None:
        self.template: Final = template
        self.lines: Final = lines
        self.body: Final = body
        self.received: Final = received
        self.layout: Final = layout
        self.form: Final = form
        """json or binary; empty if it is the client's own."""
        self.elements: Final = elements
        """Elements that were converted for the server."""
        self.client_timeout: Final = client_timeout
        """Seconds that the client of a gRPC call waits; None if it does not say."""
        self.is_query: Final = is_query
        """Whether it has no effect, whatever its method."""
        self.response_elements = 0
        """Elements that were converted for the client."""

    @property
    def is_idempotent(self) -> bool:
        """Whether a server may execute the request twice; see UpstreamRequest."""
        return self.is_query or (self.received is not None and self.received.is_idempotent)


class FastPathHandler(ABC):
    """Serves fully buffered calls with the same head."""

    max_size: int = CONVERT_CHUNK
    """Bytes of the largest request; larger ones take the streaming path."""
    is_grpc: bool = False
    """Whether the calls are gRPC calls."""

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

    def outcome(self, head: UpstreamResponseHead, trailers: FieldLines) -> int:
        """Return the HTTP status that says how a call went; see UpstreamResponse."""
        return head.status

    def error(
        self, head: UpstreamResponseHead, body: bytes | memoryview, trailers: FieldLines
    ) -> str:
        """Return the status and the message of an error; see UpstreamResponse."""
        return quote_error(head.status, head.headers, body)

    @abstractmethod
    def to_client(
        self,
        request: ServerRequest,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        destination: Destination,
        server: ServerName,
        policy: ResponseHeaderPolicy | None,
    ) -> ClientMessage | None:
        """Return a complete response, None if it takes several time slices; raises GatewayError."""

    def end(
        self,
        record: CallRecord,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        trailers: FieldLines,
    ) -> FieldLines | None:
        """Record the status of a gRPC call, and return the trailers for its client.

        None leaves the response to the streaming path, as one without a status or its message.
        """
        return ()

    @abstractmethod
    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts, as the streaming path does."""


class PassthroughHandler(FastPathHandler):
    """Passes requests and responses untouched; JSON that is nested too deep is not sent.

    Queries have no effect, whatever their method.
    """

    def __init__(self, template: RequestTemplate, is_query: bool = False) -> None:
        self._template = template
        self._is_query = is_query

    def to_server(
        self, head: ClientHead, body: bytes, destination: Destination, request_id: str
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

    def passes_untouched(
        self, request: ServerRequest, head: UpstreamResponseHead, destination: Destination
    ) -> bool:
        """Tell by its head whether the client gets a response as it is."""
        return True

    def to_client(
        self,
        request: ServerRequest,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        destination: Destination,
        server: ServerName,
        policy: ResponseHeaderPolicy | None,
    ) -> ClientMessage:
        """Return a complete response."""
        return _untouched(head, body, policy)

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        await relay_response(relay.upstream_response, relay.response, relay.server, relay.deadline)


class GenerateHandler(PassthroughHandler):
    """Passes requests to generate untouched, and responses that hold text."""

    def to_client(
        self,
        request: ServerRequest,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        destination: Destination,
        server: ServerName,
        policy: ResponseHeaderPolicy | None,
    ) -> ClientMessage:
        """Return a complete response; raises GatewayError (502) if it holds no text."""
        try:
            check = tensor_check(head.status, head.headers, OperationKind.GENERATE)
            if check is not None:
                check.check_whole(body)
        except GatewayError as error:
            raise _explain(error, server, body) from error
        return _untouched(head, body, policy)

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        received, deadline = relay.upstream_response, relay.deadline
        await relay_tensors(
            received, relay.response, relay.server, deadline, OperationKind.GENERATE
        )


class InferHandler(FastPathHandler):
    """Converts infer requests; ``header_size`` is their Inference-Header-Content-Length."""

    def __init__(
        self,
        method: str,
        target: str,
        headers: CIMultiDictProxy[str],
        operation: Operation,
        header_size: int | None,
        max_size: int,
        plans: ResponsePlans,
    ) -> None:
        self.max_size = max_size
        self._method = method
        self._target = target
        self._headers = headers
        self._operation = operation
        self._header_size = header_size
        self._templates: dict[tuple[str, bool], RequestTemplate] = {}
        self._plans = plans
        self._counted_head: InferRequestHead | None = None
        self._element_count = 0
        """Of the last head: most requests have the same."""

    def to_server(
        self, head: ClientHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server."""
        is_scheduled = self._header_size is None and len(body) > MAX_UNSCHEDULED
        if is_scheduled and not destination.upstream.dialect.binary:
            return None  # JSON of JSON takes several time slices
        if is_scheduled and not destination.scheduler.try_take_slice():
            return None  # requests of many clients may come in the same time slice
        received = read_buffered(self._operation, destination, self._header_size, body)
        return None if received is None else self._write(received, destination)

    def _write(
        self,
        received: ReceivedRequest,
        destination: Destination,
        layout: V1ResponseLayout | None = None,
    ) -> ServerRequest | None:
        head = received.request.head
        if not is_accepted(self._operation, destination, received):
            return None  # the streaming path sends the error
        unlisted = cached_outputs_to_list(self._operation, destination, head)
        if unlisted is None:
            return None
        form, content = write_for_server(received, unlisted, destination)
        if not isinstance(content, list):
            return None
        lines = b"Content-Length: %d\r\n" % sum(map(len, content))
        if form.header_size is not None:
            lines += _header_length_line(form.header_size)
        template = self._template_for(form.content_type, form.reads_response)
        elements = 0
        if form.is_converted(from_json=self._header_size is None):
            if head is not self._counted_head:
                self._counted_head, self._element_count = head, head.element_count
            elements = self._element_count
        return ServerRequest(template, lines, content, received, layout, form.name, elements)

    def _template_for(self, content_type: str, reads_response: bool) -> RequestTemplate:
        key = content_type, reads_response
        if (template := self._templates.get(key)) is None:
            headers = with_body(self._headers, {"Content-Type": content_type})
            if reads_response:
                headers.popall("Accept-Encoding", None)
            lines = tuple(headers.items())
            template = self._templates[key] = RequestTemplate(self._method, self._target, lines)
        return template

    def passes_untouched(
        self, request: ServerRequest, head: UpstreamResponseHead, destination: Destination
    ) -> bool:
        """Tell by its head whether the client gets a response as it is."""
        try:
            plan = self._plan(request, head, destination)
        except GatewayError:
            return False  # ``to_client`` raises it
        return plan.action is ResponseAction.UNTOUCHED and request.layout is None

    def to_client(
        self,
        request: ServerRequest,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        destination: Destination,
        server: ServerName,
        policy: ResponseHeaderPolicy | None,
    ) -> ClientMessage | None:
        """Return a complete response; None if it takes several time slices."""
        assert request.received is not None
        check_metadata(head.status, self._operation, destination, request.received)
        try:
            plan = self._plan(request, head, destination)
            if plan.action is ResponseAction.UNTOUCHED and request.layout is None:
                if plan.check is not None:
                    plan.check.check_whole(body)
                return _untouched(head, body, policy)
            if plan.is_coded:
                return None
            content = bytes(body)
            if len(content) <= CONVERT_CHUNK:
                converted = _convert(request, head, content, plan)
            else:
                is_small = request.layout is None and len(content) <= MAX_FAST_RESPONSE
                converted = convert_large_body(content, plan) if is_small else None
                if converted is None:
                    return None
        except GatewayError as error:
            raise _explain(error, server, body) from error
        if converted is None:
            return _untouched(head, body, policy)
        request.response_elements = converted.elements
        template = _template(head, policy, converted.content_type, has_new_body=True)
        lines = passed_lines(head, template)
        if converted.header_size is not None:
            lines += _header_length_line(converted.header_size)
        return template, lines, converted.body

    def _plan(
        self, request: ServerRequest, head: UpstreamResponseHead, destination: Destination
    ) -> ResponsePlan:
        """Return what becomes of a response; raises GatewayError. Plans are cached by head."""
        assert request.received is not None
        encoding = request.received.request.head.output_encoding
        dialect = destination.upstream.dialect
        if len(encoding.binary_by_output) > _MAX_CACHED_OUTPUTS:
            return plan_response(head.status, head.headers, encoding, destination)
        key = head.key, encoding.key, id(destination)
        cached = self._plans.get(key)
        if cached is not None and cached[0] is dialect:
            return cached[1]
        plan = plan_response(head.status, head.headers, encoding, destination)
        # It keeps the destination, so that no other can get its id.
        self._plans.put(key, (dialect, plan, destination))
        return plan

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        assert request.received is not None
        status = relay.upstream_response.status
        check_metadata(status, self._operation, relay.destination, request.received)
        await convert_response(relay)


class PredictHandler(InferHandler):
    """Converts V1 predictions to infer requests."""

    def __init__(
        self,
        target: str,
        headers: CIMultiDictProxy[str],
        operation: Operation,
        plans: ResponsePlans,
    ) -> None:
        target = infer_path(operation) + "".join(target.partition("?")[1:])
        passed = CIMultiDict(headers)
        passed.popall("Accept-Encoding", None)  # the gateway reads the response
        super().__init__(
            "POST", target, CIMultiDictProxy(passed), operation, None, MAX_UNSCHEDULED, plans
        )

    def to_server(
        self, head: ClientHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server."""
        if not request_id:  # ids are off, so that the client's own passes
            own = [field.value for field in head.noted if field.lower == "x-request-id"]
            request_id = own[0] if own and own[0].isascii() else ""
        prediction = read_buffered_prediction(self._operation, destination, body, request_id)
        if prediction is None:
            return None
        received, layout = prediction
        return self._write(received, destination, layout)


def _convert(
    request: ServerRequest, head: UpstreamResponseHead, body: bytes, plan: ResponsePlan
) -> ConvertedResponse | None:
    if request.layout is None:
        return convert_body(body, plan)
    return convert_buffered_v1_response(
        head.status, head.reason, head.headers, body, request.layout, plan
    )


def _explain(error: GatewayError, server: ServerName, body: bytes | memoryview) -> GatewayError:
    """Add what codecs do not know to the error of an invalid response."""
    if isinstance(error, NoTensorsError):
        error = error.quoting(bytes(body[:CONVERT_CHUNK]))
    return name_server(server, error)


def _header_length_line(size: int) -> bytes:
    return b"Inference-Header-Content-Length: %d\r\n" % size


_templates: BoundedCache[tuple[object, ...], ResponseTemplate] = BoundedCache(CACHED_HEADS)


def _template(
    head: UpstreamResponseHead,
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
    lines = tuple(headers.items())
    if policy is not None:
        lines = policy.apply_to_lines(lines)
    dropped = connection_options(keyed)
    return _templates.put(key, ResponseTemplate(head.status, head.reason, lines, dropped))


def _untouched(
    head: UpstreamResponseHead, body: bytes | memoryview, policy: ResponseHeaderPolicy | None
) -> ClientMessage:
    """Return a server's response as it is."""
    template = _template(head, policy)
    lines = passed_lines(head, template)
    if head.status in STATUSES_WITHOUT_BODY and "Content-Length" in head.headers:
        # It is that of a body that is not sent: RFC 9110, section 8.6.
        lines += b"Content-Length: %s\r\n" % head.headers["Content-Length"].encode()
    return template, lines, body


def passed_lines(head: UpstreamResponseHead, template: ResponseTemplate) -> bytes:
    """Return the lines that pass to the client as they came."""
    if not template.dropped:
        return head.passed
    return b"".join(
        line + b"\r\n"
        for line in head.passed.split(b"\r\n")
        if line and line.partition(b":")[0].decode("latin-1").lower() not in template.dropped
    )
