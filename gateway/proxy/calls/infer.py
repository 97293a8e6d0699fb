"""Inference in JSON, binary or raw binary form: sent in the server's form, and back.

A V1 prediction is sent as the infer request that asks for the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.shared_memory import SharedMessage
from gateway.codec.v1.buffered_request import read_prediction
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.buffered_response import (
    ConvertedResponse,
    ResponsePlan,
    convert_body,
    convert_large_body,
)
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.shared_memory import SharedDocument
from gateway.errors import GatewayError, ModelMismatchError, bad_request, name_server_in_errors
from gateway.http1.head import RequestHead, ResponseHead
from gateway.protocol.grpc.framing import frame
from gateway.protocol.grpc.headers import TIMEOUT
from gateway.protocol.messages import InferRequest, InferRequestHead
from gateway.protocol.operations import infer_path
from gateway.protocol.request_header import header_length
from gateway.protocol.response_header import (
    ResponseAction,
    is_success,
    reads_response,
    response_header_length,
)
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import error_document
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.retry import send_call
from gateway.proxy.attempts.shared_memory_forms import (
    SharedMemoryForm,
    SharedOverGrpc,
    SharedOverHttp,
)
from gateway.proxy.body_io import ClientBody, ResponseRelay, passthrough, prepend
from gateway.proxy.calls.handler import (
    BufferedHandler,
    ClientMessage,
    HandlerScope,
    ServerRequest,
    ServerResponse,
    explain,
    passed_lines,
    response_template,
    untouched_message,
)
from gateway.proxy.destination import Destination, Upstream
from gateway.proxy.filters.forwarded_headers import REQUEST_ID
from gateway.proxy.headers import with_body
from gateway.proxy.infer.convert_buffered_request import (
    ReceivedRequest,
    cached_outputs_to_list,
    is_accepted,
    read_buffered,
    read_buffered_prediction,
    received_prediction,
)
from gateway.proxy.infer.convert_request import (
    check_request,
    feed_body,
    json_body,
    model_metadata,
    outputs_to_list,
    receive_request,
    shared_tensors,
)
from gateway.proxy.infer.convert_response import convert_response, plan_response
from gateway.proxy.infer.grpc_upstream import (
    binary_body,
    binary_head,
    grpc_headers,
    in_binary_form,
    infer_message,
    with_all_data,
)
from gateway.proxy.interfaces import Call
from gateway.sizes import (
    CONVERT_CHUNK,
    MAX_FAST_REQUEST,
    MAX_FAST_RESPONSE,
    MAX_READ_EARLY,
    MAX_UNSCHEDULED,
)
from gateway.system.buffers import MAX_WINDOW
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.shared_memory import NOT_SHARED
from gateway.upstream.transport import Body, HeaderLines, RequestTemplate

_NO_HEADERS: Final = CIMultiDictProxy(CIMultiDict[str]())
_MAX_CACHED_OUTPUTS: Final = 32
"""Outputs that a request may list if what becomes of its responses is cached."""


class InferHandler(BufferedHandler):
    """Converts infer requests; ``header_size`` is their Inference-Header-Content-Length."""

    def __init__(self, scope: HandlerScope, header_size: int | None, max_size: int) -> None:
        self.max_size = max_size
        self._scope: Final = scope
        self._operation: Final = scope.operation
        self._target = scope.target
        """That of infer requests over HTTP."""
        self._header_size = self.tensors_start = header_size
        self._templates: dict[tuple[bool, bool], RequestTemplate] = {}
        self._grpc_templates: dict[str, RequestTemplate] = {}
        self._counted_head: InferRequestHead | None = None
        self._element_count = 0
        """Of the last head: most requests have the same."""

    def sends_grpc(self, upstream: Upstream) -> bool:
        """Tell whether servers of the upstream get the calls over gRPC."""
        return upstream.infers_over_grpc

    def to_server(
        self,
        head: RequestHead,
        body: bytes | memoryview,
        destination: Destination,
        request_id: str,
    ) -> ServerRequest | None:
        """Return the request for a server."""
        is_scheduled = self._header_size is None and len(body) > MAX_UNSCHEDULED
        if is_scheduled and not self.sends_binary(destination.upstream):
            return None  # JSON of JSON takes several time slices
        if is_scheduled and not destination.scheduler.try_take_slice():
            return None  # requests of many clients may come in the same time slice
        received = read_buffered(self._operation, destination, self._header_size, body)
        return None if received is None else self._write(head, received, destination)

    def reader(self, size: int, destination: Destination) -> InferRequestReader | None:
        """Return what reads a JSON body while it arrives; None if nothing does."""
        is_json = self._header_size is None and self.sends_binary(destination.upstream)
        if not is_json or size > MAX_READ_EARLY:
            return None
        header_cap, depth_cap, tensor_cap = destination.limits.reader_caps
        return InferRequestReader(
            header_cap, depth_cap, destination.offloader_for(size), tensor_cap
        )

    def as_read(
        self, head: RequestHead, read: InferRequest, destination: Destination
    ) -> ServerRequest | None:
        """Return the request for a server, whose body was read while it arrived."""
        if not self.sends_binary(destination.upstream):
            return None
        return self._write(head, ReceivedRequest(read, read.chunks), destination)

    def sends_binary(self, upstream: Upstream) -> bool:
        """Tell whether servers of the upstream get tensors as they are in binary form."""
        dialect = upstream.dialect
        return dialect.grpc.takes_raw if self.sends_grpc(upstream) else dialect.binary

    def _write(
        self, head: RequestHead, received: ReceivedRequest, destination: Destination
    ) -> ServerRequest | None:
        """Write what was read in the server's form; None if the call takes the streaming path."""
        if not is_accepted(self._operation, destination, received):
            return None  # the streaming path sends the error
        if self.sends_grpc(destination.upstream):
            if received.request.missing_size or _has_grpc_fields(head, self.is_grpc):
                return None  # the streaming path drops the fields
            return self._write_grpc(received, received.request, destination)
        unlisted = cached_outputs_to_list(self._operation, destination, received.request.head)
        if unlisted is None:
            return None
        request = self._write_http(received, unlisted, destination)
        return request if isinstance(request.body, list) else None

    async def serve(self, call: Call) -> None:
        """Serve a call in a task."""
        with call.reserve() as reservation:
            received = await receive_request(call, self._header_size, reservation)
            reservation.resize(received.buffered_size)
            if received.request.head.memory > CONVERT_CHUNK:
                await call.destination.scheduler.next_slice()  # to check and write many inputs
            await self.send(call, received)

    async def send(self, call: Call, received: ReceivedRequest) -> None:
        """Send a request in the server's form, and the response to the client.

        Raises GatewayError (400), before any server sees the request, as ``check_request``.
        """
        await check_request(call, received)
        destination, record = call.destination, call.response.record
        with call.reserve() as reservation:
            if self.sends_grpc(destination.upstream):
                placed = call.request.placed
                complete = await with_all_data(received, destination, reservation, placed)
                request = self._write_grpc(received, complete, destination)
            else:
                unlisted = await outputs_to_list(call, received.request)
                request = self._write_http(received, unlisted, destination)
            record.server_form = request.form
            record.request_elements = request.elements
            sent = request.for_attempts(request.lines, waits_for_chunks=True)
            async with send_call(call, sent, form=request.shared) as upstream_call:
                response, server = upstream_call.response, upstream_call.server
                relay = request.relay_of(
                    response, server, call.response, destination, call.deadline
                )
                await self.relay(request, relay)

    def _write_http(
        self, received: ReceivedRequest, unlisted: tuple[str, ...], destination: Destination
    ) -> ServerRequest:
        dialect, request, body = destination.upstream.dialect, received.request, received.body
        content: Body
        lines = b""
        if dialect.binary:
            header = write_binary_header(request, unlisted)
            size = len(header)
            lines = b"Content-Length: %d\r\n" % (size + request.data_size)
            lines += _header_length_line(size)
            # The first question is the fast one.
            if not isinstance(body, (list, tuple)) and isinstance(body, AsyncIterator):
                content = prepend([header], body)
            else:
                content = [header, *body]
        else:
            content = json_body(body, request, destination)
            if isinstance(content, list):
                lines = b"Content-Length: %d\r\n" % sum(map(len, content))
        encoding = request.head.output_encoding
        any_base64 = destination.policies_for(encoding).any_base64
        template = self._template_for(dialect.binary, reads_response(dialect, encoding, any_base64))
        is_converted = dialect.binary == (self._header_size is None)
        elements = self._count_elements(received) if is_converted else 0
        form = "binary" if dialect.binary else "json"
        shared = self._share_over_http(received, unlisted, destination)
        return ServerRequest(template, lines, content, received, form, elements, shared=shared)

    def _share_over_http(
        self, received: ReceivedRequest, unlisted: tuple[str, ...], destination: Destination
    ) -> SharedMemoryForm | None:
        upstream = destination.upstream
        if upstream.min_shared_bytes == NOT_SHARED or not upstream.dialect.binary:
            return None
        request = received.request

        def make(sizes: Mapping[str, int]) -> SharedDocument:
            return SharedDocument(request, received.body, sizes, unlisted)

        tensors = shared_tensors(self._operation, destination, request, make)
        if tensors is None:
            return None
        return SharedOverHttp(
            tensors, self._template_for(False, True), self._template_for(True, True)
        )

    def _write_grpc(
        self, received: ReceivedRequest, complete: InferRequest, destination: Destination
    ) -> ServerRequest:
        form = destination.upstream.dialect.grpc
        message = infer_message(complete, self._operation, form)
        if (template := self._grpc_templates.get(form.service)) is None:
            headers: HeaderLines = tuple(grpc_headers(with_body(self._scope.headers, {})).items())
            template = RequestTemplate("POST", f"/{form.service}/ModelInfer", headers)
            self._grpc_templates[form.service] = template
        content = [frame(sum(map(len, message))), *message]
        elements = self._count_elements(received) if self._header_size is None else 0
        shared = self._share_over_grpc(complete, message, template, destination)
        return ServerRequest(
            template, b"", content, received, "grpc", elements, is_grpc=True, shared=shared
        )

    def _share_over_grpc(
        self,
        request: InferRequest,
        message: Chunks,
        template: RequestTemplate,
        destination: Destination,
    ) -> SharedMemoryForm | None:
        upstream = destination.upstream
        if upstream.min_shared_bytes == NOT_SHARED or not upstream.dialect.grpc.takes_raw:
            return None
        start, contents = bytes(message[0]), message[1:]

        def make(sizes: Mapping[str, int]) -> SharedMessage:
            return SharedMessage(request, start, request.chunks, contents, sizes)

        tensors = shared_tensors(self._operation, destination, request, make)
        return None if tensors is None else SharedOverGrpc(tensors, template)

    def _count_elements(self, received: ReceivedRequest) -> int:
        head = received.request.head
        if head is not self._counted_head:
            self._counted_head, self._element_count = head, head.element_count
        return self._element_count

    def _template_for(self, is_binary: bool, reads_response: bool) -> RequestTemplate:
        key = is_binary, reads_response
        if (template := self._templates.get(key)) is None:
            content_type = "application/octet-stream" if is_binary else "application/json"
            headers = with_body(self._scope.headers, {"Content-Type": content_type})
            if reads_response:
                headers.popall("Accept-Encoding", None)
            lines = tuple(headers.items())
            template = self._templates[key] = RequestTemplate(
                self._scope.method, self._target, lines
            )
        return template

    def passes_untouched(
        self, request: ServerRequest, head: ResponseHead, destination: Destination
    ) -> bool:
        """Tell by its head whether the client gets a response as it is."""
        if request.received is None:
            return True
        if request.is_grpc or self.is_grpc:
            return False
        try:
            plan = self._plan(request, head, destination)
        except GatewayError:
            return False  # ``to_client`` raises it
        return plan.action is ResponseAction.UNTOUCHED and request.response_form is None

    def to_client(self, response: ServerResponse) -> ClientMessage | None:
        """Return a complete response; None if it takes several time slices."""
        policy = response.policy
        try:
            form = self._in_http_form(response)
            if form is None:
                return None
            request, (head, body) = response.request, form
            plan = self._plan(request, head, response.destination)
            if plan.action is ResponseAction.UNTOUCHED and request.response_form is None:
                if plan.check is not None:
                    plan.check.check_whole(body)
                return untouched_message(head, body, policy)
            if plan.is_coded:
                return None
            content = bytes(body)
            if len(content) <= CONVERT_CHUNK:
                converted = convert_whole(request, head, content, plan)
            else:
                is_small = request.response_form is None and len(content) <= MAX_FAST_RESPONSE
                converted = convert_large_body(content, plan) if is_small else None
                if converted is None:
                    return None
        except GatewayError as error:
            raise explain(error, response) from error
        if converted is None:
            return untouched_message(head, body, policy)
        response.record.response_elements = converted.elements
        template = response_template(head, policy, converted.content_type, has_new_body=True)
        lines = passed_lines(head, template)
        if converted.header_size is not None:
            lines += _header_length_line(converted.header_size)
        return template, lines, converted.body, ()

    def _in_http_form(
        self, response: ServerResponse
    ) -> tuple[ResponseHead, bytes | memoryview] | None:
        """Return head and body as they are over HTTP; None for the streaming path."""
        head, request, destination = response.head, response.request, response.destination
        received = request.received
        assert received is not None
        if not request.is_grpc:
            received.check_metadata(head.status, self._operation, destination)
            return head, response.body
        message, limits = response.plain_message, destination.limits
        if message is None or len(message) > limits.max_buffered_body_bytes:
            return None  # the streaming path sends the error
        cap = limits.max_inference_header_bytes
        header_size, body = binary_body(memoryview(message), received.request, cap)
        return binary_head(header_size), body

    def _plan(
        self, request: ServerRequest, head: ResponseHead, destination: Destination
    ) -> ResponsePlan:
        """Return what becomes of a response; raises GatewayError. Plans are cached by head.

        The head of a response that came over gRPC is none that comes over HTTP.
        """
        encoding = request.output_encoding
        dialect = destination.upstream.dialect
        is_cached = len(encoding.binary_by_output) <= _MAX_CACHED_OUTPUTS
        in_form = request.response_form is not None
        key = head.key, encoding.key, request.is_grpc, in_form
        cached = destination.response_plans.get(key) if is_cached else None
        if cached is not None and cached[0] is dialect:
            return cached[1]
        served = destination.over_grpc() if request.is_grpc else destination
        plan = plan_response(head.status, head.headers, encoding, served)
        is_passed = plan.action is ResponseAction.UNTOUCHED and is_success(head.status)
        if in_form and is_passed and not plan.is_coded:
            stated_size = response_header_length(head.headers, plan.header_cap)
            plan = replace(plan, stated_size=stated_size)
        if is_cached:
            destination.response_plans.put(key, (dialect, plan))
        return plan

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        received, destination = request.received, relay.destination
        assert received is not None
        with relay.reserve() as reservation:
            if request.is_grpc:
                with name_server_in_errors(relay.server):
                    response = await in_binary_form(relay, received.request, reservation)
                over_grpc = destination.over_grpc()
                relay = replace(relay, upstream_response=response, destination=over_grpc)
            status = relay.upstream_response.status
            received.check_metadata(status, self._operation, destination)
            if relay.upstream_response.lends_memory:
                await relay.until_sent(convert_response(relay))
            else:
                await convert_response(relay)


