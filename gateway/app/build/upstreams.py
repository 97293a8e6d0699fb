"""Settings → the upstreams."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.app.build.limits import gate_of, set_places
from gateway.app.build.pools import build_pool
from gateway.app.ejection_sync import Hearsay
from gateway.protocol.dialects import DIALECTS
from gateway.proxy.admission.concurrency_limit import Gate
from gateway.proxy.interfaces import Upstream
from gateway.routing.retry import RetryBudget
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.system.buffers import BufferAccount
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool.dialect import Interpreter, declared_speech
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import HeaderLines

_ASK_EVERY = 60.0
"""Seconds between two questions to an endpoint that has not shown how it speaks."""

_ASK_AGAIN = 1.0
"""Seconds until one is asked again that did not answer, or that failed; it may be another then."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Tell all that an upstream is made of: what is made of equal recipes does the same.

    Times are in seconds. ``own_request`` is what the gateway's own requests have, to name it.
    ``certificates`` tells what the files of its TLS hold, of which
    ``context`` is made; there is none without TLS.
    """

    name: str
    declared: UpstreamSettings
    connect_time: float
    idle_time: float
    metadata_time: float
    metadata_models: int
    workers: int = 1
    own_request: HeaderLines = ()
    certificates: tuple[bytes | None, ...] = ()
    context: ssl.SSLContext | None = field(default=None, compare=False)


class HeldUpstream:
    """An upstream that several runtimes may have: all but the newest are on their way out.

    ``before`` is the pool of the one that it replaces.
    """

    def __init__(self, recipe: Recipe, upstream: Upstream, before: Pool | None = None) -> None:
        self.recipe = recipe
        self.upstream = upstream
        self._before = before
        self._started = False
        self._holders = 0

    async def start(self) -> None:
        """Have its servers looked after, if they are not yet; see ``Pool.start``."""
        if self._started:
            return
        self._started = True
        pool, before = self.upstream.pool, self._before
        if before is not None:
            pool.begin_with_addresses_of(before)
        await pool.start()
        if before is not None:
            pool.take_over(before)
            self._before = None

    def hold(self) -> None:
        """Count a runtime that has it, from whose beginning its limits count."""
        self._holders += 1
        set_places(self.upstream.gate, self.recipe.declared.limits, self.recipe.workers)

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
    recipes: Iterable[Recipe],
    before: Mapping[str, HeldUpstream],
    buffers: BufferAccount | None = None,
    hearsay: Hearsay | None = None,
) -> dict[str, HeldUpstream]:
    """Make the upstreams, by name.

    One that is made as before is the one from before, with its connections and all that it knows.
    Of one that has changed, the endpoints that are still there keep their health, names their
    addresses, and exchanges under way their places.
    ``buffers`` counts what their connections buffer; ``hearsay`` is what all of them tell other
    workers by, if there are any.
    """
    return {
        recipe.name: _held(recipe, before.get(recipe.name), buffers, hearsay) for recipe in recipes
    }


def of_held(held: Mapping[str, HeldUpstream]) -> dict[str, Upstream]:
    """Give the upstreams themselves."""
    return {name: each.upstream for name, each in held.items()}


def _held(
    recipe: Recipe,
    before: HeldUpstream | None,
    buffers: BufferAccount | None,
    hearsay: Hearsay | None,
) -> HeldUpstream:
    if before is not None and before.recipe == recipe:
        return before
    if before is None:
        return HeldUpstream(recipe, _build(recipe, buffers, hearsay, None))
    upstream = _build(recipe, buffers, hearsay, before.upstream.gate)
    return HeldUpstream(recipe, upstream, before.upstream.pool)


def _build(
    recipe: Recipe, buffers: BufferAccount | None, hearsay: Hearsay | None, gate: Gate | None
) -> Upstream:
    declared = recipe.declared
    clock = asyncio.get_running_loop().time
    tell = None if hearsay is None else hearsay.teller(recipe.name)
    interpreter = None
    if declared.dialect == "auto":
        tells = hearsay is None or hearsay.first
        interpreter = Interpreter(recipe.name, _ASK_EVERY, _ASK_AGAIN, tells)
    return Upstream(
        recipe.name,
        interpreter or declared_speech(DIALECTS[declared.dialect]),
        build_pool(
            recipe.name,
            declared,
            recipe.context,
            recipe.connect_time,
            buffers,
            tell,
            interpreter,
            own_request=recipe.own_request,
        ),
        MetadataCache(recipe.metadata_time, recipe.metadata_models, recipe.idle_time, clock),
        RetryBudget(declared.retries.share, declared.retries.reserve),
        gate_of(f"upstream '{recipe.name}'", declared.limits, recipe.workers, gate),
        declared.required,
    )
