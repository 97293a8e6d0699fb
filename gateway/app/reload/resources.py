"""What a gateway is made of: the settings, and what they name, loaded."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from gateway.app.build.api_keys import ClientKeys
from gateway.app.build.forwarding import forwarding
from gateway.app.build.processes import worker_count
from gateway.app.build.tls import client_files, client_tls, server_context, server_files, warnings
from gateway.app.build.upstreams import Recipe
from gateway.listener.tls import ServerTls
from gateway.proxy.filters.forwarded_headers import Forwarding, new_identity
from gateway.settings.schema import Settings
from gateway.system.files import digest

_log = logging.getLogger("tensorgate")


@dataclass(frozen=True, slots=True)
class Material:
    """Hold settings, TLS with clients if it is spoken, clients' keys, and recipes of upstreams.

    ``forwarding`` holds the identity of the gateway, which all of its workers share.
    """

    settings: Settings
    tls: ServerTls | None
    keys: ClientKeys
    recipes: tuple[Recipe, ...]
    forwarding: Forwarding

    def renew(self) -> None:
        """Load keys, and TLS with clients, whose files have changed, and not since the last look.

        Who serves with them need not ask for that: they are watched meanwhile.
        """
        self.keys.look()
        if self.tls is not None:
            self.tls.look()


def gather(settings: Settings, before: Material | None = None) -> Material:
    """Load what settings name; it takes a while. Raises ListenError, UpstreamTlsError, KeysError.

    TLS with clients that is declared as ``before`` is the one from before, and so are keys: they
    renew themselves. The identity always is the one from before.
    """
    if before is not None and settings.tls == before.settings.tls:
        tls = before.tls
    else:
        tls = None if settings.tls is None else client_tls(settings.tls)
    if before is not None and settings.keys == before.settings.keys:
        keys = before.keys
    else:
        keys = ClientKeys(settings, os.environ)
    identity = new_identity() if before is None else before.forwarding.identity
    told = forwarding(settings, identity)
    recipes = tuple(_recipe(settings, name, told) for name in settings.upstreams)
    return Material(settings, tls, keys, recipes, told)


def files_named(settings: Settings) -> tuple[str, ...]:
    """Name the files that are loaded with settings, and not renewed by themselves."""
    upstreams = settings.upstreams.values()
    return tuple(file for upstream in upstreams for file in server_files(upstream))


def every_file_named(settings: Settings) -> tuple[str, ...]:
    """Name the files that are loaded with settings."""
    return (*files_named(settings), *client_files(settings.tls))


def warn(settings: Settings, before: Settings | None = None) -> None:
    """Log what is allowed, and unwise, if it was not so ``before``."""
    told = set() if before is None else set(warnings(before))
    for warning in warnings(settings):
        if warning not in told:
            _log.warning("%s", warning)


def _recipe(settings: Settings, name: str, told: Forwarding) -> Recipe:
    declared, limits = settings.upstreams[name], settings.limits
    # The digests come first: files that change between the two are loaded again next time.
    certificates = tuple(map(digest, server_files(declared)))
    return Recipe(
        name,
        declared,
        limits.connect_time,
        limits.idle_time,
        limits.metadata_time,
        limits.metadata_models,
        worker_count(settings),
        told.own_request,
        certificates,
        server_context(name, declared),
    )
