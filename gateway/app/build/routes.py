"""Settings → the router, with its routes, filters, mirrors and declared models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.app.build.limits import SharedLimits
from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.operations import OPERATION_KINDS, OperationKind
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.calls.dispatch import proxy_call
from gateway.proxy.destination import Destination, Limits, Upstream
from gateway.proxy.filters.authentication import KeyGroup
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.proxy.filters.mirror import Mirror
from gateway.proxy.router import Rewrite, Route, Router
from gateway.routing.matcher import Match, Pattern
from gateway.routing.retry import RetryPolicy
from gateway.settings.limits import Limits as CommonLimits
from gateway.settings.models import Model, Tensor
from gateway.settings.routes import Match as MatchSettings
from gateway.settings.routes import Mirror as MirrorSettings
from gateway.settings.routes import Route as RouteSettings
from gateway.settings.schema import Settings
from gateway.settings.values.fields import Section


def build_routes(
    settings: Settings,
    upstreams: Mapping[str, Upstream],
    limits: SharedLimits,
    offloader: Offloader | None,
    key_groups: Mapping[str, KeyGroup],
    forwarding: ForwardedPolicy,
    metrics: GatewayMetrics,
) -> Router:
    """Build the router. With an ``offloader``, threads convert large tensors."""
    scheduler = ConversionScheduler()  # one for all routes, as there is one event loop
    mirror_scheduler = ConversionScheduler()
    models = declared_models(settings.models)
    # An API key is for the gateway only: a server that sees it could act as its client. So no route
    # passes the headers of any key on. Authorization may be for the server, so it is passed on
    # where no key is required in it.
    key_headers = {group.header.lower() for group in key_groups.values() if group.header}

    def build_mirror(
        route: str, declared: MirrorSettings | None, policies: JsonPolicies, own_limits: Limits
    ) -> Mirror | None:
        """Build the mirror of a route; all share a memory budget and a scheduler of their own."""
        if declared is None:
            return None
        upstream = upstreams[declared.upstream]
        destination = Destination(
            upstream,
            policies,
            own_limits,
            offloader,
            mirror_scheduler,
            limits.mirror_memory_budget,
            # Copies take no slot of the gateway's own limit.
            concurrency_limits=_present(upstream.concurrency_limit),
            declared_models=models,
        )
        return Mirror(
            destination,
            declared.percent / 100,
            proxy_call,
            max_concurrent=declared.max_concurrent,
            metrics=metrics.mirror(route, upstream.name),
        )

    def build_route(name: str, declared: RouteSettings) -> Route:
        policies = JsonPolicies(Nonfinite(declared.nonfinite), BytesEncoding(declared.bytes))
        own_limits = _limits(settings.limits, declared.limits)
        rewrite = declared.rewrite
        groups = tuple(key_groups[name] for name in declared.auth)
        auth_headers = {group.header_name.lower() for group in groups}
        destinations = tuple(
            Destination(
                upstreams[share.name],
                policies,
                own_limits,
                offloader,
                scheduler,
                limits.memory_budget,
                _retry(declared.retry_on),
                # The upstream's first: a call that waits for it takes no slot from others.
                _present(upstreams[share.name].concurrency_limit, limits.concurrency_limit),
                models,
            )
            for share in declared.upstream
        )
        return Route(
            _match(declared.match),
            destinations,
            tuple(share.weight for share in declared.upstream),
            declared.sticky_header,
            Rewrite(rewrite.model, rewrite.version) if rewrite else None,
            _operation_kinds(declared.deny_operations),
            build_mirror(name, declared.mirror, policies, own_limits),
            forwarding.replaced_headers | key_headers | auth_headers,
            groups,
            declared.compression,
            name,
            declared.server_timing,
        )

    named = ((each.name or str(at), each) for at, each in enumerate(settings.routes, 1))
    return Router([build_route(*each) for each in named], forwarded=forwarding)


def _present(*limits: ConcurrencyLimit | None) -> tuple[ConcurrencyLimit, ...]:
    return tuple(limit for limit in limits if limit is not None)


def _match(declared: MatchSettings) -> Match:
    return Match(
        Pattern.of(declared.model) if declared.model else None,
        Pattern.of(declared.version) if declared.version else None,
        tuple((name, Pattern.of(value)) for name, value in declared.headers.items()),
        _operation_kinds(declared.operations) if declared.operations else None,
    )


def _retry(declared: Iterable[str | int]) -> RetryPolicy:
    statuses = frozenset(each for each in declared if isinstance(each, int))
    return RetryPolicy("no_response" in declared, statuses)


def _operation_kinds(names: Iterable[str]) -> frozenset[OperationKind]:
    return frozenset(kind for name in names for kind in OPERATION_KINDS[name])


def _limits(common: CommonLimits, own: Section) -> Limits:
    """Return a route's limits: its own, or else those of all routes."""
    return Limits(
        **{name: getattr(common, name) if limit is None else limit for name, limit in own}
    )


def declared_models(models: Mapping[str, Model]) -> dict[str, DeclaredModel]:
    """Build the declared models, by name."""
    return {name: _declared(name, model) for name, model in models.items()}


def _declared(name: str, model: Model) -> DeclaredModel:
    batching = model.max_batch_size > 0
    metadata = ModelMetadata(
        name, _specs(model.inputs, batching), batching, _specs(model.outputs, batching)
    )
    return DeclaredModel(metadata, model.max_batch_size)


def _specs(tensors: Iterable[Tensor], batching: bool) -> tuple[TensorSpec, ...]:
    # As in servers' metadata, the batch dimension comes first.
    batch = (-1,) if batching else ()
    return tuple(
        TensorSpec(tensor.name, DATATYPES[tensor.datatype], (*batch, *tensor.shape))
        for tensor in tensors
    )
