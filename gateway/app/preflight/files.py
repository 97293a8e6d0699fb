"""Loads the files that settings name, to find those that cannot be used."""

from __future__ import annotations

import os

from gateway.app.build.api_keys import ApiKeys
from gateway.app.build.tls import load_server_tls, upstream_tls_contexts
from gateway.settings.schema import Settings


def check_files(settings: Settings) -> None:
    """Load certificates and API keys, and drop them again.

    Raises ListenError, UpstreamTlsError and ApiKeysError, as ``load_resources`` does.
    """
    if settings.tls is not None:
        load_server_tls(settings.tls)
    ApiKeys(settings, os.environ)
    for name, upstream in settings.upstreams.items():
        upstream_tls_contexts(name, upstream)
