"""An error becomes the response of its call: over HTTP a document, over gRPC a status."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import orjson
from multidict import CIMultiDict

from gateway.errors import (
    INTERNAL_ERROR_TEXT,
    Audience,
    ErrorKind,
    GatewayError,
    describe_error,
    escape_for_log,
    replace_surrogates,
    strip_tracebacks,
)
from gateway.http1.content_codings import CODINGS
from gateway.observe.call_record import CallRecord
from gateway.observe.failure_log import FAILURE_LOG
from gateway.protocol.grpc.headers import GRPC_TYPE, MESSAGE, STATUS, is_grpc_type
from gateway.protocol.grpc.methods import METHODS
from gateway.protocol.grpc.status import GrpcStatus, encode_message, http_status, status_name
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.filters.authentication import UnauthenticatedError
from gateway.proxy.interfaces import ClientResponse, HeaderLines

_JSON: Final[HeaderLines] = (("Content-Type", "application/json"),)

INTERNAL_ERROR: Final = GatewayError(ErrorKind.INTERNAL, INTERNAL_ERROR_TEXT)

_log = logging.getLogger("tensorgate.proxy")


async def run_with_deadline(
    run: Callable[[Deadline], Awaitable[None]],
    response: ClientResponse,
    deadline: Deadline,
    audience: Audience = Audience.CLIENTS,
) -> None:
    """Run a call within its deadline and send its error, in words for the ``audience``.

    A response that has started is aborted, so that the client sees that it is incomplete.
    """
    try:
        with deadline:
            await run(deadline)
        return
    except GatewayError as raised:
        error = strip_tracebacks(raised)
    if response.started and not response.take_back():
        response.record.set_abort(error)
        why = escape_for_log(error.message)
        _log.warning("request %s: response aborted: %s", response.record.request_id or "-", why)
        if response.is_grpc:
            await _send_grpc_error(response, error, audience)
        else:
            response.abort()
    else:
        await send_error(response, error, audience)


async def send_error(
    response: ClientResponse, error: GatewayError, audience: Audience = Audience.CLIENTS
) -> None:
    """Send an error in the protocol's format."""
    if response.is_grpc:
        record_error(error, response.record, http_status(error.kind.value.grpc_code))
        await _send_grpc_error(response, error, audience)
        return
    headers, body = _error_document(error, response.record, audience)
    await response.send(error.kind.value.status, "", CIMultiDict(headers), body)


def error_response(
    error: GatewayError, record: CallRecord, *, is_grpc: bool
) -> tuple[int, HeaderLines, bytes]:
    """Record and log an error; return status, headers and body of the whole response to it."""
    if not is_grpc:
        return error.kind.value.status, *_error_document(error, record, Audience.CLIENTS)
    code, text = _status_of(error, Audience.CLIENTS)
    record_error(error, record, http_status(code))
    record_status(record, code)
    return 200, _trailers_only(code, text), b""


def _error_document(
    error: GatewayError, record: CallRecord, audience: Audience
) -> tuple[HeaderLines, bytes]:
    record_error(error, record, error.kind.value.status)
    headers = _JSON
    if error.retry_after is not None:
        headers += (("Retry-After", str(error.retry_after)),)
    if isinstance(error, UnauthenticatedError):
        headers += (("WWW-Authenticate", error.challenge),)
    if error.kind is ErrorKind.UNSUPPORTED_ENCODING:
        # RFC 9110, section 15.5.16.
        headers += (("Accept-Encoding", ", ".join(CODINGS)),)
    return headers, error_body(error.message_for(audience))


def record_error(error: GatewayError, record: CallRecord, status: int) -> None:
    """Record and log the error of a call; ``status`` is that of the access log."""
    record.set_error(error)
    FAILURE_LOG.write(error, record.request_id, status)


def error_body(message: str) -> bytes:
    """Write an error in the protocol's format."""
    # What a message quotes of an HTTP header need not have been UTF-8.
    return orjson.dumps({"error": replace_surrogates(message)})


async def send_status(response: ClientResponse, code: int, text: str) -> None:
    """End a call with the status of an error, whether its response has started or not."""
    if response.started:
        await response.finish(status_lines(code, text))
    else:
        await response.start(200, "", CIMultiDict(_trailers_only(code, text)))
        await response.finish()
    record_status(response.record, code, text)


async def _send_grpc_error(
    response: ClientResponse, error: GatewayError, audience: Audience
) -> None:
    await send_status(response.unwrapped, *_status_of(error, audience))


def _status_of(error: GatewayError, audience: Audience) -> tuple[int, str]:
    return error.kind.value.grpc_code, error.message_for(audience)


def record_status(record: CallRecord, code: int, text: str = "") -> None:
    """Record how a gRPC call ended; in metrics the HTTP status stands for that of gRPC.

    ``text`` is the message of a server's error. UNIMPLEMENTED for an RPC that is none of the known
    ones is the client's fault, as an unknown path is over HTTP.
    """
    record.grpc_status = code
    is_unknown = code == GrpcStatus.UNIMPLEMENTED and record.target not in METHODS
    record.status = ErrorKind.NOT_FOUND.value.status if is_unknown else http_status(code)
    if code and not record.error:
        record.server_error = describe_error(status_name(code), text)


def status_lines(code: int, text: str) -> HeaderLines:
    """Return the status of a call as header fields."""
    lines: HeaderLines = ((STATUS, str(int(code))),)
    return (*lines, (MESSAGE, encode_message(text.strip(" ")))) if text else lines


def _trailers_only(code: int, text: str) -> HeaderLines:
    """Return the headers of a whole response without a message; see PROTOCOL-HTTP2.md of grpc."""
    return (("content-type", GRPC_TYPE), *status_lines(code, text))


def end_dropped_call(record: CallRecord, has_started: bool) -> HeaderLines:
    """Record that a gRPC call ends with UNAVAILABLE, as nobody can wait for it any more.

    Return the headers that end it: trailers if its response has started, else a whole response
    without a message. The error of the record is the text.
    """
    code = GrpcStatus.UNAVAILABLE
    record_status(record, code)
    if has_started:
        return status_lines(code, record.error)
    return ((":status", "200"), *_trailers_only(code, record.error))


def is_grpc_content(content_type: bytes) -> bool:
    """Tell whether a Content-Type, as it was received, is that of gRPC."""
    return is_grpc_type(content_type.decode("latin-1").strip())
