"""Settings → the upstreams."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.exchange.base import Upstream
from gateway.protocol.dialects import DIALECTS
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.upstream.address import server_at
from gateway.upstream.http import HttpEndpoint
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool import Pool


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tell all that an upstream is made of: what is made of equal recipes does the same.

    Times are in seconds. ``certificates`` tells what the files of its TLS hold, of which
    ``context`` is made; there is none without TLS.
    """

    name: str
    declared: UpstreamSettings
    connect_time: float
    idle_time: float
    metadata_time: float
    metadata_models: int
    certificates: tuple[bytes | None, ...] = ()
    context: ssl.SSLContext | None = field(default=None, compare=False)


class HeldUpstream:
    """An upstream that several runtimes may have: all but the newest are on their way out."""

    def __init__(self, recipe: Recipe, upstream: Upstream) -> None:
        self.recipe = recipe
        self.upstream = upstream
        self._holders = 0

    def hold(self) -> None:
        """Count a runtime that has it."""
        self._holders += 1

    @property
    def in_use_by_last(self) -> bool:
        """Tell whether exchanges are under way there, and just one runtime is left that has it."""
        return self._holders == 1 and any(self.upstream.pool.outstanding)

    async def release(self) -> None:
        """Count a runtime no more; the last one closes it."""
        self._holders -= 1
        await self.close_unless_held()

    async def close_unless_held(self) -> None:
        """Close what no runtime has."""
        if not self._holders:
            await self.upstream.metadata.close()
            await self.upstream.pool.close()


def held_upstreams(
    recipes: Iterable[Recipe], before: Mapping[str, HeldUpstream]
) -> dict[str, HeldUpstream]:
    """Make the upstreams, by name.

    One that is made as before is the one from before, with its connections and all that it knows.
    Of one that has changed, the endpoints that are still there keep their health.
    """
    return {recipe.name: _held(recipe, before.get(recipe.name)) for recipe in recipes}


def of_held(held: Mapping[str, HeldUpstream]) -> dict[str, Upstream]:
    """Give the upstreams themselves."""
    return {name: each.upstream for name, each in held.items()}


def _held(recipe: Recipe, before: HeldUpstream | None) -> HeldUpstream:
    if before is not None and before.recipe == recipe:
        return before
    made = HeldUpstream(recipe, _build(recipe))
    if before is not None:
        made.upstream.pool.take_over(before.upstream.pool)
    return made


def _build(recipe: Recipe) -> Upstream:
    declared = recipe.declared
    clock = asyncio.get_running_loop().time
    return Upstream(
        recipe.name,
        DIALECTS[declared.dialect],
        Pool(_endpoints(recipe)),
        MetadataCache(recipe.metadata_time, recipe.metadata_models, recipe.idle_time, clock),
    )


def _endpoints(recipe: Recipe) -> list[HttpEndpoint]:
    declared = recipe.declared
    server_name = declared.tls.server_name if declared.tls is not None else None
    return [
        HttpEndpoint(server_at(url, recipe.context, server_name), recipe.connect_time)
        for url in declared.endpoints
    ]
