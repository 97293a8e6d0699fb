"""Settings → the upstreams."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gateway.app.build.limits import apply_concurrency, concurrency_limit_of
from gateway.app.build.pools import build_pool
from gateway.app.ejection_sync import EjectionSync
from gateway.protocol.dialects import DIALECTS
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.interfaces import Upstream
from gateway.routing.retry import RetryBudget
from gateway.settings.upstreams import Upstream as UpstreamSettings
from gateway.system.buffers import BufferAccount
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool.dialect import DialectDetector, fixed_dialect_state
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import HeaderLines

_ASK_EVERY = 60.0
"""Seconds between two questions to an endpoint that has not shown how it speaks."""

_ASK_AGAIN = 1.0
"""Seconds until one is asked again that did not answer, or that failed; it may be another then."""


@dataclass(frozen=True, slots=True)
class UpstreamSpec:
    """Tell all that an upstream is made of: what is made of equal recipes does the same.

    Times are in seconds. ``own_request_headers`` is what the gateway's own requests have, to name
    it.
    ``certificates`` tells what the files of its TLS hold, of which
    ``context`` is made; there is none without TLS.
    """

    name: str
    declared: UpstreamSettings
    connect_timeout: float
    idle_timeout: float
    metadata_ttl: float
    metadata_cache_size: int
    workers: int = 1
    own_request_headers: HeaderLines = ()
    certificates: tuple[bytes | None, ...] = ()
    context: ssl.SSLContext | None = field(default=None, compare=False)


class SharedUpstream:
    """An upstream that several runtimes may have: all but the newest are on their way out.

    ``before`` is the pool of the one that it replaces.
    """

    def __init__(self, spec: UpstreamSpec, upstream: Upstream, before: Pool | None = None) -> None:
        self.spec = spec
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
            pool.adopt_addresses(before)
        await pool.start()
        if before is not None:
            pool.adopt_state(before)
            self._before = None

    def hold(self) -> None:
        """Count a runtime that has it, from whose beginning its limits count."""
        self._holders += 1
        apply_concurrency(
            self.upstream.concurrency_limit, self.spec.declared.concurrency, self.spec.workers
        )

    @property
    def busy_with_last_holder(self) -> bool:
        """Tell whether exchanges are under way there, and just one runtime is left that has it."""
        return self._holders == 1 and any(self.upstream.pool.outstanding)

    async def release(self) -> None:
        """Count a runtime no more; the last one closes it."""
        self._holders -= 1
        await self.close_if_unused()

    async def close_if_unused(self) -> None:
        """Close what no runtime has."""
        if not self._holders:
            await self.upstream.metadata.close()
            await self.upstream.pool.close()


def build_upstreams(
    upstream_specs: Iterable[UpstreamSpec],
    before: Mapping[str, SharedUpstream],
    buffers: BufferAccount | None = None,
    hearsay: EjectionSync | None = None,
) -> dict[str, SharedUpstream]:
    """Make the upstreams, by name.

    One that is made as before is the one from before, with its connections and all that it knows.
    Of one that has changed, the endpoints that are still there keep their health, names their
    addresses, and exchanges under way their places.
    ``buffers`` counts what their connections buffer; ``hearsay`` is what all of them tell other
    workers by, if there are any.
    """
    return {
        spec.name: _held(spec, before.get(spec.name), buffers, hearsay) for spec in upstream_specs
    }


def upstreams_by_name(held: Mapping[str, SharedUpstream]) -> dict[str, Upstream]:
    """Give the upstreams themselves."""
    return {name: each.upstream for name, each in held.items()}


def _held(
    spec: UpstreamSpec,
    before: SharedUpstream | None,
    buffers: BufferAccount | None,
    hearsay: EjectionSync | None,
) -> SharedUpstream:
    if before is not None and before.spec == spec:
        return before
    if before is None:
        return SharedUpstream(spec, _build(spec, buffers, hearsay, None))
    upstream = _build(spec, buffers, hearsay, before.upstream.concurrency_limit)
    return SharedUpstream(spec, upstream, before.upstream.pool)


def _build(
    spec: UpstreamSpec,
    buffers: BufferAccount | None,
    hearsay: EjectionSync | None,
    concurrency_limit: ConcurrencyLimit | None,
) -> Upstream:
    declared = spec.declared
    clock = asyncio.get_running_loop().time
    tell = None if hearsay is None else hearsay.publisher_for(spec.name)
    dialect_detector = None
    if declared.dialect == "auto":
        tells = hearsay is None or hearsay.first
        dialect_detector = DialectDetector(spec.name, _ASK_EVERY, _ASK_AGAIN, tells)
    return Upstream(
        spec.name,
        dialect_detector or fixed_dialect_state(DIALECTS[declared.dialect]),
        build_pool(
            spec.name,
            declared,
            spec.context,
            spec.connect_timeout,
            buffers,
            tell,
            dialect_detector,
            own_request_headers=spec.own_request_headers,
        ),
        MetadataCache(spec.metadata_ttl, spec.metadata_cache_size, spec.idle_timeout, clock),
        RetryBudget(declared.retry_budget.percent / 100, declared.retry_budget.min_concurrency),
        concurrency_limit_of(
            f"upstream '{spec.name}'", declared.concurrency, spec.workers, concurrency_limit
        ),
        declared.required,
    )
