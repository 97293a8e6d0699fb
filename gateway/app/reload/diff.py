"""How settings differ from those before, in the words of an operator."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gateway.app.build.upstreams import UpstreamSpec
from gateway.app.reload.resources import Resources
from gateway.settings.schema import Settings
from gateway.sizes import LISTED_NAMES

_KEPT = ("workers",)
"""What is as it was at the start: the number of processes does not change while they run."""


def keep_startup_settings(settings: Settings, before: Settings) -> Settings:
    """Give settings as they can be taken up by who runs with those from before."""
    return settings.model_copy(update={name: getattr(before, name) for name in _KEPT})


def settings_needing_restart(settings: Settings, before: Settings) -> list[str]:
    """Name what does not change before the next start."""
    return [name for name in _KEPT if getattr(settings, name) != getattr(before, name)]


def changes(now: Resources, before: Resources) -> str:
    """Tell what has changed: ``upstreams +new -old ~other, routes changed``."""
    upstreams = list(_upstreams(_by_name(now.upstream_specs), _by_name(before.upstream_specs)))
    sections = [
        name
        for name in Settings.model_fields
        if name != "upstreams" and getattr(now.settings, name) != getattr(before.settings, name)
    ]
    parts = [f"upstreams {_listed(upstreams)}"] if upstreams else []
    parts += [f"{', '.join(sections)} changed"] if sections else []
    return ", ".join(parts) or "nothing has changed"


def _by_name(upstream_specs: Iterable[UpstreamSpec]) -> dict[str, UpstreamSpec]:
    return {spec.name: spec for spec in upstream_specs}


def _upstreams(
    now: Mapping[str, UpstreamSpec], before: Mapping[str, UpstreamSpec]
) -> Iterable[str]:
    yield from (f"+{name}" for name in now if name not in before)
    yield from (f"-{name}" for name in before if name not in now)
    yield from (f"~{name}" for name in now if name in before and now[name] != before[name])


def _listed(marked: Collection[str]) -> str:
    some = list(marked)[:LISTED_NAMES]
    more = f" and {len(marked) - LISTED_NAMES} more" if len(marked) > LISTED_NAMES else ""
    return " ".join(some) + more
