"""Settings → upstreams: their pools of endpoints, caches and limits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.app.build.limits import apply_concurrency, build_concurrency_limit
from gateway.app.build.tls import UpstreamTlsContexts
from gateway.app.ejection_sync import EjectionSync
from gateway.app.journal import EndpointEvents, Journal
from gateway.errors import upstream_name
from gateway.observe.gateway_metrics import GatewayMetrics
from gateway.protocol.dialects import DIALECTS, TRITON, GrpcForm
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.destination import Upstream
from gateway.routing.balancer import LEAST_REQUEST, LoadBalancingPolicy
from gateway.routing.endpoint_health import EjectionState, HealthCheckPolicy, OutlierPolicy
from gateway.routing.retry import RetryBudget
from gateway.settings.upstreams import (
    Endpoint,
    HealthCheck,
    LoadBalancing,
    OutlierDetection,
    SharedMemory,
    urls_of,
)
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.settings.values.addresses import is_grpc
from gateway.system.buffers import BufferAccount
from gateway.upstream.address import ServerAddress, TcpAddress, parse_server_url
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.grpc.choices import InferenceProtocol, drains_cancelled
from gateway.upstream.grpc.endpoint import DualEndpoint, GrpcEndpoint
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.http2.connections import DrainedStreams
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool.checks import HealthChecker, ModelDiscovery, PoolSupervisor
from gateway.upstream.pool.dialect import DialectDetector, DialectState
from gateway.upstream.pool.dns import Resolver, resolve_host
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.outlier_detection import EjectionListener, FailureListener, ignore
from gateway.upstream.pool.pool import Pool
from gateway.upstream.shared_memory import SharedMemoryLane, SharedMemoryLanes, SharedMemoryPolicy
from gateway.upstream.transport import HeaderLines, UpstreamEndpoint

_HTTP_IDLE_TIMEOUT = 4.0
"""Seconds until an idle connection is closed: before the server closes it, as MLServer does after
5 s."""
_GRPC_IDLE_TIMEOUT = 180.0
"""The same over HTTP/2. A server tells by GOAWAY that it closes a connection, so that no request is
lost. It ends before load balancers forget idle connections: the first ones after four minutes."""
_DISCOVERY_INTERVAL = 10.0
"""Seconds between two requests for an endpoint's list of models."""
_DIALECT_INTERVAL = 60.0
"""Seconds between two requests to an endpoint that has not shown its dialect."""
DIALECT_RETRY_INTERVAL = 1.0
"""Seconds until the next one after an error: another server may run there by then."""

_MAX_SHARED_MEMORY = 256 * 2**20
"""Bytes of an endpoint's shared memory without a ``size``, which ``max_buffered_bytes`` bounds."""

_log = logging.getLogger("tensorgate.upstream")


@dataclass(frozen=True, slots=True)
class UpstreamSpec:
    """Everything that an upstream is built from; upstreams of equal specs behave alike.

    Times are in seconds. ``own_request_headers`` name the gateway in its own requests.
    ``exposes_endpoints`` tells whether errors name endpoints to clients by their URLs.
    ``certificates`` are digests of the TLS files, from which ``tls_contexts`` are made.
    """

    name: str
    declared: UpstreamSettings
    connect_timeout: float
    idle_timeout: float
    metadata_ttl: float
    metadata_cache_size: int
    workers: int = 1
    own_request_headers: HeaderLines = ()
    exposes_endpoints: bool = False
    certificates: tuple[bytes | None, ...] = ()
    tls_contexts: UpstreamTlsContexts = field(default=UpstreamTlsContexts(), compare=False)


