"""RPCs beside pass-through: the request and the response as the same call has them over HTTP.

So one handler serves both kinds of clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.infer import ReadRequest, write_infer_response
from gateway.codec.v2.response_reader import InferResponseReader, read_binary_fast
from gateway.errors import ErrorKind, GatewayError, bad_request, bad_response, read_server_error
from gateway.observe.call_record import CallRecord
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc.headers import ACCEPT_ENCODING, ENCODING, TIMEOUT
from gateway.protocol.grpc.rpcs import HttpRequest
from gateway.protocol.grpc.status import status_of_error
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import Operation, infer_path, parse_operation_variants
from gateway.protocol.response_header import is_success, response_header_length
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import convert_message
from gateway.proxy.destination import Limits
from gateway.proxy.errors import send_status
from gateway.proxy.grpc.message import finish, start_response, write_message
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.interfaces import ClientRequest, ClientResponse, HeaderLines

Chunks = list[bytes | memoryview]

ConvertResponse = Callable[[int, CIMultiDict[str], bytes], Chunks]
"""Makes the message of a response from its status, headers and body.

Raises HttpError for an error of the server, GatewayError for what is invalid.
"""

_OWN_HEADERS = frozenset(
    ("accept-encoding", "content-encoding", "content-length", "content-type", "te")
) | {ACCEPT_ENCODING, ENCODING, TIMEOUT}
"""What says how a gRPC call is sent; it would say something else of a request over HTTP."""


def http_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return what passes to a server over HTTP of the headers of a gRPC call."""
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in _OWN_HEADERS
    )


class HttpFormRequest(ClientRequest):
    """A gRPC call's request as it is over HTTP, with its body complete."""

    def __init__(self, request: ClientRequest, as_http: HttpRequest, body: object) -> None:
        headers = http_headers(request.headers)
        if as_http.has_body:
            headers["Content-Type"] = "application/json"
        self.method = as_http.method
        self.target = as_http.target
        self.headers = CIMultiDictProxy(headers)
        self.added_headers = request.added_headers
        self._body = orjson.dumps(body) if as_http.has_body else b""
        self.content_length = len(self._body)

    async def read(self) -> bytes | memoryview:
        """Return the body, then nothing."""
        body, self._body = self._body, b""
        return body


class HttpFormResponse(ClientResponse):
    """Takes a response over HTTP, and sends it as a gRPC client gets it.

    ``convert`` makes the message of a response with its status, headers and body; it may raise
    GatewayError. A response may have ``cap`` bytes, which are reserved as they come. If it is not
    ``is_sent``, the caller takes its message or its error. ``record`` replaces that of the call.
    """

    def __init__(
        self,
        response: ClientResponse,
        convert: ConvertResponse,
        cap: int,
        reservation: Reservation,
        record: CallRecord | None = None,
        *,
        is_sent: bool = True,
    ) -> None:
        self.record = response.record if record is None else record
        self.is_grpc = True
        self.message: Chunks = []
        self.error: HttpError | None = None
        self._response = response
        self._convert = convert
        self._cap = cap
        self._reservation = reservation
        self._is_sent = is_sent
        self._status = 0
        self._headers = CIMultiDict[str]()
        self._body = bytearray()

    @property
    def unwrapped(self) -> ClientResponse:
        """Return the response that is sent."""
        return self._response

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Keep the head."""
        self._status = status
        self._headers = headers

    async def write(self, data: bytes | memoryview) -> None:
        """Keep a part of the body.

        Raises GatewayError: 502 if it is too much, 503 if too much is buffered.
        """
        self._reservation.grow(len(data))
        self._body += data
        if len(self._body) > self._cap:
            raise GatewayError(
                ErrorKind.BAD_RESPONSE, f"the response is larger than {self._cap} bytes"
            )

    async def finish(self, trailers: HeaderLines = ()) -> None:
        """Convert the response; it is sent as a message with a status, or as that of an error."""
        response, body = self._response, bytes(self._body)
        self._body.clear()
        try:
            self.message = await convert_message(
                len(body), self._convert, self._status, self._headers, body
            )
        except HttpError as error:
            self.error = error.with_traceback(None)  # it has a frame with this response
        if not self._is_sent:
            return
        if self.error is not None:
            await send_status(response, self.error.code, self.error.text)
            return
        self.started = True
        await start_response(response)
        await write_message(response, self.message)
        await finish(response)

    def abort(self) -> None:
        """Drop the response."""
        self._response.abort()


class HttpError(Exception):
    """An error of the server, or of the gateway as it writes them over HTTP."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.code = status_of_error(status)
        self.text = read_server_error(body) or f"the server returned {status}"


def parse_json(body: bytes) -> object:
    """Parse the JSON of a server's response; raises GatewayError (502)."""
    if not body:
        return None
    try:
        return orjson.loads(body)
    except ValueError as error:
        raise bad_response(f"{RESPONSE.name} is no JSON: {error}") from None


_OF_STREAM = "triton_enable_empty_final_response"


def infer_target(operation: Operation) -> str:
    """Return the target of an infer request; raises GatewayError (400) as ``check_target``."""
    target = infer_path(operation)
    check_target("POST", target)
    return target


def infer_converter(limits: Limits, *, is_raw: bool) -> ConvertResponse:
    """Return what makes a ModelInferResponse of a response over HTTP, in the request's form."""
    return partial(_infer_response, limits=limits, is_raw=is_raw)


def received_message(read: ReadRequest) -> ReceivedRequest:
    """Return a message for a server over HTTP.

    It lacks what clients say of a stream in every request: Triton refuses that over HTTP.
    """
    request, head = read.request, read.request.head
    if _OF_STREAM in head.parameters:
        parameters = {name: head.parameters[name] for name in head.parameters if name != _OF_STREAM}
        changed = replace(head, parameters=parameters, written={})
        request = InferRequest(changed, request.id, request.tensors)
    return ReceivedRequest(request, request.chunks, wants_raw=read.is_raw)


def check_target(method: str, target: str) -> None:
    """Refuse a name that a server over HTTP could take for another path; raises GatewayError."""
    if len(parse_operation_variants(method, target)) > 1:
        raise bad_request(
            f"the model's name cannot be in a path, as the server over HTTP needs it: {target}"
        )


def _infer_response(
    status: int, headers: CIMultiDict[str], body: bytes, limits: Limits, is_raw: bool
) -> Chunks:
    if not is_success(status):
        raise HttpError(status, body)
    size = response_header_length(CIMultiDictProxy(headers), limits.max_inference_header_bytes)
    return response_message(size, body, limits, is_raw=is_raw)


def response_message(
    header_size: int | None, body: bytes, limits: Limits, *, is_raw: bool
) -> Chunks:
    """Write a ModelInferResponse from an infer response over HTTP, mostly in binary form.

    Raises GatewayError (502) for an invalid one; it names no server.
    """
    read = None if header_size is None else read_binary_fast(body, header_size)
    if read is not None:
        response, data = read
        return write_infer_response(response, [[each] for each in data], is_raw)
    caps = limits.max_inference_header_bytes, limits.max_buffered_body_bytes
    reader = InferResponseReader(header_size, *caps)
    reader.feed(body, last=True)
    while reader.step():
        pass
    tensors: dict[int, Chunks] = {}
    for piece in reader.pieces():
        tensors.setdefault(piece.index, []).append(piece.data)
    reader.finish()
    assert reader.response is not None
    return write_infer_response(
        reader.response, [chunks for _, chunks in sorted(tensors.items())], is_raw
    )
