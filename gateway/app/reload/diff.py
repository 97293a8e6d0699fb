"""How settings differ from those before, in the words of an operator."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from gateway.app.build.upstreams import Recipe
from gateway.app.reload.resources import Material
from gateway.settings.schema import Settings

_LISTED = 20
"""Upstreams that are named."""

_KEPT = ("workers",)
"""What is as it was at the start: the number of processes does not change while they run."""


def as_far_as_possible(settings: Settings, before: Settings) -> Settings:
    """Give settings as they can be taken up by who runs with those from before."""
    return settings.model_copy(update={name: getattr(before, name) for name in _KEPT})


def kept_back(settings: Settings, before: Settings) -> list[str]:
    """Name what does not change before the next start."""
    return [name for name in _KEPT if getattr(settings, name) != getattr(before, name)]


def changes(now: Material, before: Material) -> str:
    """Tell what has changed: ``upstreams +new -old ~other, routes changed``."""
    upstreams = list(_upstreams(_by_name(now.recipes), _by_name(before.recipes)))
    sections = [
        name
        for name in Settings.model_fields
        if name != "upstreams" and getattr(now.settings, name) != getattr(before.settings, name)
    ]
    parts = [f"upstreams {_listed(upstreams)}"] if upstreams else []
    parts += [f"{', '.join(sections)} changed"] if sections else []
    return ", ".join(parts) or "nothing has changed"


def _by_name(recipes: Iterable[Recipe]) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


def _upstreams(now: Mapping[str, Recipe], before: Mapping[str, Recipe]) -> Iterable[str]:
    yield from (f"+{name}" for name in now if name not in before)
    yield from (f"-{name}" for name in before if name not in now)
    yield from (f"~{name}" for name in now if name in before and now[name] != before[name])


def _listed(marked: Collection[str]) -> str:
    some = list(marked)[:_LISTED]
    more = f" and {len(marked) - _LISTED} more" if len(marked) > _LISTED else ""
    return " ".join(some) + more
