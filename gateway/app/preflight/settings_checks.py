"""What valid settings name but cannot be used, and what in them is unwise: without a server."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address

from gateway.app.build.api_keys import ApiKeys
from gateway.app.build.limits import memory_warnings
from gateway.app.build.tls import load_server_tls, tls_warnings, upstream_tls_contexts
from gateway.app.build.worker_count import offload_warnings
from gateway.settings.routes import pattern_warnings
from gateway.settings.schema import Settings
from gateway.settings.upstreams import urls_of
from gateway.settings.values.addresses import Address, UnixAddress, address_of
from gateway.settings.values.wording import SettingWarning

_WILDCARDS = ("0.0.0.0", "::")


def check_files(settings: Settings) -> None:
    """Load certificates and API keys, and drop them again, without what serves calls.

    Raises UnusableSettingsError, as ``load_resources`` does.
    """
    if settings.tls is not None:
        load_server_tls(settings.tls)
    ApiKeys(settings, os.environ)
    for name, upstream in settings.upstreams.items():
        upstream_tls_contexts(name, upstream)


def settings_warnings(settings: Settings) -> Iterator[SettingWarning]:
    """Yield what is allowed but unwise, each with the setting."""
    yield from tls_warnings(settings)
    yield from offload_warnings(settings)
    yield from memory_warnings(settings)
    yield from pattern_warnings(settings.routes)


def find_self_references(settings: Settings) -> Iterator[SettingWarning]:
    """Yield the endpoints at which the gateway itself listens, without DNS lookups."""
    for name, upstream in settings.upstreams.items():
        for at, endpoint in enumerate(upstream.endpoints):
            for url in urls_of(endpoint):
                listen = [each for each in settings.listen if _leads_to(address_of(url), each)]
                if listen:
                    yield (
                        ("upstreams", name, "endpoints", at),
                        f"{url} is the gateway itself (listen: {listen[0]}); requests come back"
                        " and are answered with 508",
                    )


def _leads_to(endpoint: Address, listen: Address) -> bool:
    """Tell whether a connection to an endpoint reaches a listening address."""
    if isinstance(endpoint, UnixAddress) or isinstance(listen, UnixAddress):
        return endpoint == listen
    if endpoint.port != listen.port:
        return False
    if _same_host(endpoint.host, listen.host):
        return True
    if listen.host in _WILDCARDS:
        version = 6 if listen.host == "::" else 4
        return _is_this_machine(endpoint.host, version)
    # A connection to 0.0.0.0 goes to the loopback interface.
    is_loopback = listen.host in ("127.0.0.1", "::1") or _is_localhost(listen.host)
    return is_loopback and (endpoint.host in _WILDCARDS or _is_localhost(endpoint.host))


def _same_host(one: str, other: str) -> bool:
    return one.lower().rstrip(".") == other.lower().rstrip(".")


def _is_this_machine(host: str, version: int) -> bool:
    """Tell whether a host is this machine; an address must have this version of IP."""
    if _is_localhost(host) or _same_host(host, socket.gethostname()):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.version == version and (address.is_loopback or _can_be_bound(host, version))


def _is_localhost(host: str) -> bool:
    return _same_host(host, "localhost")


def _can_be_bound(host: str, version: int) -> bool:
    """Tell whether an address is one of this machine's."""
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    try:
        with socket.socket(family) as sock:
            sock.bind((host, 0))
    except OSError:
        return False
    return True