@dataclass(eq=False, slots=True)
class SharedUpstream:
    """An upstream that the runtimes before and after a reload may share."""

    spec: UpstreamSpec
    upstream: Upstream
    before: Pool | None = None
    """The pool of the upstream that it replaces."""
    started: bool = False
    holders: int = 0
    """The configurations that use it."""

    async def start(self) -> None:
        """Start the pool, if it is not started yet; see ``Pool.start``."""
        if self.started:
            return
        self.started = True
        pool, before, self.before = self.upstream.pool, self.before, None
        if before is not None:
            pool.adopt_addresses(before)
        await pool.start()
        if before is not None:
            pool.adopt_state(before)

    def acquire(self) -> None:
        """Count a configuration that uses it, and apply the limits of its spec."""
        self.holders += 1
        apply_concurrency(
            self.upstream.concurrency_limit, self.spec.declared.concurrency, self.spec.workers
        )

    async def release(self) -> None:
        """Count a configuration no more; the last one closes it."""
        self.holders -= 1
        await self.close_if_unused()

    async def close_if_unused(self) -> None:
        """Close it if no configuration uses it."""
        if not self.holders:
            await self.upstream.metadata.close()
            await self.upstream.pool.close()

    @property
    def has_calls_of_last_user(self) -> bool:
        """Tell whether calls are running there, and only one configuration uses it."""
        return self.holders == 1 and any(self.upstream.pool.outstanding)


def build_upstreams(
    specs: Iterable[UpstreamSpec],
    before: Mapping[str, SharedUpstream],
    metrics: GatewayMetrics,
    buffers: BufferAccount,
    ejection_sync: EjectionSync | None,
    journal: Journal,
) -> dict[str, SharedUpstream]:
    """Build the upstreams, by name.

    If the spec is as before, the upstream is the one from before, with its connections and all that
    it knows. If the spec has changed, endpoints that are still there keep their health, names keep
    their addresses, and calls in progress keep their slots. ``buffers`` counts what connections
    buffer. ``journal`` gets what happens to the endpoints.
    """

    def build_or_keep(spec: UpstreamSpec) -> SharedUpstream:
        old = before.get(spec.name)
        if old is not None and old.spec == spec:
            return old
        limit, pool = (old.upstream.concurrency_limit, old.upstream.pool) if old else (None, None)
        limit = build_concurrency_limit(
            spec.name, spec.declared.concurrency, spec.workers, metrics, limit
        )
        upstream = _build(spec, metrics, buffers, ejection_sync, journal, limit)
        return SharedUpstream(spec, upstream, pool)

    return {spec.name: build_or_keep(spec) for spec in specs}


def upstreams_by_name(shared: Mapping[str, SharedUpstream]) -> dict[str, Upstream]:
    """Return the upstreams themselves."""
    return {name: each.upstream for name, each in shared.items()}


