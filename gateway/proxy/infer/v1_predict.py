"""A predict exchange: a V1 request becomes an infer request, and the answer is told the V1 way."""

from __future__ import annotations

from contextlib import closing

from multidict import CIMultiDictProxy

from gateway.codec.v1.request import PredictRequest, PredictRequestConverter
from gateway.errors import GatewayError, bad_request
from gateway.protocol.operations import Operation, model_name_of
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import error_document, infer_path
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation, work_off
from gateway.proxy.body_io import CHUNK_SIZE, ClientBody
from gateway.proxy.filters.forwarded_headers import REQUEST_ID
from gateway.proxy.headers import end_to_end
from gateway.proxy.infer.convert_request import ALL_BINARY, Converted
from gateway.proxy.infer.handler import send_converted
from gateway.proxy.infer.listed_outputs import listing_outputs
from gateway.proxy.infer.metadata import model_metadata
from gateway.proxy.infer.predict_answer import PredictAnswer
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route
from gateway.proxy.passthrough import forward
from gateway.upstream.metadata_cache import UpstreamResponseError


async def predict(
    request: ClientRequest,
    answer: ClientResponse,
    asked: Operation,
    route: Route,
    deadline: Deadline,
) -> None:
    """Answer a V1 predict request; one that nobody can convert passes to a server of V1."""
    model = await _metadata(asked, route, deadline)
    if not model.inputs:
        if not route.upstream.dialect.speaks_v1:
            raise bad_request(
                f"model '{model.name}' does not say what inputs it takes, by which a V1 request "
                "is converted"
            )
        await forward(request, answer, route, deadline, model=model_name_of(asked))
        return
    body = ClientBody(request, route.limits.request_bytes, deadline)
    with route.held.reserve() as holding, route.held.reserve() as answer_holding:
        try:
            converted = await _convert(body, model, route, holding, _id_of(request))
        except GatewayError:
            # The model may have changed since: the next request is judged by what it takes then.
            route.upstream.metadata.invalidate(asked.model or "")
            raise
        header = await listing_outputs(converted.header, ALL_BINARY, asked, route, deadline)
        ready = _as_converted(header, converted)
        holding.resize(ready.held)
        told = PredictAnswer(answer, converted.predicted, route, deadline, answer_holding)
        await send_converted(
            _AsInfer(request, asked),
            told,
            asked,
            ready,
            route,
            deadline,
        )


def _id_of(request: ClientRequest) -> str:
    """Give the id by which the log names a request, which its copies share; empty without one."""
    given = request.headers.get(REQUEST_ID, "")
    return given if given.isascii() else ""


async def _metadata(asked: Operation, route: Route, deadline: Deadline) -> ModelMetadata:
    try:
        return await model_metadata(asked, route, deadline)
    except UpstreamResponseError as refusal:
        document = error_document(refusal.body, "the server does not tell of this model")
        raise UpstreamResponseError(refusal.status, "application/json", document) from None


class _AsInfer(ClientRequest):
    """The head of the infer request that a predict request becomes; its body has been read."""

    def __init__(self, request: ClientRequest, asked: Operation) -> None:
        self.method = request.method
        self.target = infer_path(asked) + "".join(request.target.partition("?")[1:])
        headers = end_to_end(request.headers)
        headers.popall("Accept-Encoding", None)  # the answer has to be read here
        self.headers = CIMultiDictProxy(headers)
        self.content_length = 0

    async def read(self) -> bytes:
        """Give nothing more."""
        return b""


async def _convert(
    body: ClientBody, model: ModelMetadata, route: Route, holding: Reservation, request_id: str
) -> PredictRequest:
    if body.size == 0:
        raise bad_request("the request has no body")
    limits = route.limits
    codec = PredictRequestConverter(
        model, limits.header_bytes, limits.json_depth, limits.max_tensors
    )
    with closing(codec):
        worked = 0
        while text := await body.read(codec.preferred_read_size):
            codec.feed(text)
            worked += len(text)
            while codec.step() or worked >= CHUNK_SIZE:
                worked = 0
                holding.resize(codec.buffered_bytes)
                await route.scheduler.next()
        codec.feed(b"", last=True)
        await work_off(codec, holding, route.scheduler)
        return codec.finish(request_id)


def _as_converted(header: bytes, request: PredictRequest) -> Converted:
    chunks = [header, *request.tensors]
    size = sum(map(len, chunks))
    held = [b"".join(chunks)] if size <= CHUNK_SIZE else chunks
    features, input_encodings = request.features, request.input_encodings
    return Converted(
        held, size, len(header), ALL_BINARY, features, input_encodings, by_metadata=True
    )