def make_infer_handler(scope: HandlerScope) -> InferHandler:
    """Return the handler of infer requests; raises GatewayError (400) as ``header_length``."""
    header_size = header_length(scope.headers)
    max_size = MAX_WINDOW  # tensors pass as they are
    if header_size is None:
        max_size = min(MAX_FAST_REQUEST, scope.limits.max_inference_header_bytes)
    return InferHandler(scope, header_size, max_size)


def _has_grpc_fields(head: RequestHead, is_of_grpc: bool) -> bool:
    """Tell whether a head has lines that would say something of a gRPC call made for its client.

    The noted ones of a gRPC client do not pass.
    """
    if b"grpc-" in head.passed.lower():
        return True
    if not is_of_grpc:
        for field in head.noted:
            if field.lower == TIMEOUT:
                return True
    return False


def convert_whole(
    request: ServerRequest, head: ResponseHead, body: bytes, plan: ResponsePlan
) -> ConvertedResponse | None:
    """Convert a complete response as planned; None if it passes untouched."""
    form = request.response_form
    if form is None:
        return convert_body(body, plan)
    # Headers by name are made for each head; a form needs them for the size alone.
    headers = head.headers if plan.stated_size is None else _NO_HEADERS
    return form.convert(head.status, head.reason, headers, body, plan)