def build_pool(
    spec: UpstreamSpec,
    buffers: BufferAccount | None = None,
    on_ejection: EjectionListener = ignore,
    on_failure: FailureListener = ignore,
    dialect_state: DialectState | None = None,
    concurrency_limit: ConcurrencyLimit | None = None,
    on_health: Callable[[Member], bool | None] = lambda _: None,
    lanes: SharedMemoryLanes | None = None,
) -> Pool:
    """Build the pool of an upstream, with what supervises it.

    Its endpoints have shared memory only with ``lanes``.
    """
    declared = spec.declared
    public_name = None if spec.exposes_endpoints else upstream_name(spec.name)
    state = dialect_state or _configured_dialect_state(declared)

    def grpc_form() -> GrpcForm:
        return GrpcForm() if state.dialect is None else state.dialect.grpc

    def drains() -> bool:
        return drains_cancelled(declared.grpc_cancellation, state.dialect)

    def connect(address: ServerAddress) -> UpstreamEndpoint:
        endpoint = connect_to(address)
        if address.grpc_address is not None:
            endpoint = DualEndpoint(endpoint, connect_to(address.grpc_address))
        endpoint.shared_memory = _shared_memory_lane(endpoint, address, spec, state, lanes)
        return endpoint

    def connect_to(address: ServerAddress) -> UpstreamEndpoint:
        is_http2 = address.scheme == "grpc"
        idle_timeout = declared.idle_timeout
        if idle_timeout is None:
            idle_timeout = _GRPC_IDLE_TIMEOUT if is_http2 else _HTTP_IDLE_TIMEOUT
        headers = spec.own_request_headers
        options = EndpointOptions(spec.connect_timeout, idle_timeout, buffers, headers, public_name)
        if not is_http2:
            return HttpEndpoint(address, options, declared.retry_stale)
        drained = DrainedStreams(drains)
        if concurrency_limit is not None:
            drained.counters.append(concurrency_limit)
        return GrpcEndpoint(Http2Endpoint(address, options, drained=drained), grpc_form)

    servers = [_server_address(endpoint, spec) for endpoint in declared.endpoints]
    resolver = None
    if declared.dns_refresh is not None:
        resolver = Resolver(servers, declared.dns_refresh, connect, resolve_host)
    return Pool(
        resolver.endpoints if resolver else [connect(server) for server in servers],
        _outlier_policy(declared.outlier_detection),
        supervisor=PoolSupervisor(
            _health_checker(declared.health_check, on_health),
            ModelDiscovery(_DISCOVERY_INTERVAL) if declared.model_discovery else None,
            resolver,
            state if isinstance(state, DialectDetector) else None,
        ),
        load_balancing=_load_balancing_policy(declared.load_balancing),
        notify=on_ejection,
        upstream=spec.name,
        on_failure=on_failure,
        exposes_endpoints=spec.exposes_endpoints,
    )


def _shared_memory_lanes(
    declared: SharedMemory | None, buffers: BufferAccount
) -> SharedMemoryLanes | None:
    if declared is None:
        return None
    is_auto = not declared.model_fields_set
    if declared.size is not None:
        return SharedMemoryLanes(SharedMemoryPolicy(declared.size, declared.min_bytes))
    policy = SharedMemoryPolicy(_MAX_SHARED_MEMORY, declared.min_bytes, is_auto=is_auto)
    return SharedMemoryLanes(policy, buffers.count_shared)


def _shared_memory_lane(
    endpoint: UpstreamEndpoint,
    address: ServerAddress,
    spec: UpstreamSpec,
    state: DialectState,
    lanes: SharedMemoryLanes | None,
) -> SharedMemoryLane | None:
    """Make the lane of an endpoint; a detector tells it whether the server has the extension.

    An endpoint that can have none has a lane if the settings ask for one: it says why. So has one
    whose server may have regions of another gateway: they are guarded.
    """
    if lanes is None:
        return None
    addresses = [each for each in (address, address.grpc_address) if each is not None]
    is_local = all(each.is_local for each in addresses)
    why_not = "" if is_local else "its address is not on this machine"
    if spec.declared.retry_stale != "infer":
        why_not = "it takes retry_stale: infer"
    configured = None if isinstance(state, DialectDetector) else state.dialect
    has_none = configured is not None and not configured.triton_extensions
    if configured is not None and has_none:
        why_not = f"servers of the dialect {configured.name} have none"
    is_guarded = is_local and not has_none
    if lanes.policy.is_auto and not is_guarded:
        return None
    return SharedMemoryLane(endpoint, lanes, why_not, configured is not None, is_guarded)


def _server_address(endpoint: Endpoint, spec: UpstreamSpec) -> ServerAddress:
    tls, contexts = spec.declared.tls, spec.tls_contexts
    addresses = [
        parse_server_url(
            url,
            contexts.grpc if is_grpc(url) else contexts.http,
            None if tls is None else tls.server_name,
        )
        for url in urls_of(endpoint)
    ]
    if len(addresses) == 1:
        return addresses[0]
    http, grpc = addresses
    assert isinstance(http, TcpAddress)
    assert isinstance(grpc, TcpAddress)
    return replace(http, grpc=grpc)


