"""Servers that answer in binary form with just the outputs that a request lists."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError
from gateway.exchange.attempts import reaching
from gateway.exchange.base import Route
from gateway.exchange.deadline import Deadline
from gateway.protocol.endpoints import Endpoint
from gateway.protocol.inference_header import AnswerForm, with_outputs
from gateway.protocol.tensors import ModelMetadata
from gateway.upstream.base import UpstreamEndpoint
from gateway.upstream.metadata_cache import ServerRefusalError
from gateway.upstream.pool import Outcome


async def listing_outputs(
    header: bytes, answer: AnswerForm, asked: Endpoint, route: Route, deadline: Deadline
) -> bytes:
    """Have a request's header list all outputs, where the server needs it and the client does not.

    It stays as it is where the server does not tell what outputs there are: then they come as JSON.
    """
    if not route.upstream.dialect.lists_outputs or answer.binary_by_output:
        return header
    try:
        names = (await model_metadata(asked, route, deadline)).outputs
    except ServerRefusalError:
        names = ()  # what is wrong, its answer to the request itself tells
    except GatewayError as error:
        if error.kind is not ErrorKind.BAD_ANSWER:
            raise
        names = ()
    return with_outputs(header, names) if names else header


async def model_metadata(asked: Endpoint, route: Route, deadline: Deadline) -> ModelMetadata:
    """Give a model's metadata, which a server may have to be asked for."""
    upstream = route.upstream
    batches = upstream.dialect.batches

    async def ask(endpoint: UpstreamEndpoint) -> ModelMetadata:
        deadline.wait_for_server(endpoint.url)
        return await upstream.metadata.get(asked.model or "", asked.version, endpoint, batches)

    loan, model = await reaching(upstream, ask, deadline, asked.model)
    loan.give_back(Outcome.ANSWERED)
    return model
