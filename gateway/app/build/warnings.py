"""Warnings about settings that are allowed but unwise."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.app.build.tls import tls_warnings
from gateway.app.build.worker_count import offload_warnings
from gateway.settings.routes import pattern_warnings
from gateway.settings.schema import Settings
from gateway.settings.values.wording import SettingWarning


def settings_warnings(settings: Settings) -> Iterator[SettingWarning]:
    """Yield what is allowed but unwise, each with the setting."""
    yield from tls_warnings(settings)
    yield from offload_warnings(settings)
    yield from pattern_warnings(settings.routes)