def _header_length_line(size: int) -> bytes:
    return b"Inference-Header-Content-Length: %d\r\n" % size


class PredictHandler(InferHandler):
    """Converts V1 predictions to infer requests."""

    def __init__(self, scope: HandlerScope) -> None:
        passed = CIMultiDict(scope.headers)
        passed.popall("Accept-Encoding", None)  # the gateway reads the response
        target = infer_path(scope.operation) + "".join(scope.target.partition("?")[1:])
        as_infer = replace(scope, method="POST", target=target, headers=CIMultiDictProxy(passed))
        super().__init__(as_infer, None, MAX_UNSCHEDULED)

    def to_server(
        self,
        head: RequestHead,
        body: bytes | memoryview,
        destination: Destination,
        request_id: str,
    ) -> ServerRequest | None:
        """Return the request for a server."""
        if not request_id:  # ids are off, so that the client's own passes
            own = [field.value for field in head.noted if field.lower == "x-request-id"]
            request_id = own[0] if own and own[0].isascii() else ""
        operation = self._operation
        received = read_buffered_prediction(operation, destination, bytes(body), request_id)
        return None if received is None else self._write(head, received, destination)

    def reader(self, size: int, destination: Destination) -> InferRequestReader | None:
        """Return nothing: a prediction is read by the model's metadata."""
        return None

    async def serve(self, call: Call) -> None:
        """Serve a call in a task; one that cannot be converted passes to a server of V1."""
        destination, operation = call.destination, call.operation
        model = await _model_metadata(call)
        if not model.inputs:
            if not destination.upstream.dialect.speaks_v1:
                raise bad_request(
                    f"the metadata of model '{model.name}' lists no inputs; the gateway needs them "
                    "to convert a V1 request"
                )
            await passthrough(call, inference=operation.kind)
            return
        body = ClientBody(call.request, destination.limits.max_request_bytes, call.deadline)
        with call.reserve() as reservation:
            try:
                received = await _read(call, body, model, reservation)
            except ModelMismatchError:
                # The model may have changed: the next request is checked against its new metadata.
                destination.upstream.metadata.recheck(operation.model or "", operation.version)
                raise
            reservation.resize(received.buffered_size)
            await self.send(call, received)


async def _model_metadata(call: Call) -> ModelMetadata:
    try:
        return await model_metadata(call)
    except UpstreamResponseError as error:
        document = error_document(error.body, "the server does not tell of this model")
        raise UpstreamResponseError(error.status, "application/json", document) from None


async def _read(
    call: Call, body: ClientBody, model: ModelMetadata, reservation: Reservation
) -> ReceivedRequest:
    limits, request_id = call.destination.limits, call.request.headers.get(REQUEST_ID, "")
    if not request_id.isascii():
        request_id = ""
    if body.size == 0:
        raise bad_request("the request has no body")
    if body.size is not None and body.size <= MAX_UNSCHEDULED:
        content = await body.read_all(reservation)
        return received_prediction(
            *read_prediction(content, model, *limits.reader_caps, request_id)
        )
    with closing(PredictRequestReader(model, *limits.reader_caps)) as reader:
        await feed_body(reader, body, call.destination.scheduler, reservation)
        return received_prediction(*reader.finish(request_id))
