"""What is known of the model that an infer request is for."""

from __future__ import annotations

from gateway.protocol.declared_model import completed
from gateway.protocol.model_name import named_by
from gateway.protocol.operations import Endpoint
from gateway.protocol.tensors import ModelMetadata
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.interfaces import Route
from gateway.proxy.retry import reaching
from gateway.upstream.metadata_cache import ServerRefusalError
from gateway.upstream.pool.lease import Outcome
from gateway.upstream.transport import UpstreamEndpoint

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
