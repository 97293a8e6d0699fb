"""How requests and responses go over HTTP, or gRPC, while their tensors are in shared memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.shared_memory import SharedMessage
from gateway.codec.v2.shared_memory import Place, SharedDocument, SharedTensors
from gateway.errors import bad_response
from gateway.http1.head import HeadParser, ResponseHead
from gateway.protocol.grpc.framing import PREFIX_SIZE, frame, is_one_message
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.upstream.grpc.endpoint import read_outcome
from gateway.upstream.transport import (
    KEYED_RESPONSE_HEADERS,
    FieldLines,
    RequestTemplate,
    UpstreamResponse,
    WrappedResponse,
)

_OF_FORM: Final = frozenset(("content-length", "content-type", "transfer-encoding"))
"""Headers that say how a response is written."""
_HEAD_PARSER: Final = HeadParser(KEYED_RESPONSE_HEADERS, noted=("content-length",))
NOT_FOUND, FAILED = 404, 500
"""The statuses with which a server refuses a region, and a slice that is too small."""

WrittenRequest = tuple[RequestTemplate, bytes, Chunks]
"""The template of a request, the lines of further headers, and its body."""


class SharedMemoryForm(ABC):
    """Writes a request without the tensors that are in shared memory, and completes its response.

    The rest of the gateway sees both as they are without shared memory.
    """

    def __init__(self, tensors: SharedTensors) -> None:
        self.tensors: Final = tensors

    @abstractmethod
    def write(self, inputs: Place | None, outputs: Place | None) -> WrittenRequest:
        """Write the request; tensors without a place are in its body."""

    @abstractmethod
    def set_inputs(self, data: memoryview) -> Chunks:
        """Set the inputs that have arrived; return the body of a request over the socket."""

    @abstractmethod
    def read_error(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines
    ) -> tuple[int, bytes | memoryview]:
        """Return the HTTP status of a complete response, and the text of its error."""

    @abstractmethod
    async def receive_error(
        self, response: UpstreamResponse
    ) -> tuple[UpstreamResponse, int, bytes | memoryview]:
        """Return the same of one that arrives, before all that may be read of it."""

    @abstractmethod
    def read_outputs(self, document: bytes, memory: memoryview) -> Chunks:
        """Return the body of a response with its outputs, which are views of ``memory``.

        Raises GatewayError (502) if it does not have the outputs that were asked for.
        """

    @abstractmethod
    def complete_head(self, head: ResponseHead, body: Sequence[bytes | memoryview]) -> ResponseHead:
        """Return the head of a response that has got such a body."""

    @abstractmethod
    def complete_headers(
        self, headers: CIMultiDictProxy[str], body: Sequence[bytes | memoryview]
    ) -> CIMultiDict[str]:
        """Return the headers of a response that has got such a body."""


class SharedOverHttp(SharedMemoryForm):
    """``json`` is the template of requests that are JSON alone, ``binary`` of the binary form."""

    def __init__(
        self, tensors: SharedDocument, json: RequestTemplate, binary: RequestTemplate
    ) -> None:
        super().__init__(tensors)
        self._document: Final = tensors
        self._json: Final = json
        self._binary: Final = binary

    def write(self, inputs: Place | None, outputs: Place | None) -> WrittenRequest:
        """Write the request; see SharedMemoryForm."""
        header = self._document.write_header(inputs, outputs)
        if inputs is not None:
            return self._json, b"Content-Length: %d\r\n" % len(header), [header]
        # They are few, or there was no room for them.
        assert isinstance(self._document.data, Sequence)
        body = [header, *self._document.data]
        lengths = sum(map(len, body)), HEADER_LENGTH.encode(), len(header)
        return self._binary, b"Content-Length: %d\r\n%b: %d\r\n" % lengths, body

    def set_inputs(self, data: memoryview) -> Chunks:
        """Set the inputs; see SharedMemoryForm."""
        self._document.data = [data]
        return [self._document.binary_header, data]

    def read_error(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines
    ) -> tuple[int, bytes | memoryview]:
        """Return status and text; see SharedMemoryForm."""
        return head.status, body

    async def receive_error(
        self, response: UpstreamResponse
    ) -> tuple[UpstreamResponse, int, bytes | memoryview]:
        """Return status and text; see SharedMemoryForm."""
        status = response.status
        if status not in (NOT_FOUND, FAILED):
            return response, status, b""
        text = bytes(await response.read())
        return _Replayed(response, text), status, text

    def read_outputs(self, document: bytes, memory: memoryview) -> Chunks:
        """Return the body in binary form; see SharedMemoryForm."""
        header, data = self._document.read_response(document, memory)
        return [header, *data]

    def complete_head(self, head: ResponseHead, body: Sequence[bytes | memoryview]) -> ResponseHead:
        """Return the head of the binary form."""
        kept = b"".join([field.line for field in head.fields if field.lower not in _OF_FORM])
        lines = b"HTTP/1.1 %d OK\r\n%bContent-Type: application/octet-stream\r\n%b: %d\r\n\r\n" % (
            head.status,
            kept,
            HEADER_LENGTH.encode(),
            len(body[0]),
        )
        return _HEAD_PARSER.parse_response(lines, "POST")

    def complete_headers(
        self, headers: CIMultiDictProxy[str], body: Sequence[bytes | memoryview]
    ) -> CIMultiDict[str]:
        """Return the headers of the binary form."""
        completed = CIMultiDict(headers)
        completed.popall("Transfer-Encoding", None)
        completed["Content-Type"] = "application/octet-stream"
        completed["Content-Length"] = str(sum(map(len, body)))
        completed[HEADER_LENGTH] = str(len(body[0]))
        return completed


class SharedOverGrpc(SharedMemoryForm):
    """A ModelInfer call; ``lines`` are headers of the request beside those of its template."""

    def __init__(
        self, message: SharedMessage, template: RequestTemplate, lines: bytes = b""
    ) -> None:
        super().__init__(message)
        self._message: Final = message
        self._template: Final = template
        self._lines: Final = lines

    def write(self, inputs: Place | None, outputs: Place | None) -> WrittenRequest:
        """Write the request; see SharedMemoryForm."""
        return self._template, self._lines, _framed(self._message.write(inputs, outputs))

    def set_inputs(self, data: memoryview) -> Chunks:
        """Set the inputs; see SharedMemoryForm."""
        self._message.set_inputs(data)
        return _framed(self._message.write(None, None))

    def read_error(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines
    ) -> tuple[int, bytes | memoryview]:
        """Return what the status of the call stands for; see SharedMemoryForm."""
        status, text = read_outcome(head, trailers)
        return status, text.encode()

    async def receive_error(
        self, response: UpstreamResponse
    ) -> tuple[UpstreamResponse, int, bytes | memoryview]:
        """Return status and text, which come after an error's empty body."""
        response = _Replayed(response, await response.read())
        return response, response.final_status, response.grpc_message.encode()

    def read_outputs(self, document: bytes, memory: memoryview) -> Chunks:
        """Return the message with raw contents; see SharedMemoryForm."""
        if not is_one_message(document, len(document)) or document[0]:
            raise bad_response("the server's response is not one gRPC message, uncompressed")
        message = memoryview(document)[PREFIX_SIZE:]
        return _framed(self._message.read_response(message, memory))

    def complete_head(self, head: ResponseHead, body: Sequence[bytes | memoryview]) -> ResponseHead:
        """Return the head, which says nothing of the body."""
        return head

    def complete_headers(
        self, headers: CIMultiDictProxy[str], body: Sequence[bytes | memoryview]
    ) -> CIMultiDict[str]:
        """Return the headers, which need not tell the length."""
        completed = CIMultiDict(headers)
        completed.popall("Content-Length", None)
        return completed


def _framed(message: Chunks) -> Chunks:
    return [frame(sum(map(len, message))), *message]


class _Replayed(WrappedResponse):
    """A response of which a first piece was read."""

    def __init__(self, response: UpstreamResponse, start: bytes | memoryview) -> None:
        super().__init__(response)
        self._start = start

    @property
    def error(self) -> str:
        """Return the status and the message of an error; see UpstreamResponse."""
        return self._response.error

    async def read(self) -> bytes | memoryview:
        """Return the first piece again, then what follows."""
        start, self._start = self._start, b""
        return start or await self._response.read()
