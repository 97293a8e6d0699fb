"""The settings of an upstream → the pool of its endpoints."""

from __future__ import annotations

import ssl

from gateway.routing.balancer import LEAST_REQUEST, LoadBalancingPolicy
from gateway.routing.health import HealthCheckPolicy, OutlierPolicy
from gateway.settings.upstreams import HealthCheck, LoadBalancing, OutlierDetection
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.system.buffers import BufferAccount
from gateway.upstream.http.address import ServerAddress, parse_server_url
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.dns import Resolver, resolve_host
from gateway.upstream.pool.health_check import HealthChecker
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.pool.outlier_detection import EjectionListener
from gateway.upstream.pool.pool import Pool
from gateway.upstream.pool.supervisor import PoolSupervisor
from gateway.upstream.transport import HeaderLines

_DISCOVER_EVERY = 10.0
"""Seconds between two questions for an endpoint's models."""


def build_pool(
    name: str,
    declared: UpstreamSettings,
    context: ssl.SSLContext | None,
    connect_timeout: float,
    buffers: BufferAccount | None = None,
    tell: EjectionListener | None = None,
    dialect_detector: DialectDetector | None = None,
    own_request_headers: HeaderLines = (),
) -> Pool:
    """Make the pool of the upstream ``name``, and who looks after it.

    ``context`` is for TLS, ``connect_timeout`` in seconds; ``buffers`` counts what connections
    buffer.
    ``tell`` is told which endpoints are ejected, and which answer again; ``interpreter`` asks them
    what they are, where the settings do not say. ``own_request_headers`` names the gateway where
    it asks.
    """

    def connect(address: ServerAddress) -> HttpEndpoint:
        return HttpEndpoint(
            address, connect_timeout, declared.idle_timeout, buffers, own_request_headers
        )

    server_name = declared.tls.server_name if declared.tls is not None else None
    servers = [parse_server_url(url, context, server_name) for url in declared.endpoints]
    resolver = None
    if declared.dns_refresh is not None:
        resolver = Resolver(servers, declared.dns_refresh, connect, resolve_host)
    supervisor = PoolSupervisor(
        None if declared.health_check is None else _health_checker(declared.health_check),
        ModelDiscovery(_DISCOVER_EVERY) if declared.model_discovery else None,
        resolver,
        dialect_detector,
    )
    endpoints = resolver.endpoints if resolver else [connect(server) for server in servers]
    ejection, balance = _ejection(declared.outlier_detection), _balance(declared.load_balancing)
    return Pool(
        endpoints,
        ejection,
        supervisor=supervisor,
        load_balancing=balance,
        notify=tell,
        upstream=name,
    )


def _balance(declared: LoadBalancing) -> LoadBalancingPolicy:
    policy = LoadBalancingPolicy(declared.policy == "round_robin", declared.hash_header)
    return LEAST_REQUEST if policy == LEAST_REQUEST else policy


def _ejection(declared: OutlierDetection) -> OutlierPolicy:
    return OutlierPolicy(
        declared.consecutive_failures,
        declared.base_ejection_time,
        declared.max_ejection_time,
        declared.max_ejection_percent / 100,
        frozenset(declared.failure_statuses),
    )


def _health_checker(declared: HealthCheck) -> HealthChecker:
    policy = HealthCheckPolicy(declared.healthy_threshold, declared.unhealthy_threshold)
    return HealthChecker(declared.path, declared.interval, declared.timeout, policy)
