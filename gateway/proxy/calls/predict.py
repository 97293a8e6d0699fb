"""V1 predictions: each is sent as the infer request that asks for the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.v1.buffered_request import read_prediction
from gateway.codec.v1.request import PredictRequestReader
from gateway.errors import ModelMismatchError, bad_request
from gateway.http1.head import RequestHead
from gateway.protocol.operations import infer_path
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import error_document
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import ClientBody
from gateway.proxy.calls.handler import HandlerScope, ServerRequest
from gateway.proxy.calls.infer import InferHandler
from gateway.proxy.destination import Destination
from gateway.proxy.filters.forwarded_headers import REQUEST_ID
from gateway.proxy.infer.convert_buffered_request import (
    ReceivedRequest,
    read_buffered_prediction,
    received_prediction,
)
from gateway.proxy.infer.convert_request import feed_body, model_metadata
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import passthrough
from gateway.sizes import MAX_UNSCHEDULED
from gateway.upstream.metadata_cache import UpstreamResponseError


class PredictHandler(InferHandler):
    """Converts V1 predictions to infer requests."""

    def __init__(self, scope: HandlerScope) -> None:
        passed = CIMultiDict(scope.headers)
        passed.popall("Accept-Encoding", None)  # the gateway reads the response
        target = infer_path(scope.operation) + "".join(scope.target.partition("?")[1:])
        as_infer = replace(scope, method="POST", target=target, headers=CIMultiDictProxy(passed))
        super().__init__(as_infer, None, MAX_UNSCHEDULED)

    def to_server(
        self, head: RequestHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server."""
        if not request_id:  # ids are off, so that the client's own passes
            own = [field.value for field in head.noted if field.lower == "x-request-id"]
            request_id = own[0] if own and own[0].isascii() else ""
        received = read_buffered_prediction(self._operation, destination, body, request_id)
        return None if received is None else self._write(head, received, destination)

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
