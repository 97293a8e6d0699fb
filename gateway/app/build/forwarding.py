"""Settings → what servers are told of clients."""

from __future__ import annotations

from ipaddress import ip_network

from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.settings.schema import Settings


def forwarding(settings: Settings, identity: str) -> ForwardedPolicy:
    """Make what the settings say of it; ``identity`` is that of the gateway."""
    declared = settings.forwarded
    trusted = tuple(map(ip_network, declared.trusted_proxies))
    return ForwardedPolicy(declared.headers, trusted, declared.via, settings.request_id, identity)
