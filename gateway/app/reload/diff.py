"""The difference between two settings, as an operator reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gateway.app.build.upstreams import UpstreamSpec
from gateway.app.loaded_resources import LoadedResources
from gateway.settings.schema import Settings
from gateway.sizes import LISTED_NAMES

_STARTUP_SETTINGS = ("workers",)
"""Settings that take effect at a start only: the number of processes is fixed while they run."""


def keep_startup_settings(settings: Settings, before: Settings) -> Settings:
    """Return settings with the values from ``before`` where a change needs a restart."""
    return settings.model_copy(update={name: getattr(before, name) for name in _STARTUP_SETTINGS})


def settings_needing_restart(settings: Settings, before: Settings) -> list[str]:
    """Return the names of changed settings that take effect at the next start."""
    return [name for name in _STARTUP_SETTINGS if getattr(settings, name) != getattr(before, name)]


def describe_changes(now: LoadedResources, before: LoadedResources) -> str:
    """Describe what has changed: ``upstreams +new -old ~other, routes changed``."""
    upstreams = list(_upstreams(_by_name(now.upstream_specs), _by_name(before.upstream_specs)))
    sections = [
        name
        for name in Settings.model_fields
        if name != "upstreams" and getattr(now.settings, name) != getattr(before.settings, name)
    ]
    parts = [f"upstreams {_shorten(upstreams)}"] if upstreams else []
    parts += [f"{', '.join(sections)} changed"] if sections else []
    return ", ".join(parts) or "no setting that applies now has changed"


def _by_name(specs: Iterable[UpstreamSpec]) -> dict[str, UpstreamSpec]:
    return {spec.name: spec for spec in specs}


def _upstreams(
    now: Mapping[str, UpstreamSpec], before: Mapping[str, UpstreamSpec]
) -> Iterable[str]:
    yield from (f"+{name}" for name in now if name not in before)
    yield from (f"-{name}" for name in before if name not in now)
    yield from (f"~{name}" for name in now if name in before and now[name] != before[name])


def _shorten(names: Collection[str]) -> str:
    shown = list(names)[:LISTED_NAMES]
    more = f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    return " ".join(shown) + more
