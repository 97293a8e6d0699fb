"""What valid settings name but cannot be used, and what in them is unwise: without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gateway.app.build.api_keys import ApiKeys
from gateway.app.build.tls import load_server_tls, tls_warnings, upstream_tls_contexts
from gateway.app.build.worker_count import offload_warnings
from gateway.settings.routes import pattern_warnings
from gateway.settings.schema import Settings
from gateway.settings.values.wording import SettingWarning


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
    yield from pattern_warnings(settings.routes)
