"""Passes fully buffered gRPC calls through to a server that speaks gRPC."""

from __future__ import annotations

from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import GatewayError, ServerName, describe_error
from gateway.observe.call_record import CallRecord
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.framing import PREFIX_SIZE, is_one_message
from gateway.protocol.grpc.headers import (
    STATUS,
    TIMEOUT,
    is_written_well,
    read_message,
    read_status,
)
from gateway.protocol.grpc.methods import INFERENCE_SERVICE, GrpcMethod
from gateway.protocol.grpc.model_scanner import ModelScanner, ScannedModel
from gateway.protocol.grpc.status import GrpcStatus, http_status, status_name
from gateway.protocol.grpc.timeout import format_timeout, parse_timeout
from gateway.proxy.destination import Destination
from gateway.proxy.errors import record_status
from gateway.proxy.fast_path.handlers import (
    ClientMessage,
    FastPathHandler,
    ServerRequest,
    passed_lines,
)
from gateway.proxy.grpc.passthrough import relay_messages
from gateway.proxy.headers import connection_options, end_to_end
from gateway.proxy.infer.convert_response import ResponseRelay
from gateway.proxy.interfaces import ClientHead, ResponseTemplate
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import BoundedCache
from gateway.upstream.grpc.endpoint import check_grpc_head
from gateway.upstream.transport import FieldLines, RequestTemplate, UpstreamResponseHead

MAX_REQUEST: Final = 64 * 1024
"""Bytes of the largest request: the first window of a stream."""

_MAX_FIELDS: Final = 256
"""Fields of a message that are scanned at once: about a quarter of a millisecond."""
_SCAN_STEP: Final = 1024

_OK: Final[FieldLines] = ((b"grpc-status", b"0"),)
_OK_TRAILERS: Final = frozenset((_OK, (*_OK, (b"grpc-message", b""))))
"""The trailers of calls that went well, as servers on C++, Java, Go and Python write them."""

_templates: BoundedCache[tuple[object, ...], ResponseTemplate] = BoundedCache(CACHED_HEADS)


def scan_message(method: GrpcMethod, body: bytes) -> tuple[ScannedModel, tuple[str, ...]] | None:
    """Return the model of a body with one message, and all names that servers may take for it.

    None leaves it to the streaming path: an invalid message, a compressed one, one of very many
    fields, or one that may want outputs to be classified, which has to be checked.
    """
    if not is_one_message(body, len(body)) or body[0] or fields.CLASSIFICATION in body:
        return None
    scanner = ModelScanner(method.name_fields, method.version_field)
    if method.name_fields:
        data = memoryview(body)[PREFIX_SIZE:]
        try:
            while data:
                size = max(_SCAN_STEP, scanner.skip_size)
                scanner.feed(data[:size])
                data = data[size:]
                if scanner.fields > _MAX_FIELDS:
                    return None
            scanner.end()
        except GatewayError:
            return None
    return scanner.model, scanner.names


class GrpcHandler(FastPathHandler):
    """Passes infer calls and their responses untouched; ``headers`` are those of the client."""

    max_size = MAX_REQUEST
    is_grpc = True

    def __init__(self, target: str, headers: CIMultiDictProxy[str]) -> None:
        self._target: Final = target
        sent = CIMultiDict(headers)
        sent["TE"] = "trailers"
        self._headers: Final = tuple(sent.items())
        self._templates: Final[dict[str, RequestTemplate]] = {}

    def to_server(
        self, head: ClientHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server."""
        dialect = destination.upstream.dialect_state.dialect
        if dialect is None or not dialect.grpc.infer_passes:
            return None
        service = dialect.grpc.service
        template = self._templates.get(service)
        if template is None:
            target = self._target.replace(f"/{INFERENCE_SERVICE}/", f"/{service}/", 1)
            template = RequestTemplate("POST", target, self._headers)
            self._templates[service] = template
        timeouts = [field.value for field in head.noted if field.lower == TIMEOUT]
        if not timeouts:
            return ServerRequest(template, b"", (body,))
        if len(timeouts) > 1:
            return None
        seconds = parse_timeout(timeouts[0])
        if not seconds:
            return None  # the streaming path sends the error
        line = b""
        if not destination.upstream.drains_cancelled:  # else the server would cancel it itself
            left = min(seconds, destination.limits.request_timeout)
            line = f"{TIMEOUT}: {format_timeout(left)}\r\n".encode()
        return ServerRequest(template, line, (body,), client_timeout=seconds)

    def passes_untouched(
        self, request: ServerRequest, head: UpstreamResponseHead, destination: Destination
    ) -> bool:
        """Tell by its head whether the client gets a response as it is."""
        return True

    def outcome(self, head: UpstreamResponseHead, trailers: FieldLines) -> int:
        """Return the HTTP status that says how a call went; see UpstreamResponse."""
        if trailers in _OK_TRAILERS:
            return 200
        code = _status(head, trailers)
        if code is None:
            return head.status
        return http_status(GrpcStatus.CANCELLED if code == GrpcStatus.DEADLINE_EXCEEDED else code)

    def error(
        self, head: UpstreamResponseHead, body: bytes | memoryview, trailers: FieldLines
    ) -> str:
        """Return the status and the message of an error; see UpstreamResponse."""
        code = _status(head, trailers)
        if code is None:
            return super().error(head, body, trailers)
        return describe_error(
            status_name(code), read_message(_decode(trailers) or head.headers.items())
        )

    def to_client(
        self,
        request: ServerRequest,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        destination: Destination,
        server: ServerName,
        policy: ResponseHeaderPolicy | None,
    ) -> ClientMessage:
        """Return a complete response; raises GatewayError (502) if it is none of gRPC."""
        key = head.key, policy
        template = _templates.get(key)
        if template is None:
            check_grpc_head(head.status, head.headers, server)
            keyed = CIMultiDictProxy(CIMultiDict(head.keyed_headers))
            lines = tuple(end_to_end(keyed).items())
            if policy is not None:
                lines = policy.apply_to_lines(lines)
            dropped = connection_options(keyed)
            template = ResponseTemplate(head.status, "", lines, dropped, states_length=False)
            _templates.put(key, template)
        return template, passed_lines(head, template), body

    def end(
        self,
        record: CallRecord,
        head: UpstreamResponseHead,
        body: bytes | memoryview,
        trailers: FieldLines,
    ) -> FieldLines | None:
        """Record the status of a call, and return its trailers; see FastPathHandler."""
        is_message = is_one_message(body, len(body))
        if is_message and trailers in _OK_TRAILERS and STATUS not in head.headers:
            record_status(record, GrpcStatus.OK)
            return trailers
        code = _status(head, trailers)
        if code is None:
            return None  # it is no response of gRPC
        if code == GrpcStatus.OK and not is_message:
            return None  # the streaming path sends the error
        # The streaming path writes a status, and spaces around a text, as clients read them.
        if any(value != value.strip(b" ") for _, value in trailers):
            return None
        fields = _decode(trailers)
        if not is_written_well(fields) or not is_written_well(head.headers.items()):
            return None
        text = read_message(fields or head.headers.items())
        record_status(record, code, text)
        return trailers

    async def relay(self, request: ServerRequest, relay: ResponseRelay) -> None:
        """Pass on a response that arrives in parts."""
        await relay_messages(
            relay.upstream_response, relay.response, relay.server, relay.deadline, is_unary=True
        )


def _status(head: UpstreamResponseHead, trailers: FieldLines) -> int | None:
    return read_status(_decode(trailers) or head.headers.items())


def _decode(fields: FieldLines) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in fields]