def _build(
    spec: UpstreamSpec,
    metrics: GatewayMetrics,
    buffers: BufferAccount,
    ejection_sync: EjectionSync | None,
    journal: Journal,
    concurrency_limit: ConcurrencyLimit | None,
) -> Upstream:
    declared = spec.declared
    events = EndpointEvents(journal, spec.name, declared.required)

    def on_ejection(url: str, state: EjectionState) -> bool:
        if url and state.ejections:
            metrics.count_ejection(spec.name, url)
        is_known = ejection_sync is not None and ejection_sync.publish(spec.name, url, state)
        if not is_known:
            events.record_ejection(pool, url, state)
        return is_known

    def on_health(member: Member) -> bool:
        checks, url = declared.health_check, member.endpoint.url
        is_known = False
        if ejection_sync is not None and checks is not None:
            most = max(checks.healthy_threshold, checks.unhealthy_threshold)
            seconds = 2 * most * (checks.interval + checks.timeout)
            is_known = ejection_sync.publish_health(spec.name, url, member.is_healthy, seconds)
        if not is_known:
            events.record_health(member)
        return is_known

    protocol = _inference_protocol(declared)
    logs = ejection_sync is None or ejection_sync.slot == 0
    state = _configured_dialect_state(declared)
    if declared.dialect == "auto":
        state = DialectDetector(
            spec.name, _DIALECT_INTERVAL, DIALECT_RETRY_INTERVAL, logs, protocol
        )
    elif logs and protocol.is_choice:
        _log.info("upstream %s: %s", spec.name, protocol.describe(DIALECTS[declared.dialect]))
    clock = asyncio.get_running_loop().time
    on_failure = partial(metrics.count_failure, spec.name)
    lanes = _shared_memory_lanes(declared.shared_memory, buffers)
    pool = build_pool(
        spec, buffers, on_ejection, on_failure, state, concurrency_limit, on_health, lanes
    )
    return Upstream(
        spec.name,
        state,
        pool,
        MetadataCache(spec.metadata_ttl, spec.metadata_cache_size, spec.idle_timeout, clock),
        RetryBudget(declared.retry_budget.percent / 100, declared.retry_budget.min_concurrency),
        concurrency_limit,
        declared.required,
        protocol,
        declared.grpc_cancellation,
        lanes,
    )


def _inference_protocol(declared: UpstreamSettings) -> InferenceProtocol:
    protocols = {is_grpc(url) for endpoint in declared.endpoints for url in urls_of(endpoint)}
    return InferenceProtocol(False in protocols, True in protocols, declared.inference_protocol)


def _configured_dialect_state(declared: UpstreamSettings) -> DialectState:
    """Make the state of the dialect that the settings name; of triton for auto."""
    dialect = DIALECTS.get(declared.dialect, TRITON)
    has_http = _inference_protocol(declared).has_http
    return DialectState(dialect if has_http else dialect.over_grpc())


def _load_balancing_policy(declared: LoadBalancing) -> LoadBalancingPolicy:
    policy = LoadBalancingPolicy(declared.policy == "round_robin", declared.hash_header)
    return LEAST_REQUEST if policy == LEAST_REQUEST else policy


def _outlier_policy(declared: OutlierDetection) -> OutlierPolicy:
    return OutlierPolicy(
        declared.consecutive_failures,
        declared.base_ejection_time,
        declared.max_ejection_time,
        declared.max_ejection_percent / 100,
        frozenset(declared.failure_statuses),
        declared.latency_factor or 0.0,
    )


def _health_checker(
    declared: HealthCheck | None, notify: Callable[[Member], bool | None]
) -> HealthChecker | None:
    if declared is None:
        return None
    policy = HealthCheckPolicy(declared.healthy_threshold, declared.unhealthy_threshold)
    return HealthChecker(
        *(declared.path, declared.interval, declared.timeout, policy), notify=notify
    )
