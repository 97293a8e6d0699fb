"""What is known of the model that an infer request is for."""

from __future__ import annotations

from gateway.protocol.declared_model import complete_metadata
from gateway.protocol.operations import Operation, model_name_of
from gateway.protocol.tensors import ModelMetadata
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.interfaces import Route
from gateway.proxy.retry import use_reachable_endpoint
from gateway.upstream.metadata_cache import UpstreamResponseError
from gateway.upstream.pool.member import Outcome
from gateway.upstream.transport import UpstreamEndpoint

_FIRST_FAILURE = 500
_NOT_IMPLEMENTED = 501


async def model_metadata(asked: Operation, route: Route, deadline: Deadline) -> ModelMetadata:
    """Give a model's metadata, which a server may have to be asked for.

    What is declared counts where the server says nothing. Raises UpstreamResponseError where it
    refuses and nothing is declared, and GatewayError where it fails.
    """
    name = asked.model or ""
    upstream = route.upstream
    has_config = upstream.dialect.has_config
    declared = route.models.get(name)

    async def ask(endpoint: UpstreamEndpoint) -> ModelMetadata:
        deadline.expect_server(endpoint.url)
        try:
            return await upstream.metadata.get(name, asked.version, endpoint, has_config)
        except UpstreamResponseError as refusal:
            failed = refusal.status >= _FIRST_FAILURE and refusal.status != _NOT_IMPLEMENTED
            if declared is None or failed:
                raise
            return declared.metadata

    loan, known = await use_reachable_endpoint(upstream, ask, deadline, model_name_of(asked))
    loan.release(Outcome.SUCCEEDED)
    return complete_metadata(known, declared)
