"""What a gateway is made of: the settings, and what they name, loaded."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from gateway.app.build.api_keys import ApiKeys
from gateway.app.build.forwarding import forwarding
from gateway.app.build.processes import worker_count
from gateway.app.build.tls import (
    load_server_tls,
    server_tls_files,
    upstream_ssl_context,
    upstream_tls_files,
    warnings,
)
from gateway.app.build.upstreams import UpstreamSpec
from gateway.listener.tls import ReloadingTlsContext
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy, new_identity
from gateway.settings.schema import Settings
from gateway.system.files import digest

_log = logging.getLogger("tensorgate")


@dataclass(frozen=True, slots=True)
class Resources:
    """Hold settings, TLS with clients if it is spoken, clients' keys, and recipes of upstreams.

    ``forwarding`` holds the identity of the gateway, which all of its workers share.
    """

    settings: Settings
    tls: ReloadingTlsContext | None
    keys: ApiKeys
    upstream_specs: tuple[UpstreamSpec, ...]
    forwarding: ForwardedPolicy

    def renew(self) -> None:
        """Load keys, and TLS with clients, whose files have changed, and not since the last look.

        Who serves with them need not ask for that: they are watched meanwhile.
        """
        self.keys.look()
        if self.tls is not None:
            self.tls.reload_if_changed()


def gather(settings: Settings, before: Resources | None = None) -> Resources:
    """Load what settings name; it takes a while.

    Raises ListenError, UpstreamTlsError, ApiKeysError.

    TLS with clients that is declared as ``before`` is the one from before, and so are keys: they
    renew themselves. The identity always is the one from before.
    """
    if before is not None and settings.tls == before.settings.tls:
        tls = before.tls
    else:
        tls = None if settings.tls is None else load_server_tls(settings.tls)
    if before is not None and settings.api_keys == before.settings.api_keys:
        keys = before.keys
    else:
        keys = ApiKeys(settings, os.environ)
    identity = new_identity() if before is None else before.forwarding.identity
    told = forwarding(settings, identity)
    upstream_specs = tuple(_recipe(settings, name, told) for name in settings.upstreams)
    return Resources(settings, tls, keys, upstream_specs, told)


def unwatched_files(settings: Settings) -> tuple[str, ...]:
    """Name the files that are loaded with settings, and not renewed by themselves."""
    upstreams = settings.upstreams.values()
    return tuple(file for upstream in upstreams for file in upstream_tls_files(upstream))


def all_referenced_files(settings: Settings) -> tuple[str, ...]:
    """Name the files that are loaded with settings."""
    return (*unwatched_files(settings), *server_tls_files(settings.tls))


def warn(settings: Settings, before: Settings | None = None) -> None:
    """Log what is allowed, and unwise, if it was not so ``before``."""
    told = set() if before is None else set(warnings(before))
    for warning in warnings(settings):
        if warning not in told:
            _log.warning("%s", warning)


def _recipe(settings: Settings, name: str, told: ForwardedPolicy) -> UpstreamSpec:
    declared, limits = settings.upstreams[name], settings.limits
    # The digests come first: files that change between the two are loaded again next time.
    certificates = tuple(map(digest, upstream_tls_files(declared)))
    return UpstreamSpec(
        name,
        declared,
        limits.connect_timeout,
        limits.idle_timeout,
        limits.metadata_ttl,
        limits.metadata_cache_size,
        worker_count(settings),
        told.own_request_headers,
        certificates,
        upstream_ssl_context(name, declared),
    )
