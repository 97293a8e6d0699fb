"""The settings of an upstream → the pool of its endpoints."""

from __future__ import annotations

import ssl

from gateway.routing.balancer import BY_LOAD, BalancePolicy
from gateway.routing.health import EjectionPolicy, ProbePolicy
from gateway.settings.upstreams import Balance, Ejection, Health
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.system.buffers import BufferAccount
from gateway.upstream.http.address import ServerAddress, server_at
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.pool.dialect import Interpreter
from gateway.upstream.pool.dns import Resolver, addresses_of
from gateway.upstream.pool.health_check import Prober
from gateway.upstream.pool.model_discovery import Discovery
from gateway.upstream.pool.outlier_detection import Tell
from gateway.upstream.pool.pool import Pool
from gateway.upstream.pool.supervisor import Keeper
from gateway.upstream.transport import HeaderLines

_DISCOVER_EVERY = 10.0
"""Seconds between two questions for an endpoint's models."""


def build_pool(
    name: str,
    declared: UpstreamSettings,
    context: ssl.SSLContext | None,
    connect_time: float,
    buffers: BufferAccount | None = None,
    tell: Tell | None = None,
    interpreter: Interpreter | None = None,
    own_request: HeaderLines = (),
) -> Pool:
    """Make the pool of the upstream ``name``, and who looks after it.

    ``context`` is for TLS, ``connect_time`` in seconds; ``buffers`` counts what connections buffer.
    ``tell`` is told which endpoints are ejected, and which answer again; ``interpreter`` asks them
    what they are, where the settings do not say. ``own_request`` names the gateway where it asks.
    """

    def connect(address: ServerAddress) -> HttpEndpoint:
        return HttpEndpoint(address, connect_time, declared.keep_alive, buffers, own_request)

    server_name = declared.tls.server_name if declared.tls is not None else None
    servers = [server_at(url, context, server_name) for url in declared.endpoints]
    resolver = None
    if declared.resolve is not None:
        resolver = Resolver(servers, declared.resolve, connect, addresses_of)
    keeper = Keeper(
        None if declared.health is None else _prober(declared.health),
        None if declared.discover is None else Discovery(_DISCOVER_EVERY),
        resolver,
        interpreter,
    )
    endpoints = resolver.endpoints if resolver else [connect(server) for server in servers]
    ejection, balance = _ejection(declared.ejection), _balance(declared.balance)
    return Pool(endpoints, ejection, keeper=keeper, balance=balance, tell=tell, upstream=name)


def _balance(declared: Balance) -> BalancePolicy:
    policy = BalancePolicy(declared.by == "round_robin", declared.hash)
    return BY_LOAD if policy == BY_LOAD else policy


def _ejection(declared: Ejection) -> EjectionPolicy:
    return EjectionPolicy(
        declared.failures,
        declared.time,
        declared.longest,
        declared.most,
        frozenset(declared.statuses),
    )


def _prober(declared: Health) -> Prober:
    policy = ProbePolicy(declared.healthy, declared.unhealthy)
    return Prober(declared.path, declared.every, declared.time, policy)
