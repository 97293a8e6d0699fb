"""Loads the certificates, API keys and upstream specs that the settings name."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from ipaddress import ip_network
from typing import NamedTuple

from gateway.app.build.api_keys import ApiKeys
from gateway.app.build.tls import load_server_tls, upstream_tls_contexts, upstream_tls_files
from gateway.app.build.upstreams import UpstreamSpec
from gateway.app.build.worker_count import worker_count
from gateway.app.journal import CERTIFICATE_REFUSED, CERTIFICATE_RELOADED, Journal
from gateway.listener.tls import ReloadingTlsContext
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy, new_identity
from gateway.settings.schema import Settings
from gateway.system.file_watcher import POLL_INTERVAL, digest

_log = logging.getLogger("tensorgate")


class LoadedResources(NamedTuple):
    """Settings, and what they name.

    ``forwarding`` has the identity of the gateway, which its workers share.
    """

    settings: Settings
    tls: ReloadingTlsContext | None
    api_keys: ApiKeys
    upstream_specs: tuple[UpstreamSpec, ...]
    forwarding: ForwardedPolicy

    def refresh(self, journal: Journal | None) -> bool:
        """Load API keys and the server certificate again, if their files have changed.

        Return whether API keys were replaced. ``journal`` gets what comes of the certificate. An
        error of our own in one is logged, and the other is loaded nevertheless.
        """
        try:
            self._refresh_certificate(journal)
        except Exception:
            _log.exception("the server certificate could not be reloaded; keeping the previous one")
        try:
            return self.api_keys.refresh()
        except Exception:
            _log.exception("API keys could not be reloaded; keeping the previous ones")
            return False

    def _refresh_certificate(self, journal: Journal | None) -> None:
        failure = None if self.tls is None else self.tls.reload_if_changed()
        if failure is not None and journal is not None and self.settings.tls is not None:
            kind = CERTIFICATE_REFUSED if failure else CERTIFICATE_RELOADED
            why, file = failure or "the file has changed", self.settings.tls.certificate
            journal.record(kind, who="file watch", why=why, subject=file)

    async def follow(self, on_new_keys: Callable[[], None], journal: Journal | None = None) -> None:
        """Follow the files of API keys and certificate until cancelled; see ``refresh``."""
        while self.tls is not None or self.api_keys.groups:
            if self.refresh(journal):
                on_new_keys()
            await asyncio.sleep(POLL_INTERVAL)


def load_resources(settings: Settings, before: LoadedResources | None = None) -> LoadedResources:
    """Load what settings name, which takes a while.

    If their settings are as ``before``, the server certificate and the API keys are those from
    before, which follow their files. The identity is always that from before, and so is the number
    of processes, which is fixed as they run. Raises UnusableSettingsError.
    """
    if before is not None:
        settings = settings.model_copy(update={"workers": before.settings.workers})
    if before is not None and settings.tls == before.settings.tls:
        tls = before.tls
    else:
        tls = None if settings.tls is None else load_server_tls(settings.tls)
    if before is not None and settings.api_keys == before.settings.api_keys:
        api_keys = before.api_keys
    else:
        api_keys = ApiKeys(settings, os.environ)
    identity = new_identity() if before is None else before.forwarding.identity
    declared = settings.forwarded
    trusted = tuple(map(ip_network, declared.trusted_proxies))
    forwarding = ForwardedPolicy(
        declared.headers, trusted, declared.via, settings.request_id, identity
    )
    specs = tuple(_upstream_spec(settings, name, forwarding) for name in settings.upstreams)
    return LoadedResources(settings, tls, api_keys, specs, forwarding)


def unwatched_files(settings: Settings) -> tuple[str, ...]:
    """Return the files that only a reload loads again: those of TLS to upstreams."""
    upstreams = settings.upstreams.values()
    return tuple(file for upstream in upstreams for file in upstream_tls_files(upstream))


def _upstream_spec(settings: Settings, name: str, forwarding: ForwardedPolicy) -> UpstreamSpec:
    declared, limits = settings.upstreams[name], settings.limits
    # The digests come first: a file that changes between the two is loaded again at the next look.
    certificates = tuple(map(digest, upstream_tls_files(declared)))
    return UpstreamSpec(
        name,
        declared,
        limits.connect_timeout,
        limits.idle_timeout,
        limits.metadata_ttl,
        limits.metadata_cache_size,
        worker_count(settings),
        forwarding.own_request_headers,
        settings.expose_endpoints,
        certificates,
        upstream_tls_contexts(name, declared),
    )
