"""What is known of the model that an infer request is for."""

from __future__ import annotations

from gateway.exchange.attempts import reaching
from gateway.exchange.base import Route
from gateway.exchange.deadline import Deadline
from gateway.protocol.declared import completed
from gateway.protocol.endpoints import Endpoint
from gateway.protocol.model_name import named_by
from gateway.protocol.tensors import ModelMetadata
from gateway.upstream.base import UpstreamEndpoint
from gateway.upstream.loan import Outcome
from gateway.upstream.metadata_cache import ServerRefusalError

_FIRST_FAILURE = 500
_NOT_IMPLEMENTED = 501


async def model_metadata(asked: Endpoint, route: Route, deadline: Deadline) -> ModelMetadata:
    """Give a model's metadata, which a server may have to be asked for.

    What is declared counts where the server says nothing. Raises ServerRefusalError where it
    refuses and nothing is declared, and GatewayError where it fails.
    """
    name = asked.model or ""
    upstream = route.upstream
    batches = upstream.dialect.batches
    declared = route.models.get(name)

    async def ask(endpoint: UpstreamEndpoint) -> ModelMetadata:
        deadline.wait_for_server(endpoint.url)
        try:
            return await upstream.metadata.get(name, asked.version, endpoint, batches)
        except ServerRefusalError as refusal:
            failed = refusal.status >= _FIRST_FAILURE and refusal.status != _NOT_IMPLEMENTED
            if declared is None or failed:
                raise
            return declared.metadata

    loan, known = await reaching(upstream, ask, deadline, named_by(asked))
    loan.give_back(Outcome.ANSWERED)
    return completed(known, declared)
