"""V1 predictions: the request becomes an infer request, its response a V1 response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.v1.fast_request import read_buffered_predict
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.response import ResponseConverter
from gateway.errors import GatewayError, bad_request
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import Operation, model_name_of
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1ResponseLayout, error_document, infer_path
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation, run_steps
from gateway.proxy.body_io import ClientBody, split, write
from gateway.proxy.filters.forwarded_headers import REQUEST_ID
from gateway.proxy.headers import end_to_end, with_body
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.convert_buffered_response import (
    new_v1_converter,
    parse_header_size,
    too_much_json,
)
from gateway.proxy.infer.convert_request import model_metadata
from gateway.proxy.infer.handler import send_request
from gateway.proxy.interfaces import Call, ClientRequest, ClientResponse, Destination
from gateway.proxy.passthrough import passthrough
from gateway.sizes import CONVERT_CHUNK, ENCODE_CHUNK
from gateway.upstream.metadata_cache import UpstreamResponseError


async def predict(call: Call) -> None:
    """Serve a V1 prediction; one that cannot be converted passes to a server of V1."""
    destination, operation = call.destination, call.operation
    model = await _model_metadata(call)
    if not model.inputs:
        if not destination.upstream.dialect.speaks_v1:
            raise bad_request(
                f"the metadata of model '{model.name}' lists no inputs; the gateway needs them "
                "to convert a V1 request"
            )
        await passthrough(call, model=model_name_of(operation))
        return
    body = ClientBody(call.request, destination.limits.max_request_bytes, call.deadline)
    budget = destination.memory_budget
    with budget.reserve() as reservation, budget.reserve() as response_reservation:
        try:
            request, layout = await _read(call, body, model, reservation)
        except GatewayError:
            # The model may have changed: the next request is checked against its new metadata.
            destination.upstream.metadata.invalidate(operation.model or "")
            raise
        received = ReceivedRequest(request, request.chunks, uses_metadata=True)
        reservation.resize(received.buffered_size)
        response = PredictResponse(
            call.response, layout, destination, call.deadline, response_reservation
        )
        head = _InferHead(call.request, operation)
        await send_request(replace(call, request=head, response=response), received)


def _request_id(request: ClientRequest) -> str:
    """Return the request id, which goes into the infer request; empty without one."""
    request_id = request.headers.get(REQUEST_ID, "")
    return request_id if request_id.isascii() else ""


async def _model_metadata(call: Call) -> ModelMetadata:
    try:
        return await model_metadata(call)
    except UpstreamResponseError as error:
        document = error_document(error.body, "the server does not tell of this model")
        raise UpstreamResponseError(error.status, "application/json", document) from None


class _InferHead(ClientRequest):
    """The head of the infer request that a predict request becomes; its body was read."""

    def __init__(self, request: ClientRequest, operation: Operation) -> None:
        self.method = request.method
        self.target = infer_path(operation) + "".join(request.target.partition("?")[1:])
        headers = end_to_end(request.headers)
        headers.popall("Accept-Encoding", None)  # the gateway reads the response
        self.headers = CIMultiDictProxy(headers)
        self.content_length = 0

    async def read(self) -> bytes:
        """Return nothing more."""
        return b""


async def _read(
    call: Call, body: ClientBody, model: ModelMetadata, reservation: Reservation
) -> tuple[InferRequest, V1ResponseLayout]:
    limits, scheduler = call.destination.limits, call.destination.scheduler
    if body.size == 0:
        raise bad_request("the request has no body")
    request_id = _request_id(call.request)
    if body.size is not None and body.size <= ENCODE_CHUNK:
        small = await body.read_all(reservation)
        read = read_buffered_predict(small, model, limits.max_json_depth, request_id)
        if read is not None:
            return read
    codec = PredictRequestReader(
        model, limits.max_inference_header_bytes, limits.max_json_depth, limits.max_tensors
    )
    with closing(codec):
        unscheduled = 0
        while text := await body.read(codec.preferred_read_size):
            codec.feed(text)
            unscheduled += len(text)
            while codec.step() or unscheduled >= CONVERT_CHUNK:
                unscheduled = 0
                reservation.resize(codec.buffered_bytes)
                await scheduler.next_slice()
        codec.feed(b"", last=True)
        await run_steps(codec, reservation, scheduler)
        return codec.finish(request_id)


class PredictResponse(ClientResponse):
    """Takes a binary infer response, or a server's error, and sends it in V1 format.

    A small response is sent fully buffered, a larger one as it is converted. ``reservation`` counts
    the buffered bytes.
    """

    def __init__(
        self,
        response: ClientResponse,
        layout: V1ResponseLayout,
        destination: Destination,
        deadline: Deadline,
        reservation: Reservation,
    ) -> None:
        self.record = response.record
        self._response = response
        self._layout = layout
        self._destination = destination
        self._deadline = deadline
        self._reservation = reservation
        self._codec: ResponseConverter[Iterator[bytes]] | None = None
        self._buffer = bytearray()
        self._unscheduled = 0
        self._status = 0
        self._reason = ""
        self._headers = CIMultiDict[str]()

    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Read the head; the client's response starts once there is text for it."""
        self.started = True
        self._status, self._reason = status, reason
        received = CIMultiDictProxy(headers)
        self._headers = with_body(received, {"Content-Type": "application/json"})
        if status == 200:
            header_size = parse_header_size(
                received, self._destination.limits.max_inference_header_bytes
            )
            if header_size is not None:
                self._codec = self._new_codec(header_size)

    async def write(self, data: bytes | memoryview) -> None:
        """Convert the next bytes of the response."""
        if self._codec is None:
            # A server's error, or a response without tensors, as all of them are empty.
            self._buffer += data
            self._reservation.resize(len(self._buffer))
            cap = self._destination.limits.max_inference_header_bytes
            if self._status == 200 and len(self._buffer) > cap:
                raise too_much_json(cap)
            del self._buffer[cap:]
            return
        for piece in split(data, ENCODE_CHUNK):
            text = self._codec.text(piece)
            self._reservation.resize(self._codec.buffered_bytes + len(self._buffer))
            await self._write_text(text, len(piece))

    async def finish(self) -> None:
        """Send the rest to the client."""
        if self._status != 200:
            await self._send(error_document(bytes(self._buffer), self._reason))
            return
        codec = self._codec
        if codec is None:
            document = bytes(self._buffer)
            self._buffer.clear()
            codec = self._codec = self._new_codec(len(document))
            await self.write(document)
        for text in codec.finish():
            await self._write_text(text, len(text))
        if not self._response.started:
            await self._send(bytes(self._buffer))
            return
        await write(self._response, bytes(self._buffer), self._deadline)
        await self._response.finish()

    def abort(self) -> None:
        """Drop the client's connection."""
        self._response.abort()

    def _new_codec(self, header_size: int) -> ResponseConverter[Iterator[bytes]]:
        return new_v1_converter(header_size, self._layout, self._destination)

    async def _write_text(self, text: bytes, converted: int) -> None:
        """Write text once there is more than is sent fully buffered.

        Time slices are taken by the bytes ``converted``, not by the text: buffered rows give no
        text for a long time, and a server's data may all be there without a pause.
        """
        self._buffer += text
        if len(self._buffer) > CONVERT_CHUNK:
            if not self._response.started:
                await self._response.start(self._status, self._reason, self._headers)
            text = bytes(self._buffer)
            self._buffer.clear()
            await write(self._response, text, self._deadline)
        self._unscheduled += converted
        if self._unscheduled >= ENCODE_CHUNK:
            self._unscheduled = 0
            await self._destination.scheduler.next_slice()

    async def _send(self, body: bytes) -> None:
        self._deadline.expect_client()
        await self._response.send(self._status, self._reason, self._headers, body)
